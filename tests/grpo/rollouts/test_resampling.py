"""Constant groups are replaced by others, in the rewards of all ranks and the rollouts of the ranks that have them."""

from types import SimpleNamespace
from typing import Any

import torch
from rank_threads import run_ranks

from polar_trl.grpo.credit.advantage import Advantages, compute_advantages
from polar_trl.grpo.rollouts.resampling import resample_constant_groups
from polar_trl.rollout.ranks import Ranks


class Source:
    """New rollouts are numbered from 100 on; each rank has its part of them."""

    def __init__(self, ranks: Ranks, group_size: int) -> None:
        self.runner = SimpleNamespace(ranks=ranks)
        self.num_generations = {"train": group_size}
        self.asked: list[tuple[int, int]] = []

    def run_others(self, num_groups: int, round_number: int) -> list[Any]:
        self.asked.append((num_groups, round_number))
        part = num_groups * self.num_generations["train"] // self.runner.ranks.num_ranks
        return [100 + self.runner.ranks.rank * part + index for index in range(part)]


def resample(
    ranks: Ranks, rewards: list[float], others: list[float], *, group_size: int
) -> tuple[list[Any], list[float], list[bool], int, list[tuple[int, int]]]:
    def rate(rewards_RF: torch.Tensor) -> Advantages:
        return compute_advantages(
            rewards_RF,
            torch.ones(1),
            num_generations=group_size,
            scale_rewards="group",
            aggregation="sum_then_normalize",
        )

    source: Any = Source(ranks, group_size)
    rewards_RF = torch.tensor(rewards)[:, None]
    part = len(rewards) // ranks.num_ranks
    results, replaced_RF, advantages, num_rolled_out = resample_constant_groups(
        [ranks.rank * part + index for index in range(part)],  # type: ignore[misc]
        rewards_RF,
        rate(rewards_RF),
        source=source,
        num_rounds=1,
        compute_rewards=lambda results: torch.tensor(others)[:, None],
        compute_advantages=rate,
    )
    return results, replaced_RF[:, 0].tolist(), advantages.zero_variance_R.tolist(), num_rolled_out, source.asked


def test_rollouts_of_whichever_rank_replace_those_of_another() -> None:
    # groups of 2 on two ranks of 4: the second is constant, and the third, of the other rank
    rewards = [0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0]
    # the first of two new groups, rank 0's, is constant too
    outcomes = run_ranks(2, lambda ranks: resample(ranks, rewards, [1.0, 1.0, 0.5, 0.0], group_size=2))
    replaced = [0.0, 1.0, 0.5, 0.0, 0.0, 0.0, 1.0, 0.0]
    constant = [False] * 4 + [True] * 2 + [False] * 2
    assert outcomes[0] == ([0, 1, 102, 103], replaced, constant, 2, [(2, 0)])
    assert outcomes[1] == ([4, 5, 6, 7], replaced, constant, 2, [(2, 0)])


def test_a_group_that_lies_on_two_ranks_is_replaced_on_both() -> None:
    # groups of 4 on two ranks of 6: the second lies on both
    rewards = [0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0]
    outcomes = run_ranks(2, lambda ranks: resample(ranks, rewards, [0.0, 0.0, 0.0, 1.0], group_size=4))
    assert outcomes[0][0] == [0, 1, 2, 3, 100, 101]
    assert outcomes[1][0] == [102, 103, 8, 9, 10, 11]
    assert outcomes[0][1] == outcomes[1][1] == [0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0]


def test_as_many_groups_are_rolled_out_as_ranks_can_share_evenly() -> None:
    # one constant group of 2, and four ranks
    rewards = [0.0, 0.0, *[0.0, 1.0] * 3]
    outcomes = run_ranks(4, lambda ranks: resample(ranks, rewards, [0.0, 1.0, 0.5, 0.0], group_size=2))
    assert [outcome[0] for outcome in outcomes] == [[100, 101], [2, 3], [4, 5], [6, 7]]
    assert [outcome[3:] for outcome in outcomes] == [(2, [(2, 0)])] * 4


def test_no_round_is_made_without_a_constant_group() -> None:
    (outcome,) = run_ranks(1, lambda ranks: resample(ranks, [0.0, 1.0] * 4, [], group_size=2))
    assert outcome[0] == list(range(8))
    assert outcome[3:] == (0, [])
