"""A Python function as a grader: its number is the reward, and anything else is no reward."""

import math
import numbers
from collections.abc import Callable
from typing import Any

from polar_trl.errors import GradeError
from polar_trl.sandbox.base import Sandbox
from polar_trl.types import Task


class FunctionGrader:
    """Grades by calling `function(task, sandbox)`, which returns a finite number or a bool.

    It runs in the trainer's process on the session's thread: nothing stops it at `timeout_s`.
    """

    def __init__(self, function: Callable[[Task, Sandbox], Any]) -> None:
        self._function = function

    def grade(self, task: Task, sandbox: Sandbox, *, timeout_s: float) -> float:
        """The function's number. Raises `GradeError` if it raises or returns anything else."""
        try:
            value = self._function(task, sandbox)
        except Exception as error:
            raise GradeError(f"{type(error).__name__}: {error}") from error
        if not isinstance(value, numbers.Real) or not math.isfinite(value):
            raise GradeError(f"the grading function returned {value!r}; it must return a finite number")
        return float(value)
