"""Build the rows of the sessions table from the index and the rollouts' outcomes, and filter and sort them.

A filter that is not understood raises `ValueError` with the reason; it never shows everything.
"""

import operator
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from polar_trl.tools.inspector.conversation import clean
from polar_trl.tools.inspector.sessions import LOST_END, Entry, is_alive
from polar_trl.tools.inspector.trained_rows import RolloutOutcome, TrainedRowIndex

COLUMNS = (
    "step", "batch", "task", "agent", "stage", "reward", "advantage", "calls", "tokens", "trajectories", "ended",
    "error", "seconds", "rollout",
)  # fmt: skip
MAX_ROWS = 500
"""Of one answer."""
_COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {
    ">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt, "=": operator.eq, "": operator.eq,
}  # fmt: skip
_STEPS = re.compile(r"^(\d{1,9})(?:-(\d{1,9}))?$", re.ASCII)
_REWARD = re.compile(r"^(>=|<=|>|<|=|)\s*(-?\d+(?:\.\d*)?|-?\.\d+)$")


def build_table_rows(entries: Sequence[Entry], rows: TrainedRowIndex, agent: str | None) -> list[dict[str, Any]]:
    """Build one JSON object per session: the latest batch first, in a batch by key."""
    now_s = time.time()
    in_order = sorted(entries, key=lambda entry: entry.key)
    in_order.sort(key=lambda entry: (entry.attempt[:15], _number_batch(entry.batch)), reverse=True)
    return [build_table_row(entry, rows, agent, now_s) for entry in in_order]


def build_table_row(entry: Entry, rows: TrainedRowIndex, agent: str | None, now_s: float) -> dict[str, Any]:
    """Build the row of one session. `stage` is "preparing", "running", "done", "cut off" or "unreadable"."""
    outcome = rows.find_outcome(entry.key)
    reward = outcome.reward if outcome is not None and entry.reward is None else entry.reward
    is_counted = entry.counted or not entry.finished
    seconds = {name: round(value, 3) for name, value in entry.seconds.items()}
    stage, problem = name_stage(entry, now_s), entry.problem
    if stage == "cut off" and outcome is not None:  # the trainer is given sessions that have ended, and no others
        stage, problem = "unreadable", LOST_END
    ended, detail = entry.ended, entry.detail
    if ended is not None and outcome is not None and outcome.reason:  # the trainer has seen the calls as well
        ended, detail = outcome.reason, outcome.detail
    return {
        "key": entry.key,
        "step": None if outcome is None else outcome.step,
        "batch": entry.batch,
        "attempt": entry.attempt,
        "rollout": entry.rollout,
        "task": clean(entry.task),
        "group": entry.group,
        "agent": entry.agent or agent,
        "stage": stage,
        "reward": reward if _is_number(reward) else None,
        "advantage": None if outcome is None or outcome.mode != "train" else outcome.advantage,
        "left_out": None if outcome is None else outcome.dropped,
        "use": name_use(outcome, rows.count_rows(entry.key)),
        "calls": entry.num_calls if is_counted else None,
        "tokens": entry.sampled_tokens if is_counted else None,
        "trajectories": entry.trajectories,
        "dropped": dict(entry.dropped),
        "stop_reason": entry.stop_reason,
        "ended": None if ended is None else clean(ended[:160]),
        "error": clean(error[:2000]) if (error := problem or entry.error or detail) else None,
        "phases": seconds,
        "seconds": round(sum(seconds.values()), 3) if seconds else None,
    }


def name_use(outcome: RolloutOutcome | None, num_rows: int) -> str | None:
    """Name a session's use: "evaluation", "not trained", "trained", or "to train" before its step; None: undecided."""
    if outcome is None:
        return None
    if outcome.mode == "eval":
        return "evaluation"
    if outcome.dropped is not None:
        return "not trained"
    return "trained" if num_rows else "to train"


def name_stage(entry: Entry, now_s: float) -> str:
    """Name a session's stage. A record does not tell an agent that works from one that is being graded."""
    if entry.problem:
        return "unreadable"
    if entry.finished:
        return "done"
    if not is_alive(entry, now_s):
        return "cut off"
    return "running" if entry.num_calls else "preparing"


def select(rows: Sequence[dict[str, Any]], asked: Mapping[str, str]) -> list[dict[str, Any]]:
    """Select the rows that match, sorted. Raises `ValueError` for a filter or column that is not understood.

    Args:
        asked: `attempt`, `batch`, `stage`, `ended`, `task`, `group`, `use` (equal), `search` (contained in task, id or
            error), `step` (a number or a range, "3-7"), `reward` (such as "1", ">0.5" or "none"), `sort` (a column)
            and `down` ("1").
    """
    tests = [*_build_equalities(asked), *_build_texts(asked)]
    if asked.get("reward"):
        tests.append(parse_reward(asked["reward"]))
    chosen = [row for row in rows if all(test(row) for test in tests)]
    column = asked.get("sort") or ""
    if column and column not in COLUMNS:
        raise ValueError(f"cannot sort by {column!r}; columns are {', '.join(COLUMNS)}")
    if column:
        known = [row for row in chosen if row[column] is not None]
        unknown = [row for row in chosen if row[column] is None]
        known.sort(key=operator.itemgetter(column), reverse=asked.get("down") == "1")
        chosen = known + unknown
    elif asked.get("down") == "1":
        chosen.reverse()
    return chosen


def parse_reward(text: str) -> Callable[[Mapping[str, Any]], bool]:
    """Parse a filter on the reward: "none", a number, or a comparison. Raises `ValueError`."""
    if text.strip().lower() == "none":
        return lambda row: row["reward"] is None
    match = _REWARD.match(text.strip())
    if match is None:
        raise ValueError(f"reward {text!r}: give a number, a comparison such as >0.5, or none")
    compare, value = _COMPARISONS[match[1]], float(match[2])
    return lambda row: row["reward"] is not None and compare(row["reward"], value)


def count_choices(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Count the values that filters may be set to, the most frequent errors, and the mean of known rewards."""
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    return {
        "batch": dict(sorted(Counter(row["batch"] for row in rows).items())),
        "stage": dict(Counter(row["stage"] for row in rows).most_common()),
        "ended": dict(Counter(row["ended"] for row in rows if row["ended"]).most_common()),
        "num_tasks": len({row["task"] for row in rows if row["task"]}),  # what cannot be read has none
        "num_rewards": len(rewards),
        "mean_reward": sum(rewards) / len(rewards) if rewards else None,
        "examples": {row["ended"]: row["error"][:300] for row in reversed(rows) if row["ended"] and row["error"]},
        "unreadable": Counter(row["error"][:160] for row in rows if row["stage"] == "unreadable").most_common(8),
        "num_uncounted": sum(row["stage"] == "done" and row["calls"] is None for row in rows),
    }


def _build_equalities(asked: Mapping[str, str]) -> list[Callable[[Mapping[str, Any]], bool]]:
    tests: list[Callable[[Mapping[str, Any]], bool]] = []
    for name in ("attempt", "batch", "stage", "ended", "task", "group", "use"):
        if wanted := asked.get(name):
            tests.append(lambda row, name=name, wanted=wanted: row[name] == wanted)  # type: ignore[misc]
    if step := asked.get("step"):
        match = _STEPS.match(step.strip())
        if match is None:
            raise ValueError(f"step {step!r}: give a number, or a range such as 3-7")
        low, high = int(match[1]), int(match[2] or match[1])
        tests.append(lambda row: row["step"] is not None and low <= row["step"] <= high)
    return tests


def _build_texts(asked: Mapping[str, str]) -> list[Callable[[Mapping[str, Any]], bool]]:
    tests: list[Callable[[Mapping[str, Any]], bool]] = []
    if search := asked.get("search", "").lower():
        tests.append(
            lambda row: (
                search in row["task"].lower()
                or search in row["rollout"].lower()
                or search in (row["error"] or "").lower()
            )
        )
    return tests


def _number_batch(name: str) -> int:
    digits = name.rpartition("_")[2]
    return int(digits) if digits.isdecimal() else 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and value == value and abs(value) != float("inf")
