"""A task becomes a container of any engine that speaks Docker's API; its work folder lives on the host.

A session is one container whose first process only sleeps; commands are execs in it. It has no network of its own but
the proxy (see `network`), no capabilities, and limits on memory, CPU, processes and disk. The work folder is an
overlay on the host, so its upper folder is what the agent changed, and outlives the container.

It refuses engines on another machine: the work folder and the proxy's socket are this machine's.
"""

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import docker
import requests
from docker.errors import DockerException, ImageNotFound, NotFound

from polar_trl.errors import SandboxError
from polar_trl.sandbox.base import Capabilities, ExecResult
from polar_trl.sandbox.disk import is_full, make_disk
from polar_trl.sandbox.exec_stream import ExecStream
from polar_trl.sandbox.folder import SUBFOLDERS, SessionFolder, encode_text
from polar_trl.sandbox.limits import Limits
from polar_trl.sandbox.network import open_listener
from polar_trl.sandbox.owner import (
    build_owner_tag,
    find_state_folder,
    is_dead,
    make_session_folder,
    reap_session_folders,
    remove_session_folder,
)
from polar_trl.sandbox.work_tree import WorkTrees
from polar_trl.types import Task

logger = logging.getLogger(__name__)
_T = TypeVar("_T")

LABEL = "polar-trl.run"
OWNER_LABEL = "polar-trl.owner"
WORKDIR = "/workspace"
HOME = "/home/agent"
API_TIMEOUT_S = 60
ATTEMPTS = 3
MAX_LIFE_S = 24 * 3600
# bash where the image has it: agents and graders write bash
SHELL = 'if command -v bash >/dev/null 2>&1; then exec bash -c "$0"; else exec sh -c "$0"; fi'


class DockerSandboxBackend:
    """Makes containers.

    Args:
        image: For tasks that name none.
        limits: Per session.
        mounts: Host folders that every container sees read-only at the same path, such as the cache of agents.
        run_id: Label of this run's containers.
        host: The engine's address; None takes $DOCKER_HOST or the system's socket.
        root: Where session folders are kept; None takes the user's state folder.
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
    ) -> None:
        if os.geteuid() != 0:
            raise SandboxError(
                "the docker sandbox needs root: it mounts work folders and opens the proxy inside of containers; "
                "run as root, or use the bubblewrap sandbox"
            )
        self.capabilities = Capabilities(cuts_network=True, limits_memory=True, limits_disk=True, uses_images=True)
        self._image = image
        self._limits = limits
        self._mounts = tuple(mounts)
        self._run_id = run_id
        self._root = root or find_state_folder()
        self._client = _connect(host)
        self._starting = threading.BoundedSemaphore(2 * (os.cpu_count() or 1))
        self._pulling = threading.Lock()
        self._trees = WorkTrees()
        reap(self._client, self._root)

    def prepare(self, tasks: Sequence[Task]) -> None:
        """Pull every image that is not here. Raises `SandboxError` naming the task."""
        for task in {self._choose_image(task): task for task in tasks}.values():
            self._require_image(task)

    def create(self, task: Task, session_id: str) -> "DockerSandbox":
        """A running container with the task's files in its work folder. Raises `SandboxError`."""
        image = self._require_image(task)
        folder = make_session_folder(self._root, session_id)
        try:
            tree = self._trees.find(task.workspace) if task.workspace else None
            disk = make_disk(folder, tree, self._limits.disk_mb)
            files = SessionFolder(disk)
            for path, text in task.files.items():
                files.put(path, encode_text(text, f"task {task.id}: file {path}"))
            with self._starting:
                container = self._start(task, image, disk, session_id)
        except BaseException:
            remove_session_folder(folder)
            raise
        return DockerSandbox(self._client, container, folder, files, tree)

    def _choose_image(self, task: Task) -> str:
        image = task.image or self._image
        if image is None:
            raise SandboxError(f"task {task.id} names no image, and the run has none; set sandbox_image")
        return image

    def _require_image(self, task: Task) -> str:
        image = self._choose_image(task)
        with self._pulling:  # sessions of a group want the same image at the same time
            try:
                self._client.images.get(image)
            except ImageNotFound:
                _pull(self._client, image, task)
            except (DockerException, requests.RequestException) as error:
                raise SandboxError(f"task {task.id}: the engine does not answer: {error}") from error
        return image

    def _start(self, task: Task, image: str, disk: Path, session_id: str) -> Any:
        limits = self._limits
        volumes = {str(path): {"bind": str(path), "mode": "ro"} for path in self._mounts if path.exists()}
        volumes |= {
            str(disk / name): {"bind": bind, "mode": "rw"}
            for name, bind in zip(SUBFOLDERS, (WORKDIR, HOME, "/tmp"), strict=True)
        }

        def start() -> Any:
            container = self._client.containers.create(
                image,
                # leftovers of a killed trainer on a machine that nobody comes back to end by themselves
                ["sleep", str(MAX_LIFE_S)],
                entrypoint=[],
                init=True,
                network_mode="none",
                read_only=True,
                tmpfs={"/run": "size=16m", "/dev/shm": "size=64m"},
                volumes=volumes,
                working_dir=WORKDIR,
                user="0:0",
                cap_drop=["ALL"],
                security_opt=["no-new-privileges"],
                mem_limit=f"{limits.memory_mb}m",
                memswap_limit=f"{limits.memory_mb}m",
                nano_cpus=int(limits.cpus * 1e9),
                pids_limit=limits.pids,
                labels={LABEL: self._run_id, OWNER_LABEL: build_owner_tag()},
                name=f"polar-{secrets.token_hex(8)}",
            )
            try:
                container.start()
            except BaseException:
                _remove(container)
                raise
            return container

        return _retry(start, f"task {task.id}: no container could be started from {image} for {session_id}")

    def close(self) -> None:
        """Nothing to give back."""


class DockerSandbox:
    """One session's container."""

    workdir = WORKDIR

    def __init__(
        self, client: Any, container: Any, folder: Path, files: SessionFolder, base_tree: Path | None
    ) -> None:
        self.base_tree = base_tree
        self._client = client
        self._container = container
        self._folder = folder
        self._files = files
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
            exec_id = self._client.api.exec_create(
                self._container.id, argv, environment={"HOME": HOME, **env}, workdir=WORKDIR
            )["Id"]
            with ExecStream(self._client.api, exec_id) as stream:
                exit_code = stream.read_until(deadline)
            timed_out = exit_code is None and time.monotonic() >= deadline
            if exit_code is None and not timed_out and not self._is_killed:
                raise SandboxError("the container ended while a command ran in it")
            out_of_memory = self._ran_out_of_memory(started)
            if not self._is_killed and (timed_out or self._has_company()):
                self._restart()
        except (DockerException, requests.RequestException, OSError) as error:
            raise SandboxError(f"the container is gone, or its engine does not answer: {error}") from error
        return ExecResult(
            exit_code=exit_code,
            stdout=stream.stdout.decode("utf-8", "replace"),
            stderr=stream.stderr.decode("utf-8", "replace"),
            timed_out=timed_out,
            seconds=time.time() - started,
            out_of_memory=out_of_memory,
            disk_full=is_full(self._files.base),
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
        """Copy a folder of this machine to an absolute path inside, replacing what is there. Raises `SandboxError`."""
        raise SandboxError("not yet")

    def open_listener(self) -> socket.socket:
        """On the container's own loopback."""
        try:
            self._container.reload()
            return open_listener(self._container.attrs["State"]["Pid"])
        except (DockerException, requests.RequestException) as error:
            raise SandboxError(f"the engine does not say where the container runs: {error}") from error

    def kill(self) -> None:
        """Kill the container; the `run` in progress returns with no exit code."""
        self._is_killed = True
        with suppress(DockerException, requests.RequestException):
            self._container.kill()

    def destroy(self) -> None:
        """Remove the container and its folder. Safe to call twice."""
        self._is_destroyed = True
        _remove(self._container)
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
            self._container.wait(timeout=API_TIMEOUT_S)
            self._container.start()
        except (DockerException, requests.RequestException) as error:
            raise SandboxError(f"the container could not be restarted: {error}") from error

    def _has_company(self) -> bool:
        """Whether anything runs besides the first process (an init) and its sleep."""
        deadline = time.monotonic() + 0.3
        while len(self._container.top()["Processes"] or ()) > 2:
            if time.monotonic() > deadline:
                return True
            time.sleep(0.03)  # the shell of the command is reaped a moment after its exit code is known
        return False

    def _ran_out_of_memory(self, since: float) -> bool:
        # a child that was killed does not make the container's own flag true while the container runs
        events = self._client.api.events(
            since=f"{since:.6f}",
            until=f"{time.time():.6f}",
            filters={"container": self._container.id, "event": "oom"},
            decode=True,
        )
        return any(True for _ in events)


def reap(client: Any, root: Path) -> int:
    """Remove the containers and folders of processes that are dead; how many there were. Raises `SandboxError`."""
    try:
        containers = client.containers.list(all=True, filters={"label": OWNER_LABEL})
    except (DockerException, requests.RequestException) as error:
        raise SandboxError(f"the engine does not list its containers: {error}") from error
    dead = [container for container in containers if is_dead(container.labels[OWNER_LABEL])]
    for container in dead:
        _remove(container)
    return len(dead) + len(reap_session_folders(root))


def _connect(host: str | None) -> Any:
    host = host or os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
    if not host.startswith("unix://"):
        raise SandboxError(
            f"the engine at {host} is on another machine; work folders and the proxy's socket are on this one. "
            "Run the trainer where the engine is"
        )
    try:
        client = docker.DockerClient(base_url=host, timeout=API_TIMEOUT_S, max_pool_size=128)
        info = client.info()
    except (DockerException, requests.RequestException) as error:
        raise SandboxError(f"no container engine answers at {host}: {error}") from error
    if "podman" in str(client.version().get("Components", "")).lower():
        raise SandboxError(
            f"the engine at {host} is Podman, which does not report processes that ran out of memory; use Docker"
        )
    logger.info("container engine %s, cgroup v%s", info.get("ServerVersion"), info.get("CgroupVersion"))
    return client


def _pull(client: Any, image: str, task: Task) -> None:
    def pull() -> None:
        logger.warning("pulling the image %s ...", image)
        client.images.pull(image)

    _retry(pull, f"task {task.id}: the image {image} is not here and could not be pulled")


def _retry(action: Callable[[], _T], failure: str) -> _T:
    """Try a few times: a busy engine answers 500 or nothing, and does what it was asked a moment later."""
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(2**attempt)
        try:
            return action()
        except ImageNotFound as error:
            raise SandboxError(f"{failure}: {error}") from error
        except (DockerException, requests.RequestException) as error:
            last = error
            logger.warning("%s, attempt %d: %s", failure, attempt + 1, error)
    raise SandboxError(f"{failure}: {last}") from last


def _remove(container: Any) -> None:
    with suppress(NotFound):
        try:
            container.remove(force=True, v=True)
        except (DockerException, requests.RequestException) as error:
            logger.warning("container %s could not be removed: %s", container.name, error)


def _check_command(command: str) -> str:
    if "\0" in command:
        raise SandboxError("the command holds a NUL byte, which no shell can be given")
    encode_text(command, "the command")
    return command
