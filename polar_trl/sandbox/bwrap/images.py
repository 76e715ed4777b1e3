"""Unpack container images into the cache, layer by layer, and find the base of each task in them.

An image comes from a registry, once and by its name as Docker has it ("python:3.11"), or from an archive of `docker
save` (the absolute path of a file). Layers that images share are unpacked once. No engine and no root is needed.
"""

import hashlib
import json
import logging
import os
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

from zstandard import ZstdError

from polar_trl.cache import find_cache
from polar_trl.errors import SandboxError
from polar_trl.sandbox.base import WORKDIR
from polar_trl.sandbox.bases import Base, Bases
from polar_trl.sandbox.bwrap.layers import unpack_layer
from polar_trl.sandbox.work_tree import make_folder_once, make_once
from polar_trl.types import Task

logger = logging.getLogger(__name__)

PAUSES_S = (2.0, 5.0, 15.0, 45.0)
RECORD = "image.json"
_UNREADABLE = (
    *(OSError, EOFError, tarfile.TarError, zlib.error, ZstdError),
    *(ValueError, LookupError, TypeError, AttributeError, OverflowError),
)
"""Errors of an archive, or of a reply, that is no image."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Image:
    """An unpacked image."""

    id: str
    layers: list[str]
    """Names of folders of `find_layers`, the lowest first."""
    env: dict[str, str]
    workdir: str | None


def find_layers() -> Path:
    """Find the folder of all unpacked layers."""
    return find_cache("images") / "layers"


class Images(Bases):
    """Finds the base of each task, with images of the cache.

    Args:
        default: The image of tasks that have none of their own.
        take_tree: Copies a folder of an image into an empty folder of this machine. Raises `SandboxError`.
    """

    def __init__(self, default: str | None, take_tree: Callable[[Base, str, Path], None]) -> None:
        super().__init__(default)
        self._take_tree = take_tree

    def read(self, base: Base) -> Image:
        """Read an image that was found before."""
        return read_image(find_cache("images") / base.image)

    def _make(self, task: Task) -> Base:
        name = task.image or self._default
        if name is None:
            return Base(image="", image_id="", workdir=task.workdir or WORKDIR, tree=self._trees.find(task))
        with self._lock_source(name):
            try:
                folder = find_image(name, is_stopped=self._is_stopped.is_set, pause=self._is_stopped.wait)
            except SandboxError as error:
                raise SandboxError(f"task {task.id}: {error}") from error
        image = read_image(folder)
        workdir = self._find_workdir(task, image.workdir)
        base = Base(image=folder.name, image_id=image.id, workdir=workdir or WORKDIR, tree=self._trees.find(task))
        if base.tree is not None or workdir is None:
            return base
        digest = hashlib.sha256(f"{image.id} {workdir}".encode()).hexdigest()[:16]

        def fill(target: Path) -> None:
            try:
                self._take_tree(base, workdir, target)
            except SandboxError as error:
                raise SandboxError(f"task {task.id}: {workdir} cannot be taken out of {name}: {error}") from error

        tree = make_once(f"{Path(workdir).name[:40]}-{digest}", fill)
        return Base(image=base.image, image_id=image.id, workdir=workdir, tree=tree)


def find_image(
    name: str, *, is_stopped: Callable[[], bool] = lambda: False, pause: Callable[[float], object] | None = None
) -> Path:
    """Return the cache's folder of an image, fetched and unpacked now if it was not before. Raises `SandboxError`."""
    key, state = name, None
    if os.path.isabs(name):
        try:
            state = os.stat(name)
        except OSError as error:
            raise SandboxError(f"there is no archive {name} ({error.strerror})") from error
        key = f"{name} {state.st_size} {state.st_mtime_ns}"

    def fill(target: Path) -> None:
        if state is not None:
            image = _unpack_archive(name)
        else:
            logger.info("pulling %s ...", name)
            image = _pull(name, is_stopped, pause)
        (target / RECORD).write_text(json.dumps(asdict(image)))

    return make_folder_once(find_cache("images") / hashlib.sha256(key.encode()).hexdigest()[:24], fill)


def read_image(folder: Path) -> Image:
    """Read what `find_image` found."""
    return Image(**json.loads((folder / RECORD).read_text()))


def _pull(name: str, is_stopped: Callable[[], bool], pause: Callable[[float], object] | None) -> Image:
    # only here: the clients of engines and registries take their time to load
    import requests
    from docker.errors import DockerException

    from polar_trl.sandbox.bwrap.registry import RETRIED, DXFError, RemoteImage
    from polar_trl.sandbox.docker.client import retry

    failure = f"the image {name} could not be pulled"

    def pull() -> Image:
        if is_stopped():
            raise SandboxError(f"{failure}: given up, as another one failed")
        try:
            remote = RemoteImage(name, is_stopped)

            def unpack(layer: str, digest: str, target: Path) -> None:
                with tempfile.TemporaryFile(dir=target.parent) as file:
                    remote.download(layer, file)
                    file.seek(0)
                    unpack_layer(cast(BinaryIO, file), digest, target)

            return _unpack(remote.config, remote.layers, unpack)
        except requests.HTTPError as error:
            status = error.response.status_code
            if 400 <= status < 500 and status not in (408, 429):
                raise SandboxError(f"{failure}: {error}") from error
            raise
        except RETRIED:
            raise
        except DockerException as error:  # of the name, or of the logins
            raise SandboxError(f"{failure}: {error}") from error
        except (DXFError, *_UNREADABLE) as error:
            detail = str(error) or type(error).__name__
            raise SandboxError(
                f"{failure} ({detail}); if its registry asks for a login, put it into ~/.docker/config.json"
            ) from error

    return retry(pull, failure, pauses_s=PAUSES_S, **({} if pause is None else {"pause": pause}))


def _unpack_archive(path: str) -> Image:
    """Unpack an archive in Docker's format, with a manifest.json."""
    try:
        with tarfile.open(path) as tar:

            def open_member(name: str) -> BinaryIO:
                if (file := tar.extractfile(name)) is None:
                    raise ValueError(f"{name} is no file")
                return cast(BinaryIO, file)

            def unpack(layer: str, digest: str, target: Path) -> None:
                unpack_layer(open_member(layer), digest, target)

            manifests = json.load(open_member("manifest.json"))
            if len(manifests) != 1:
                raise ValueError(f"it has {len(manifests)} images, and one is wanted")
            config = json.load(open_member(manifests[0]["Config"]))
            return _unpack(config, manifests[0]["Layers"], unpack)
    except _UNREADABLE as error:
        raise SandboxError(f"{path} is no archive of `docker save` that can be unpacked: {error}") from error


def _unpack(config: Mapping[str, Any], layers: list[str], unpack: Callable[[str, str, Path], None]) -> Image:
    """Unpack the layers that the cache does not have.

    Args:
        config: In the format of the OCI image specification.
        layers: Their names in this source, as many as the configuration has digests.
        unpack: Given such a name, the digest and an empty folder.
    """
    own = config.get("config") or {}
    variables, workdir = [entry.partition("=") for entry in own.get("Env") or ()], own.get("WorkingDir")
    if any(not name or "\0" in name + value for name, _, value in variables):
        raise ValueError("a variable of its environment has no name, or a NUL character")
    if not isinstance(workdir, str | None):
        raise ValueError(f"its work folder is {workdir!r}")
    names = []
    for layer, digest in zip(layers, config["rootfs"]["diff_ids"], strict=True):
        names.append(hashlib.sha256(digest.encode()).hexdigest()[:24])  # short: an overlay's words fit into a page
        make_folder_once(find_layers() / names[-1], partial(unpack, layer, digest))
    # an overlay takes a folder once; of a layer that comes again (the empty one often does) the upper place decides
    layers = list(dict.fromkeys(reversed(names)))[::-1]
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
    return Image(id=digest, layers=layers, env={name: value for name, _, value in variables}, workdir=workdir)
