"""Read the output of a command in a container, up to a deadline. Docker's own reader waits for ever."""

import os
import select
import socket
import struct
import time
from types import TracebackType
from typing import Any, Self

TAIL_BYTES = 64 << 10
POLL_S = 0.25
LOOK_S = 1.0
"""The longest time between two questions to the engine, however much a background process prints."""
DRAIN_S = 2.0
_HEADER = struct.Struct(">BxxxL")
"""Stream (1 stdout, 2 stderr) and length of the frame (Docker Engine API, "Attach to a container")."""


class ExecStream:
    """Starts an exec; its output is read by `read_until`.

    Args:
        api: A `docker.APIClient`.
        exec_id: Of an exec that was created and not yet started.
    """

    def __init__(self, api: Any, exec_id: str) -> None:
        self._api = api
        self._exec_id = exec_id
        self._response = api.exec_start(exec_id, socket=True)
        self._fd = self._response.fileno()
        self._unread = b""
        self._tails = {1: bytearray(), 2: bytearray()}
        self._take(_read_ahead(self._response))

    @property
    def stdout(self) -> bytes:
        """The last 64 KiB."""
        return bytes(self._tails[1])

    @property
    def stderr(self) -> bytes:
        """The last 64 KiB."""
        return bytes(self._tails[2])

    def read_until(self, deadline: float) -> int | None:
        """Read until the command has ended; return its exit code, None at the deadline or if the container is gone.

        A background process can hold the output open for ever, so the end of the command is what counts.
        """
        is_open, look_at = True, time.monotonic() + LOOK_S
        while (left := deadline - time.monotonic()) > 0:
            if is_open and self._wait_for_output(min(left, POLL_S)):
                is_open = self._read()
                if time.monotonic() < look_at:
                    continue
            state = self._api.exec_inspect(self._exec_id)
            if not state["Running"]:
                self._drain(is_open)
                code = state["ExitCode"]
                return None if code is None else int(code)
            look_at = time.monotonic() + LOOK_S
            if not is_open:
                time.sleep(min(left, 0.02))
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._response.close()

    def _drain(self, is_open: bool) -> None:
        """Read the rest of the stream, which may come after the engine says that the command has ended.

        For `DRAIN_S` only: a background process can hold the stream open.
        """
        limit = time.monotonic() + DRAIN_S
        while is_open and (left := limit - time.monotonic()) > 0 and self._wait_for_output(left):
            is_open = self._read()

    def _wait_for_output(self, timeout_s: float) -> bool:
        return bool(select.select([self._fd], [], [], timeout_s)[0])

    def _read(self) -> bool:
        """Read the available bytes. False at the end of the stream."""
        try:
            block = os.read(self._fd, 1 << 16)
        except ConnectionResetError:  # whether the command ended as well is asked of the engine
            return False
        self._take(block)
        return bool(block)

    def _take(self, block: bytes) -> None:
        self._unread += block
        while len(self._unread) >= _HEADER.size:
            stream, length = _HEADER.unpack_from(self._unread)
            if len(self._unread) < _HEADER.size + length:
                break
            tail = self._tails.get(stream, self._tails[1])
            tail += self._unread[_HEADER.size : _HEADER.size + length]
            del tail[:-TAIL_BYTES]
            self._unread = self._unread[_HEADER.size + length :]


def _read_ahead(stream: Any) -> bytes:
    """Return output that came with the head of the engine's reply, which docker-py read into a buffer and left."""
    if not isinstance(stream, socket.SocketIO):
        return b""
    buffer, connection = stream._response.raw._fp.fp, stream._sock  # type: ignore[attr-defined]
    timeout_s = connection.gettimeout()
    connection.settimeout(0)  # where nothing was read ahead, `peek` reads
    try:
        return bytes(buffer.peek())
    finally:
        connection.settimeout(timeout_s)
