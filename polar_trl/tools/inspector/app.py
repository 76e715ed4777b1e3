"""Serve the inspector's pages: static files, and JSON answers about one run.

Only GET on loopback names is answered (another name in Host is a page elsewhere that had its name point here), nothing
is changed, and sessions are found by key in the index, never by a path that a request brings.
"""

import json
import math
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from polar_trl.errors import RecordError
from polar_trl.tools.inspector.run_folder import RunFolder
from polar_trl.tools.inspector.table import MAX_ROWS, count_choices, select

HOSTS = ["127.0.0.1", "localhost"]
MAX_CALLS = 50
"""Of one answer."""
_HEADERS = [
    (b"content-security-policy", b"default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
]


def build_app(*runs: RunFolder) -> Starlette:
    """Build the ASGI application of one run or several; its lifespan owns the threads that count old sessions.

    Questions about a session bring its key, which begins with its run's prefix; others may say `run`, from 0.
    """
    counters = [_Counter(run) for run in runs]

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        for counter in counters:
            counter.start()
        try:
            yield
        finally:
            for counter in counters:
                await run_in_threadpool(counter.stop)

    def find_run(asked: dict[str, str]) -> RunFolder:
        if "key" in asked:
            return next((run for run in runs[1:] if asked["key"].startswith(run.prefix)), runs[0])
        return runs[_number(asked, "run", 0)]

    def build_endpoint(function: Callable[[RunFolder, dict[str, str]], Any]) -> Callable[[Request], Any]:
        return _answer(lambda asked: function(find_run(asked), asked))

    static = files("polar_trl.tools.inspector") / "static"
    names = [run.folder.resolve().name for run in runs]
    routes: list[Any] = [Route(f"/api/{name}", build_endpoint(function)) for name, function in _API.items()]
    routes.append(Route("/api/run", build_endpoint(lambda run, asked: run.build_run() | {"runs": names})))
    routes.append(Mount("/", StaticFiles(directory=str(static), html=True)))
    middleware = [
        Middleware(_HeaderMiddleware),
        Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS, www_redirect=False),
        Middleware(GZipMiddleware, minimum_size=2048, compresslevel=1),
    ]
    return Starlette(routes=routes, middleware=middleware, lifespan=lifespan)


class _Counter:
    """A thread that counts calls, tokens and trajectories of finished sessions whose records lack a summary."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._work, name="polar-inspect-counter", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._stopped.is_set():
            try:
                self._run.sessions.refresh()
                is_more = self._run.sessions.count_next()
            except Exception:  # noqa: BLE001 - a folder gone for a moment must not end the thread
                is_more = False
            # a breath between two, so that pages are answered while thousands are counted
            self._stopped.wait(0.002 if is_more else 1.0)


class _HeaderMiddleware:
    """Headers that keep other pages out, on every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                kept = [pair for pair in message["headers"] if pair[0].lower() != b"cache-control"]
                message = {**message, "headers": [*kept, *_HEADERS]}
            await send(message)

        await self._app(scope, receive, send_with_headers if scope["type"] == "http" else send)


def _answer(function: Callable[[Any], Any]) -> Callable[[Request], Any]:
    """Build the endpoint that answers with the JSON of `function(query)`, computed on a thread."""

    async def endpoint(request: Request) -> Response:
        status = 200
        try:
            body = await run_in_threadpool(lambda: _render(function(dict(request.query_params))))
        except (KeyError, IndexError) as error:
            status, body = 404, _render({"error": f"not found: {error}"})
        except ValueError as error:
            status, body = 400, _render({"error": str(error)})
        except (RecordError, OSError) as error:
            status, body = 500, _render({"error": str(error)})
        except Exception as error:  # noqa: BLE001 - what a run's files hold may be anything; the page says so and stays
            status, body = 500, _render({"error": f"{type(error).__name__}: {error}"})
        return Response(body, status_code=status, media_type="application/json")

    return endpoint


def _render(content: Any) -> bytes:
    """Render JSON as browsers read it, which has no NaN and no infinities: they become null."""
    try:
        # the standard library's: texts may hold lone surrogates, which it escapes and others refuse
        text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(_drop_non_finite(content), allow_nan=False, separators=(",", ":"))
    return text.encode()


def _drop_non_finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _drop_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_drop_non_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _list_sessions(run: RunFolder, asked: dict[str, str]) -> dict[str, Any]:
    rows = run.build_table()
    chosen = select(rows, asked)
    offset, limit = _number(asked, "offset", 0), min(_number(asked, "limit", 100), MAX_ROWS)
    return {
        "version": f"{run.sessions.version}.{run.rows.version}",
        "total": len(rows),
        "matched": len(chosen),
        "offset": offset,
        "rows": chosen[offset : offset + limit],
        "mean_reward": count_choices(chosen)["mean_reward"],
    }


def _list_calls(run: RunFolder, asked: dict[str, str]) -> list[dict[str, Any]]:
    view = run.open_session(asked["key"])
    return view.build_calls(_number(asked, "first"), min(_number(asked, "count", 10), MAX_CALLS))


def _read_text(run: RunFolder, asked: dict[str, str]) -> dict[str, Any]:
    view = run.open_session(asked["key"])
    return view.read_text(_number(asked, "call"), asked["part"], _number(asked, "offset", 0))


def _list_lines(run: RunFolder, asked: dict[str, str]) -> dict[str, Any]:
    view = run.open_session(asked["key"])
    return view.build_lines(
        _number(asked, "track"),
        _number(asked, "columns", 100),
        _number(asked, "first", 0),
        _number(asked, "count", 60),
    )


def _build_overview(run: RunFolder, asked: dict[str, str]) -> dict[str, Any]:
    view = run.open_session(asked["key"])
    return view.build_overview(_number(asked, "track"), _number(asked, "columns", 100), _number(asked, "bins", 400))


def _find_line(run: RunFolder, asked: dict[str, str]) -> dict[str, Any]:
    view = run.open_session(asked["key"])
    columns = _number(asked, "columns", 100)
    return {"line": view.find_line(_number(asked, "track"), columns, _number(asked, "position"))}


def _number(asked: dict[str, str], name: str, default: int | None = None) -> int:
    """Read a whole number of the query, from 0. Raises `ValueError`, and `KeyError` where it is missing."""
    text = asked[name] if default is None else asked.get(name, str(default))
    if not text.isdecimal() or len(text) > 12:
        raise ValueError(f"{name}={text[:40]!r}: give a whole number from 0")
    return int(text)


_API: dict[str, Callable[[RunFolder, dict[str, str]], Any]] = {
    "curves": lambda run, asked: run.curves.build(),
    "tasks": lambda run, asked: run.build_tasks(),
    "task_names": lambda run, asked: sorted({row["task"] for row in run.build_table() if row["task"]}),
    "sessions": _list_sessions,
    "session": lambda run, asked: run.build_session(asked["key"]),
    "ending": lambda run, asked: run.open_session(asked["key"]).build_ending(),
    "calls": _list_calls,
    "text": _read_text,
    "fork": lambda run, asked: run.open_session(asked["key"]).build_fork(_number(asked, "track")),
    "lines": _list_lines,
    "overview": _build_overview,
    "line": _find_line,
    "token": lambda run, asked: {
        "bytes": run.open_session(asked["key"]).describe_token(_number(asked, "track"), _number(asked, "position"))
    },
}
