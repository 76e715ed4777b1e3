"""Bound the connections of agents: their number, the size of a request's head, and the time a request may take.

HTTP is uvicorn's on httptools, whose own limits know no sessions. A connection belongs to a session from the start
where the session has a listener of its own, elsewhere from its first valid key on. Time is counted in sweeps of the
event loop, about a second each: after a while in which the process stood still, no connection has become too slow.

A session past its bounds ends (`SessionBounds.exceed`). Where all together are past theirs, the largest ends.
"""

import asyncio
import resource
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from polar_trl.errors import WireError
from polar_trl.recording.session import Session
from polar_trl.wire.base import MAX_BODY_BYTES

SWEEP_INTERVAL_S = 1.0
HEAD_SWEEPS = 60
"""For the head of a request, and for the first valid key on a connection. Dozens of agents that start at once on a few
cores take this long between a connection and its first byte; the number of connections is what is scarce."""
BODY_SWEEPS = 120
CLOSING_SWEEPS = 2
MAX_HEAD_BYTES = 64 << 10
MAX_FRAMING_BYTES = 320 << 10
"""Of a request's head, the sizes of its chunks, and what follows the last of them: all is parsed bit by bit."""
MAX_HEADERS = 256
MAX_PIPELINED = 4
"""Requests that wait behind the one that is being answered. No client that is known here sends even one."""
MAX_OPEN_FILES = 65536
"""What the limit of open files is raised to, where the system allows it. vLLM takes as many."""
MAX_UNAUTHENTICATED = 1024
"""Connections without a valid key."""
MAX_BODY_BYTES_HELD = 512 << 20
"""Bodies of requests that are being read or answered, of all sessions together."""
MODEST_BODY_BYTES = 2 * MAX_BODY_BYTES
"""A session that holds no more does not pay for the others: 64 agents with some screenshots each may ask at once."""
_TIMED_OUT = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


def raise_open_file_limit() -> int:
    """Raise the process's limit of open files as far as the system and `MAX_OPEN_FILES` allow. Returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


class Connections:
    """The open connections of all sessions, and the request bodies that they hold. Used on the event loop only.

    Args:
        max_open: Of all sessions together.
    """

    def __init__(self, max_open: int) -> None:
        self._max_open = max_open
        self._max_unauthenticated = min(MAX_UNAUTHENTICATED, max_open // 4)
        # in the order in which they came
        self._open: dict[Connection, None] = {}
        self._unauthenticated: dict[Connection, None] = {}
        self._num_open: Counter[Session] = Counter()
        self._num_bytes: Counter[Session] = Counter()

    def add(self, connection: "Connection") -> None:
        """Count a new connection. If there are too many, the oldest without a key goes, or the largest session."""
        self._open[connection] = None
        if connection.session is None:
            self._unauthenticated[connection] = None
        else:
            self._count(connection, connection.session)
        is_full = len(self._open) > self._max_open
        if self._unauthenticated and (is_full or len(self._unauthenticated) > self._max_unauthenticated):
            next(iter(self._unauthenticated)).abort()
        elif is_full:
            self._end_largest(self._num_open, "connections")

    def adopt(self, connection: "Connection", session: Session) -> None:
        """Make a connection, whose request had the session's key, the session's own."""
        self._forget(connection)
        connection.session = session
        self._count(connection, session)

    def discard(self, connection: "Connection") -> None:
        """Count a connection no longer."""
        if self._open.pop(connection, self) is not self:
            self._forget(connection)

    @contextmanager
    def holding_bytes(self, session: Session) -> Iterator[Callable[[int], None]]:
        """Give a function that counts bytes held for a request, which counts them until the end of the block."""
        num_bytes = 0

        def hold(num_more: int) -> None:
            nonlocal num_bytes
            num_bytes += num_more
            self._hold_bytes(session, num_more)

        try:
            yield hold
        finally:
            self._num_bytes[session] -= num_bytes
            if not self._num_bytes[session]:
                del self._num_bytes[session]

    def _hold_bytes(self, session: Session, num_bytes: int) -> None:
        self._num_bytes[session] += num_bytes
        if self._num_bytes[session] > session.limits.max_body_bytes_held:
            session.bounds.exceed("memory")
        elif self._num_bytes.total() > MAX_BODY_BYTES_HELD:
            self._end_largest(self._num_bytes, "memory", at_least=MODEST_BODY_BYTES + 1)
        session.bounds.check_open()

    async def sweep(self) -> None:
        """Close slow connections and those of sessions that have ended. Runs until it is cancelled."""
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            self._sweep_once()

    def _sweep_once(self) -> None:
        # not in `sweep`, whose variables would keep the last connection and its session alive
        for connection in list(self._open):
            connection.sweep()

    def _count(self, connection: "Connection", session: Session) -> None:
        self._num_open[session] += 1
        session.bounds.count_request()  # one that opens a connection for each of a million requests is as busy
        if session.bounds.has_ended:
            connection.abort()
        elif self._num_open[session] > session.limits.max_connections:
            # some agents make a client for each call and leave its connection open, which other servers close in time
            idle = next((other for other in self._open if other.session is session and other.is_idle), None)
            if idle is None:
                session.bounds.exceed("connections")
            else:
                idle.shutdown()

    def _end_largest(self, amounts: Counter[Session], limit: str, at_least: int = 0) -> None:
        """End the session that has the most, and its connections with it, unless it is less than `at_least`. One that
        has ended already may still be it: no other pays before that one has paid."""
        ((session, amount),) = amounts.most_common(1)
        if amount < at_least:
            return
        session.bounds.exceed(limit)
        for connection in list(self._open):
            if connection.session is session:
                connection.abort()

    def _forget(self, connection: "Connection") -> None:
        if connection.session is None:
            self._unauthenticated.pop(connection, None)
            return
        self._num_open[connection.session] -= 1
        if not self._num_open[connection.session]:
            del self._num_open[connection.session]


class _Transport:
    """Drops what is written after the end, as asyncio's transports do: uvloop's raise, and a reply to a client that
    has just gone would be a fault of ours."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)


class Connection(HttpToolsProtocol):
    """One connection of an agent.

    Args:
        connections: Counts it.
        session: Whose listener accepted it; None for the listener that all sessions share.
        server: What uvicorn gives a protocol.
    """

    def __init__(self, *, connections: Connections, session: Session | None = None, **server: Any) -> None:
        super().__init__(**server)
        self.session = session
        self.has_own_listener = session is not None
        self._connections = connections
        self._sweeps_left: int | None = HEAD_SWEEPS
        """None while nothing is awaited from the client."""
        self._is_ending = False
        self._in_body = False
        self._num_body_bytes = 0
        """Of the request that is being read."""
        self._num_other_bytes = 0
        """Of its head and between its chunks, or since the last request."""
        self._num_new_bytes = self._num_new_body_bytes = 0
        """Of the block that is being parsed."""

    @property
    def is_idle(self) -> bool:
        """True if a request of its session was answered on it, and no other has begun."""
        has_answered = self.cycle is not None and self.cycle.response_complete
        return has_answered and self._sweeps_left is None and not self.transport.is_closing()

    def connection_made(self, transport: Any) -> None:
        super().connection_made(_Transport(transport))  # type: ignore[arg-type]
        self._connections.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._connections.discard(self)
        super().connection_lost(error)
        if self.timeout_keep_alive_task is not None:  # after an error uvicorn lets it run, and it holds the session
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._num_new_bytes, self._num_new_body_bytes = len(data), 0
        super().data_received(data)
        if not self.transport.is_closing():
            self._num_other_bytes += len(data) - self._num_new_body_bytes
            if self._num_other_bytes > (MAX_FRAMING_BYTES if self._in_body else MAX_HEAD_BYTES):
                self.send_400_response("The head of the request is too large, or its chunks are too small.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._sweeps_left, self._num_other_bytes = HEAD_SWEEPS, 0

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) >= MAX_HEADERS:
            raise ValueError("too many headers")  # httptools makes a 400 of it
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            raise ValueError("too many pipelined requests")
        self._sweeps_left, self._in_body, self._num_body_bytes = BODY_SWEEPS, True, 0
        if self.session is not None:
            self.session.bounds.count_request()
        self.scope["connection"] = self  # type: ignore[typeddict-unknown-key]
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_new_body_bytes += len(body)
        self._num_body_bytes += len(body)
        if self._num_body_bytes > MAX_BODY_BYTES + MAX_HEAD_BYTES:
            raise ValueError("the body is too large")
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._sweeps_left = None if self.session is not None else HEAD_SWEEPS
        self._in_body, self._num_other_bytes = False, self._num_new_body_bytes - self._num_new_bytes
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, or too much of it."""
        self._note_refusal(msg, 400)
        super().send_400_response(msg)

    def adopt(self, session: Session) -> bool:
        """Make this connection the session's. False where its listener is that of another session."""
        if self.session is not session:
            if self.has_own_listener:
                return False
            self._connections.adopt(self, session)
            if not self.cycle.more_body:
                self._sweeps_left = None
        return True

    def abort(self) -> None:
        """Close it, whatever is still to be sent."""
        self.transport.abort()

    def sweep(self) -> None:
        """Close the connection if its session has ended, or if its client took too long."""
        if not self._is_ending and self.session is not None and self.session.bounds.has_ended:
            self._is_ending = True
            self._sweeps_left = CLOSING_SWEEPS
            self.shutdown()  # once the reply that is under way was sent
        if self._sweeps_left is None:
            return
        self._sweeps_left -= 1
        if self._sweeps_left > 0:
            return
        if self._is_ending:
            self.abort()
            return
        self._is_ending = True
        self._sweeps_left = CLOSING_SWEEPS
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            if self._in_body or self._num_other_bytes > 0:
                self._note_refusal("the request took too long to arrive", 408)
            self.transport.write(_TIMED_OUT)
        self.transport.close()

    def _note_refusal(self, message: str, status: int) -> None:
        if self.session is not None:
            self.session.refusals.note(WireError(message, status=status, reason="http"), is_call=False)
