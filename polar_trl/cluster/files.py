"""Send the files that tasks name to nodes, which share no file system with the trainer, and rewrite the tasks there.

What is sent is kept in the node's cache by its content, and sent once. Tar keeps modes and times: a node's work trees
are those of the trainer.
"""

import hashlib
import io
import os
import tarfile
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from polar_trl.cache import find_cache
from polar_trl.errors import ConfigError
from polar_trl.types import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """A file or folder of the trainer's machine, as tar."""

    path: str
    """Where it is there."""
    digest: str
    content: bytes


def list_roots(tasks: Iterable[Task]) -> list[str]:
    """List the files and folders that tasks name, without those that lie below another one."""
    paths = {os.path.abspath(path) for task in tasks for path in _list_paths(task)}
    roots: list[str] = []
    for path in sorted(paths, key=lambda path: f"{path}/"):  # what is below comes right after
        if not roots or not Path(path).is_relative_to(roots[-1]):
            roots.append(path)
    return roots


def pack(path: str) -> Packed:
    """Pack a file or a folder. Raises `ConfigError`."""
    buffer = io.BytesIO()
    try:
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            archive.add(os.path.realpath(path), arcname=os.path.basename(path))  # a link would lead nowhere there
    except OSError as error:
        raise ConfigError(f"a task's {path} cannot be read: {error.strerror}") from error
    content = buffer.getvalue()
    return Packed(path=path, digest=hashlib.sha256(content).hexdigest()[:24], content=content)


def find_place(path: str, digest: str) -> Path:
    """Return where a node keeps a path of the trainer's, there or not."""
    return find_cache("sent") / digest / os.path.basename(path)


def unpack(packed: Packed) -> None:
    """Lay a file or folder into this node's cache, unless it is there."""
    folder = find_place(packed.path, packed.digest).parent
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{packed.digest}-", dir=folder.parent) as scratch:
        made = Path(scratch) / "made"
        with tarfile.open(fileobj=io.BytesIO(packed.content)) as archive:
            archive.extractall(made, filter="fully_trusted")
        try:
            made.rename(folder)
        except OSError:
            if not folder.is_dir():  # another process of this node was first
                raise


def move(task: Task, places: Mapping[str, Path]) -> Task:
    """Return the task with its paths where they are on this node.

    Args:
        places: Of this node, by the trainer's roots.
    """

    def find(path: str | None) -> str | None:
        if not path:
            return path
        whole = Path(os.path.abspath(path))
        root = next((root for root in (whole, *whole.parents) if str(root) in places), None)
        return path if root is None else str(places[str(root)] / whole.relative_to(root))

    tests = task.tests
    if tests is not None:
        tests = replace(
            tests,
            folder=find(tests.folder) or "",
            requirements=find(tests.requirements),
            gold_patch=find(tests.gold_patch),
        )
    metadata = task.metadata
    if isinstance(harbor := metadata.get("harbor"), Mapping) and "folder" in harbor:
        metadata = {**metadata, "harbor": {**harbor, "folder": find(harbor["folder"])}}
    return replace(
        task,
        build_context=find(task.build_context),
        workspace=find(task.workspace),
        tests=tests,
        metadata=metadata,
    )


def _list_paths(task: Task) -> Sequence[str]:
    tests, harbor = task.tests, task.metadata.get("harbor")
    of_tests = () if tests is None else (tests.folder, tests.requirements, tests.gold_patch)
    folder = harbor.get("folder") if isinstance(harbor, Mapping) else None
    return [path for path in (task.build_context, task.workspace, *of_tests, folder) if path]
