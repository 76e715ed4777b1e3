"""The output of a command in a container, read up to a deadline. Docker's own reader waits for ever."""

import os
import select
import struct
import time
from types import TracebackType
from typing import Any, Self

TAIL_BYTES = 64 << 10
POLL_S = 0.25
_HEADER = struct.Struct(">BxxxL")
"""Stream (1 stdout, 2 stderr) and length of what follows (Docker Engine API, "Attach to a container")."""


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

    @property
    def stdout(self) -> bytes:
        """The last 64 KiB."""
        return bytes(self._tails[1])

    @property
    def stderr(self) -> bytes:
        """The last 64 KiB."""
        return bytes(self._tails[2])

    def read_until(self, deadline: float) -> int | None:
        """Read until the command has ended; its exit code. None at the deadline, or if the container is gone.

        A background process can hold the output open for ever, so the end of the command is what counts.
        """
        is_open = True
        while (left := deadline - time.monotonic()) > 0:
            is_quiet = not is_open or not self._wait_for_output(min(left, POLL_S))
            if is_quiet:
                state = self._api.exec_inspect(self._exec_id)
                if not state["Running"]:
                    while is_open and self._wait_for_output(POLL_S):  # its last words may come after the last look
                        is_open = self._read()
                    code = state["ExitCode"]
                    return None if code is None else int(code)
                if not is_open:
                    time.sleep(min(left, 0.02))
                continue
            is_open = self._read()
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._response.close()

    def _wait_for_output(self, timeout_s: float) -> bool:
        return bool(select.select([self._fd], [], [], timeout_s)[0])

    def _read(self) -> bool:
        """Take in what is there. False at the end of the stream."""
        block = os.read(self._fd, 1 << 16)
        self._unread += block
        while len(self._unread) >= _HEADER.size:
            stream, length = _HEADER.unpack_from(self._unread)
            if len(self._unread) < _HEADER.size + length:
                break
            tail = self._tails.get(stream, self._tails[1])
            tail += self._unread[_HEADER.size : _HEADER.size + length]
            del tail[:-TAIL_BYTES]
            self._unread = self._unread[_HEADER.size + length :]
        return bool(block)
