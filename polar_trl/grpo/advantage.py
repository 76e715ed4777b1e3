"""Rewards of all rollouts of a step -> one advantage per rollout, before any rollout is split into rows.

A rollout without a reward (NaN for every reward function) enters no baseline and gets no advantage. The formulas are
those of TRL's `GRPOTrainer` (`scale_rewards`, `multi_objective_aggregation`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

EPSILON = 1e-4
"""Added to standard deviations, as in TRL."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Advantages:
    """R rollouts in groups of G."""

    advantages_R: Tensor
    """0 where `scored_R` is False."""
    rewards_R: Tensor
    """Weighted sums; NaN where no reward function gave one."""
    scored_R: Tensor
    """Whether the rollout has a reward."""
    zero_variance_R: Tensor
    """Whether all scored rollouts of its group have one reward."""


def compute_advantages(
    rewards_RF: Tensor, weights_F: Tensor, *, num_generations: int, scale_rewards: str, aggregation: str
) -> Advantages:
    """Advantages of R rollouts under F reward functions.

    Args:
        rewards_RF: Rewards, NaN where a function gave none; R is a multiple of `num_generations`, groups adjacent.
        weights_F: Weight of each function.
        scale_rewards: "group", "batch" or "none": what the centred reward is divided by the deviation of.
        aggregation: "sum_then_normalize" or "normalize_then_sum".
    """
    scored_R = ~torch.isnan(rewards_RF).all(dim=1)
    rewards_R = (rewards_RF * weights_F).nansum(dim=1)
    rewards_R[~scored_R] = torch.nan
    if aggregation == "normalize_then_sum":
        grouped_NGF = rewards_RF.view(-1, num_generations, rewards_RF.shape[1])
        mean = torch.nanmean(grouped_NGF, dim=1, keepdim=True)
        normalised_RF = ((grouped_NGF - mean) / (_nanstd(grouped_NGF, 1) + EPSILON)).view(rewards_RF.shape)
        score_R = (normalised_RF * weights_F).nansum(dim=1)
        score_R[~scored_R] = torch.nan
        advantages_R = (score_R - torch.nanmean(score_R)) / (_nanstd(score_R, 0) + EPSILON)
    else:
        grouped_NG = rewards_R.view(-1, num_generations)
        centred_R = (grouped_NG - torch.nanmean(grouped_NG, dim=1, keepdim=True)).flatten()
        if scale_rewards == "group":
            std_R = _nanstd(grouped_NG, 1).expand_as(grouped_NG).flatten()
            advantages_R = centred_R / (std_R + EPSILON)
        elif scale_rewards == "batch":
            advantages_R = centred_R / (_nanstd(rewards_R, 0) + EPSILON)
        else:
            advantages_R = centred_R
    spread_N = _nanstd(rewards_R.view(-1, num_generations), 1).flatten()
    return Advantages(
        advantages_R=torch.nan_to_num(advantages_R, nan=0.0),
        rewards_R=rewards_R,
        scored_R=scored_R,
        zero_variance_R=torch.isclose(spread_N, torch.zeros_like(spread_N)).repeat_interleave(num_generations),
    )


def _nanstd(x: Tensor, dim: int) -> Tensor:
    """Sample standard deviation over `dim` (kept) of the entries that are not NaN; 0 where fewer than two are."""
    mean = torch.nanmean(x, dim=dim, keepdim=True)
    count = (~torch.isnan(x)).sum(dim=dim, keepdim=True)
    variance = torch.nansum((x - mean) ** 2, dim=dim, keepdim=True) / (count - 1).clamp(min=1)
    return torch.nan_to_num(variance, nan=0.0).sqrt()
