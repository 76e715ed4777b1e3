"""Correct for the gap between trainer and engine by truncated or masked importance sampling, and measure the gap.

The engine samples with other kernels than the trainer computes with, and perhaps with older weights, so a token's
loss is weighted by the ratio p(trainer) / p(engine), bounded so that few tokens cannot rule the gradient: truncated
importance sampling (Ionides 2008; in reinforcement learning of language models Yao et al. 2025, "Your Efficient RL
Framework Secretly Brings You Off-Policy RL Training"). Three tokens of a rollout, with an upper bound of 3:

    trainer's less engine's logprob    0.1   2.0  -3.0      summed over the rollout: -0.9
    ratio                              1.11  7.39  0.05
    token_truncate                     1.11  3     0.05
    token_mask                         1.11  0     0.05
    sequence_truncate, sequence_mask   0.41  0.41  0.41     one ratio for all tokens
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def bound_ratio(log_ratio: Tensor, args: Any) -> Tensor:
    """Bound the ratio of training to sampling policy as TRL does.

    Args:
        log_ratio: Of any shape, of tokens; for the modes "sequence_...", the sums over their rollouts.
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
    """Collect the raw, unbounded ratios of training to sampling policy per token over the passes of a step."""

    def __init__(self) -> None:
        self._log_ratios: list[Tensor] = []
        self._by_row: list[tuple[Sequence[str | None], Tensor]] = []

    def add(
        self,
        trainer_logps_BC: Tensor,
        sampling_logps_BC: Tensor,
        mask_BC: Tensor,
        agents: Sequence[str | None] = (),
    ) -> None:
        """Add the tokens in the mask of one pass. `agents` are those of its rows, if they are to be told apart."""
        log_ratio_BC = (trainer_logps_BC - sampling_logps_BC).detach().float()
        self._log_ratios.append(log_ratio_BC[mask_BC.bool()])
        if agents:
            gap_B = (log_ratio_BC.double().abs() * mask_BC).sum(dim=1)
            self._by_row.append((agents, torch.stack([gap_B, mask_BC.sum(dim=1).double()])))

    def summarize_agents(self, agents: Sequence[str], accelerator: Any) -> dict[str, float]:
        """Compute the mean absolute difference (nats) of each agent's tokens on all ranks (a collective)."""
        sums = torch.zeros((len(agents), 2), dtype=torch.double, device=accelerator.device)
        for of_rows, sums_2B in self._by_row:
            places = torch.tensor([agents.index(str(agent)) for agent in of_rows], device=sums.device)
            sums.index_add_(0, places, sums_2B[:, : len(of_rows)].T)  # a pass may have room for more rows
        totals = accelerator.reduce(sums, reduction="sum").tolist()
        return {agent: gap / num for agent, (gap, num) in zip(agents, totals, strict=True) if num}

    def summarize(self, accelerator: Any, *, clip_min: float | None, clip_max: float | None) -> dict[str, float]:
        """Compute figures over all ranks' tokens (a collective); none where no token was compared.

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
        # all sums in one collective, and all extremes (as maxima) in another
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
    """Find the nearest-rank 99th percentile of all ranks' values, `num` in all, exactly (a collective).

    It is the smallest of the largest `count` values, 11 for 1000. Each of those is among its own rank's largest
    `count`, so only these travel; a rank with fewer values fills up with -inf.
    """
    count = num - math.ceil(num * 99 / 100) + 1
    largest = torch.full((count,), -torch.inf, dtype=values.dtype, device=values.device)
    here = min(count, len(values))
    largest[:here] = values.topk(here).values
    return float(accelerator.gather(largest).topk(count).values[-1])
