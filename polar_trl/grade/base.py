"""From a finished sandbox to a reward, or to the reason why there is none."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from polar_trl.sandbox.base import Sandbox
from polar_trl.types import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Grade:
    """What a session's work is worth."""

    reward: float
    counters: Mapping[str, int] = field(default_factory=dict)
    """Named counts for the rollout, such as an agent's attempts on its judge."""


_LARGEST = 3.4028234663852886e38
"""The largest float32: rewards are trained in it, and count in an evaluation as they would in training."""


def is_finite_reward(value: Any) -> bool:
    """Whether a real number is neither NaN nor infinite, nor too large to be trained."""
    return bool(-_LARGEST <= value <= _LARGEST)


class Grader(Protocol):
    """Decides what a session's work is worth."""

    def grade(self, task: Task, sandbox: Sandbox, *, timeout_s: float) -> Grade:
        """The reward, a finite number.

        Raises `GradeError` (or anything else) where none can be determined: the rollout then has no reward and
        enters neither a baseline nor a gradient.
        """
        ...


@runtime_checkable
class FreshSandboxGrader(Protocol):
    """A grader that looks at the work in a sandbox of its own, which can be made while the agent still works."""

    def order(self, task: Task) -> None:
        """`grade` will be called for this task: have made ready what it will want."""
        ...

    def withdraw(self, task: Task) -> None:
        """It will not be called after all."""
        ...
