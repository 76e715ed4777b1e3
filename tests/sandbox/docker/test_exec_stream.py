"""The output of a command in a container, from a played engine: timing and chunks."""

import socket
import struct
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import docker
import pytest

from polar_trl.sandbox.docker.exec_stream import TAIL_BYTES, ExecStream


class Engine:
    """The two calls that are made of a `docker.APIClient`. The command has ended once `exit_code` is set.

    Args:
        on_inspect: Sent at the first question of how the command is, before it is answered.
    """

    def __init__(self, on_inspect: bytes = b"") -> None:
        self.ours, self._theirs = socket.socketpair()
        self.exit_code: int | None = None
        self._on_inspect = on_inspect

    def exec_start(self, exec_id: str, *, socket: bool) -> Any:
        return self._theirs

    def exec_inspect(self, exec_id: str) -> dict[str, Any]:
        if self._on_inspect:
            self.ours.sendall(self._on_inspect)
            self._on_inspect = b""
            self.exit_code = 7
        return {"Running": self.exit_code is None, "ExitCode": self.exit_code}


class RawEngine:
    """Answers two requests on a unix socket: a start, with the command's first words in one piece with the head of the
    reply, as a busy machine delivers them; then a question of how the command is.
    """

    def __init__(self, path: Path, words: bytes) -> None:
        self._words = words
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(path))
        self._server.listen(2)
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> "RawEngine":
        self._thread.start()
        return self

    def __exit__(self, *failure: Any) -> None:
        self._thread.join(timeout=60)
        self._server.close()

    def _serve(self) -> None:
        state = b'{"Running": false, "ExitCode": 3}'
        head = b"HTTP/1.1 101 UPGRADED\r\nContent-Type: application/vnd.docker.raw-stream\r\n"
        replies = (
            head + b"Connection: Upgrade\r\nUpgrade: tcp\r\n\r\n" + self._words,
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(state), state),
        )
        with ExitStack() as connections:
            for reply in replies:
                connection = connections.enter_context(self._server.accept()[0])
                while b"\r\n\r\n" not in connection.recv(1 << 16):
                    pass
                connection.sendall(reply)


def frame(stream: int, text: bytes) -> bytes:
    return struct.pack(">BxxxL", stream, len(text)) + text


def test_last_words_that_come_while_the_engine_is_asked() -> None:
    engine = Engine(on_inspect=frame(1, b"out") + frame(2, b"err"))
    with engine.ours, ExecStream(engine, "id") as stream:
        assert stream.read_until(time.monotonic() + 60) == 7
        assert (stream.stdout, stream.stderr) == (b"out", b"err")


def test_first_words_that_come_with_the_head_of_the_reply(tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    with RawEngine(path, frame(1, b"out") + frame(2, b"err")):
        api = docker.APIClient(base_url=f"unix://{path}", version="1.41", timeout=60)
        with ExecStream(api, "id") as stream:
            assert stream.read_until(time.monotonic() + 60) == 3
            assert (stream.stdout, stream.stderr) == (b"out", b"err")
        api.close()


@pytest.mark.parametrize("size", [1, 5, 8, 9, 100])
def test_frames_in_any_pieces(size: int) -> None:
    engine = Engine()
    sent = frame(1, b"one ") + frame(2, b"") + frame(2, b"two") + frame(1, b"three")
    with engine.ours, ExecStream(engine, "id") as stream:
        for start in range(0, len(sent), size):
            engine.ours.sendall(sent[start : start + size])
        engine.ours.shutdown(socket.SHUT_WR)
        engine.exit_code = 0
        assert stream.read_until(time.monotonic() + 60) == 0
        assert (stream.stdout, stream.stderr) == (b"one three", b"two")


def test_only_the_end_is_kept() -> None:
    engine = Engine()
    with engine.ours, ExecStream(engine, "id") as stream:
        engine.ours.sendall(frame(1, b"a" * 40_000))
        engine.exit_code = 0
        assert stream.read_until(time.monotonic() + 60) == 0
        engine.ours.sendall(frame(1, b"b" * TAIL_BYTES))
        assert stream.read_until(time.monotonic() + 60) == 0
        assert stream.stdout == b"b" * TAIL_BYTES


def test_a_background_process_that_goes_on_talking_is_not_waited_for() -> None:
    engine, stop = Engine(), threading.Event()

    def talk() -> None:
        while not stop.wait(0.05):
            engine.ours.sendall(frame(1, b"."))

    engine.exit_code = 0
    talker = threading.Thread(target=talk)
    with engine.ours, ExecStream(engine, "id") as stream:
        talker.start()
        try:
            assert stream.read_until(time.monotonic() + 60) == 0
        finally:
            stop.set()
            talker.join()


def test_the_deadline_comes_first() -> None:
    engine = Engine()
    with engine.ours, ExecStream(engine, "id") as stream:
        engine.ours.sendall(frame(1, b"so far"))
        assert stream.read_until(time.monotonic() + 0.6) is None
        assert stream.stdout == b"so far"
