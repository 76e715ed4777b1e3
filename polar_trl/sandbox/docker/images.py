"""Fetch the images and work trees that tasks' containers are made from.

Images that are missing are pulled, or built from the task's Dockerfile; trees are copied from folders of this machine,
or taken out of the image, once. Several at a time, before they are needed.

Refuses a task without an image, and a work folder that the image does not have (`SandboxError`).
"""

import hashlib
import logging
import os
import secrets
import tarfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from docker.errors import DockerException, ImageNotFound

from polar_trl.errors import SandboxError
from polar_trl.sandbox.base import WORKDIR
from polar_trl.sandbox.bases import MAX_FETCHES, Base, Bases
from polar_trl.sandbox.docker.client import ENGINE_ERRORS, Removals, allow_silence, retry
from polar_trl.sandbox.work_tree import make_once
from polar_trl.types import Task

logger = logging.getLogger(__name__)

PULL_SILENCE_S = 120.0
BUILD_SILENCE_S = 1800.0
"""A step of a Dockerfile may compile for long without a word."""
PULL_PAUSES_S = (2.0, 5.0, 15.0, 45.0)
BUILD_LOG_LINES = 20
TAG = "polar-trl-task"


class Images(Bases):
    """Finds the base of each task, with images of an engine.

    Args:
        client: From `client.connect`.
        removals: Of the same client.
        default: The image of tasks that have none of their own; tasks are built only where there is no such image.
        labels: Of the containers that trees are taken out of.
        silence_s: After which a pull without progress is given up.
        pauses_s: Between tries to pull or build one image.
    """

    def __init__(
        self,
        client: Any,
        removals: Removals,
        *,
        default: str | None = None,
        labels: Mapping[str, str] | None = None,
        silence_s: float = PULL_SILENCE_S,
        pauses_s: Sequence[float] = PULL_PAUSES_S,
    ) -> None:
        super().__init__(default)
        self._client = client
        self._removals = removals
        self._labels = dict(labels or {})
        self._silence_s = silence_s
        self._pauses_s = tuple(pauses_s)
        self._fetch_slots = threading.BoundedSemaphore(MAX_FETCHES)

    def _make(self, task: Task) -> Base:
        name = task.image or self._default
        if name is None and task.build_context is None:
            raise SandboxError(f"task {task.id} names no image, and the run has none; set sandbox_image")
        with self._lock_source(name or f"build {task.build_context}"):
            if name is None:
                name, attrs = self._require_built(task)
            else:
                attrs = self._require_pulled(task, name)
        workdir = self._find_workdir(task, attrs["Config"].get("WorkingDir"))
        tree = self._trees.find(task)
        if tree is None and workdir is not None:
            tree = self._take_tree(task, name, attrs["Id"], workdir)
        return Base(image=name, image_id=attrs["Id"], workdir=workdir or WORKDIR, tree=tree)

    def _inspect(self, task: Task, name: str) -> dict[str, Any] | None:
        try:
            attrs: dict[str, Any] = self._client.api.inspect_image(name)
        except ImageNotFound:
            return None
        except ENGINE_ERRORS as error:
            raise SandboxError(f"task {task.id}: the engine does not say whether it has {name}: {error}") from error
        return attrs

    def _require_pulled(self, task: Task, name: str) -> dict[str, Any]:
        if (attrs := self._inspect(task, name)) is not None:
            return attrs

        def pull() -> None:
            with allow_silence(self._silence_s):
                self._follow(self._client.api.pull(name, stream=True, decode=True))

        logger.info("pulling %s ...", name)
        self._fetch(
            pull,
            f"task {task.id}: the image {name} is not here and could not be pulled (try `docker pull {name}`, "
            "after `docker login` if its registry asks for one)",
        )
        return self._require(task, name)

    def _require_built(self, task: Task) -> tuple[str, dict[str, Any]]:
        context = Path(task.build_context or "")
        if not (context / "Dockerfile").is_file():
            raise SandboxError(f"task {task.id}: there is no Dockerfile in {context} to build its image from")
        name = f"{TAG}:{digest_context(context)}"
        if (attrs := self._inspect(task, name)) is not None:
            return name, attrs

        def build() -> None:
            with allow_silence(BUILD_SILENCE_S):
                self._follow(self._client.api.build(path=str(context), tag=name, rm=True, forcerm=True, decode=True))

        logger.info("building %s from %s ...", name, context)
        self._fetch(
            build,
            f"task {task.id}: its image could not be built from {context} (`docker build -t {name} {context}` by hand "
            "is as good)",
        )
        return name, self._require(task, name)

    def _fetch(self, action: Callable[[], None], failure: str) -> None:
        with self._fetch_slots:
            try:
                retry(action, failure, pauses_s=self._pauses_s, pause=self._is_stopped.wait)
            except (_StepFailedError, _StoppedError) as error:
                raise SandboxError(f"{failure}: {error}") from error

    def _require(self, task: Task, name: str) -> dict[str, Any]:
        attrs = self._inspect(task, name)
        if attrs is None:
            raise SandboxError(f"task {task.id}: the engine said that it made {name}, and does not have it")
        return attrs

    def _follow(self, words: Iterable[Mapping[str, Any]]) -> None:
        """Read the engine's progress to its end (Docker Engine API, "Create an image", "Build an image")."""
        log: list[str] = []
        for word in words:
            if self._is_stopped.is_set():
                raise _StoppedError("given up, as another one failed")
            log.append(str(word.get("stream", "")))
            if "error" in word:
                tail = "\n".join("".join(log).splitlines()[-BUILD_LOG_LINES:])
                # a command of the Dockerfile's that fails has an exit code, and fails again
                is_final = bool(word.get("errorDetail", {}).get("code"))
                raise (_StepFailedError if is_final else DockerException)(
                    f"{word['error']}; its log ends:\n{tail}" if tail else str(word["error"])
                )

    def _take_tree(self, task: Task, image: str, image_id: str, path: str) -> Path:
        """Extract a folder of the image into the cache, its modes kept."""
        digest = hashlib.sha256(f"{image_id} {path}".encode()).hexdigest()[:16]
        failure = f"task {task.id}: {path} cannot be taken out of the image {image}"

        def fill(target: Path) -> None:
            name = f"polar-{secrets.token_hex(8)}"
            try:
                with self._removals.expect(name):
                    self._client.api.create_container(image_id, ["true"], name=name, labels=self._labels)
                try:
                    with allow_silence(self._silence_s):
                        self._extract(name, path, target)
                finally:
                    self._removals.remove(name)
            except _NoFolderError:
                raise SandboxError(f"task {task.id}: the image {image} has no folder {path}") from None
            except (*ENGINE_ERRORS, OSError, tarfile.TarError) as error:
                raise SandboxError(f"{failure}: {error}") from error

        return make_once(f"{PurePosixPath(path).name[:40]}-{digest}", fill)

    def _extract(self, container: str, path: str, target: Path) -> None:
        api = self._client.api
        # docker-py's own way takes the limit off this stream; the dot asks for the folder behind a link
        url = f"{api.base_url}/v{api.api_version}/containers/{container}/archive"
        headers = {"Accept-Encoding": "identity"}
        with api.get(url, params={"path": f"{path}/."}, headers=headers, stream=True) as response:
            if response.status_code == 404:
                raise _NoFolderError
            if response.status_code != 200:
                raise OSError(response.text.strip()[-300:])
            with tarfile.open(fileobj=response.raw, mode="r|") as tar:
                tar.extractall(target, numeric_owner=True, filter=_keep_modes)


class _StepFailedError(Exception):
    """A command of a Dockerfile failed."""


class _StoppedError(Exception):
    """Another image failed while this one was fetched."""


class _NoFolderError(Exception):
    """The image has no such folder."""


def digest_context(folder: Path) -> str:
    """Hash the names, kinds, modes and contents of a build context."""
    digest = hashlib.sha256()
    for parent, names, files in os.walk(folder):
        names.sort()
        for name in sorted([*names, *files]):
            path = Path(parent, name)
            mode = path.lstat().st_mode
            digest.update(f"{path.relative_to(folder)}\0{mode}\0".encode("utf-8", "surrogateescape"))
            if path.is_symlink():
                digest.update(os.fsencode(path.readlink()))
            elif path.is_file():
                with path.open("rb") as file:
                    digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:32]


def _keep_modes(member: tarfile.TarInfo, target: str) -> tarfile.TarInfo:
    """Filter a tar member: refuse paths that lead outside, as the standard filter does, but keep write bits.

    All is this user's, as whom containers run: without capabilities, root cannot write the files of others.
    """
    checked = tarfile.tar_filter(member, target)
    return checked.replace(mode=member.mode & 0o7777, uid=os.geteuid(), gid=os.getegid(), deep=False)
