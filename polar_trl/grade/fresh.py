"""Open fresh sandboxes for grading, in which the agent never ran.

A sandbox that cannot be made raises `SandboxError`, and a full disk of this machine raises `GradeError`: neither
decides a reward. A disk of the sandbox's own, filled by what the agent left, does: `is_filled`.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from polar_trl.errors import GradeError, SandboxError
from polar_trl.sandbox.base import Sandbox, SandboxBackend
from polar_trl.types import Task

logger = logging.getLogger(__name__)

MIN_BYTES, MIN_FILES = 8 << 20, 64
"""Room that a sandbox's disk needs for what the grader itself writes."""
MIN_HOST_BYTES = 32 << 20


class FreshSandboxes:
    """Makes fresh sandboxes, or takes those that were ordered of the backend in time.

    Args:
        backend: Makes the sandboxes.
        writable_root: Of all of them, where they come from an image.
    """

    def __init__(self, backend: SandboxBackend, *, writable_root: bool = False) -> None:
        self._backend = backend
        self._writable_root = writable_root

    def order(self, task: Task) -> None:
        """Have a sandbox made ready, where the backend makes some ahead: one will be opened for this task."""
        self._backend.order(self._build_task(task))

    def withdraw(self, task: Task) -> None:
        """Take an order back: no sandbox will be opened for this task after all."""
        self._backend.withdraw(self._build_task(task))

    @contextmanager
    def open(self, task: Task, *, with_files: bool = False) -> Iterator[Sandbox]:
        """Open a sandbox with the task's work tree.

        Args:
            with_files: And the task's `files`, as agents find them; where a tree is graded, those come with it.

        Raises `SandboxError`, also at the end if its folders were harmed from outside meanwhile, and `GradeError` if
        this machine's disk is full then or at the end of the block.
        """
        sandbox = self._backend.create(self._build_task(task, with_files=with_files), f"{task.id}-grade")
        try:
            _require_host_room(sandbox)
            yield sandbox
            sandbox.require_whole()
            _require_host_room(sandbox)
        finally:
            try:
                sandbox.destroy()
            except (SandboxError, OSError) as failure:
                # what was decided in it is not worth less for it; the next start removes it
                logger.warning("a sandbox that graded %s could not be removed: %s", task.id, failure)

    def is_filled(self, sandbox: Sandbox) -> bool:
        """Return whether the sandbox has a disk of its own, and that disk has no room left."""
        if not self._backend.capabilities.limits_disk:
            return False
        state = os.statvfs(sandbox.host_workdir)
        return state.f_bavail * state.f_frsize < MIN_BYTES or state.f_favail < MIN_FILES

    def _build_task(self, task: Task, *, with_files: bool = False) -> Task:
        files = task.files if with_files else {}
        return replace(task, files=files, writable_root=task.writable_root or self._writable_root)


def _require_host_room(sandbox: Sandbox) -> None:
    # two folders up is below the session folders of every backend, and no disk of the sandbox's own any more
    folder = sandbox.host_workdir.parents[1]
    state = os.statvfs(folder)
    if (left := state.f_bavail * state.f_frsize) < MIN_HOST_BYTES:
        raise GradeError(f"this machine's disk is full ({left >> 20} MiB are left at {folder}): nothing is graded")
