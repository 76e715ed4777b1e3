"""Open fresh sandboxes for grading, in which the agent never ran.

A sandbox that cannot be made raises `SandboxError`, and so decides no reward.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from polar_trl.errors import SandboxError
from polar_trl.sandbox.base import Sandbox, SandboxBackend
from polar_trl.types import Task

logger = logging.getLogger(__name__)


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
    def open(self, task: Task) -> Iterator[Sandbox]:
        """Open a sandbox with the task's work tree, but not its `files`: those come with the agent's changes.

        Raises `SandboxError`, also at the end, if its folders were harmed from outside meanwhile.
        """
        sandbox = self._backend.create(self._build_task(task), f"{task.id}-grade")
        try:
            yield sandbox
            sandbox.require_whole()
        finally:
            try:
                sandbox.destroy()
            except (SandboxError, OSError) as failure:
                # what was decided in it is not worth less for it; the next start removes it
                logger.warning("a sandbox that graded %s could not be removed: %s", task.id, failure)

    def _build_task(self, task: Task) -> Task:
        return replace(task, files={}, writable_root=task.writable_root or self._writable_root)
