"""Docker sandboxes: containers of any engine that speaks Docker's API, with the work folder on the host.

A session is one container whose first process only sleeps; commands are execs in it. The container reaches the proxy
and nothing else (see `network`) unless the task asks for more, has no capabilities, and limits on memory, CPU,
processes and disk. The work folder is an overlay on the host, whose upper folder holds the agent's changes and
outlives the container.

Without root (the user may talk to the engine's socket) the work folder is a plain copy with no limit, commands run as
that user, and the first process is a relay to the proxy (see `relay_folder`).

Refuses engines on another machine (`SandboxError`): the work folder and the proxy's socket are this machine's.
"""

import os
import secrets
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import docker
from docker.errors import ImageNotFound, NotFound

from polar_trl.errors import SandboxError
from polar_trl.sandbox.base import HOME, Capabilities, SandboxBackend
from polar_trl.sandbox.bases import Base
from polar_trl.sandbox.disk import make_disk, make_folders
from polar_trl.sandbox.docker.client import (
    API_TIMEOUT_S,
    ENGINE_ERRORS,
    Removals,
    connect,
    limit_calls,
    retry,
)
from polar_trl.sandbox.docker.container import DockerSandbox, start_container
from polar_trl.sandbox.docker.images import Images
from polar_trl.sandbox.docker.relay_folder import PASSWD, PLACE, RelayFolder, build_command
from polar_trl.sandbox.folder import SUBFOLDERS, SessionFolder, encode_text
from polar_trl.sandbox.limits import Limits
from polar_trl.sandbox.owner import (
    build_owner_tag,
    find_state_folder,
    is_dead,
    make_session_folder,
    reap_session_folders,
    remove_session_folder,
)
from polar_trl.sandbox.python import list_package_folders
from polar_trl.types import Task

LABEL = "polar-trl.run"
OWNER_LABEL = "polar-trl.owner"
MAX_LIFE_S = 24 * 3600
ROOT_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "SETGID", "SETUID")
"""Capabilities for package managers and verifiers, where the root is writable; over the container's files only."""
KEEPER = "65534:65534"


class DockerSandboxBackend(SandboxBackend):
    """Makes containers.

    Args:
        image: For tasks that name none.
        limits: Per session.
        mounts: Host folders that every container sees read-only at the same path, such as the cache of agents.
        run_id: Label of this run's containers.
        host: The engine's address; None takes $DOCKER_HOST, or a socket where engines are known to listen.
        root: Where session folders are kept; None takes the user's state folder.
        public_network: The engine's network that tasks with `network="public"` join.
        api_timeout_s: After which an engine that says nothing has failed.
    """

    def __init__(
        self,
        *,
        image: str | None = None,
        limits: Limits = Limits(),
        mounts: Sequence[Path] = (),
        run_id: str = "run",
        host: str | None = None,
        root: Path | None = None,
        public_network: str = "bridge",
        api_timeout_s: float = API_TIMEOUT_S,
    ) -> None:
        self._is_root = os.geteuid() == 0
        self._limits = limits
        self._mounts = tuple(mounts)
        self._hidden = [path for path in list_package_folders() if any(path.is_relative_to(mount) for mount in mounts)]
        self._public_network = public_network
        self._root = root or find_state_folder()
        self._client = connect(host, timeout_s=api_timeout_s)
        self._user, limits_memory = read_user(self._client)
        self.capabilities = Capabilities(
            cuts_network=True, limits_memory=limits_memory, limits_disk=self._is_root, uses_images=True
        )
        self._labels = {LABEL: run_id, OWNER_LABEL: build_owner_tag()}
        self._removals = Removals(self._client)
        self._images = Images(self._client, self._removals, default=image, labels=self._labels)
        self._starting = threading.BoundedSemaphore(2 * (os.cpu_count() or 1))
        reap_containers(self._client)
        reap_session_folders(self._root)

    def prepare(self, tasks: Sequence[Task]) -> None:
        """Pull, build and unpack missing images and trees. Raises `SandboxError` naming the task."""
        for task in tasks:
            self._refuse_impossible(task)
        self._images.prepare(tasks)

    def create(self, task: Task, session_id: str) -> DockerSandbox:
        """Start a container with the task's files in its work folder.

        Raises `SandboxError`, within `task.prepare_timeout_s` where the task was prepared before.
        """
        self._refuse_impossible(task)
        if not self._images.knows(task):
            self._images.find(task)
        deadline = time.monotonic() + task.prepare_timeout_s
        with limit_calls(deadline):
            self._removals.sweep()
            base = self._images.find(task)
            folder = make_session_folder(self._root, session_id)
            try:
                disk = self._make_disk(folder, base)
                relay = None if self._is_root else RelayFolder(folder / "proxy", self._user)
                files = SessionFolder(disk)
                for path, text in task.files.items():
                    files.put(path, encode_text(text, f"task {task.id}: file {path}"))
                container = self._start_in_time(task, base, disk, relay, session_id, deadline)
            except BaseException:
                remove_session_folder(folder)
                raise
        return DockerSandbox(
            self._client,
            container,
            folder,
            files,
            base,
            self._removals,
            relay,
            user=self._user,
            has_writable_root=task.writable_root,
        )

    def close(self) -> None:
        """Remove containers that the engine made too late."""
        self._removals.close()
        self._client.close()

    def _refuse_impossible(self, task: Task) -> None:
        if task.writable_root and not self._is_root:
            raise SandboxError(
                f"task {task.id} wants to change files of its image, which belong to root; run the trainer as root"
            )

    def _make_disk(self, folder: Path, base: Base) -> Path:
        if self._is_root:
            return make_disk(folder, base.tree, self._limits.disk_mb)
        disk = folder / "disk"
        try:
            make_folders(disk, base.tree)
            for source, place, _ in self._list_binds(base, disk):
                # where the engine has to make it, it is root's, and this user could not remove it
                for name, above in zip(SUBFOLDERS, _list_places(base), strict=True):
                    if place != above and Path(place).is_relative_to(above) and Path(source).is_dir():
                        (disk / name / Path(place).relative_to(above)).mkdir(parents=True, exist_ok=True)
        except (OSError, shutil.Error) as error:
            raise SandboxError(f"the work folder could not be made: {error}") from error
        return disk

    def _start_in_time(
        self, task: Task, base: Base, disk: Path, relay: RelayFolder | None, session_id: str, deadline: float
    ) -> Any:
        failure = f"task {task.id}: no container could be started from {base.image} for {session_id}"
        if not self._starting.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise SandboxError(f"{failure}: others were still starting after {task.prepare_timeout_s:g} s")
        try:
            return retry(lambda: self._start(task, base, disk, relay), failure)
        finally:
            self._starting.release()

    def _start(self, task: Task, base: Base, disk: Path, relay: RelayFolder | None) -> Any:
        """Try once to create and start a container."""
        name = f"polar-{secrets.token_hex(8)}"
        try:
            with self._removals.expect(name):
                container = self._client.containers.create(**self._build_options(task, base, disk, relay), name=name)
            try:
                start_container(container, relay)
            except BaseException:
                self._removals.remove(name)
                raise
        except ImageNotFound:
            self._images.forget(task)
            raise
        except NotFound as error:
            if task.network == "public":
                raise self._explain_network(task, error) from error
            raise
        return container

    def _build_options(self, task: Task, base: Base, disk: Path, relay: RelayFolder | None) -> dict[str, Any]:
        """Build the options of `docker.models.containers.ContainerCollection.create`."""
        limits = self._limits
        binds = self._list_binds(base, disk)
        if relay is not None:
            binds += [(str(relay.folder), PLACE, False), (str(relay.folder / PASSWD), "/etc/passwd", True)]
        return {
            "image": base.image_id,
            # leftovers of a killed trainer on a machine that nobody comes back to end by themselves
            "command": ["sleep", str(MAX_LIFE_S)] if relay is None else build_command(MAX_LIFE_S),
            "entrypoint": [],
            "init": True,
            "network_mode": self._public_network if task.network == "public" else "none",
            "read_only": not task.writable_root,
            "tmpfs": {
                "/run": "size=16m",
                "/dev/shm": "size=64m",
                **{str(path): "ro,size=4k" for path in self._hidden},
            },
            # unlike volumes, these make no folders on the host for a container that comes too late
            "mounts": [
                docker.types.Mount(place, source, type="bind", read_only=is_read_only)
                for source, place, is_read_only in binds
            ],
            # the first process is another user's than the commands, so that no agent can end its own container
            "user": KEEPER if relay is None else self._user,
            "working_dir": "/",
            "cap_drop": ["ALL"],
            "cap_add": list(ROOT_CAPABILITIES) if task.writable_root else [],
            "security_opt": ["no-new-privileges"],
            "mem_limit": f"{limits.memory_mb}m",
            "memswap_limit": f"{limits.memory_mb}m",
            "nano_cpus": int(limits.cpus * 1e9),
            "pids_limit": limits.pids,
            "labels": self._labels,
        }

    def _list_binds(self, base: Base, disk: Path) -> list[tuple[str, str, bool]]:
        """List bind mounts: host folder, path in the container, whether it is read-only."""
        binds = [(str(path), str(path), True) for path in self._mounts if path.exists()]
        return binds + [
            (str(disk / name), place, False) for name, place in zip(SUBFOLDERS, _list_places(base), strict=True)
        ]

    def _explain_network(self, task: Task, error: Exception) -> SandboxError:
        name = self._public_network
        return SandboxError(
            f"task {task.id} asks for the public network, and the engine has no network {name!r} ({error}); start "
            "the engine with its bridge, or name another one of its networks as public_network"
        )


def read_user(client: Any) -> tuple[str, bool]:
    """Return the user that owns the work folder, as the engine names it, and whether the engine limits memory.

    In the containers of an engine that runs as a user, that user is number 0. Such an engine ignores limits unless
    systemd delegates control groups of version 2 to it. Raises `SandboxError`.
    """
    try:
        info = client.info()
    except ENGINE_ERRORS as error:
        raise SandboxError(f"the engine does not tell about itself: {error}") from error
    # Podman's field, and Docker's
    is_rootless = info.get("Rootless") or "name=rootless" in (info.get("SecurityOptions") or ())
    user = "0:0" if is_rootless else f"{os.geteuid()}:{os.getegid()}"
    has_groups = (info.get("CgroupVersion"), info.get("CgroupDriver")) == ("2", "systemd")
    return user, has_groups or not is_rootless


def _list_places(base: Base) -> tuple[str, str, str]:
    """Return the paths of the session's own folders (`SUBFOLDERS`) in its container."""
    return base.workdir, HOME, "/tmp"


def reap_containers(client: Any) -> list[str]:
    """Remove the containers of processes that are dead; their names. Raises `SandboxError`."""
    try:
        containers = client.containers.list(all=True, filters={"label": OWNER_LABEL}, ignore_removed=True)
    except ENGINE_ERRORS as error:
        raise SandboxError(f"the engine does not list its containers: {error}") from error
    dead = [str(container.name) for container in containers if is_dead(container.labels[OWNER_LABEL])]
    removals = Removals(client)
    for name in dead:
        removals.remove(name)
    return dead
