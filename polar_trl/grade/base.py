"""The grader protocol: a finished sandbox gives a reward, or raises why there is none."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from polar_trl.sandbox.base import Sandbox
from polar_trl.types import Task


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
    """Grades a session's work."""

    def grade(self, task: Task, sandbox: Sandbox, *, timeout_s: float) -> Grade:
        """Return the reward, a finite number.

        Raises `GradeError` (or anything else) where none can be determined: the rollout then has no reward and
        enters neither a baseline nor a gradient.
        """
        ...


@runtime_checkable
class FreshSandboxGrader(Protocol):
    """A grader that looks at the work in a sandbox of its own, which can be made while the agent still works."""

    def order(self, task: Task) -> None:
        """Have a sandbox made ready: `grade` will be called for this task."""
        ...

    def withdraw(self, task: Task) -> None:
        """Take an order back: `grade` will not be called after all."""
        ...
