"""Count which tasks an evaluation solved, and compare the first of a run with its last."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from polar_trl.grade.base import PASSING_REWARD
from polar_trl.grade.pass_at_k import TaskCount, estimate_pass_rate

FIGURES = ("graded", "solved", "pass_rate", "pass_rate_low", "pass_rate_high")
"""Of an evaluation: counts of sessions, pass@1 over tasks, and its 95 % interval."""


class Evaluations:
    """Collects the graded sessions of an evaluation, until its figures are logged."""

    def __init__(self) -> None:
        self._rewards: list[tuple[str, float]] = []

    def note(self, rewards: Sequence[tuple[str, float]]) -> None:
        """Note (task id, reward) of the graded sessions of all ranks."""
        self._rewards += rewards

    def take_figures(self, logs: Mapping[str, Any]) -> dict[str, float]:
        """Return the `FIGURES` of the evaluation that `logs` are of, under its names, and forget it; else nothing."""
        prefixes = find_evaluations(logs)
        if not prefixes:
            return {}
        rewards, self._rewards = self._rewards, []
        graded = Counter(task for task, _ in rewards)
        solved = Counter(task for task, reward in rewards if reward >= PASSING_REWARD)
        rate = estimate_pass_rate([TaskCount(num_graded=graded[t], num_passed=solved[t]) for t in graded], 1)
        values = (len(rewards), solved.total(), rate.rate, rate.low, rate.high)
        return {
            f"{prefixes[0]}{name}": value for name, value in zip(FIGURES, values, strict=True) if value is not None
        }


def find_evaluations(logs: Mapping[str, Any]) -> list[str]:
    """Return the beginnings of the names of evaluations' figures: "eval_", or "eval_NAME_" of a set with a name."""
    ending = "runtime"
    return [name.removesuffix(ending) for name in logs if name.startswith("eval_") and name.endswith(ending)]


def format_solved(logs: Mapping[str, Any], prefix: str = "eval_", words: str = "") -> str:
    """Format how many sessions of an evaluation solved their task: "12 of 48 (25 %, 95 % interval 15-39 %)".

    Args:
        words: Come before the parentheses.
    """
    if f"{prefix}pass_rate" not in logs:
        return f"none{words} (no session has a reward)"
    rate, low, high = (round(100 * logs[f"{prefix}pass_rate{name}"]) for name in ("", "_low", "_high"))
    counts = f"{logs[f'{prefix}solved']:.0f} of {logs[f'{prefix}graded']:.0f}"
    return f"{counts}{words} ({rate} %, 95 % interval {low}-{high} %)"


def compare_evaluations(log_history: Sequence[Mapping[str, Any]], *, kind: str = "evaluation") -> list[str]:
    """Compare the first evaluation of a run with its last, a sentence for each set of tasks.

    Args:
        log_history: `trainer.state.log_history`.
        kind: What the tasks are called.
    """
    by_set: dict[str, list[Mapping[str, Any]]] = {}
    for evaluation in list_evaluations(log_history):
        by_set.setdefault(evaluation["set"], []).append(evaluation)
    sentences = []
    for name, found in by_set.items():
        tasks, step = f" {kind} tasks{f' of {name}' if name else ''}", found[0]["step"]
        parts = [format_solved(found[0], "", f"{tasks} {f'at step {step}' if step else 'before'}")]
        if len(found) > 1:
            parts.append(format_solved(found[-1], "", " after"))
        sentences.append(f"solved {' and '.join(parts)}")
    return sentences


def list_evaluations(log_history: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """List the evaluations of a run: `step`, `set` (its name, "" where it has none), and their figures."""
    return [
        {
            "step": entry.get("step", 0),
            "set": prefix.removeprefix("eval_").rstrip("_"),
            "reward": entry.get(f"{prefix}reward", entry.get("eval_reward")),
            **{name: entry[f"{prefix}{name}"] for name in FIGURES if f"{prefix}{name}" in entry},
        }
        for entry in log_history
        for prefix in find_evaluations(entry)
        if f"{prefix}graded" in entry
    ]
