"""The grader protocol: a finished sandbox gives a reward, or raises why there is none."""

import numbers
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Protocol

from polar_trl.errors import GradeError
from polar_trl.sandbox.base import Sandbox
from polar_trl.types import Call, GradeReport, Task

PASSING_REWARD = 1.0
"""From which on a session has solved its task."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grade:
    """The reward of a session's work, and named counts."""

    reward: float
    counters: Mapping[str, int] = field(default_factory=dict)
    """Named counts for the rollout, such as tampering with the grader."""
    call_rewards: Mapping[int, float] = field(default_factory=dict)
    """Rewards of single model calls, by their index in the session; trained with `turn_credit`."""
    report: GradeReport = field(default_factory=GradeReport)
    """What the grader and its tests said, for people."""


MAX_OUTPUT = 4000
MAX_NAMES = 100
_FAILED_LINE = re.compile(r"^(?:FAILED|ERROR) (\S+?)(?: - .*)?$", re.MULTILINE)


def report_tests(
    names: Sequence[str], passed: Set[str], found: Iterable[str], messages: Mapping[str, str], output: str = ""
) -> GradeReport:
    """Report the outcomes of the tests that decide.

    Args:
        names: All of them.
        passed: Those that passed.
        found: Those that have any outcome.
        messages: Of tests that failed, and of files that could not be collected.
        output: What the run printed besides.
    """
    known = set(found)
    failed = [name for name in names if name in known and name not in passed]
    missing = [name for name in names if name not in known]
    deciding = {*names, *(name.partition("::")[0] for name in names)}
    said = "\n".join(f"{name}: {text.strip()}" for name, text in messages.items() if name in deciding)
    return GradeReport(
        output_tail="\n".join(filter(None, (output.strip(), said)))[-MAX_OUTPUT:],
        failed_tests=tuple(failed[:MAX_NAMES]),
        missing_tests=tuple(missing[:MAX_NAMES]),
        num_tests=len(names),
        num_passed=len(names) - len(failed) - len(missing),
        num_failed=len(failed),
        num_missing=len(missing),
    )


def report_output(output: str) -> GradeReport:
    """Report what a grader printed, with the failed tests that a summary of pytest's names in it."""
    failed = tuple(dict.fromkeys(_FAILED_LINE.findall(output)))[:MAX_NAMES]
    return GradeReport(output_tail=output[-MAX_OUTPUT:], failed_tests=failed, num_failed=len(failed))


def describe_tests(report: GradeReport | None) -> str:
    """Describe the tests of a report that did not pass, such as "2 of 5 tests failed: a, b"; "" where all did."""
    if report is None:
        return ""
    of_all = f" of {report.num_tests}" if report.num_tests else ""
    parts = []
    if report.num_failed:
        parts.append(f"{report.num_failed}{of_all} tests failed: {_join(report.failed_tests)}")
    if report.num_missing:
        parts.append(f"{report.num_missing}{of_all} tests were not found: {_join(report.missing_tests)}")
    return "; ".join(parts)


def _join(names: tuple[str, ...], most: int = 3) -> str:
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


_LARGEST = 3.4028234663852886e38
"""The largest float32: rewards are trained in that type, and evaluations count the same ones."""


def is_finite_reward(value: Any) -> bool:
    """Return whether a real number is neither NaN nor infinite, nor too large for float32."""
    return bool(-_LARGEST <= value <= _LARGEST)


def read_call_rewards(call_rewards: Mapping[Any, Any], num_calls: int) -> dict[int, float]:
    """Read the rewards of a session's calls, whatever kinds of numbers they are. Raises `GradeError`."""
    found = {}
    for index, value in call_rewards.items():
        if not isinstance(index, numbers.Integral) or not 0 <= int(index) < num_calls:
            raise GradeError(f"the grader gave a reward to call {index!r} of a session with {num_calls} calls")
        if not isinstance(value, numbers.Real) or not is_finite_reward(value):
            raise GradeError(f"the grader gave call {index} the reward {value!r}, which is no finite number")
        found[int(index)] = float(value)
    return found


class Grader(Protocol):
    """Decides what a session's work is worth. A base class: one that prepares nothing needs `grade` alone."""

    takes_calls: bool = False
    """Whether `grade_session` looks at the session's model calls."""

    def grade(self, task: Task, sandbox: Sandbox, *, timeout_s: float) -> Grade:
        """Return the reward, a finite number.

        Raises `GradeError` (or anything else) where none can be determined: the rollout then has no reward and
        enters neither a baseline nor a gradient.
        """
        ...

    def grade_session(self, task: Task, sandbox: Sandbox, calls: Sequence[Call], *, timeout_s: float) -> Grade:
        """Return the reward, given the session's model calls as well; by default that of `grade`."""
        return self.grade(task, sandbox, timeout_s=timeout_s)

    def order(self, task: Task) -> None:
        """Prepare for a `grade` of this task, such as by ordering the fresh sandbox that it will want."""
        return

    def withdraw(self, task: Task) -> None:
        """Take an order back: `grade` will not be called after all."""
        return
