"""The grader protocol: a finished sandbox gives a reward, or raises why there is none."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from polar_trl.sandbox.base import Sandbox
from polar_trl.types import Task

PASSING_REWARD = 1.0
"""From which on a session has solved its task."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grade:
    """The reward of a session's work, and named counts."""

    reward: float
    counters: Mapping[str, int] = field(default_factory=dict)
    """Named counts for the rollout, such as tampering with the grader."""


_LARGEST = 3.4028234663852886e38
"""The largest float32: rewards are trained in that type, and evaluations count the same ones."""


def is_finite_reward(value: Any) -> bool:
    """Return whether a real number is neither NaN nor infinite, nor too large for float32."""
    return bool(-_LARGEST <= value <= _LARGEST)


class Grader(Protocol):
    """Decides what a session's work is worth. A base class: one that prepares nothing needs `grade` alone."""

    def grade(self, task: Task, sandbox: Sandbox, *, timeout_s: float) -> Grade:
        """Return the reward, a finite number.

        Raises `GradeError` (or anything else) where none can be determined: the rollout then has no reward and
        enters neither a baseline nor a gradient.
        """
        ...

    def order(self, task: Task) -> None:
        """Prepare for a `grade` of this task, such as by ordering the fresh sandbox that it will want."""
        return

    def withdraw(self, task: Task) -> None:
        """Take an order back: `grade` will not be called after all."""
        return
