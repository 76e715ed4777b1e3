"""Local sandboxes: a temporary folder of this machine, and commands as processes of this user in it.

This is no security boundary. The agent runs as the trainer's own user: it can read what the user can read, reach the
network, and fill the disk and the process table. The agent gets a folder of its own, an environment without the
trainer's secrets, a deadline, and an end: after each `run` no process that it started is left, however it was
detached. Where the kernel allows namespaces (see `supervise.py`), it can neither signal other processes nor change
files outside of its folder and the scratch folders; without them it can do both, and one that sends SIGKILL to its own
supervisor escapes. A fork bomb is ended at the deadline, but until then it starves the machine unless the user has a
process limit (`ulimit -u`; it does not bind root). For agents and models that are not trusted use bubblewrap or
docker.

Refuses tasks that name a container image (`SandboxError`).
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from polar_trl.errors import SandboxError
from polar_trl.sandbox.base import Capabilities, ExecResult, SandboxBackend
from polar_trl.sandbox.disk import make_folders
from polar_trl.sandbox.folder import SessionFolder, encode_text, remove_tree
from polar_trl.sandbox.inside.supervise import KILL_LIMIT_S
from polar_trl.sandbox.owner import find_state_folder, make_session_folder, reap_session_folders
from polar_trl.sandbox.work_tree import WorkTrees
from polar_trl.types import Task

INHERITED = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "USER", "LOGNAME")
SUPERVISOR = Path(__file__).parent / "inside" / "supervise.py"
SUPERVISOR_GRACE_S = KILL_LIMIT_S + 20.0


class LocalSandboxBackend(SandboxBackend):
    """Makes sandboxes out of temporary folders.

    Args:
        root: Where session folders are kept; None takes the user's state folder.
        inherit_env: Names of the trainer's own variables that agents get. Nothing else of its environment is passed.
    """

    def __init__(self, root: Path | None = None, inherit_env: Sequence[str] = INHERITED) -> None:
        if not sys.platform.startswith("linux"):
            raise SandboxError("the local sandbox needs Linux; use the docker sandbox on other systems")
        if isinstance(inherit_env, str):
            raise SandboxError(f"inherit_env is the text {inherit_env!r}; pass a list of variable names")
        self.capabilities = Capabilities(cuts_network=False, limits_memory=False, limits_disk=False, uses_images=False)
        self._root = root or find_state_folder()
        self._inherit_env = tuple(inherit_env)
        self._trees = WorkTrees()
        reap_session_folders(self._root)

    def prepare(self, tasks: Sequence[Task]) -> None:
        """Prepare the work trees. Raises `SandboxError`."""
        for task in tasks:
            self._trees.find(task)

    def create(self, task: Task, session_id: str) -> "LocalSandbox":
        """Make a fresh folder with the task's files. Raises `SandboxError`."""
        if task.image is not None:
            raise SandboxError(
                f"task {task.id}: the local sandbox has no images, and this task names {task.image!r}; "
                "use the docker sandbox, or leave `image` out of the task"
            )
        tree = self._trees.find(task)
        try:
            base = make_session_folder(self._root, session_id)
            make_folders(base, tree)
        except OSError as error:
            raise SandboxError(f"cannot make a folder for session {session_id}: {error}") from error
        env = {name: os.environ[name] for name in self._inherit_env if name in os.environ}
        sandbox = LocalSandbox(base, tree, {"PATH": os.defpath, **env, **task.env})
        try:
            for path, text in task.files.items():
                sandbox.put(path, encode_text(text, f"task {task.id}: file {path}"))
        except BaseException:
            sandbox.destroy()
            raise
        return sandbox

    def close(self) -> None:
        """Do nothing: the backend holds nothing."""


class LocalSandbox:
    """One session's folder: work/, home/ and tmp/.

    A `run` lives no longer than the thread that called it, nor than this process: the kernel then tells the
    supervisor, which kills everything. The folders of a killed trainer are removed by the next one.
    """

    def __init__(self, base: Path, base_tree: Path | None, env: Mapping[str, str]) -> None:
        self.workdir = str(base / "work")
        self.host_workdir = base / "work"
        self.host_home = base / "home"
        self.base_tree = base_tree
        self._base = base
        self._folder = SessionFolder(base)
        self._env = {**env}
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
        text = encode_text(command, "the command")
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

    def put(self, path: str, content: bytes) -> None:
        """See `SessionFolder.put`."""
        self._open_folder().put(path, content)

    def get(self, path: str, *, max_bytes: int = 1 << 20) -> bytes | None:
        """See `SessionFolder.get`."""
        return self._open_folder().get(path, max_bytes=max_bytes)

    def upload(self, source: Path, target: str) -> None:
        """Raise `SandboxError`: the sandbox has no root of its own."""
        raise SandboxError("the local sandbox has no files of its own outside of the work folder; use docker")

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
        remove_tree(self._base)

    def _start_supervisor(self, env: Mapping[str, str], timeout_s: float) -> "subprocess.Popen[bytes]":
        folders = {"HOME": str(self._base / "home"), "TMPDIR": str(self._base / "tmp")}
        full_env = {
            encode_text(name, "an environment variable's name"): encode_text(value, f"the environment variable {name}")
            for name, value in {**self._env, **env, **folders}.items()
        }
        with self._lock:
            if self._is_destroyed:
                raise SandboxError("the sandbox was destroyed; make a new one")
            try:
                for folder in (self.workdir, *folders.values()):
                    os.makedirs(folder, exist_ok=True)  # an agent that removed them is still graded
                self._supervisor = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(SUPERVISOR), str(os.getpid()), str(timeout_s), str(self._base)],
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

    def _open_folder(self) -> SessionFolder:
        if self._is_destroyed:
            raise SandboxError("the sandbox was destroyed; make a new one")
        return self._folder


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
