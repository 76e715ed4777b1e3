"""Serve small OpenAI-compatible apps on a real socket."""

import socket
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import uvicorn
from serving import wait_until
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

Handler = Callable[[Request], Awaitable[Response]]
ASKED: list[dict[str, Any]] = []
"""Bodies that handlers put here, in order."""


@contextmanager
def serve_app(routes: Mapping[str, Handler]) -> Iterator[str]:
    """The address of a server with these paths, for any method."""
    app = Starlette(routes=[Route(path, handler, methods=["GET", "POST"]) for path, handler in routes.items()])
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_level="error", lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
