"""Bubblewrap sandboxes: the host's programs read-only, folders of their own, and one loopback address.

Each command is a bubblewrap process with process ids of its own, so nothing that it started outlives it. All commands
of a session share a network namespace in which only the proxy listens. As root, memory, CPU, processes and disk are
limited. Without root they are not, which `capabilities` says: only a process' own memory, a file's size and the number
of processes have an end.

Refuses tasks that name a container image, ask for a network, or for files of the system that can be changed
(`SandboxError`).
"""

import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from polar_trl.errors import SandboxError
from polar_trl.sandbox.base import HOME, WORKDIR, Capabilities, ExecResult, SandboxBackend
from polar_trl.sandbox.bwrap.command import BwrapCommand
from polar_trl.sandbox.cgroup import Cgroup, can_limit, reap_cgroups
from polar_trl.sandbox.disk import is_full, make_disk, make_folders
from polar_trl.sandbox.folder import SUBFOLDERS, HostFolders, SessionFolder, encode_text
from polar_trl.sandbox.limits import Limits
from polar_trl.sandbox.network import NetworkHolder
from polar_trl.sandbox.owner import (
    build_helper_mark,
    find_state_folder,
    make_session_folder,
    reap_session_folders,
    remove_session_folder,
)
from polar_trl.sandbox.python import find_python, list_package_folders
from polar_trl.sandbox.work_tree import WorkTrees
from polar_trl.sandbox.workdir import find_workdir_fault
from polar_trl.types import Task

TRIAL_TIMEOUT_S = 60.0
SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib64")
# root without capabilities still owns these; the same are read-only, or not shown, in a container of Docker's
PROC_READ_ONLY = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")
PROC_HIDDEN = (
    *("/proc/acpi", "/proc/asound", "/proc/kcore", "/proc/keys", "/proc/kmsg", "/proc/latency_stats"),
    *("/proc/scsi", "/proc/timer_list"),
)
SYSTEM_FILES = ("/etc/alternatives", "/etc/ssl", "/etc/ld.so.cache", "/etc/passwd", "/etc/group", "/etc/localtime")


class BwrapSandboxBackend(SandboxBackend):
    """Makes bubblewrap sandboxes.

    Args:
        limits: Per session; memory, CPU and disk are limited as root only.
        mounts: Further host folders that every sandbox sees read-only at the same path, such as the cache of agents.
            This machine's Python is always there, without the packages that are installed in it.
        root: Where session folders are kept; None takes the user's state folder.
    """

    def __init__(self, *, limits: Limits = Limits(), mounts: Sequence[Path] = (), root: Path | None = None) -> None:
        for program in ("bwrap", "nsenter", "prlimit"):
            if shutil.which(program) is None:
                raise SandboxError(
                    f"the bubblewrap sandbox needs `{program}` (as root: apt-get install bubblewrap util-linux)"
                )
        self._has_limits = can_limit()
        self.capabilities = Capabilities(
            cuts_network=True, limits_memory=self._has_limits, limits_disk=self._has_limits, uses_images=False
        )
        self._limits = limits
        self._mounts = tuple(dict.fromkeys([*mounts, *find_python()]))
        self._root = root or find_state_folder()
        self._trees = WorkTrees()
        reap_session_folders(self._root)
        reap_cgroups()
        self._try_out()

    def prepare(self, tasks: Sequence[Task]) -> None:
        """Prepare the work trees. Raises `SandboxError`."""
        for task in tasks:
            _refuse_impossible(task)
            self._trees.find(task)

    def create(self, task: Task, session_id: str) -> "BwrapSandbox":
        """Make a sandbox: folders with the task's files, a network namespace, limits. Raises `SandboxError`."""
        _refuse_impossible(task)
        folder = make_session_folder(self._root, session_id)
        sandbox = None
        try:
            tree = self._trees.find(task)
            if self._has_limits:
                files = SessionFolder(make_disk(folder, tree, self._limits.disk_mb))
            else:
                make_folders(folder / "disk", tree)
                files = SessionFolder(folder / "disk")
            workdir = task.workdir or WORKDIR
            sandbox = BwrapSandbox(
                folder, files, tree, self._mounts, self._limits, workdir=workdir, has_cgroup=self._has_limits
            )
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
        """Do nothing: the backend holds nothing."""

    def _try_out(self) -> None:
        """Raise `SandboxError` where the system lets this user make no such sandbox."""
        sandbox = self.create(Task(id="trial", instruction=""), "trial")
        try:
            result = sandbox.run("true", env={}, timeout_s=TRIAL_TIMEOUT_S)
        finally:
            sandbox.destroy()
        if result.exit_code != 0:
            raise SandboxError(f"bubblewrap cannot run a command here: {result.stderr.strip()[-300:]}")


class BwrapSandbox(HostFolders):
    """One session's folders, network namespace and control group."""

    def __init__(
        self,
        folder: Path,
        files: SessionFolder,
        base_tree: Path | None,
        mounts: Sequence[Path],
        limits: Limits,
        *,
        workdir: str,
        has_cgroup: bool,
    ) -> None:
        self.workdir = workdir
        self.base_tree = base_tree
        self._folder = folder
        self._files = files
        self._mounts = [mount for mount in mounts if mount.exists()]
        self._limits = limits
        self._lock = threading.Lock()
        self._command: BwrapCommand | None = None
        self._is_killed = False
        self._is_destroyed = False
        self._network = NetworkHolder(build_helper_mark(folder))
        self._cgroup = None
        try:
            if has_cgroup:
                self._cgroup = Cgroup(folder.name, memory_mb=limits.memory_mb, cpus=limits.cpus, pids=limits.pids)
        except BaseException:
            self._network.close()
            raise

    def run(self, command: str, *, env: Mapping[str, str], timeout_s: float) -> ExecResult:
        """Run `bash -c command`. Raises `SandboxError` if it could not be started."""
        started = time.monotonic()
        running, oom_kills = self._start(command, env)
        try:
            ended = running.wait_until(started + timeout_s)
        finally:
            try:
                running.end()
            finally:
                with self._lock:
                    self._command = None
        exit_code = running.exit_code
        timed_out = not ended and exit_code is None
        out_of_memory = self._cgroup is not None and self._cgroup.count_oom_kills() > oom_kills
        if exit_code is None and not (timed_out or out_of_memory or self._is_killed):
            raise SandboxError(f"a command could not be started, or was killed from outside: {running.stderr[-500:]}")
        return ExecResult(
            exit_code=exit_code,
            stdout=running.stdout,
            stderr=running.stderr,
            timed_out=timed_out,
            seconds=time.monotonic() - started,
            out_of_memory=out_of_memory,
            disk_full=self._cgroup is not None and is_full(self._files.base),
        )

    def upload(self, source: Path, target: str) -> None:
        """Raise `SandboxError`: the sandbox has no root of its own."""
        raise SandboxError("a bubblewrap sandbox has no files of its own outside of the work folder; use docker")

    def open_listener(self) -> socket.socket:
        """Return the socket that listens on the sandbox's own loopback."""
        return self._network.open_listener()

    def is_alive(self) -> bool:
        """See `Sandbox.is_alive`."""
        return not self._is_destroyed and self._network.is_alive()

    def kill(self) -> None:
        """Kill what is running; the `run` in progress returns with no exit code."""
        with self._lock:
            if self._command is not None:
                self._is_killed = True
                self._command.kill()

    def destroy(self) -> None:
        """Kill and remove everything. Safe to call twice."""
        with self._lock:
            self._is_destroyed = True
        self.kill()
        self._network.close()
        if self._cgroup is not None:
            self._cgroup.remove()
        remove_session_folder(self._folder)

    def _start(self, command: str, env: Mapping[str, str]) -> tuple[BwrapCommand, int]:
        """Start a command; return it, and the number of earlier kills at the memory limit."""
        text = encode_text(command, "the command").decode()
        with self._lock:
            if self._is_destroyed:
                raise SandboxError("the sandbox was destroyed; make a new one")
            oom_kills = self._cgroup.count_oom_kills() if self._cgroup else 0
            self._is_killed = False
            try:
                self._files.restore()
                self._command = BwrapCommand(self._build_prefix(), self._build_options(env), ["bash", "-c", text])
            except (OSError, ValueError) as error:
                raise SandboxError(f"cannot start a command: {error}") from error
            return self._command, oom_kills

    def _build_prefix(self) -> list[str]:
        """Build the words that join the limits, then the network."""
        prefix = self._network.build_prefix()
        if self._cgroup is None:
            # counted for each user namespace, and so for each sandbox, unless this is root
            sizes = {"nproc": self._limits.pids, "data": self._limits.memory_mb << 20, "core": 0}
            sizes |= {"fsize": self._limits.disk_mb << 20}
            return [*prefix, "prlimit", *(f"--{name}={size}:{size}" for name, size in sizes.items())]
        joins = "; ".join(f"echo $$ > '{path}'" for path in self._cgroup.join_files)
        return ["sh", "-c", f'set -e; {joins}; exec "$@"', "sh", *prefix]

    def _build_options(self, env: Mapping[str, str]) -> list[str]:
        words = ["--die-with-parent", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--new-session"]
        words += ["--cap-drop", "ALL", "--clearenv", "--proc", "/proc", "--dev", "/dev"]
        for path in filter(os.path.exists, PROC_READ_ONLY):
            words += ["--ro-bind", path, path]
        for path in filter(os.path.exists, PROC_HIDDEN):
            words += ["--tmpfs", path] if os.path.isdir(path) else ["--ro-bind", "/dev/null", path]
        for path in SYSTEM_FOLDERS:
            if os.path.islink(path):
                words += ["--symlink", os.readlink(path), path]
            elif os.path.isdir(path):
                words += ["--ro-bind", path, path]
        for path in SYSTEM_FILES:
            words += ["--ro-bind-try", path, path]
        work, home, tmp = (str(self._files.base / name) for name in SUBFOLDERS)
        words += ["--bind", tmp, "/tmp"]  # before what may lie below it on this machine
        for mount in self._mounts:
            words += ["--ro-bind", str(mount), str(mount)]
        for packages in list_package_folders():
            words += ["--tmpfs", str(packages), "--remount-ro", str(packages)]
        words += ["--bind", work, self.workdir, "--bind", home, HOME, "--chdir", self.workdir]
        path = os.pathsep.join((str(Path(sys.base_prefix, "bin")), "/usr/local/bin", "/usr/bin", "/bin"))
        for name, value in {"PATH": path, "HOME": HOME, "TMPDIR": "/tmp", "LANG": "C.UTF-8", **env}.items():
            words += ["--setenv", name, value]
        return words


def _refuse_impossible(task: Task) -> None:
    """Raise `SandboxError` naming the task, where bubblewrap cannot give what it asks for."""
    if task.image is not None:
        reason = f"bubblewrap has no images, and this task names {task.image!r}"
    elif task.network != "none":
        reason = f"bubblewrap has no network but the proxy, and this task asks for the {task.network} one"
    elif task.writable_root:
        reason = "bubblewrap shows the system's own files, which this task wants to change"
    elif task.workdir is not None and (fault := find_workdir_fault(task.workdir)):
        raise SandboxError(f"task {task.id}: {fault}")
    else:
        return
    raise SandboxError(f"task {task.id}: {reason}; use the docker sandbox")
