"""Local sandboxes: a temporary folder of this machine, and commands as processes of this user in it.

This is no security boundary. The agent runs as the trainer's own user: it can read what the user can read, reach the
network, and fill the disk, the memory and the process table. The agent gets folders of its own, an environment without
the trainer's secrets, a deadline, and an end: after each `run` no process that it started is left, however it was
detached. Where the kernel allows namespaces (see `supervise.py`), it can neither signal other processes nor change
files outside of its folders (a service that obeys this user, such as a container engine, still can for it), and has
/tmp, /var/tmp and /dev/shm to itself; without them it can harm whatever its user can, other sessions included, and one
that sends SIGKILL to its own supervisor escapes. A fork bomb is ended at the deadline, but until then it starves the
machine unless the user has a process limit (`ulimit -u`; it does not bind root). For agents and models that are not
trusted use bubblewrap or docker.

Refuses tasks that name a container image (`SandboxError`).
"""

import functools
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from polar_trl.errors import SandboxError
from polar_trl.sandbox.base import Capabilities, ExecResult, SandboxBackend
from polar_trl.sandbox.disk import make_folders
from polar_trl.sandbox.folder import DISK, HostFolders, SessionFolder, encode_text
from polar_trl.sandbox.inside.supervise import KILL_LIMIT_S
from polar_trl.sandbox.owner import (
    find_state_folder,
    make_session_folder,
    reap_session_folders,
    remove_session_folder,
)
from polar_trl.sandbox.python import find_python
from polar_trl.sandbox.seccomp import build_filter
from polar_trl.sandbox.work_tree import WorkTrees, apply_start_patch
from polar_trl.types import Task

logger = logging.getLogger(__name__)

INHERITED = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "USER", "LOGNAME")
SUPERVISOR = Path(__file__).parent / "inside" / "supervise.py"
SUPERVISOR_GRACE_S = KILL_LIMIT_S + 20.0
TRIAL_TIMEOUT_S = 60.0


class LocalSandboxBackend(SandboxBackend):
    """Makes sandboxes out of temporary folders.

    Args:
        root: Where session folders are kept; None takes the user's state folder.
        inherit_env: Names of the trainer's own variables that agents get. Nothing else of its environment is passed.
        mounts: Folders that agents see, read-only at the same path, also below /tmp and /var/tmp.
    """

    def __init__(
        self, root: Path | None = None, inherit_env: Sequence[str] = INHERITED, *, mounts: Sequence[Path] = ()
    ) -> None:
        if not sys.platform.startswith("linux"):
            raise SandboxError("the local sandbox needs Linux; use the docker sandbox on other systems")
        if isinstance(inherit_env, str):
            raise SandboxError(f"inherit_env is the text {inherit_env!r}; pass a list of variable names")
        self.capabilities = Capabilities(cuts_network=False, limits_memory=False, limits_disk=False, uses_images=False)
        self._root = root or find_state_folder()
        self._inherit_env = tuple(inherit_env)
        self._mounts = tuple(dict.fromkeys(map(Path.absolute, [*mounts, *find_python(), Path(sys.prefix)])))
        self._trees = WorkTrees()
        self._is_enclosed = can_enclose()
        reap_session_folders(self._root)
        logger.warning(describe_local())

    def prepare(self, tasks: Sequence[Task]) -> None:
        """Prepare the work trees. Raises `SandboxError`."""
        for task in tasks:
            self._find_tree(task)

    def _find_tree(self, task: Task) -> Path | None:
        return apply_start_patch(task, self._trees.find(task))

    def create(self, task: Task, session_id: str) -> "LocalSandbox":
        """Make a fresh folder with the task's files. Raises `SandboxError`."""
        if task.image is not None:
            raise SandboxError(
                f"task {task.id}: the local sandbox has no images, and this task names {task.image!r}; "
                "use the docker sandbox, or leave `image` out of the task"
            )
        tree = self._find_tree(task)
        folder = make_session_folder(self._root, session_id)
        try:
            make_folders(folder / DISK, tree)
            env = {name: os.environ[name] for name in self._inherit_env if name in os.environ}
            full_env = {"PATH": os.defpath, **env, **task.env}
            shown = [path for path in self._mounts if path.is_dir()]
            sandbox = LocalSandbox(folder, tree, full_env, shown if self._is_enclosed else None)
            for path, text in task.files.items():
                sandbox.put(path, encode_text(text, f"task {task.id}: file {path}"))
        except OSError as error:
            remove_session_folder(folder)
            raise SandboxError(f"cannot make a folder for session {session_id}: {error}") from error
        except BaseException:
            remove_session_folder(folder)
            raise
        return sandbox

    def close(self) -> None:
        """Do nothing: the backend holds nothing."""


class LocalSandbox(HostFolders):
    """One session's folder, of which its agent sees work/, home/ and tmp/.

    A `run` lives no longer than the thread that called it, nor than this process: the kernel then tells the
    supervisor, which kills everything. The folders of a killed trainer are removed by the next one.

    Args:
        folder: Made by `make_session_folder`, with the three folders in its `DISK`.
        base_tree: See `Sandbox`.
        env: Of every command.
        shown: Folders that a command sees although it has its own /tmp; None: it gets no namespaces.
    """

    def __init__(
        self, folder: Path, base_tree: Path | None, env: Mapping[str, str], shown: Sequence[Path] | None
    ) -> None:
        self.base_tree = base_tree
        self._folder = folder
        self._files = SessionFolder(folder / DISK, are_mounted=shown is not None)
        self.workdir = str(self.host_workdir)
        self._env = {**env}
        self._shown = shown
        self._lock = threading.Lock()
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._is_destroyed = False

    def run(self, command: str, *, env: Mapping[str, str], timeout_s: float) -> ExecResult:
        """Run `bash -c command` in the work folder. Everything it started is gone when this returns.

        An exit by signal n is reported as exit code 128 + n, as shells do. Raises `SandboxError` if the command could
        not be started, or if something that it started cannot be killed.
        """
        started = time.monotonic()
        if "\0" in command:
            raise SandboxError("the command holds a NUL byte, which no shell can be given")
        text = (b"" if self._shown is None else build_filter()) + encode_text(command, "the command")
        supervisor = self._start_supervisor(env, timeout_s)
        try:
            stdout, stderr = supervisor.communicate(text, timeout=max(timeout_s, 0.0) + SUPERVISOR_GRACE_S)
        except subprocess.TimeoutExpired as error:
            raise SandboxError("the supervisor of a command did not end after the deadline; it was killed") from error
        finally:
            with self._lock:
                self._supervisor = None
            _end(supervisor)
        if not stdout and supervisor.returncode < 0:  # a signal came before the report: `kill`, or the agent itself
            seconds = time.monotonic() - started
            return ExecResult(exit_code=None, stdout="", stderr="", timed_out=False, seconds=seconds)
        return _parse_report(stdout, stderr, time.monotonic() - started)

    def put(self, path: str, content: bytes, *, executable: bool = False) -> None:
        """See `SessionFolder.put`."""
        self._require_alive()
        super().put(path, content, executable=executable)

    def get(self, path: str, *, max_bytes: int = 1 << 20) -> bytes | None:
        """See `SessionFolder.get`."""
        self._require_alive()
        return super().get(path, max_bytes=max_bytes)

    def open_listener(self) -> None:
        """Return None: the sandbox shares the host's network."""

    def is_alive(self) -> bool:
        """See `Sandbox.is_alive`."""
        return not self._is_destroyed

    def kill(self) -> None:
        """Kill what is running; the `run` in progress returns with no exit code."""
        with self._lock:
            if self._supervisor is not None:
                self._supervisor.terminate()

    def destroy(self) -> None:
        """Kill and remove everything. Safe to call twice. Raises `SandboxError` if the folder cannot be removed."""
        with self._lock:
            self._is_destroyed = True
        self.kill()
        remove_session_folder(self._folder)

    def _start_supervisor(self, env: Mapping[str, str], timeout_s: float) -> "subprocess.Popen[bytes]":
        folders = {"HOME": str(self.host_home), "TMPDIR": str(self._files.base / "tmp")}
        full_env = {
            encode_text(name, "an environment variable's name"): encode_text(value, f"the environment variable {name}")
            for name, value in {**self._env, **env, **folders}.items()
        }
        words = ["plain"]
        if self._shown is not None:
            words = ["enclosed", *map(str, (len(build_filter()), self._folder.parent, self._files.base, *self._shown))]
        with self._lock:
            self._require_alive()
            try:
                self._files.restore()
                self._supervisor = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(SUPERVISOR), str(os.getpid()), str(timeout_s), *words],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    cwd=self.workdir,
                    env=full_env,
                    start_new_session=True,
                )
            except (OSError, ValueError) as error:
                raise SandboxError(f"cannot start a command in {self.workdir}: {error}") from error
            return self._supervisor

    def _require_alive(self) -> None:
        if self._is_destroyed:
            raise SandboxError("the sandbox was destroyed; make a new one")


def describe_local() -> str:
    """Describe in one sentence what a local sandbox does not hold on this machine."""
    if can_enclose():
        rest = "by themselves they change no file and end no process but their session's own"
    else:
        rest = (
            "this system allows this user no namespaces, so they can also end this user's processes and change or "
            "remove its files, those of the run and of other sessions included"
        )
    return (
        "the local sandbox is no boundary: agents read what this user can read, reach the network, and have no limit "
        f"on memory, disk and processes; {rest}"
    )


@functools.cache
def can_enclose() -> bool:
    """Return whether this user may have namespaces here, by trying."""
    with tempfile.TemporaryDirectory(prefix="polar-trl-trial-") as root:
        folder = make_session_folder(Path(root), "trial")
        make_folders(folder / DISK, None)
        try:
            result = LocalSandbox(folder, None, {"PATH": os.defpath}, []).run(
                "true", env={}, timeout_s=TRIAL_TIMEOUT_S
            )
        except SandboxError:
            return False
    return result.exit_code == 0


def _end(supervisor: "subprocess.Popen[bytes]") -> None:
    """Leave no supervisor behind, and through it no process of its command."""
    if supervisor.poll() is not None:
        return
    supervisor.send_signal(signal.SIGTERM)
    supervisor.send_signal(signal.SIGCONT)  # an agent may have stopped it
    try:
        supervisor.communicate(timeout=SUPERVISOR_GRACE_S)
    except subprocess.TimeoutExpired:
        supervisor.kill()
        supervisor.communicate()


def _parse_report(report: bytes, complaint: bytes, seconds: float) -> ExecResult:
    head, separator, body = report.partition(b"\n")
    fields = head.split()
    if not separator or len(fields) != 4:
        raise SandboxError(f"the supervisor of a command failed: {complaint.decode(errors='replace').strip()}")
    kind, code, num_stdout = fields[0].decode(), int(fields[1]), int(fields[2])
    if kind == "failed":
        raise SandboxError(f"bash could not be started: {os.strerror(code)}")
    if kind == "stuck":
        raise SandboxError("a process that the command started could not be killed; is it another user's?")
    return ExecResult(
        exit_code=code if kind == "exit" else None,
        stdout=body[:num_stdout].decode("utf-8", "replace"),
        stderr=body[num_stdout:].decode("utf-8", "replace"),
        timed_out=kind == "timeout",
        seconds=seconds,
    )
