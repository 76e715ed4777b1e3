"""From a finished sandbox to a reward, or to the reason why there is none."""

from typing import Protocol

from polar_trl.sandbox.base import Sandbox
from polar_trl.types import Task


class Grader(Protocol):
    """Decides what a session's work is worth."""

    def grade(self, task: Task, sandbox: Sandbox, *, timeout_s: float) -> float:
        """The reward.

        Raises `GradeError` (or anything else) where none can be determined: the rollout then has no reward and
        enters neither a baseline nor a gradient.
        """
        ...
