"""Bubblewrap sandboxes: the host's programs or an image's, folders of their own, and one loopback address.

Each command is a bubblewrap process with process ids of its own, so nothing that it started outlives it. All commands
of a session share a network namespace in which only the proxy listens. No command can make a namespace or get a
capability (`options`), and a filter denies what only those need (`seccomp`). As root, memory, CPU, processes and disk
are limited. Without root they are not, which `capabilities` says: only a process' own memory, a file's size and the
number of processes have an end.

An image is unpacked layer by layer (`images`), and each session writes to an overlay of its own over it, which takes
no root either. Its user is root there, without a capability: all files of the image are this user's.

Refuses tasks that ask for a network, or without an image for files of the system that can be changed (`SandboxError`).
"""

import logging
import os
import re
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from polar_trl.errors import SandboxError
from polar_trl.sandbox.base import HOME, SHELL, Capabilities, ExecResult, SandboxBackend
from polar_trl.sandbox.bases import Base
from polar_trl.sandbox.bwrap.command import BwrapCommand
from polar_trl.sandbox.bwrap.images import Image, Images, find_layers
from polar_trl.sandbox.bwrap.options import Root, build_limits, build_options
from polar_trl.sandbox.cgroup import Cgroup, can_limit, reap_cgroups
from polar_trl.sandbox.disk import (
    TERMINALS,
    Overlay,
    is_full,
    make_disk,
    make_folders,
    make_overlay,
    mount_terminals,
)
from polar_trl.sandbox.folder import (
    DISK,
    SUBFOLDERS,
    HostFolders,
    SessionFolder,
    check_upload,
    encode_text,
    restore_folder,
)
from polar_trl.sandbox.limits import Limits
from polar_trl.sandbox.network import NetworkHolder
from polar_trl.sandbox.owner import (
    build_helper_mark,
    find_state_folder,
    make_session_folder,
    reap_session_folders,
    remove_session_folder,
    remove_tree,
)
from polar_trl.sandbox.python import find_python
from polar_trl.sandbox.seccomp import build_filter
from polar_trl.sandbox.workdir import find_workdir_fault
from polar_trl.types import Task

logger = logging.getLogger(__name__)

TRIAL_TIMEOUT_S = 60.0
TREE = "/polar-tree"
"""Work folder while an image's own one is copied."""
TREE_TIMEOUT_S = 600.0
HOSTS = b"127.0.0.1 localhost\n::1 localhost\n"
MIN_VERSION = (0, 8)
PROGRAMS = ("bwrap", "nsenter", "prlimit", "sh")


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """The part of a sandbox that is the same for all of a backend."""

    limits: Limits
    mounts: Sequence[Path]
    has_limits: bool
    """Whether control groups and disks of their own enforce them."""
    has_userns: bool
    path: str
    """Folders of the programs that make a sandbox."""


class BwrapSandboxBackend(SandboxBackend):
    """Makes bubblewrap sandboxes.

    Args:
        limits: Per session; memory, CPU and disk are limited as root only.
        mounts: Further host folders that every sandbox sees read-only at the same path, such as the cache of agents.
            This machine's Python is always there, without the packages that are installed in it.
        image: For tasks that name none; see `images.find_image`. None: those see this machine's programs.
        root: Where session folders are kept; None takes the user's state folder.
    """

    def __init__(
        self,
        *,
        limits: Limits = Limits(),
        mounts: Sequence[Path] = (),
        image: str | None = None,
        root: Path | None = None,
    ) -> None:
        found = {program: shutil.which(program) for program in PROGRAMS}
        for program, path in found.items():
            if path is None:
                raise SandboxError(
                    f"the bubblewrap sandbox needs `{program}` (as root: apt-get install bubblewrap util-linux)"
                )
        _require_version()
        path = os.pathsep.join(dict.fromkeys(os.path.dirname(path) for path in found.values() if path))
        has_limits = can_limit()
        self.capabilities = Capabilities(
            cuts_network=True, limits_memory=has_limits, limits_disk=has_limits, uses_images=True
        )
        self._setup = Setup(
            limits=limits,
            mounts=tuple(dict.fromkeys([*mounts, *find_python()])),
            has_limits=has_limits,
            has_userns=True,
            path=path,
        )
        self._root = root or find_state_folder()
        self._default = image
        self._images = Images(image, self._take_tree)
        reap_cgroups(reap_session_folders(self._root))
        fault = self._try_out()
        if fault and os.geteuid() == 0:
            # a kernel without user namespaces has none to deny; the filter and the lack of capabilities are left
            logger.warning("trying sandboxes without a user namespace of their own: %s", fault)
            self._setup = replace(self._setup, has_userns=False)
            fault = self._try_out()
        if fault:
            raise SandboxError(f"bubblewrap cannot run a command here: {fault}")

    def prepare(self, tasks: Sequence[Task]) -> None:
        """Unpack missing images and prepare the work trees. Raises `SandboxError`."""
        for task in tasks:
            self._refuse_impossible(task)
        self._images.prepare(tasks)

    def create(self, task: Task, session_id: str) -> "BwrapSandbox":
        """Make a sandbox: folders with the task's files, a network namespace, limits. Raises `SandboxError`."""
        self._refuse_impossible(task)
        return self._make(task, session_id, self._images.find(task))

    def try_images(self) -> None:
        """Raise `SandboxError` where the layers of images cannot be mounted."""
        folder = make_session_folder(self._root, "trial")
        try:
            (folder / "layer").mkdir()
            NetworkHolder(build_helper_mark(folder), _mount(make_overlay(folder, folder, ["layer"]))).close()
        finally:
            remove_session_folder(folder)

    def close(self) -> None:
        """Do nothing: the backend holds nothing."""

    def _make(self, task: Task, session_id: str, base: Base) -> "BwrapSandbox":
        folder = make_session_folder(self._root, session_id)
        sandbox = None
        try:
            if self._setup.has_limits:
                files = SessionFolder(make_disk(folder, base.tree, self._setup.limits.disk_mb))
                mount_terminals(folder)
            else:
                make_folders(folder / DISK, base.tree)
                files = SessionFolder(folder / DISK)
            image = self._images.read(base) if base.image else None
            sandbox = BwrapSandbox(folder, files, base, self._setup, image, has_writable_root=task.writable_root)
            for path, text in task.files.items():
                sandbox.put(path, encode_text(text, f"task {task.id}: file {path}"))
        except BaseException:
            if sandbox is not None:
                sandbox.destroy()
            else:
                remove_session_folder(folder)
            raise
        return sandbox

    def _take_tree(self, base: Base, path: str, target: Path) -> None:
        """Copy a folder of an image, by the image's own `cp`: links in it lead nowhere else."""
        sandbox = self._make(Task(id="tree", instruction=""), "tree", replace(base, workdir=TREE))
        try:
            result = sandbox.run('cp -a "$SOURCE/." .', env={"SOURCE": path}, timeout_s=TREE_TIMEOUT_S)
            if result.exit_code != 0:
                raise SandboxError(result.tail(300) or "it took too long")
            shutil.copytree(sandbox.host_workdir, target, symlinks=True, dirs_exist_ok=True)
        except (OSError, shutil.Error) as error:
            raise SandboxError(str(error)) from error
        finally:
            sandbox.destroy()

    def _refuse_impossible(self, task: Task) -> None:
        """Raise `SandboxError` naming the task, where bubblewrap cannot give what it asks for."""
        if task.network != "none":
            reason = f"bubblewrap has no network but the proxy, and this task asks for the {task.network} one"
        elif task.writable_root and task.image is None and self._default is None:
            reason = "without an image, bubblewrap shows the system's own files, which this task wants to change"
        elif task.workdir is not None and (fault := find_workdir_fault(task.workdir)):
            raise SandboxError(f"task {task.id}: {fault}")
        else:
            return
        raise SandboxError(f"task {task.id}: {reason}; use the docker sandbox")

    def _try_out(self) -> str:
        """Return why the system lets bubblewrap run no command; "" where it does.

        Raises `SandboxError` for every other reason, such as an image that is not there.
        """
        sandbox = self.create(Task(id="trial", instruction=""), "trial")
        try:
            result = sandbox.run("true", env={}, timeout_s=TRIAL_TIMEOUT_S)
        except SandboxError as error:
            return str(error)
        finally:
            sandbox.destroy()
        if result.timed_out:
            raise SandboxError(f"a first command in bubblewrap did not end within {TRIAL_TIMEOUT_S:g} s")
        return "" if result.exit_code == 0 else result.stderr.strip()[-300:] or f"exit code {result.exit_code}"


class BwrapSandbox(HostFolders):
    """One session's folders, network namespace and control group."""

    def __init__(
        self,
        folder: Path,
        files: SessionFolder,
        base: Base,
        setup: Setup,
        image: Image | None,
        *,
        has_writable_root: bool,
    ) -> None:
        self.workdir = base.workdir
        self.base_tree = base.tree
        self._folder = folder
        self._files = files
        self._setup = setup
        self._lock = threading.Lock()
        self._command: BwrapCommand | None = None
        self._is_killed = False
        self._is_destroyed = False
        self._has_writable_root = has_writable_root
        self._uploads: dict[str, Path] = {}
        overlay = make_overlay(files.base, find_layers(), image.layers) if image else None
        self._network = NetworkHolder(build_helper_mark(folder), _mount(overlay) if overlay else ())
        self._root = None
        if image is not None and overlay is not None:
            self._root = Root(
                merged=overlay.merged, env=image.env, is_writable=has_writable_root, uploads=self._uploads
            )
        self._cgroup = None
        try:
            if (place := self._find_root()) is not None:
                _write_hosts(place)
            if setup.has_limits:
                limits = setup.limits
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

    def upload(self, source: Path, target: str) -> None:
        """Copy a host folder to an absolute path inside, shown in place of the folder there.

        Raises `SandboxError`, also where the task has no writable root.
        """
        if self._root is None:
            raise SandboxError("a bubblewrap sandbox without an image has no files of its own outside of its folders")
        place = str(check_upload(source, target, has_writable_root=self._has_writable_root))
        uploads = self._files.base / "uploads"
        try:
            uploads.mkdir(exist_ok=True)
            copy = Path(tempfile.mkdtemp(dir=uploads))
            shutil.copytree(source, copy, symlinks=True, dirs_exist_ok=True)
        except (OSError, shutil.Error) as error:
            raise SandboxError(f"cannot upload {source} to {target}: {error}") from error
        if (earlier := self._uploads.get(place)) is not None:
            remove_tree(earlier)
        self._uploads[place] = copy

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
                self._restore_places()
                self._command = BwrapCommand(
                    self._build_prefix(),
                    self._build_options(env),
                    ["bash", "-c", text] if self._root is None else ["sh", "-c", SHELL, text],
                    seccomp=build_filter(),
                    path=self._setup.path,
                )
            except (OSError, ValueError) as error:
                raise SandboxError(f"cannot start a command: {error}") from error
            return self._command, oom_kills

    def _build_prefix(self) -> list[str]:
        """Build the words that join the limits, then the network."""
        limits, join = self._setup.limits, []
        sizes = {
            "core": 1,  # and not 0: the kernel gives whole dumps to a program of the machine's even then, see core(5)
            "nice": 0,
            "rtprio": 0,
            "sigpending": 4 * limits.pids,  # this and the next are counted for a user of the machine
            "msgqueue": 64 << 10,
        }
        if self._cgroup is None:
            # processes are counted for each user namespace, and so for each sandbox, unless this is root
            sizes |= {"nproc": limits.pids, "data": limits.memory_mb << 20, "fsize": limits.disk_mb << 20}
        else:
            joins = "; ".join(f"echo $$ > '{path}'" for path in self._cgroup.join_files)
            join = ["sh", "-c", f'set -e; {joins}; exec "$@"', "sh"]
        return [*join, *self._network.build_prefix(), "prlimit", *build_limits(sizes)]

    def _find_root(self) -> Path | None:
        """Return the path by which this process reaches the image's files, links in which lead anywhere."""
        if self._root is None:
            return None
        merged = self._root.merged
        return merged if os.geteuid() == 0 else self._network.root / merged.relative_to("/")

    def _list_mounts(self) -> list[Path]:
        return [mount for mount in self._setup.mounts if mount.exists()]

    def _restore_places(self) -> None:
        """Give an agent back the folders that it moved away, in which something is to be mounted.

        Bubblewrap follows a link in the place of one out of the sandbox, and makes the folders that it leads to.
        """
        work, home, tmp = (self._files.base / name for name in SUBFOLDERS)
        own = {self.workdir: work, HOME: home, "/tmp": tmp}
        if (root := self._find_root()) is not None:
            own["/"] = root
        mounts = map(str, self._list_mounts())
        for place in ("/proc", "/dev", "/run", "/tmp", *mounts, self.workdir, HOME, *self._uploads):
            above = [folder for folder in own if folder != place and Path(place).is_relative_to(folder)]
            if above:
                folder = max(above, key=len)
                restore_folder(own[folder], str(Path("/", Path(place).relative_to(folder))))

    def _build_options(self, env: Mapping[str, str]) -> list[str]:
        terminals = self._folder / TERMINALS if self._setup.has_limits else None
        return build_options(
            self._files.base,
            self.workdir,
            self._list_mounts(),
            env,
            has_userns=self._setup.has_userns,
            terminals=terminals,
            root=self._root,
        )


def _require_version() -> None:
    """Raise `SandboxError` where bubblewrap is older than its option --disable-userns."""
    said = subprocess.run(["bwrap", "--version"], capture_output=True, text=True, check=False).stdout
    if (version := re.search(r"(\d+)\.(\d+)", said)) and tuple(map(int, version.groups())) < MIN_VERSION:
        raise SandboxError(f"bubblewrap is {version[0]} here, and 0.8 or newer is needed; use the docker sandbox")


def _write_hosts(root: Path) -> None:
    """Let an image know localhost, as engines do, unless its file is a link. Raises `SandboxError`."""
    hosts = root / "etc" / "hosts"
    try:
        restore_folder(root, "/etc")
        if not hosts.is_symlink() and (not hosts.exists() or hosts.stat().st_size == 0):
            hosts.write_bytes(HOSTS)
    except OSError as error:
        raise SandboxError(f"/etc/hosts of the image cannot be written: {error}") from error


def _mount(overlay: Overlay) -> tuple[str, ...]:
    """Mount an overlay as root; otherwise return the words with which a `NetworkHolder` does."""
    if os.geteuid() == 0:
        overlay.mount()
        return ()
    return str(overlay.layers), overlay.options, str(overlay.merged)
