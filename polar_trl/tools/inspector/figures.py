"""Compute what the page of a run says first: where the reward began and ended, evaluations, and what failed most."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from polar_trl.eval.sample_tasks import read_results
from polar_trl.grade.base import PASSING_REWARD
from polar_trl.grade.pass_at_k import TaskCount, estimate_pass_rate, wilson_interval
from polar_trl.grpo.logs.evaluations import list_evaluations
from polar_trl.grpo.logs.summary import average_quarters


def build_figures(lines: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Build the JSON of a run's header.

    Args:
        lines: Of the log.
        rows: Of the sessions table.
    """
    rewards = {int(line["step"]): line["reward"] for line in lines if _is_number(line.get("reward"))}
    by_set: dict[str, list[dict[str, Any]]] = {}
    for found in list_evaluations(lines):
        by_set.setdefault(found["set"], []).append(
            {name: value for name, value in found.items() if name == "set" or _is_number(value)}
        )
    failures = Counter(row["ended"] for row in rows if row["ended"] not in (None, "completed"))
    reward = None
    if rewards:
        first, last = average_quarters(list(rewards.values()))
        best = max(rewards, key=lambda step: rewards[step])
        reward = {"first": first, "last": last, "best": rewards[best], "best_step": best}
    return {
        "reward": reward,
        "evaluations": [found[:1] + found[1:][-1:] for found in by_set.values()],
        "failure": [*failures.most_common(1)[0]] if failures else None,
    }


def build_pass_rates(folder: Path) -> dict[str, Any]:
    """Build the JSON of an evaluation's pass@k and its tasks, from `results.jsonl`; empty where there is none.

    pass@k is given for the powers of two that some task has graded sessions for. A task's own interval is Wilson's of
    its sessions. Raises `RecordError`.
    """
    graded, passed, failed = Counter[str](), Counter[str](), Counter[str]()
    seen: dict[str, dict[int, float | None]] = defaultdict(dict)
    for result in read_results(folder):  # in the order in which they ended: the later attempt of a sample counts
        seen[result.task][result.sample] = result.reward
        failed[result.task] += result.reward is None
    for task, samples in seen.items():
        rewards = [reward for reward in samples.values() if reward is not None]
        graded[task], passed[task] = len(rewards), sum(reward >= PASSING_REWARD for reward in rewards)
    counts = [TaskCount(num_graded=graded[task], num_passed=passed[task]) for task in seen]
    most = max(graded.values(), default=0)
    ks = [2**power for power in range(most.bit_length())]
    by_rate = sorted(seen, key=lambda task: (-passed[task] / max(1, graded[task]), task))
    tasks = [
        {
            "task": task,
            "graded": graded[task],
            "passed": passed[task],
            "failed": failed[task],
            "interval": wilson_interval(passed[task] / graded[task], graded[task]) if graded[task] else None,
        }
        for task in by_rate
    ]
    return {"pass_at": [asdict(estimate_pass_rate(counts, k)) for k in ks], "tasks": tasks}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
