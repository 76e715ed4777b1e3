"""Constant groups are replaced by others, in the rewards of all ranks and the rollouts of the rank that has them."""

from typing import Any

import torch

from polar_trl.grpo.advantage import Advantages, compute_advantages
from polar_trl.grpo.rollouts.resampling import resample_constant_groups


class Source:
    """Two ranks of two groups of two rollouts; this is rank 1. New rollouts are numbered from 100 on."""

    rank, num_ranks = 1, 2
    num_generations = {"train": 2}  # noqa: RUF012

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def by_rank(self, values: torch.Tensor) -> torch.Tensor:
        return values.view(2, -1)

    def run_others(self, num_groups: int, round_number: int) -> list[Any]:
        self.asked.append((num_groups, round_number))
        return [100 + index for index in range(2 * num_groups)]


def rate(rewards_RF: torch.Tensor) -> Advantages:
    return compute_advantages(
        rewards_RF, torch.ones(1), num_generations=2, scale_rewards="group", aggregation="sum_then_normalize"
    )


def test_this_ranks_rollouts_and_all_ranks_rewards_are_replaced() -> None:
    # rank 0: groups vary, constant; rank 1: constant, varies
    rewards_RF = torch.tensor([[0.0], [1.0], [1.0], [1.0], [0.0], [0.0], [1.0], [0.0]])
    others_RF = torch.tensor([[1.0], [1.0], [0.5], [0.0]])  # rank 0's new group is constant too
    source: Any = Source()
    results, replaced_RF, advantages, num_rolled_out = resample_constant_groups(
        [0, 1, 2, 3],  # type: ignore[list-item]
        rewards_RF,
        rate(rewards_RF),
        source=source,
        num_rounds=1,
        compute_rewards=lambda others: others_RF,
        compute_advantages=rate,
    )
    assert (source.asked, num_rolled_out) == ([(1, 0)], 2)
    assert results == [100, 101, 2, 3]
    assert replaced_RF[:, 0].tolist() == [0.0, 1.0, 1.0, 1.0, 0.5, 0.0, 1.0, 0.0]
    assert advantages.zero_variance_R.tolist() == [False, False, True, True, False, False, False, False]


def test_no_round_is_made_without_a_constant_group() -> None:
    rewards_RF = torch.tensor([[0.0], [1.0]] * 4)
    source: Any = Source()
    results, *_, num_rolled_out = resample_constant_groups(
        [0, 1, 2, 3],  # type: ignore[list-item]
        rewards_RF,
        rate(rewards_RF),
        source=source,
        num_rounds=3,
        compute_rewards=lambda others: rewards_RF,
        compute_advantages=rate,
    )
    assert (source.asked, results, num_rolled_out) == ([], [0, 1, 2, 3], 0)
