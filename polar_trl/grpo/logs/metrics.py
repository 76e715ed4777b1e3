"""Compute the metrics of a step from its rollouts; pure, with the summaries of all ranks as input."""

import math
from collections import Counter
from collections.abc import Mapping, MutableMapping, Sequence
from statistics import fmean

import torch
from torch import Tensor

from polar_trl.rollout.runner import STAGES
from polar_trl.rollout.session_run import RolloutResult

COUNTS = ("polar/counters/", "polar/dropped/", "polar/stopped/")
"""Beginnings of the names of counts that a batch may have none of."""


def append_metrics(waiting: MutableMapping[str, list[float]], batch: Mapping[str, float]) -> None:
    """Add a generation batch's metrics to those that wait to be logged.

    TRL logs the mean of each list. A count that a batch has none of is a 0 in its list, so that with several batches
    between two lines of the log, sampled tokens are still trained tokens and the dropped ones of all reasons.
    """
    num_before = len(waiting["polar/sampled_tokens"])
    for name in [*batch, *(name for name in waiting if name.startswith(COUNTS) and name not in batch)]:
        if name.startswith(COUNTS):
            waiting[name] += [0.0] * (num_before - len(waiting[name]))
        waiting[name].append(batch.get(name, 0.0))


def count_rollout(result: RolloutResult) -> dict[str, float]:
    """Summarize one rollout in numbers, all of which may be added up over rollouts."""
    rollout, reconstruction = result.rollout, result.reconstruction
    summary: dict[str, float] = {
        "calls": len(rollout.calls),
        "sampled_tokens": sum(len(call.completion.token_ids) for call in rollout.calls),
        "trajectories": len(reconstruction.trajectories),
        "truncated": bool(rollout.calls) and rollout.calls[-1].completion.finish_reason == "length",
        f"stopped/{rollout.stop_reason}": 1,
    }
    counters = {**rollout.counters, **reconstruction.counters}
    summary |= {f"counters/{name}": count for name, count in counters.items()}
    summary |= {f"dropped/{reason}": count for reason, count in reconstruction.dropped.items()}
    summary |= {f"seconds/{phase}": rollout.seconds[phase] for phase in ("queue", "held", *STAGES)}
    return summary


def build_rollout_metrics(summaries: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Build the metrics of a generation batch from the summaries of all ranks' rollouts."""
    totals: Counter[str] = Counter()
    for summary in summaries:
        totals.update(summary)
    num = len(summaries)
    sampled = [summary["sampled_tokens"] for summary in summaries]
    metrics = {
        "completions/mean_length": sum(sampled) / num,
        "completions/min_length": min(sampled),
        "completions/max_length": max(sampled),
        "completions/clipped_ratio": totals["truncated"] / num,
        "polar/sampled_tokens": totals["sampled_tokens"],
        "polar/calls_per_rollout": totals["calls"] / num,
        "polar/trajectories_per_rollout": totals["trajectories"] / num,
    }
    for key, value in sorted(totals.items()):
        if key.startswith(("counters/", "dropped/", "stopped/")):
            metrics[f"polar/{key}"] = value
        elif key.startswith("seconds/"):
            metrics[f"polar/{key}"] = value / num
    return metrics


def build_agent_metrics(
    agents: Sequence[str], rollouts: Sequence[tuple[str | None, float, Mapping[str, float]]]
) -> dict[str, float]:
    """Build the metrics of each of several agents, of those that played in a batch.

    Args:
        rollouts: Of all ranks: the agent, the reward (NaN where there is none), and the summary of `count_rollout`,
            with `no_reward`: whether it has none although it was not left out.
    """
    metrics: dict[str, float] = {}
    for agent in agents:
        rewards = [reward for played_by, reward, _ in rollouts if played_by == agent]
        summaries = [summary for played_by, _, summary in rollouts if played_by == agent]
        if not rewards:
            continue
        scored = [reward for reward in rewards if not math.isnan(reward)]
        figures = {
            "sessions": len(rewards),
            "without_reward": sum(summary["no_reward"] for summary in summaries),
            **({"reward": fmean(scored)} if scored else {}),
            "mean_length": fmean(summary["sampled_tokens"] for summary in summaries),
            "calls_per_rollout": fmean(summary["calls"] for summary in summaries),
            "forks": sum(summary.get("counters/forks", 0) for summary in summaries),
        }
        metrics |= {f"polar/agents/{agent}/{name}": value for name, value in figures.items()}
    return metrics


def nan_std(values: Tensor) -> float:
    """Return the sample standard deviation of what is not NaN: NaN of fewer than two values, 0 where all are equal."""
    kept = values[~torch.isnan(values)].double()
    if kept.numel() < 2:
        return math.nan
    return 0.0 if kept.max() == kept.min() else kept.std().item()
