"""Serve the model to agents over HTTP, in every provider's dialect, and have each session's calls recorded.

Runs on a thread with an event loop of its own. Knows no dialect by name and no token by meaning. Requests without a
session's key are refused (`WireError`, status 401), and no reply is sent that is not on record.
"""

import asyncio
import logging
import math
import os
import secrets
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match
from starlette.routing import Route as HTTPRoute
from starlette.types import Receive, Scope, Send

from polar_trl.engine.base import Engine, GenerationParams
from polar_trl.engine.gate import GateStats
from polar_trl.errors import ConfigError, LawError, WireError
from polar_trl.recording.log import SessionLog
from polar_trl.recording.session import (
    Classify,
    ModelBackend,
    Session,
    SessionLimits,
    Turn,
    always_policy,
    internal_error,
)
from polar_trl.sandbox.network import PROXY_ADDRESS
from polar_trl.tokens.base import Renderer
from polar_trl.types import Endpoint
from polar_trl.wire import DIALECTS
from polar_trl.wire.base import Dialect, Incoming, ReplyHead, Route, parse_key
from polar_trl.wire.compression import decode_body

_log = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 << 20
HEADER_DELAY_S = 0.02
NUM_WORKERS = max(2, min(8, (os.cpu_count() or 2) // 2))
"""Threads for large bodies. Tokenizers let go of the interpreter's lock while they encode."""


class Proxy:
    """Serves every dialect to any number of sessions, each under a random key of its own.

    Args:
        engine: Samples; awaited on the proxy's event loop.
        renderer: The policy's chat format; that of the engine where it has its own.
        params: How to sample. An agent's request can lower `max_tokens` and add to `stop`, nothing else.
        model: The name that agents are told.
        host: Address to listen on.
        port: 0 lets the system choose.
        ping_interval_s: How often an open stream hears a ping while the engine works.
    """

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        *,
        params: GenerationParams,
        model: str = "policy",
        host: str = "127.0.0.1",
        port: int = 0,
        ping_interval_s: float = 10.0,
    ) -> None:
        workers = ThreadPoolExecutor(NUM_WORKERS, thread_name_prefix="polar-proxy-worker")
        self._backend = ModelBackend(engine=engine, renderer=renderer, params=params, model=model, workers=workers)
        self.is_text_only = engine.own_renderer is not None  # nothing of what is recorded can be trained then
        self._address = (host, port)
        self._ping_interval_s = ping_interval_s
        self._sessions: dict[str, Session] = {}
        self._listeners: dict[str, asyncio.Server] = {}
        self.origin = ""
        """Such as "http://127.0.0.1:41123", once started."""

    def start(self) -> None:
        """Listen, and serve from a thread. Raises `ConfigError` if the address cannot be listened on."""
        host, port = self._address
        try:
            # ours and not uvicorn's: the port is known, and connections queue, before the thread runs
            listener = socket.create_server((host, port), backlog=2048)
        except (OSError, OverflowError) as error:
            advice = "choose another port, or 0 to let the system choose one"
            reason = error.strerror if isinstance(error, OSError) else "ports are 0 to 65535"
            raise ConfigError(f"cannot listen on {host}:{port} ({reason}): {advice}") from error
        self.origin = f"http://{host}:{listener.getsockname()[1]}"
        config = uvicorn.Config(
            self._build_app(),
            http="httptools",
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            # agents keep connections open while their tools run; one that closes under a request looks like a crash
            timeout_keep_alive=3600,
            timeout_graceful_shutdown=5,
        )
        self._server = uvicorn.Server(config)
        new_loop = config.get_loop_factory() or asyncio.new_event_loop
        self._loop = new_loop()
        self._thread = threading.Thread(target=self._serve, args=(listener,), name="polar-proxy", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Close every session, then end the thread. Raises the first `LawError` that a session broke."""
        broken: list[LawError] = []
        for api_key in list(self._sessions):
            try:
                self.close_session(api_key)
            except LawError as error:  # the other sessions' calls still have to end
                broken.append(error)
        self._server.should_exit = True
        self._thread.join()
        self._backend.workers.shutdown()
        if broken:
            raise broken[0]

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def open_session(
        self,
        log: SessionLog,
        limits: SessionLimits = SessionLimits(),
        classify: Classify = always_policy,
        listener: socket.socket | None = None,
        gate_stats: GateStats | None = None,
    ) -> Endpoint:
        """Make a key under which calls are served, and recorded in `log`.

        Args:
            log: Of this session.
            limits: What it may use.
            classify: Tells an agent's side requests from the policy's own.
            listener: A listening socket inside the agent's own network, or one that is relayed to from there; served
                and owned by this session.
            gate_stats: Filled with what the gate sees of this session.
        """
        api_key = secrets.token_urlsafe(24)
        origin = self.origin
        if listener is not None:
            # a unix socket stands at the end of a relay, which listens where agents always look
            is_relayed = listener.family == socket.AF_UNIX
            origin = "http://{}:{}".format(*(PROXY_ADDRESS if is_relayed else listener.getsockname()))
            self._listeners[api_key] = asyncio.run_coroutine_threadsafe(self._serve_on(listener), self._loop).result()
        self._sessions[api_key] = Session(self._backend, log, limits, classify, gate_stats)
        return Endpoint(
            origin=origin,
            api_key=api_key,
            model=self._backend.model,
            max_model_len=self._backend.engine.max_model_len,
            max_tokens=self._backend.params.max_tokens,
        )

    def close_session(self, api_key: str) -> None:
        """Abort what is in flight and wait for it to end; later requests get 401. Closing twice does nothing.

        Raises the `LawError` that a call of this session broke, if one did.
        """
        session = self._sessions.pop(api_key, None)
        if session is None:
            return
        if (listener := self._listeners.pop(api_key, None)) is not None:
            self._loop.call_soon_threadsafe(listener.close)
        asyncio.run_coroutine_threadsafe(session.close(), self._loop).result()
        if session.broken_law is not None:
            raise session.broken_law

    @property
    def policy_version(self) -> int:
        """The engine's: grows by one whenever the weights change."""
        return self._backend.engine.policy_version

    def hold(self) -> None:
        """Let no further call of any session through to the engine; returns once those in flight have their answers.

        Later calls wait, and their streams are kept alive by pings, until `release`. The weights may change, and the
        engine may sleep, in between. Holding twice is holding once.
        """
        asyncio.run_coroutine_threadsafe(self._backend.gate.hold(), self._loop).result()

    def release(self) -> None:
        """Let calls through again, those first that waited."""
        self._loop.call_soon_threadsafe(self._backend.gate.release)

    async def _serve_on(self, listener: socket.socket) -> asyncio.Server:
        """Serve one more socket, as uvicorn does with its own."""
        server = self._server
        while not server.started:
            await asyncio.sleep(0.01)

        def build_protocol() -> asyncio.Protocol:
            kind: Any = server.config.http_protocol_class
            protocol: asyncio.Protocol = kind(
                config=server.config, server_state=server.server_state, app_state=server.lifespan.state
            )
            return protocol

        loop = asyncio.get_running_loop()
        if listener.family == socket.AF_UNIX:
            return await loop.create_unix_server(build_protocol, sock=listener)
        return await loop.create_server(build_protocol, sock=listener)

    def _serve(self, listener: socket.socket) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._server.serve(sockets=[listener]))
        finally:
            listener.close()
            self._loop.close()

    def _build_app(self) -> Starlette:
        routes = [HTTPRoute("/", _reply_alive, methods=["HEAD"])]
        served = [(dialect, route) for dialect in DIALECTS for route in dialect.routes]
        # those that ask for a header first: the same path without it is somebody else's
        for dialect, route in sorted(served, key=lambda pair: pair[1].header is None):
            endpoint = _DialectEndpoint(self._sessions, dialect, route, self._backend.model, self._ping_interval_s)
            routes.append(_HeaderRoute(route, endpoint))
        app = Starlette(routes=routes, exception_handlers={HTTPException: _render_http_error})
        app.router.redirect_slashes = False
        return app


class _HeaderRoute(HTTPRoute):
    """A route that can ask for a header."""

    def __init__(self, route: Route, endpoint: "_DialectEndpoint") -> None:
        # an object and not a function: starlette then passes the bare ASGI call on
        super().__init__(route.path, endpoint, methods=[route.method])
        self._header = route.header.encode() if route.header else None

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if self._header is not None and all(name != self._header for name, _ in scope.get("headers", ())):
            return Match.NONE, {}
        return super().matches(scope)


class _DialectEndpoint:
    """One route of one dialect, as an ASGI application."""

    def __init__(
        self, sessions: dict[str, Session], dialect: Dialect, route: Route, model: str, ping_interval_s: float
    ) -> None:
        self._sessions = sessions
        self._dialect = dialect
        self._kind = route.kind
        self._model = model
        self._ping_interval_s = ping_interval_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        session: Session | None = None
        try:
            incoming = await _read_incoming(Request(scope, receive))
            if self._kind == "alive":
                return await _send_whole(send, b"")
            if self._kind == "no_upgrade":
                raise WireError("this path is served over plain HTTP only; send a POST", status=426)
            session = self._identify(incoming)
            if self._kind == "count":
                num_tokens = await session.count_prompt_tokens(self._dialect, incoming)
                return await _send_whole(send, self._dialect.render_count(num_tokens))
            if self._kind == "models":
                return await _send_whole(send, self._dialect.render_models(incoming, self._model))
            await self._reply(session, incoming, receive, send)
        except ClientDisconnect:
            return
        except Exception as failure:  # noqa: BLE001 - one request's boundary: the agent gets an answer, the log the cause
            error = _explain(failure, session)
            await _send_error(send, self._dialect, error)

    def _identify(self, incoming: Incoming) -> Session:
        session = self._sessions.get(parse_key(incoming) or "")
        if session is None:
            raise WireError("unknown API key: use the key of a running session", status=401, kind="authentication")
        return session

    async def _reply(self, session: Session, incoming: Incoming, receive: Receive, send: Send) -> None:
        turn, parsed = await session.begin_turn(self._dialect, incoming)
        hung_up = asyncio.ensure_future(_wait_for_hang_up(receive))
        try:
            head = session.describe(turn, parsed)
            if parsed.request.stream:
                return await self._stream(session, turn, head, hung_up, send)
            await _wait_for_either(turn, hung_up)
            if turn.task.done():
                await _send_whole(send, self._dialect.render(head, turn.result()))
        finally:
            hung_up.cancel()
            session.leave(turn)

    async def _stream(
        self, session: Session, turn: Turn, head: ReplyHead, hung_up: "asyncio.Future[None]", send: Send
    ) -> None:
        """Headers almost at once, pings while the engine works, then the whole reply as events.

        What fails before the headers are sent gets a status of its own, which clients heed better than an event.
        """
        await _wait_for_either(turn, hung_up, timeout_s=HEADER_DELAY_S)
        if turn.has_failed():
            turn.result()
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await _send_part(send, self._dialect.stream_start(head))
        while not turn.task.done():
            await _wait_for_either(turn, hung_up, timeout_s=self._ping_interval_s)
            if hung_up.done():
                return
            if not turn.task.done():
                await _send_part(send, self._dialect.ping())
        try:
            events = b"".join(self._dialect.stream(head, turn.result()))
        except Exception as failure:  # noqa: BLE001 - the same boundary, once a status has been sent
            events = self._dialect.stream_error(_explain(failure, session))
        await _send_part(send, events, is_last=True)


def _explain(failure: Exception, session: Session | None) -> WireError:
    """Turn a failure into the error that the client is told."""
    if isinstance(failure, WireError):
        return failure
    if session is None:
        _log.error("a request failed on our side", exc_info=failure)
    else:
        session.note_fault(failure)
    return internal_error()


async def _send_error(send: Send, dialect: Dialect, error: WireError) -> None:
    # the providers' own client libraries obey the first; repeating a hopeless request costs an agent minutes
    headers = [(b"x-should-retry", b"true" if error.kind == "overloaded" else b"false")]
    if error.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % math.ceil(error.retry_after_s)))
    await _send_whole(send, dialect.render_error(error), dialect.error_status(error), headers)


async def _send_whole(
    send: Send, body: bytes, status: int = 200, extra_headers: Sequence[tuple[bytes, bytes]] = ()
) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *extra_headers]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _send_part(send: Send, part: bytes, *, is_last: bool = False) -> None:
    if part or is_last:
        await send({"type": "http.response.body", "body": part, "more_body": not is_last})


async def _wait_for_either(turn: Turn, hung_up: "asyncio.Future[None]", timeout_s: float | None = None) -> None:
    waiting: list[asyncio.Future[Any]] = [turn.task, hung_up]
    await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)


async def _wait_for_hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _read_incoming(request: Request) -> Incoming:
    blocks, size = [], 0
    async for block in request.stream():
        size += len(block)
        if size > MAX_BODY_BYTES:
            raise WireError(f"the body is larger than {MAX_BODY_BYTES >> 20} MiB", status=413)
        blocks.append(block)
    encoding = request.headers.get("content-encoding")
    body = b"".join(blocks)
    return Incoming(
        body=decode_body(body, encoding, MAX_BODY_BYTES) if encoding else body,
        path=request.url.path,
        path_params=request.path_params,
        query=request.query_params,
        headers=request.headers,
    )


async def _reply_alive(request: Request) -> Response:
    return Response()


async def _render_http_error(request: Request, error: Exception) -> Response:
    """Answer a path that no dialect has a route for."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    message = f"{request.method} {request.url.path} is not served here"
    return JSONResponse({"error": {"message": message, "type": "not_found", "code": status}}, status_code=status)
