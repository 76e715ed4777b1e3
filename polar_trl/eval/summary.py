"""Summarize the results of an evaluation: pass rates with intervals, failures of the infrastructure, averages.

A session without a reward is none that failed its task: it is in no rate and no average, and is counted by the kind of
its error.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from polar_trl.eval.sample_tasks import SampleResult
from polar_trl.grade.base import PASSING_REWARD
from polar_trl.grade.pass_at_k import TaskCount, estimate_pass_rate


def build_summary(
    task_ids: Sequence[str],
    results: Sequence[SampleResult],
    *,
    num_samples: int,
    ks: Sequence[int],
    groups: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Summarize a task set (JSON values); "by" has the same for each group of tasks, if there are any.

    Args:
        task_ids: All tasks that were to be evaluated.
        results: Lines of `results.jsonl`; those of other tasks and of samples from `num_samples` on are left out.
        num_samples: Sessions that each task was to get.
        ks: Of the pass rates.
        groups: Task id -> name of its group; tasks that it lacks are in none.
    """
    wanted = set(task_ids)
    kept = [result for result in results if result.task in wanted and result.sample < num_samples]
    summary = _summarize(task_ids, kept, num_samples, ks)
    if groups:
        members: dict[str, list[str]] = defaultdict(list)
        for task_id in task_ids:
            if task_id in groups:
                members[groups[task_id]].append(task_id)
        summary["by"] = {
            name: _summarize(ids, [result for result in kept if result.task in set(ids)], num_samples, ks)
            for name, ids in sorted(members.items())
        }
    return summary


def _summarize(
    task_ids: Sequence[str], results: Sequence[SampleResult], num_samples: int, ks: Sequence[int]
) -> dict[str, Any]:
    graded = {(result.task, result.sample): result for result in results if result.reward is not None}
    tried = {(result.task, result.sample) for result in results}
    failed = [result for result in results if result.reward is None]
    num_graded, num_passed = Counter[str](), Counter[str]()
    for (task, _), result in graded.items():
        num_graded[task] += 1
        num_passed[task] += (result.reward or 0.0) >= PASSING_REWARD
    counts = [TaskCount(num_graded=num_graded[task], num_passed=num_passed[task]) for task in task_ids]
    sessions = list(graded.values())
    return {
        "tasks": len(task_ids),
        "tasks_graded": len(num_graded),
        "sessions": {
            "wanted": len(task_ids) * num_samples,
            "graded": len(graded),
            "passed": sum(num_passed.values()),
            "failed": len(tried - set(graded)),
            "missing": len(task_ids) * num_samples - len(tried),
        },
        "failures": _count_failures(failed),
        "pass_at": {str(k): asdict(estimate_pass_rate(counts, k)) for k in ks},
        "mean_reward": _mean([result.reward or 0.0 for result in sessions]),
        "calls_per_session": _mean([result.calls for result in sessions]),
        "sampled_tokens_per_session": _mean([result.sampled_tokens for result in sessions]),
        "agent_seconds_per_session": _mean([result.seconds.get("agent", 0.0) for result in sessions]),
        "stop_reasons": dict(Counter(result.stop_reason for result in sessions).most_common()),
        "reasons": _count_reasons(sessions),
    }


def _count_failures(failed: Sequence[SampleResult]) -> dict[str, dict[str, Any]]:
    """Count sessions without a reward by kind, with the latest error of each kind."""
    counts = Counter(_name_failure(result) for result in failed)
    latest = {_name_failure(result): result.error for result in failed}
    return {name: {"sessions": count, "latest": latest[name]} for name, count in counts.most_common()}


def _count_reasons(graded: Sequence[SampleResult]) -> list[dict[str, Any]]:
    """Count graded sessions that did not pass by the reason, the most frequent first, each with its latest example."""
    reasons = [result.reason for result in graded if result.reason and (result.reward or 0.0) < PASSING_REWARD]
    latest = {result.reason: result for result in graded if (result.reward or 0.0) < PASSING_REWARD}
    return [
        {"reason": reason, "sessions": count, "example": latest[reason].detail, "record": latest[reason].record}
        for reason, count in Counter(reasons).most_common()
    ]


def _name_failure(result: SampleResult) -> str:
    """Name the kind of failure that left a session without a reward: an `ErrorKind`, or "unknown"."""
    if result.error_kind is None and result.stop_reason in ("prepare_failed", "no_calls", "cancelled"):
        return result.stop_reason  # lines of earlier versions have no kind, and these reasons are kinds
    return result.error_kind or "unknown"


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
