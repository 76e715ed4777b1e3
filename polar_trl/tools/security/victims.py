"""Processes, files and sockets of this machine that no sandbox may reach, and a watch over what runs in one."""

import ctypes
import os
import secrets
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from polar_trl.errors import SandboxError
from polar_trl.sandbox.base import Sandbox, SandboxBackend
from polar_trl.sandbox.limits import Limits
from polar_trl.types import Task

MARK, VICTIM_MARK, SECRET = "POLAR_PROBE", "POLAR_PROBE_VICTIM", "POLAR_PROBE_SECRET"
LIFE_S = 600
WATCH_EVERY_S = 0.1
_TICKS = os.sysconf("SC_CLK_TCK")
_IPC_CREAT, _IPC_RMID = 0o1000, 0


class Victims:
    """Things outside of a sandbox that an attacker goes for: a context manager.

    A process with a secret, a file in HOME, one in /dev/shm, a System V segment, TCP and Unix sockets, and another
    sandbox of the same backend, in which a command runs.
    """

    def __init__(self, backend: SandboxBackend) -> None:
        self._token = secrets.token_hex(8)
        self._folder = Path(tempfile.mkdtemp(prefix="polar-probe-"))
        home = Path.home()
        self._canary = (home if os.access(home, os.W_OK) else self._folder) / f".polar-trl-probe-{self._token}"
        self._shm_file = Path("/dev/shm", f"polar-trl-probe-{self._token}")
        self._shm_key = secrets.randbelow(1 << 30) + 1
        self._connections: list[str] = []
        self._servers: list[socket.socket] = []
        self._backend = backend
        self._sibling: Sandbox | None = None
        self._sibling_run: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        for server in self._servers:
            server.shutdown(socket.SHUT_RDWR)  # which ends a wait for connections, as closing does not
            server.close()
        if self._sibling is not None:
            self._sibling.kill()
            if self._sibling_run is not None:
                self._sibling_run.join()
            self._sibling.destroy()
        libc = ctypes.CDLL(None)
        libc.shmctl(libc.shmget(self._shm_key, 0, 0), _IPC_RMID, None)
        for path in (self._canary, self._shm_file, self._folder / "socket"):
            path.unlink(missing_ok=True)
        self._folder.rmdir()

    def describe(self) -> dict[str, Any]:
        """Tell the attacker where to look, and nothing of the secrets."""
        assert self._process is not None and self._sibling is not None
        return {
            "victims": [self._process.pid],
            "victim_mark": f"{VICTIM_MARK}={self._token}",
            "canary": str(self._canary),
            "files": [str(self._canary), str(self._sibling.host_home / "key.txt")],
            "hosts": list(dict.fromkeys(["127.0.0.1", _find_address()])),
            "port": self._servers[0].getsockname()[1],
            "abstract": f"polar-trl-probe-{self._token}",
            "socket": str(self._folder / "socket"),
            "shm_key": self._shm_key,
            "shm_file": str(self._shm_file),
        }

    def find_harm(self) -> list[str]:
        """Say what has happened to them, and mend it."""
        assert self._process is not None and self._sibling is not None and self._sibling_run is not None
        harm = []
        if self._process.poll() is not None or _read_state(self._process.pid) in "Tt":
            harm.append("a process of this machine was ended or stopped")
            self._process.kill()
            self._process.wait()
            self._start_process()
        if not self._sibling_run.is_alive():
            harm.append("another session's command was ended")
            self._start_sibling_run()
        for path in (self._canary, self._sibling.host_home / "key.txt"):
            if not path.exists() or path.read_text() != self._token:
                harm.append(f"{path} was changed")
                path.write_text(self._token)
        while self._connections:
            harm.append(f"{self._connections.pop()} was reached")
        return harm

    def _start(self) -> None:
        self._canary.touch(mode=0o600)
        for path in (self._canary, self._shm_file):
            path.write_text(self._token)
        if ctypes.CDLL(None).shmget(self._shm_key, 4096, _IPC_CREAT | 0o666) < 0:
            raise SandboxError("no System V shared memory can be made here, which an attack needs")
        self._serve("a TCP port of this machine", socket.create_server(("0.0.0.0", 0)))
        for what, address in (
            ("an abstract socket of this machine", f"\0polar-trl-probe-{self._token}"),
            ("a socket in a folder of this machine", str(self._folder / "socket")),
        ):
            server = socket.socket(socket.AF_UNIX)
            server.bind(address)
            server.listen()
            self._serve(what, server)
        self._start_process()
        self._sibling = self._backend.create(Task(id="sibling", instruction=""), "sibling")
        self._sibling.put("~/key.txt", self._token.encode())
        self._start_sibling_run()

    def _start_process(self) -> None:
        env = {SECRET: self._token, VICTIM_MARK: self._token, "PATH": os.defpath}
        self._process = subprocess.Popen(["sleep", str(LIFE_S)], env=env, start_new_session=True)

    def _start_sibling_run(self) -> None:
        assert self._sibling is not None
        sibling, env = self._sibling, {VICTIM_MARK: self._token}

        def run() -> None:
            with suppress(SandboxError):
                sibling.run(f"exec sleep {LIFE_S}", env=env, timeout_s=LIFE_S)

        self._sibling_run = threading.Thread(target=run, name="polar-probe-sibling")
        self._sibling_run.start()

    def _serve(self, what: str, server: socket.socket) -> None:
        self._servers.append(server)

        def accept() -> None:
            with suppress(OSError):  # closed at the end
                while True:
                    connection, _ = server.accept()
                    self._connections.append(what)
                    connection.close()

        threading.Thread(target=accept, name="polar-probe-server", daemon=True).start()


class Watch:
    """Follows the processes with a mark in their environment: their number, memory and CPU time. A context manager."""

    def __init__(self, token: str) -> None:
        self.token = token
        self.most_processes = 0
        self.most_mb = 0.0
        self._cpu_s: dict[int, float] = {}
        self._started = self._ended = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, name="polar-probe-watch", daemon=True)

    def __enter__(self) -> Self:
        self._started = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended = time.monotonic()
        self._stop.set()
        self._thread.join()

    def list_processes(self) -> list[int]:
        """List those that live."""
        mark = f"{MARK}={self.token}".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):  # ended, or another user's
                if mark in path.read_bytes():
                    found.append(int(path.parent.name))
        return found

    def find_excess(self, limits: Limits) -> list[str]:
        """Say which limits were passed."""
        excess = []
        if self.most_processes > limits.pids:
            excess.append(f"{self.most_processes} processes were alive at a limit of {limits.pids}")
        # its processes are read one after another, while some grow and others end
        if self.most_mb > 1.25 * limits.memory_mb:
            excess.append(f"{self.most_mb:.0f} MB were held at a limit of {limits.memory_mb}")
        seconds, used_s = self._ended - self._started, sum(self._cpu_s.values())
        # a period of the limit may be half over at either end
        if seconds > 1.5 and used_s > limits.cpus * (seconds + 0.5):
            excess.append(f"{used_s / seconds:.1f} cores were used at a limit of {limits.cpus:g}")
        if self.list_processes():
            excess.append("what it started lives after the command's end")
        return excess

    def _look(self) -> None:
        while not self._stop.wait(WATCH_EVERY_S):
            pids = self.list_processes()
            self.most_processes = max(self.most_processes, len(pids))
            self.most_mb = max(self.most_mb, sum(map(_read_anonymous_mb, pids)))
            self._cpu_s |= {pid: _read_cpu_s(pid) for pid in pids}


def _find_address() -> str:
    """Find the address of this machine on the way out; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("203.0.113.1", 53))
        except OSError:
            return "127.0.0.1"
        address: str = probe.getsockname()[0]
        return address


def _read_stat(pid: int) -> Sequence[str]:
    """Read proc(5)'s stat from the state on; after the name, which may hold anything."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ()


def _read_state(pid: int) -> str:
    return (*_read_stat(pid), "X")[0]


def _read_cpu_s(pid: int) -> float:
    fields = _read_stat(pid)
    return (int(fields[11]) + int(fields[12])) / _TICKS if fields else 0.0


def _read_anonymous_mb(pid: int) -> float:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss_Anon:"):  # a part of what forks share
                return int(line.split()[1]) / 1024
    return 0.0
