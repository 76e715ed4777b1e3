"""Run a command in bubblewrap, drain its output and read its exit code.

When `end` returns, no process of the sandbox is left, however it was detached: the first process of its namespace is
dead, which the kernel reports only after all others. Bubblewrap's own messages come by a pipe which the sandbox does
not have, so a command cannot print them.
"""

import json
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from polar_trl.errors import SandboxError
from polar_trl.sandbox.inside.supervise import Tail

END_TIMEOUT_S = 30.0


class BwrapCommand:
    """A command that runs in bubblewrap.

    Args:
        prefix: Words before "bwrap", which end by running what follows them in their own place.
        options: Words of bubblewrap. They go by a file: what is on a command line, or in the environment, of the
            sandbox's first process can be read in it.
        command: Words of the command.
        seccomp: Filter of system calls, in the kernel's format.
        path: Folders in which the programs of `prefix` and bubblewrap are.

    Raises `OSError` or `ValueError` if it cannot be started.
    """

    def __init__(
        self, prefix: Sequence[str], options: Sequence[str], command: Sequence[str], *, seccomp: bytes, path: str
    ) -> None:
        if any("\0" in word for word in options):
            raise ValueError("a NUL character in one of its variables or paths")  # where the next option would begin
        status, status_end = os.pipe()
        given = [status_end]
        try:
            for content in (b"".join(os.fsencode(word) + b"\0" for word in options), seccomp):
                given.append(os.memfd_create("bwrap", os.MFD_CLOEXEC))
                with open(given[-1], "wb", closefd=False) as file:
                    file.write(content)
                os.lseek(given[-1], 0, os.SEEK_SET)
            _, arguments, program = map(str, given)
            own = ["--json-status-fd", str(status_end), "--seccomp", program, "--args", arguments]
            self._process = subprocess.Popen(
                [*prefix, "bwrap", *own, *command],
                env={"PATH": path},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=given,
                start_new_session=True,
            )
        except BaseException:
            os.close(status)
            raise
        finally:
            for fd in given:
                os.close(fd)
        assert self._process.stdout is not None and self._process.stderr is not None
        self._status, self._stdout, self._stderr = (
            Tail(fd) for fd in (status, self._process.stdout.fileno(), self._process.stderr.fileno())
        )
        self._first_process: int | None = None
        self._lock = threading.Lock()
        self._has_ended = False

    @property
    def stdout(self) -> str:
        """The last 64 KiB, undecodable bytes replaced."""
        return self._stdout.read().decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        """The last 64 KiB, undecodable bytes replaced."""
        return self._stderr.read().decode("utf-8", "replace")

    @property
    def exit_code(self) -> int | None:
        """The command's own after `end`, 128 + n where signal n ended it; None where it did not come to its end."""
        codes = [document["exit-code"] for document in self._read_status() if "exit-code" in document]
        return int(codes[-1]) if codes else None

    def wait_until(self, deadline: float) -> bool:
        """Drain the output until the command has ended; False if the deadline came first."""
        process = os.pidfd_open(self._process.pid)
        poll = select.poll()
        tails = {tail.fd: tail for tail in (self._status, self._stdout, self._stderr)}
        try:
            for fd in (process, *tails):
                poll.register(fd, select.POLLIN)
            while (left_s := deadline - time.monotonic()) > 0:
                ready = {fd for fd, _ in poll.poll(min(left_s, 3600.0) * 1000 + 1)}
                for fd in ready & tails.keys():
                    tails[fd].drain()
                    if not tails[fd].is_open:
                        poll.unregister(fd)  # closed by all; the command may go on without it
                    if fd == self._status.fd:
                        self._watch_first_process()
                if process in ready:
                    return True
            return False
        finally:
            os.close(process)

    def kill(self) -> None:
        """Kill it, from any thread; `wait_until` returns."""
        # its children are in its group until they are in a session of their own, and then bound to its life
        with self._lock, suppress(ProcessLookupError):
            if not self._has_ended:
                os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill its remaining processes and read the rest of its output. Raises `SandboxError` if one will not die."""
        self.kill()
        with self._lock:
            self._has_ended = True
        self._process.wait()  # its id may be somebody else's from here on
        self._status.drain()
        self._watch_first_process()
        try:
            self._await_first_process()
        finally:
            for tail in (self._stdout, self._stderr):
                tail.drain()
            for stream in (self._process.stdout, self._process.stderr):
                if stream is not None:
                    stream.close()
            os.close(self._status.fd)

    def _watch_first_process(self) -> None:
        pids = [document["child-pid"] for document in self._read_status() if "child-pid" in document]
        if pids and self._first_process is None:
            with suppress(ProcessLookupError):
                self._first_process = os.pidfd_open(pids[0])

    def _await_first_process(self) -> None:
        if self._first_process is None:
            return
        try:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._first_process, signal.SIGKILL)
            poll = select.poll()  # and not select(2), which knows no more than 1024 files
            poll.register(self._first_process, select.POLLIN)
            if not poll.poll(END_TIMEOUT_S * 1000):
                raise SandboxError("what the command started could not be killed")
        finally:
            os.close(self._first_process)

    def _read_status(self) -> list[dict[str, int]]:
        lines = self._status.read().decode().split("\n")[:-1]  # the last one is not whole yet
        return [json.loads(line) for line in lines]
