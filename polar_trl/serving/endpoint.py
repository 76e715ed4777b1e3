"""Answer one request: find its session, read its body, wait for the turn, render the reply in its dialect.

Knows no dialect by name and no token by meaning. A request without a session's key is answered before its body is
read.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match
from starlette.routing import Route as HTTPRoute
from starlette.types import Receive, Scope, Send

from polar_trl.errors import WireError
from polar_trl.recording.session import Session
from polar_trl.recording.turn import Turn, internal_error
from polar_trl.serving.connections import Connections
from polar_trl.types import Call
from polar_trl.wire import DIALECTS
from polar_trl.wire.base import (
    MAX_BODY_BYTES,
    NOTHING_TOLD,
    Dialect,
    Incoming,
    ReplyHead,
    Route,
    Told,
    parse_key,
)

_log = logging.getLogger(__name__)

FindSession = Callable[[str], Session | None]
"""Finds the session of a key, "" where a request has none."""
HEADER_DELAY_S = 0.02
MAX_PATH_LENGTH = 200
"""Of a path that nobody serves, in the words of its refusal."""
LOOK_INTERVAL_S = 0.05
"""Between two looks at a reply that is told while it is sampled."""


def build_app(find_session: FindSession, connections: Connections, model: str, ping_interval_s: float) -> Starlette:
    """Build the ASGI app with every dialect's routes."""
    routes = [HTTPRoute("/", _reply_alive, methods=["HEAD"])]
    served = [(dialect, route) for dialect in DIALECTS for route in dialect.routes]
    # those that ask for a header first: the same path without it is somebody else's
    for dialect, route in sorted(served, key=lambda pair: pair[1].header is None):
        endpoint = _DialectEndpoint(find_session, connections, dialect, route, model, ping_interval_s)
        routes.append(_HeaderRoute(route, endpoint))
    app = Starlette(routes=routes, exception_handlers={HTTPException: partial(_render_http_error, find_session)})
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
        self,
        find_session: FindSession,
        connections: Connections,
        dialect: Dialect,
        route: Route,
        model: str,
        ping_interval_s: float,
    ) -> None:
        self._find_session = find_session
        self._connections = connections
        self._dialect = dialect
        self._kind = route.kind
        self._model = model
        self._ping_interval_s = ping_interval_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        session: Session | None = None
        try:
            if self._kind == "alive":
                return await _send_whole(send, b"")
            if self._kind == "no_upgrade":
                raise WireError("this path is served over plain HTTP only; send a POST", status=426)
            request = Request(scope, receive)
            # one that is refused here is not read: uvicorn drops the body while the client sends it
            session = self._identify(request)
            session.bounds.check_open()
            with self._connections.holding_bytes(session) as hold:
                async with session.refusals.noting(is_call=self._kind == "chat"):
                    incoming = _describe(request, await _read_body(request, hold))
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

    def _identify(self, request: Request) -> Session:
        session = self._find_session(parse_key(_describe(request)) or "")
        connection = request.scope["connection"]
        if session is None or not connection.adopt(session):
            message = "unknown API key: use the key of a running session"
            error = WireError(message, status=401, kind="authentication", reason="key")
            if connection.session is not None and not connection.session.bounds.has_ended:
                connection.session.refusals.note(error, is_call=False)
            raise error
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
        """Headers almost at once, pings or what can be told while the engine works, then the rest of the reply.

        What fails before the headers are sent gets a status of its own, which clients heed better than an event.
        """
        await _wait_for_either(turn, hung_up, timeout_s=HEADER_DELAY_S)
        if turn.has_failed():
            turn.result()
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await _send_part(send, self._dialect.stream_start(head))
        told, last_sent = NOTHING_TOLD, time.monotonic()
        while not turn.task.done():
            timeout_s = self._ping_interval_s if turn.live is None else min(LOOK_INTERVAL_S, self._ping_interval_s)
            await _wait_for_either(turn, hung_up, timeout_s=timeout_s)
            if hung_up.done():
                return
            if turn.task.done():
                break
            parts: list[bytes] = []
            if turn.live is not None:
                now = turn.live.look()
                parts = list(self._dialect.stream_part(head, told, now))
                told = replace(now, num_events=told.num_events + len(parts)) if parts else told
            if parts or turn.live is None or time.monotonic() - last_sent >= self._ping_interval_s:
                await _send_part(send, b"".join(parts) or self._dialect.ping())
                last_sent = time.monotonic()
        try:
            call = turn.result()
            _check_told(told, call, session)
            events = b"".join(self._dialect.stream(head, call, told))
        except Exception as failure:  # noqa: BLE001 - the same boundary, once a status has been sent
            events = self._dialect.stream_error(_explain(failure, session))
        await _send_part(send, events, is_last=True)


def _check_told(told: Told, call: Call, session: Session) -> None:
    """Raise `WireError`, after which clients ask again, where a stream has told what the call does not say."""
    if not told.begins(call.message):
        session.count("streams_taken_back")
        message = "the reply was read in another way at its end than before: ask again for the whole of it"
        raise WireError(message, status=503, kind="overloaded")


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


async def _read_body(request: Request, hold: Callable[[int], None]) -> bytes:
    """Read the body, counting its bytes by `hold`. Raises `WireError` where it is too large."""
    blocks, num_bytes = [], int(request.headers.get("content-length", 0))  # httptools lets only digits through
    if num_bytes <= MAX_BODY_BYTES:
        num_bytes = 0
        async for block in request.stream():
            hold(len(block))
            num_bytes += len(block)
            if num_bytes > MAX_BODY_BYTES:
                break
            blocks.append(block)
    if num_bytes > MAX_BODY_BYTES:
        raise WireError(f"the body is larger than {MAX_BODY_BYTES >> 20} MiB", status=413)
    return b"".join(blocks)


def _describe(request: Request, body: bytes = b"") -> Incoming:
    return Incoming(
        body=body,
        path=request.url.path,
        path_params=request.path_params,
        query=request.query_params,
        headers=request.headers,
    )


async def _reply_alive(request: Request) -> Response:
    return Response()


async def _render_http_error(find_session: FindSession, request: Request, error: Exception) -> Response:
    """Answer a path that no dialect has a route for."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    message = f"{request.method} {request.url.path[:MAX_PATH_LENGTH]} is not served here"
    session = find_session(parse_key(_describe(request)) or "") or request.scope["connection"].session
    if session is not None:
        refusal = WireError(message, status=status, kind="not_found", reason="path")
        session.refusals.note(refusal, is_call=False)
    return JSONResponse({"error": {"message": message, "type": "not_found", "code": status}}, status_code=status)
