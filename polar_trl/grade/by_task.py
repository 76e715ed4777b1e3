"""Choose a task's grader by its fields: a command, hidden tests, SWE-bench's script, Harbor's verifier.

`check_gradable` refuses, before a run starts, a task that none of them can grade (`TaskError`).
"""

from collections.abc import Sequence
from typing import Literal

from polar_trl.errors import GradeError, TaskError
from polar_trl.grade.base import Grade, Grader
from polar_trl.grade.command import CommandGrader
from polar_trl.grade.harbor import HarborGrader
from polar_trl.grade.swebench import SwebenchGrader, check_row
from polar_trl.grade.tests import TestsGrader
from polar_trl.sandbox.base import Sandbox, SandboxBackend
from polar_trl.types import Task

Kind = Literal["command", "pytest", "swebench", "harbor"]


class GraderByTask(Grader):
    """Grades each task by the grader that its fields ask for.

    Args:
        backend: Makes the fresh sandboxes in which hidden tests run, and failed graders are tried again. A
            `WarmPool` has them ready in time.
        command: For tasks that name no grader.
        command_reward: See `CommandGrader`.
        partial: Reward the share of the failing tests that pass, as long as none of the others broke.
        zero_suspected: See `HiddenTestsGrader`.
    """

    def __init__(
        self,
        backend: SandboxBackend,
        *,
        command: str | None = None,
        command_reward: Literal["exit_code", "stdout"] = "exit_code",
        partial: bool = False,
        zero_suspected: bool = False,
    ) -> None:
        self._has_command = command is not None
        self._graders: dict[Kind, Grader] = {
            "command": CommandGrader(command, reward=command_reward, backend=backend),
            "pytest": TestsGrader(backend, partial=partial, zero_suspected=zero_suspected),
            "swebench": SwebenchGrader(backend, partial=partial, zero_suspected=zero_suspected),
            "harbor": HarborGrader(backend),
        }

    def grade(self, task: Task, sandbox: Sandbox, *, timeout_s: float) -> Grade:
        """Return the reward. Raises `GradeError` where the task's grader decided nothing."""
        grader = self._find(task)
        if grader is None:
            raise GradeError(f"task {task.id}: {NOBODY}")
        return grader.grade(task, sandbox, timeout_s=timeout_s)

    def order(self, task: Task) -> None:
        """See `Grader`."""
        if (grader := self._find(task)) is not None:
            grader.order(task)

    def withdraw(self, task: Task) -> None:
        """See `Grader`."""
        if (grader := self._find(task)) is not None:
            grader.withdraw(task)

    def _find(self, task: Task) -> Grader | None:
        kind = find_kind(task, has_command=self._has_command)
        return None if kind is None else self._graders[kind]


NOBODY = "it has no `grader` command, no tests and no Harbor verifier, and the run has no grader command"


def find_kind(task: Task, *, has_command: bool = False) -> Kind | None:
    """Return the kind of a task's grader, None for no grader. A task's own command comes before its tests."""
    if task.grader is not None:
        return "command"
    if task.tests is not None:
        return "swebench" if task.tests.runner == "swebench" else "pytest"
    if "harbor" in task.metadata:
        return "harbor"
    return "command" if has_command else None


def check_gradable(tasks: Sequence[Task], backend: SandboxBackend, *, has_command: bool = False) -> None:
    """Raise `TaskError` naming the first task that cannot be graded, and why; `ConfigError` if a package is missing.

    Args:
        backend: Of the sandboxes that the tasks run in.
        has_command: Whether the run has a grader command for tasks that bring nothing.
    """
    for task in tasks:
        kind = find_kind(task, has_command=has_command)
        if kind is None:
            raise TaskError(f"task {task.id!r} cannot be graded: {NOBODY}")
        if kind == "swebench":
            check_row(task)
        elif kind == "pytest" and task.tests is not None and task.tests.runner != "pytest":
            runner = task.tests.runner
            raise TaskError(f"task {task.id!r}: 'tests.runner' must be 'pytest' or 'swebench', not {runner!r}")
        elif kind == "harbor" and not (task.writable_root and backend.capabilities.uses_images):
            raise TaskError(
                f"task {task.id!r} cannot be graded here: its verifier is laid into /tests of a container whose root "
                "can be written; use the docker sandbox"
            )
