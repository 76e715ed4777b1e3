"""Grade by a Python function: its number is the reward, and anything else raises `GradeError`.

Of the errors that it may raise, those of `Sandbox.get` for a file too large are the agent's own loss: reward 0.
"""

import inspect
import numbers
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from polar_trl.errors import GradeError, NotFiniteRewardError
from polar_trl.grade.base import Grade, Grader, is_finite_reward
from polar_trl.grade.changes import UNUSABLE
from polar_trl.sandbox.base import Sandbox
from polar_trl.types import Call, GradeReport, Task
from polar_trl.user_code import describe_error, format_trace


def takes_calls(function: Callable[..., Any]) -> bool:
    """Tell whether a grading function has a third argument that must be given, or one named `calls`."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # of a built-in
        return False
    positional = [p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(positional) > 2 and (positional[2].default is inspect.Parameter.empty or positional[2].name == "calls")


class FunctionGrader(Grader):
    """Grades by calling `function(task, sandbox)`, which returns a finite number, a bool or a `Grade`.

    A function with a third argument (that must be given, or is named `calls`) gets the session's model calls:
    `function(task, sandbox, calls)`.

    It runs in the trainer's process. At `timeout_s` its answer is given up on; the thread that it runs on cannot be
    ended, so a function that never returns costs a thread each time.
    """

    def __init__(self, function: Callable[[Task, Sandbox], Any]) -> None:
        self._function = function
        self.takes_calls = takes_calls(function)

    def grade(self, task: Task, sandbox: Sandbox, *, timeout_s: float) -> Grade:
        """Return the function's number, for a session without calls. Raises as `grade_session`."""
        return self.grade_session(task, sandbox, (), timeout_s=timeout_s)

    def grade_session(self, task: Task, sandbox: Sandbox, calls: Sequence[Call], *, timeout_s: float) -> Grade:
        """Return the function's number or `Grade`. Raises `GradeError` if it raises or returns anything else."""
        outcome: Future[Any] = Future()
        given = (task, sandbox, calls) if self.takes_calls else (task, sandbox)
        threading.Thread(target=self._call, args=(outcome, *given), daemon=True, name="polar-grader").start()
        try:
            value = outcome.result(timeout=timeout_s)
        except TimeoutError as error:
            if not outcome.done():
                raise GradeError(f"the grading function ran longer than {timeout_s:g} s") from None
            raise GradeError(describe_error(error), output=format_trace(error)) from error
        except tuple(UNUSABLE) as loss:
            return Grade(reward=0.0, counters={UNUSABLE[type(loss)]: 1}, report=GradeReport(output_tail=str(loss)))
        except Exception as error:
            raise GradeError(describe_error(error), output=format_trace(error)) from error
        if isinstance(value, Grade):
            return value
        if not isinstance(value, numbers.Real):
            raise GradeError(f"the grading function returned {value!r}; it must return a finite number")
        if not is_finite_reward(value):
            raise NotFiniteRewardError(f"the grading function returned {value}; it must return a finite number")
        return Grade(reward=float(value))

    def _call(self, outcome: "Future[Any]", *given: Any) -> None:
        try:
            outcome.set_result(self._function(*given))
        except BaseException as error:  # noqa: BLE001 - handed to the session's thread, which waits for it
            outcome.set_exception(error)
