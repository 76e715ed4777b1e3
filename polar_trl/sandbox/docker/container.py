"""One session's container: commands with a deadline, files, and its removal.

Docker cannot kill a command that it runs in a container, and processes that a command detached outlive it: the
container is killed and started again then. A container that is gone raises `SandboxError`; it is no failed command.
"""

import socket
import tarfile
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from docker.errors import DockerException

from polar_trl.errors import SandboxError
from polar_trl.sandbox.base import HOME, SHELL, ExecResult
from polar_trl.sandbox.bases import Base
from polar_trl.sandbox.cgroup import count_oom_kills, limit_sockets
from polar_trl.sandbox.disk import is_full
from polar_trl.sandbox.docker.client import ENGINE_ERRORS, Removals
from polar_trl.sandbox.docker.exec_stream import ExecStream
from polar_trl.sandbox.docker.relay_folder import RelayFolder
from polar_trl.sandbox.folder import HostFolders, SessionFolder, check_upload, encode_text
from polar_trl.sandbox.network import open_listener
from polar_trl.sandbox.owner import remove_session_folder

_PF_EXITING = 0x4


class DockerSandbox(HostFolders):
    """One session's container.

    Args:
        user: Of the commands, who owns the work folder: root without capabilities could not write another's.
    """

    def __init__(
        self,
        client: Any,
        container: Any,
        folder: Path,
        files: SessionFolder,
        base: Base,
        removals: Removals,
        relay: RelayFolder | None,
        *,
        user: str,
        has_writable_root: bool,
    ) -> None:
        self.workdir = base.workdir
        self.base_tree = base.tree
        self._client = client
        self._container = container
        self._folder = folder
        self._files = files
        self._removals = removals
        self._relay = relay
        self._user = user
        self._has_writable_root = has_writable_root
        self._is_killed = False
        self._is_destroyed = False

    def run(self, command: str, *, env: Mapping[str, str], timeout_s: float) -> ExecResult:
        """Run a command with the image's shell. Nothing that it started is left when this returns.

        Raises `SandboxError` if the container is gone.
        """
        self._require_running()
        started, deadline = time.time(), time.monotonic() + timeout_s
        argv = ["sh", "-c", SHELL, _check_command(command)]
        try:
            self._files.restore()
            oom_kills = self._count_oom_kills()
            limit_sockets(self._container.attrs["State"]["Pid"], self._container.id)
            exec_id = self._client.api.exec_create(
                self._container.id, argv, environment={"HOME": HOME, **env}, workdir=self.workdir, user=self._user
            )["Id"]
            with ExecStream(self._client.api, exec_id) as stream:
                exit_code = stream.read_until(deadline)
            timed_out = exit_code is None and time.monotonic() >= deadline
            is_lost = (exit_code is None and not timed_out) or _is_ending(self._container.attrs["State"]["Pid"])
            if is_lost and not self._is_killed:
                raise SandboxError("the container ended while a command ran in it")
            out_of_memory = self._count_oom_kills() > oom_kills
            if not self._is_killed and (timed_out or self._has_company()):
                self._restart()
        except (*ENGINE_ERRORS, OSError) as error:
            raise SandboxError(f"the container is gone, or its engine does not answer: {error}") from error
        return ExecResult(
            exit_code=None if self._is_killed else exit_code,  # Podman says 137
            stdout=stream.stdout.decode("utf-8", "replace"),
            stderr=stream.stderr.decode("utf-8", "replace"),
            timed_out=timed_out,
            seconds=time.time() - started,
            out_of_memory=out_of_memory,
            disk_full=self._relay is None and is_full(self._files.base),
        )

    def upload(self, source: Path, target: str) -> None:
        """Copy a host folder to an absolute path inside, replacing the folder there; its files are root's.

        Raises `SandboxError`, also where the task has no writable root.
        """
        path = check_upload(source, target, has_writable_root=self._has_writable_root)
        try:
            with tempfile.TemporaryFile() as archive:
                _write_archive(source, str(path)[1:], archive)
                archive.seek(0)
                self._container.put_archive("/", archive)
        except (*ENGINE_ERRORS, OSError) as error:
            raise SandboxError(f"cannot upload {source} to {target}: {error}") from error

    def open_listener(self) -> socket.socket:
        """Listen on the container's own loopback, or on the socket that the relay there leads to."""
        if self._relay is not None:
            return self._relay.open_listener()
        try:
            self._container.reload()
            return open_listener(self._container.attrs["State"]["Pid"])
        except ENGINE_ERRORS as error:
            raise SandboxError(f"the engine does not say where the container runs: {error}") from error

    def is_alive(self) -> bool:
        """See `Sandbox.is_alive`."""
        if self._is_destroyed:
            return False
        try:
            self._container.reload()
        except ENGINE_ERRORS:
            return False
        return bool(self._container.attrs["State"]["Running"])

    def kill(self) -> None:
        """Kill the container; the `run` in progress returns with no exit code."""
        self._is_killed = True
        with suppress(*ENGINE_ERRORS):
            self._container.kill()

    def destroy(self) -> None:
        """Remove the container and its folder. Safe to call twice."""
        self._is_destroyed = True
        self._removals.remove(self._container.name)
        remove_session_folder(self._folder)

    def _require_running(self) -> None:
        if self._is_destroyed:
            raise SandboxError("the sandbox was destroyed; make a new one")
        if self._is_killed:
            self._is_killed = False
            self._restart()

    def _restart(self) -> None:
        """Kill every process and start afresh. Docker cannot kill an exec, and a detached process outlives its own."""
        try:
            with suppress(DockerException):
                self._container.kill()
            self._container.wait()
            start_container(self._container, self._relay)
        except ENGINE_ERRORS as error:
            raise SandboxError(f"the container could not be restarted: {error}") from error

    def _has_company(self) -> bool:
        """Return whether anything runs besides the first process (an init) and its sleep or relay."""
        deadline = time.monotonic() + 0.3
        try:
            while len(self._container.top()["Processes"] or ()) > 2:
                if time.monotonic() > deadline:
                    return True
                time.sleep(0.03)  # the shell of the command is reaped a moment after its exit code is known
        except ValueError:  # Podman's answer can be empty where there are many
            return True
        return False

    def _count_oom_kills(self) -> int:
        """Count kills at the memory limit since the container's last start.

        Docker's own flag stays false while the container runs, and its events are forgotten after the next 256 of any
        container's.
        """
        try:
            return count_oom_kills(self._container.attrs["State"]["Pid"])
        except OSError:
            if self._is_killed:
                return 0
            raise


def start_container(container: Any, relay: RelayFolder | None) -> None:
    """Start a container, and its relay if it has one. Raises `SandboxError` if the relay does not start."""
    if relay is not None:
        relay.expect()
    container.start()
    container.reload()
    if relay is not None:
        relay.wait(lambda: _is_running(container), lambda: str(container.logs(tail=5).decode("utf-8", "replace")))


def _is_running(container: Any) -> bool:
    container.reload()
    return bool(container.attrs["State"]["Running"])


def _is_ending(pid: int) -> bool:
    """Return whether a process is dead or dying. A container's first one is so before the engine reports others."""
    try:
        # state and flags: fields 3 and 9 of proc(5)
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return True
    return state in "ZX" or bool(int(fields[5]) & _PF_EXITING)


def _write_archive(source: Path, name: str, archive: Any) -> None:
    """Write a tar archive of a folder, to be unpacked at the root."""

    def own(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        return member

    with tarfile.open(fileobj=archive, mode="w") as tar:
        # an engine that unpacks a file over a folder removes the folder, without a program of the container's
        tar.addfile(tarfile.TarInfo(name))
        tar.add(source, arcname=name, filter=own)


def _check_command(command: str) -> str:
    if "\0" in command:
        raise SandboxError("the command holds a NUL byte, which no shell can be given")
    encode_text(command, "the command")
    return command
