"""Say in a few words why a session ended as it did, so that sessions can be counted by it."""

import re
import threading
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass

from polar_trl.grade.base import PASSING_REWARD, describe_tests
from polar_trl.rollout.ending import ended_before_first_call, find_last_line, name_exit, to_one_line
from polar_trl.types import Call, ErrorKind, Rollout, StopReason

MAX_DETAIL = 300
_ERRORS: dict[ErrorKind, str] = {
    "prepare_failed": "the sandbox could not be made",
    "sandbox_failed": "the sandbox failed",
    "model_calls_failed": "model calls failed on our side",
    "request_refused": "a request of the agent was refused",
    "engine_busy": "the model's server was too busy",
    "no_calls": "the model answered no call of the agent",
    "grader_failed": "the grader failed",
    "cancelled": "the run was stopped",
}
_STOPS: dict[StopReason, str] = {
    "agent_timeout": "the agent ran into its time limit",
    "straggler": "the agent was cut as a straggler",
    "limit_exceeded": "the agent went past a limit of the proxy",
}
MAX_COMPLETION = "max_completion_length"
WINDOW = "the context window"
SESSION_TOKENS = "max_session_tokens"
ASKED = "the max_tokens that the agent asks for"
_LIMITS = {
    "answers_cut_at_window": WINDOW,
    "answers_cut_at_max_session_tokens": SESSION_TOKENS,
    "answers_cut_at_asked_max_tokens": ASKED,
}
"""Counter of a session -> the limit that cut answers of the policy where it was lower than max_completion_length."""
OUT_OF_BUDGET = "the session's budget of calls or tokens was used up"
NOT_FOUND = "agent exit code 127"
"""A shell's exit code for a command that it does not find."""
BEFORE_FIRST_CALL = " before its first call"
"""Ending of the names of agents that failed by themselves, whatever the model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reason:
    """Why a session ended as it did."""

    name: str
    """The same for all sessions that ended alike, such as "agent exit code 127"."""
    detail: str = ""
    """What this one said: the last line of its output, or its error. One line of at most 300 characters."""

    def __str__(self) -> str:
        return f"{self.name}: {self.detail}" if self.detail else self.name


def name_cut(limit: str) -> str:
    """Name the reason of sessions whose last answer a limit cut."""
    return f"the last answer was cut at {limit}"


def find_cut(rollout: Rollout) -> str | None:
    """Find the limit at which an answer of the policy was cut; None where none was, or the session passed anyway."""
    if has_passed(rollout) or not any(_is_cut(call) for call in rollout.calls if call.purpose == "policy"):
        return None
    return _name_limit(rollout.counters)


def was_cut(rollout: Rollout) -> bool:
    """Tell whether a limit ended the session: of time, calls or tokens, or of its last answer's length."""
    last = _find_last_answer(rollout)
    return (
        rollout.stop_reason in _STOPS
        or bool(rollout.counters.get("budget_messages"))
        or (last is not None and _is_cut(last))
    )


def has_passed(rollout: Rollout) -> bool:
    """Tell whether the grader gave the session a passing reward."""
    return rollout.reward is not None and rollout.reward >= PASSING_REWARD


def find_reason(rollout: Rollout) -> Reason | None:
    """Find why a session has no reward, or did not end as it should; None where it did and has no error.

    A session that did not pass and whose last answer was cut did not end as it should, whatever its agent made of it.
    """
    ended, tail = rollout.agent_exit, rollout.agent_exit.output_tail if rollout.agent_exit else ""
    if rollout.error is not None:
        name = _ERRORS.get(rollout.error_kind or "sandbox_failed", "the session failed")
        if rollout.error_kind == "no_calls" and ended is not None:
            if ended_before_first_call(ended, rollout.counters):
                return Reason(name=f"agent {name_exit(ended)}{BEFORE_FIRST_CALL}", detail=_last_line(tail))
            return Reason(
                name=f"{name} (agent {name_exit(ended)})", detail=_last_line(tail) or _one_line(rollout.error)
            )
        if rollout.error_kind == "worker_lost":  # counted by node
            name = rollout.error.partition(":")[0]
        return Reason(name=name, detail=_one_line(rollout.error))
    if rollout.counters.get("budget_messages"):
        return Reason(name=OUT_OF_BUDGET)
    last = _find_last_answer(rollout)
    if rollout.stop_reason == "completed":
        is_cut = last is not None and _is_cut(last) and not has_passed(rollout)
        return Reason(name=name_cut(_name_limit(rollout.counters))) if is_cut else None
    if rollout.stop_reason in _STOPS:
        past = [name for name in rollout.counters if name.endswith("_exceeded")]
        return Reason(name=_STOPS[rollout.stop_reason], detail=", ".join(past) or _last_line(tail))
    fault = _find_fault_of_reply(last, rollout.counters)
    if ended is not None and (ended.exit_code != 0 or fault is None):
        return Reason(name=f"agent {name_exit(ended)}", detail=_last_line(tail))
    return Reason(name=fault or f"the session ended as {rollout.stop_reason}", detail=_last_line(tail))


def find_shortfall(rollout: Rollout) -> Reason:
    """Find why a session that ended as it should was not worth more: its tests, or the end of what the grader said."""
    report = rollout.grading
    if tests := describe_tests(report):
        assert report is not None
        return Reason(name="tests failed" if report.num_failed else "tests were not found", detail=tests[:MAX_DETAIL])
    return Reason(name="the grader gave less than 1", detail=_last_line(report.output_tail if report else ""))


def count_reasons(reasons: Iterable[Reason | None]) -> list[tuple[Reason, int]]:
    """Count reasons by name, the most frequent first; each with its latest detail."""
    found = [reason for reason in reasons if reason is not None]
    latest = {reason.name: reason for reason in found}
    return [(latest[name], count) for name, count in Counter(reason.name for reason in found).most_common()]


class Repeats:
    """Tells which occurrences of something to report: the 1st, 2nd, 4th, 8th and so on. Threads may share it."""

    def __init__(self) -> None:
        self._counts: Counter[Hashable] = Counter()
        self._lock = threading.Lock()

    def note(self, key: Hashable) -> int | None:
        """Count an occurrence; return how many there were if it is one to report."""
        with self._lock:
            self._counts[key] += 1
            count = self._counts[key]
        return count if count & (count - 1) == 0 else None


def mask_numbers(text: str) -> str:
    """Replace the numbers and hexadecimal ids of a message, so that those of one kind are equal."""
    return re.sub(r"0x[0-9a-f]+|[0-9a-f]{8,}|\d+", "N", text)


def _find_last_answer(rollout: Rollout) -> Call | None:
    """Find the policy's last answered call."""
    answers = (call for call in reversed(rollout.calls) if call.purpose == "policy" and call.is_answered)
    return next(answers, None)


def _is_cut(call: Call) -> bool:
    return call.is_answered and call.completion.finish_reason == "length"


def _name_limit(counters: Mapping[str, int]) -> str:
    return next((limit for name, limit in _LIMITS.items() if counters.get(name)), MAX_COMPLETION)


def _find_fault_of_reply(last: Call | None, counters: Mapping[str, int]) -> str | None:
    """Find what was wrong with the policy's last reply, by which most agents are judged; None where nothing was."""
    if last is None:
        return "the policy answered no call"
    if _is_cut(last):
        return name_cut(_name_limit(counters))
    if last.message.tool_calls:
        return "the agent ended with a tool call that was not run"
    return None if last.message.text.strip() else "the last answer was empty"


def _last_line(output: str) -> str:
    return find_last_line(output)[:MAX_DETAIL]


def _one_line(text: str) -> str:
    return to_one_line(text)[:MAX_DETAIL]
