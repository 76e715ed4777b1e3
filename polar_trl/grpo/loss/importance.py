"""Log-probabilities of trainer and engine on the same tokens -> importance ratios, and how far apart they are."""

import math
from typing import Any

import torch
from torch import Tensor


def bound_ratio(log_ratio: Tensor, args: Any) -> Tensor:
    """The ratio of training to sampling policy, bounded as TRL does, of whatever shape its logarithm has.

    Args:
        log_ratio: Of tokens; for the modes "sequence_...", the sums over their rollouts.
        args: The config. Its modes "..._truncate" clamp the ratio, "..._mask" set it to 0 outside the bounds.
    """
    ratio = torch.exp(log_ratio)
    low, high = args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max
    low = float("-inf") if low is None else low
    high = float("inf") if high is None else high
    if args.vllm_importance_sampling_mode.endswith("truncate"):
        return ratio.clamp(min=low, max=high)
    return ratio.masked_fill((ratio < low) | (ratio > high), 0.0)


class RatioStats:
    """Raw, unbounded ratios of training to sampling policy per token, collected over the passes of a step."""

    def __init__(self) -> None:
        self._log_ratios: list[Tensor] = []

    def add(self, trainer_logps_BT: Tensor, sampling_logps_BT: Tensor, mask_BT: Tensor) -> None:
        """The tokens in the mask of one pass."""
        self._log_ratios.append((trainer_logps_BT - sampling_logps_BT)[mask_BT.bool()].detach().float())

    def summarise(self, accelerator: Any, *, clip_min: float | None, clip_max: float | None) -> dict[str, float]:
        """Figures over all ranks' tokens (a collective); none where no token was compared.

        `sampling_logp_difference/mean`, `/p99` and `/max` are absolute, in nats; p99 is the least difference that 99%
        of the tokens do not exceed. `importance_sampling_ratio/...` are of the raw ratio: its mean, least and largest,
        the share outside the bounds, and the effective sample size as a share of the tokens, (sum r)^2 / (n sum r^2)
        (Kish 1965).
        """
        device = accelerator.device
        log_ratio = torch.cat([torch.zeros(0, device=device), *self._log_ratios])
        ratio = log_ratio.double().exp()
        outside = torch.zeros_like(ratio, dtype=torch.bool)
        outside |= ratio < (-1.0 if clip_min is None else clip_min)
        outside |= ratio > (float("inf") if clip_max is None else clip_max)
        gap = log_ratio.double().abs()
        count = torch.tensor(len(ratio), dtype=torch.double, device=device)
        sums = torch.stack([count, gap.sum(), ratio.sum(), (ratio**2).sum(), outside.sum().double()])
        none = torch.zeros(1, dtype=torch.double, device=device)
        extremes = torch.stack(
            [torch.cat([gap, none]).max(), torch.cat([ratio, none]).max(), torch.cat([-ratio, none - torch.inf]).max()]
        )
        num, total_gap, total, squares, num_outside = accelerator.reduce(sums, reduction="sum").tolist()
        largest_gap, largest, negated_least = accelerator.gather(extremes[None]).amax(dim=0).tolist()
        if num == 0:
            return {}
        return {
            "sampling_logp_difference/mean": total_gap / num,
            "sampling_logp_difference/p99": _percentile_99(gap, int(num), accelerator),
            "sampling_logp_difference/max": largest_gap,
            "importance_sampling_ratio/mean": total / num,
            "importance_sampling_ratio/min": -negated_least,
            "importance_sampling_ratio/max": largest,
            "importance_sampling_ratio/outside_bounds": num_outside / num,
            "importance_sampling_ratio/effective_share": total**2 / (num * squares),
        }


def _percentile_99(values: Tensor, num: int, accelerator: Any) -> float:
    """The nearest-rank 99th percentile of all ranks' values, `num` of them in all, exactly (a collective).

    It is one of the largest 1% of all, which are among each rank's own largest: only those travel.
    """
    count = num - math.ceil(num * 99 / 100) + 1
    largest = torch.full((count,), -torch.inf, dtype=values.dtype, device=values.device)
    here = min(count, len(values))
    largest[:here] = values.topk(here).values
    return float(accelerator.gather(largest).topk(count).values[-1])
