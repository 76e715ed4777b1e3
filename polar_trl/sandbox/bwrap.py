"""A task becomes a bubblewrap sandbox: the host's programs read-only, folders of its own, and one loopback address.

Each command is a bubblewrap process with process ids of its own, so nothing that it started outlives it. All commands
of a session share a network namespace in which only the proxy listens. As root, memory, CPU, processes and disk are
limited; without root none of them, which `capabilities` says.

It refuses tasks that name a container image.
"""

import os
import secrets
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from polar_trl.errors import SandboxError
from polar_trl.sandbox.base import Capabilities, ExecResult
from polar_trl.sandbox.cgroup import Cgroup, can_limit
from polar_trl.sandbox.disk import is_full, make_disk, make_folders
from polar_trl.sandbox.folder import SUBFOLDERS, SessionFolder, encode_text
from polar_trl.sandbox.limits import Limits
from polar_trl.sandbox.network import NetworkHolder
from polar_trl.sandbox.owner import (
    find_state_folder,
    make_session_folder,
    reap_session_folders,
    remove_session_folder,
)
from polar_trl.sandbox.work_tree import WorkTrees
from polar_trl.types import Task

WORKDIR = "/workspace"
HOME = "/home/agent"
TAIL_BYTES = 64 << 10
SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib64")
SYSTEM_FILES = ("/etc/alternatives", "/etc/ssl", "/etc/ld.so.cache", "/etc/passwd", "/etc/group", "/etc/localtime")


class BwrapSandboxBackend:
    """Makes bubblewrap sandboxes.

    Args:
        limits: Per session; enforced as root only.
        mounts: Further host folders that every sandbox sees read-only at the same path, such as the cache of agents.
            The Python that runs this is always there.
        root: Where session folders are kept; None takes the user's state folder.
    """

    def __init__(self, *, limits: Limits = Limits(), mounts: Sequence[Path] = (), root: Path | None = None) -> None:
        for program in ("bwrap", "nsenter"):
            if shutil.which(program) is None:
                raise SandboxError(f"the bubblewrap sandbox needs `{program}`; install bubblewrap and util-linux")
        self._has_limits = can_limit()
        self.capabilities = Capabilities(
            cuts_network=True, limits_memory=self._has_limits, limits_disk=self._has_limits, uses_images=False
        )
        self._limits = limits
        python = {Path(sys.prefix), Path(sys.base_prefix)}
        self._mounts = tuple(dict.fromkeys([*mounts, *(path for path in python if not path.is_relative_to("/usr"))]))
        self._root = root or find_state_folder()
        self._trees = WorkTrees()
        reap_session_folders(self._root)

    def prepare(self, tasks: Sequence[Task]) -> None:
        """Prepare the work trees. Raises `SandboxError`."""
        for task in tasks:
            if task.workspace:
                self._trees.find(task.workspace)

    def create(self, task: Task, session_id: str) -> "BwrapSandbox":
        """Folders with the task's files, a network namespace, and limits. Raises `SandboxError`."""
        if task.image is not None:
            raise SandboxError(
                f"task {task.id}: bubblewrap has no images, and this task names {task.image!r}; use the docker sandbox"
            )
        folder = make_session_folder(self._root, session_id)
        sandbox = None
        try:
            tree = self._trees.find(task.workspace) if task.workspace else None
            if self._has_limits:
                files = SessionFolder(make_disk(folder, tree, self._limits.disk_mb))
            else:
                make_folders(folder / "disk", tree)
                files = SessionFolder(folder / "disk")
            limits = self._limits if self._has_limits else None
            sandbox = BwrapSandbox(folder, files, tree, self._mounts, limits)
            for path, text in task.files.items():
                sandbox.put(path, encode_text(text, f"task {task.id}: file {path}"))
        except BaseException:
            if sandbox is not None:
                sandbox.destroy()
            else:
                remove_session_folder(folder)
            raise
        return sandbox

    def close(self) -> None:
        """Nothing to give back."""


class BwrapSandbox:
    """One session's folders, network namespace and control group."""

    workdir = WORKDIR

    def __init__(
        self,
        folder: Path,
        files: SessionFolder,
        base_tree: Path | None,
        mounts: Sequence[Path],
        limits: Limits | None,
    ) -> None:
        self.base_tree = base_tree
        self._folder = folder
        self._files = files
        self._mounts = mounts
        self._network = NetworkHolder()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_destroyed = False
        self._cgroup = None
        if limits is not None:
            name = f"{folder.name}-{secrets.token_hex(4)}"
            self._cgroup = Cgroup(name, memory_mb=limits.memory_mb, cpus=limits.cpus, pids=limits.pids)

    def run(self, command: str, *, env: Mapping[str, str], timeout_s: float) -> ExecResult:
        """Run `bash -c command`. Raises `SandboxError` if it could not be started."""
        started = time.monotonic()
        process, oom_kills = self._start(command, env)
        try:
            stdout, stderr, timed_out = _read_until(process, started + timeout_s)
        finally:
            _end(process)
            with self._lock:
                self._process = None
        if process.returncode == 1 and stderr.startswith(b"bwrap: "):
            raise SandboxError(f"bubblewrap failed: {stderr.decode(errors='replace').strip()}")
        was_killed = timed_out or process.returncode < 0
        return ExecResult(
            exit_code=None if was_killed else process.returncode,
            stdout=stdout.decode("utf-8", "replace"),
            stderr=stderr.decode("utf-8", "replace"),
            timed_out=timed_out,
            seconds=time.monotonic() - started,
            out_of_memory=self._cgroup is not None and self._cgroup.count_oom_kills() > oom_kills,
            disk_full=self._cgroup is not None and is_full(self._files.base),
        )

    @property
    def host_workdir(self) -> Path:
        """The work folder on this machine."""
        return self._files.base / "work"

    @property
    def host_home(self) -> Path:
        """HOME on this machine."""
        return self._files.base / "home"

    def put(self, path: str, content: bytes) -> None:
        """See `SessionFolder.put`."""
        self._files.put(path, content)

    def get(self, path: str, *, max_bytes: int = 1 << 20) -> bytes | None:
        """See `SessionFolder.get`."""
        return self._files.get(path, max_bytes=max_bytes)

    def upload(self, source: Path, target: str) -> None:
        """Refused: it has no root of its own. Raises `SandboxError`."""
        raise SandboxError("a bubblewrap sandbox has no files of its own outside of the work folder; use docker")

    def open_listener(self) -> socket.socket:
        """On the sandbox's own loopback."""
        return self._network.open_listener()

    def kill(self) -> None:
        """Kill what is running; the `run` in progress returns with no exit code."""
        with self._lock:
            if self._process is not None:
                self._process.kill()

    def destroy(self) -> None:
        """Kill and remove everything. Safe to call twice."""
        with self._lock:
            self._is_destroyed = True
        self.kill()
        self._network.close()
        if self._cgroup is not None:
            self._cgroup.remove()
        remove_session_folder(self._folder)

    def _start(self, command: str, env: Mapping[str, str]) -> tuple["subprocess.Popen[bytes]", int]:
        """The running command, and how many processes had been killed for their memory before it."""
        text = encode_text(command, "the command")
        with self._lock:
            if self._is_destroyed:
                raise SandboxError("the sandbox was destroyed; make a new one")
            oom_kills = self._cgroup.count_oom_kills() if self._cgroup else 0
            try:
                self._process = subprocess.Popen(
                    [*self._build_prefix(), *self._build_bwrap(env), "bash", "-c", text],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                )
            except (OSError, ValueError) as error:
                raise SandboxError(f"cannot start a command: {error}") from error
            return self._process, oom_kills

    def _build_prefix(self) -> list[str]:
        """Join the limits, then the network."""
        prefix = self._network.build_prefix()
        if self._cgroup is None:
            return prefix
        joins = "; ".join(f"echo $$ > {path}" for path in self._cgroup.join_files)
        return ["sh", "-c", f'set -e; {joins}; exec "$@"', "sh", *prefix]

    def _build_bwrap(self, env: Mapping[str, str]) -> list[str]:
        words = ["bwrap", "--die-with-parent", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--new-session"]
        words += ["--cap-drop", "ALL", "--clearenv", "--proc", "/proc", "--dev", "/dev"]
        for path in SYSTEM_FOLDERS:
            if os.path.islink(path):
                words += ["--symlink", os.readlink(path), path]
            elif os.path.isdir(path):
                words += ["--ro-bind", path, path]
        for path in SYSTEM_FILES:
            words += ["--ro-bind-try", path, path]
        for mount in self._mounts:
            words += ["--ro-bind-try", str(mount), str(mount)]
        for name, bind in zip(SUBFOLDERS, (WORKDIR, HOME, "/tmp"), strict=True):
            words += ["--bind", str(self._files.base / name), bind]
        words += ["--chdir", WORKDIR]
        path = os.pathsep.join((str(Path(sys.base_prefix, "bin")), "/usr/local/bin", "/usr/bin", "/bin"))
        for name, value in {"PATH": path, "HOME": HOME, "TMPDIR": "/tmp", "LANG": "C.UTF-8", **env}.items():
            words += ["--setenv", name, value]
        return words


def _read_until(process: "subprocess.Popen[bytes]", deadline: float) -> tuple[bytes, bytes, bool]:
    """The ends of both outputs, and whether the deadline came first."""
    tails = {process.stdout: bytearray(), process.stderr: bytearray()}
    with selectors.DefaultSelector() as selector:
        for stream in tails:
            selector.register(stream, selectors.EVENT_READ)  # type: ignore[arg-type]
        while selector.get_map():
            left = deadline - time.monotonic()
            if left <= 0:
                return bytes(tails[process.stdout]), bytes(tails[process.stderr]), True
            for key, _ in selector.select(left):
                block = os.read(key.fd, 1 << 16)
                if not block:
                    selector.unregister(key.fileobj)
                tail = tails[key.fileobj]  # type: ignore[index]
                tail += block
                del tail[:-TAIL_BYTES]
    return bytes(tails[process.stdout]), bytes(tails[process.stderr]), False


def _end(process: "subprocess.Popen[bytes]") -> None:
    with suppress(ProcessLookupError):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()
