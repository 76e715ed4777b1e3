"""Find the image and the work tree that each task's sandboxes are made from, each once and several at a time."""

import threading
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Hashable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from tqdm import tqdm

from polar_trl.errors import SandboxError
from polar_trl.sandbox.work_tree import WorkTrees, apply_start_patch
from polar_trl.sandbox.workdir import find_workdir_fault
from polar_trl.types import Task

MAX_FETCHES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Base:
    """Image and work tree that a task's sandboxes are made from."""

    image: str
    """Name of the image."""
    image_id: str
    """Its own id: a name may come to mean another image while a run goes on."""
    workdir: str
    """Absolute path of the work folder in the sandbox."""
    tree: Path | None
    """Host folder with the first content of the work folder; None: empty."""


class Bases(ABC):
    """Finds the base of each task, and makes it where it is missing.

    Args:
        default: The image of tasks that have none of their own.
    """

    def __init__(self, default: str | None) -> None:
        self._default = default
        self._trees = WorkTrees()
        self._bases: dict[Hashable, Base] = {}
        self._lock = threading.Lock()
        self._source_locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._is_stopped = threading.Event()

    @abstractmethod
    def _make(self, task: Task) -> Base:
        """Make a task's base. Raises `SandboxError` naming the task."""

    def prepare(self, tasks: Iterable[Task]) -> None:
        """Make missing bases, a few at a time. Raises the first `SandboxError`, which names its task."""
        missing = {key: task for task in tasks if (key := self._build_key(task)) not in self._bases}
        bar = tqdm(total=len(missing), desc="images", unit="image", leave=False, disable=len(missing) < 2 or None)
        with bar, ThreadPoolExecutor(max_workers=MAX_FETCHES, thread_name_prefix="polar-images") as threads:
            try:
                for done in as_completed([threads.submit(self.find, task) for task in missing.values()]):
                    done.result()
                    bar.update(1)
            except BaseException:
                self._is_stopped.set()
                threads.shutdown(wait=True, cancel_futures=True)
                self._is_stopped.clear()
                raise

    def find(self, task: Task) -> Base:
        """Return the base of a task, made now if it was not before. Raises `SandboxError`."""
        key = self._build_key(task)
        base = self._bases.get(key)
        if base is None:
            made = self._make(task)
            base = self._bases[key] = replace(made, tree=apply_start_patch(task, made.tree))
        return base

    def knows(self, task: Task) -> bool:
        """Return whether `find` has the task's base already."""
        return self._build_key(task) in self._bases

    def forget(self, task: Task) -> None:
        """Forget a base whose image is gone: the next `find` makes it again."""
        self._bases.pop(self._build_key(task), None)

    def _build_key(self, task: Task) -> Hashable:
        return (task.image, task.build_context, task.workspace, task.workdir, task.start_patch)

    def _lock_source(self, name: str) -> threading.Lock:
        """Return the lock of an image: sessions of a group want the same one at the same time."""
        with self._lock:
            return self._source_locks[name]

    def _find_workdir(self, task: Task, named: str | None) -> str | None:
        """Return the work folder that the task names, or its own image for its sandboxes to start in.

        Args:
            named: The image's own, from its configuration.
        """
        if task.workdir is not None:
            return _check_workdir(task, task.workdir)
        if task.workspace is not None or (task.image is None and self._default is not None):
            return None
        return None if named in (None, "", "/") else _check_workdir(task, named)


def _check_workdir(task: Task, path: str) -> str:
    """Raise `SandboxError` for a path that no work folder can be mounted at."""
    if fault := find_workdir_fault(path):
        raise SandboxError(f"task {task.id}: {fault}")
    return str(PurePosixPath(path))
