"""Compute group-relative advantages (GRPO), one per rollout, before any rollout is split into rows.

A rollout without a reward (NaN for every reward function) enters no baseline and gets no advantage. The formulas are
those of TRL's `GRPOTrainer` (`scale_rewards`, `multi_objective_aggregation`), computed in float64. A group is constant
where the largest of its scores is the smallest, never by its deviation: that of eight float32 0.2 is not 0, and
dividing by it makes advantages out of rounding.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

EPSILON = 1e-4
"""Added to standard deviations, as in TRL."""
ROUNDING = 2.0**-22
"""Relative error of a sum whose terms were rounded to float32: 0.1 + 0.2 and 0.3 + 0.0 are one reward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Advantages:
    """R rollouts in groups of G."""

    advantages_R: Tensor
    """Exactly 0 where `scored_R` is False and where the group is constant."""
    rewards_R: Tensor
    """Weighted sums; NaN where there is no reward."""
    scored_R: Tensor
    """Whether the rollout has a reward."""
    overflowed_R: Tensor
    """Whether reward functions gave one whose weighted sum float32 cannot hold: the rollout has none then."""
    zero_variance_R: Tensor
    """Whether its group is constant: all scored rollouts have one score, or none is scored."""

    def list_rollouts(self, rank: int, count: int) -> "list[RolloutAdvantage]":
        """Return the values of the `count` rollouts of a rank, one by one."""
        local = slice(rank * count, (rank + 1) * count)
        columns = (self.advantages_R, self.rewards_R, self.scored_R, self.zero_variance_R)
        rows = zip(*(column[local].tolist() for column in columns), strict=True)
        return [RolloutAdvantage(*row) for row in rows]


class RolloutAdvantage(NamedTuple):
    """The advantage, reward and status of one rollout."""

    advantage: float
    reward: float
    """NaN where there is none."""
    scored: bool
    zero_variance: bool


def compute_advantages(
    rewards_RF: Tensor, weights_F: Tensor, *, num_generations: int, scale_rewards: str, aggregation: str
) -> Advantages:
    """Compute the advantages of R rollouts under F reward functions.

    Args:
        rewards_RF: Rewards, NaN where a function gave none; R is a multiple of `num_generations`, groups adjacent.
        weights_F: Weight of each function.
        scale_rewards: "group", "batch" or "none": whose deviation the centered reward is divided by.
        aggregation: "sum_then_normalize" or "normalize_then_sum".
    """
    given_RF = rewards_RF.double()
    any_given_R = ~torch.isnan(given_RF).all(dim=1)
    sums_R = (given_RF * weights_F.double()).nansum(dim=1)
    scored_R = any_given_R & torch.isfinite(sums_R.float())
    given_RF = given_RF.masked_fill(~scored_R[:, None], torch.nan)
    values_NGF = given_RF.view(-1, num_generations, given_RF.shape[1])
    scored_NG = scored_R.view(-1, num_generations)
    if aggregation == "normalize_then_sum":
        values_NGF = _normalize_columns(values_NGF)
    # what is summed: a function that gave nothing adds nothing
    terms_NGF = torch.where(torch.isnan(values_NGF), 0.0, values_NGF * weights_F.double())
    constant_N = _find_constant(terms_NGF, scored_NG)
    score_NG = terms_NGF.sum(dim=2).masked_fill(~scored_NG, torch.nan)
    if aggregation == "normalize_then_sum":
        advantages_NG = (score_NG - torch.nanmean(score_NG)) / (_nanstd(score_NG.flatten(), 0) + EPSILON)
    else:
        advantages_NG = score_NG - torch.nanmean(score_NG, dim=1, keepdim=True)
        if scale_rewards == "group":
            advantages_NG = advantages_NG / (_nanstd(score_NG, 1) + EPSILON)
        elif scale_rewards == "batch":
            advantages_NG = advantages_NG / (_nanstd(score_NG.flatten(), 0) + EPSILON)
    advantages_NG = torch.where(scored_NG & ~constant_N[:, None], advantages_NG, 0.0)
    return Advantages(
        advantages_R=advantages_NG.flatten().to(rewards_RF.dtype),
        rewards_R=sums_R.masked_fill(~scored_R, torch.nan).to(rewards_RF.dtype),
        scored_R=scored_R,
        overflowed_R=any_given_R & ~scored_R,
        zero_variance_R=constant_N.repeat_interleave(num_generations),
    )


def _normalize_columns(values_NGF: Tensor) -> Tensor:
    """Normalize each function's rewards in each group; exactly 0 where the function gave one reward only."""
    centered_NGF = values_NGF - torch.nanmean(values_NGF, dim=1, keepdim=True)
    normalized_NGF = centered_NGF / (_nanstd(values_NGF, 1) + EPSILON)
    spread_N1F = _spread(values_NGF, ~torch.isnan(values_NGF))[:, None]
    return torch.where((spread_N1F == 0) & ~torch.isnan(values_NGF), 0.0, normalized_NGF)


def replace_groups(constant_N: Tensor, usable_N: Tensor) -> list[tuple[int, int]]:
    """Pair constant groups with usable new ones, in order, for as many as there are of both.

    With constant groups 1 and 3, and new groups of which 0 is constant too and 1 is not: [(1, 1)].

    Args:
        constant_N: Whether all rollouts of a group have one score.
        usable_N: Whether they differ, of the new groups.

    Returns:
        Pairs of an old and a new group.
    """
    return list(zip(constant_N.nonzero()[:, 0].tolist(), usable_N.nonzero()[:, 0].tolist(), strict=False))


def _find_constant(terms_NGF: Tensor, scored_NG: Tensor) -> Tensor:
    """Return [N]: whether the sums of a group's scored rollouts are equal.

    One function that varies decides exactly. Several may cancel, up to the rounding of their terms.
    """
    varies_NF = _spread(terms_NGF, scored_NG[:, :, None].expand_as(terms_NGF)) > 0
    varying_NGF = terms_NGF * varies_NF[:, None]
    spread_N = _spread(varying_NGF.sum(dim=2), scored_NG)
    largest_N = (varying_NGF.abs().sum(dim=2) * scored_NG).amax(dim=1)
    return spread_N <= torch.where(varies_NF.sum(dim=1) > 1, ROUNDING * largest_N, 0.0)


def _spread(values_NG: Tensor, present_NG: Tensor) -> Tensor:
    """Return the largest minus the smallest present value over the second dimension; 0 where none is present."""
    largest = values_NG.masked_fill(~present_NG, -torch.inf).amax(dim=1)
    smallest = values_NG.masked_fill(~present_NG, torch.inf).amin(dim=1)
    return torch.where(present_NG.any(dim=1), largest - smallest, 0.0)


def _nanstd(x: Tensor, dim: int) -> Tensor:
    """Return the sample standard deviation over `dim` (kept) of what is not NaN; 0 where fewer than two are."""
    mean = torch.nanmean(x, dim=dim, keepdim=True)
    count = (~torch.isnan(x)).sum(dim=dim, keepdim=True)
    return (torch.nansum((x - mean) ** 2, dim=dim, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
