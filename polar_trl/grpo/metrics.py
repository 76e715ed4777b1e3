"""Finished rollouts -> the numbers that a step logs. Pure: nothing is gathered and nothing is kept here."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from polar_trl.rollout import STAGES, Finished


def count_rollout(result: Finished) -> dict[str, float]:
    """Numbers of one rollout, all of which may be added up over rollouts."""
    rollout, reconstruction = result.rollout, result.reconstruction
    summary: dict[str, float] = {
        "calls": len(rollout.calls),
        "sampled_tokens": sum(len(call.completion.token_ids) for call in rollout.calls),
        "trajectories": len(reconstruction.trajectories),
        "cut_by_length": bool(rollout.calls) and rollout.calls[-1].completion.finish_reason == "length",
        f"stopped/{rollout.stop_reason}": 1,
    }
    counters = {**rollout.counters, **reconstruction.counters}
    summary |= {f"counters/{name}": count for name, count in counters.items()}
    summary |= {f"dropped/{reason}": count for reason, count in reconstruction.dropped.items()}
    summary |= {f"seconds/{phase}": rollout.seconds[phase] for phase in ("queue", "held", *STAGES)}
    return summary


def build_rollout_metrics(summaries: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of a generation batch, from the summaries of all ranks' rollouts."""
    totals: Counter[str] = Counter()
    for summary in summaries:
        totals.update(summary)
    num = len(summaries)
    sampled = [summary["sampled_tokens"] for summary in summaries]
    metrics = {
        "completions/mean_length": sum(sampled) / num,
        "completions/min_length": min(sampled),
        "completions/max_length": max(sampled),
        "completions/clipped_ratio": totals["cut_by_length"] / num,
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


def nan_std(values: Tensor) -> float:
    """Sample standard deviation of what is not NaN; NaN where fewer than two values are, 0 where all are equal."""
    kept = values[~torch.isnan(values)].double()
    if kept.numel() < 2:
        return math.nan
    return 0.0 if kept.max() == kept.min() else kept.std().item()
