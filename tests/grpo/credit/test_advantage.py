"""Advantages against hand-made numbers and TRL's own formulas."""

import math
from typing import Any

import pytest
import torch

from polar_trl.grpo.credit.advantage import compute_advantages, replace_groups
from polar_trl.grpo.logs.metrics import nan_std

NAN = math.nan


def advantages(rewards: list[list[float]], **settings: object) -> object:
    defaults = {"num_generations": 2, "scale_rewards": "group", "aggregation": "sum_then_normalize"}
    table = torch.tensor(rewards)
    return compute_advantages(table, torch.ones(table.shape[1]), **{**defaults, **settings})


def test_a_group_is_centred_and_scaled() -> None:
    result = advantages([[1.0], [0.0], [0.5], [0.5]])
    std = math.sqrt(0.5)
    expected = torch.tensor([0.5 / (std + 1e-4), -0.5 / (std + 1e-4), 0.0, 0.0])
    assert torch.allclose(result.advantages_R, expected)
    assert result.zero_variance_R.tolist() == [False, False, True, True]


def test_a_rollout_without_reward_is_in_no_baseline() -> None:
    result = advantages([[1.0], [0.0], [NAN], [0.4]], num_generations=4)
    rewards = torch.tensor([1.0, 0.0, 0.4])
    expected = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    assert torch.allclose(result.advantages_R[[0, 1, 3]], expected)
    assert result.advantages_R[2] == 0.0
    assert result.scored_R.tolist() == [True, True, False, True]
    assert result.rewards_R[2].isnan()


def test_zero_is_a_reward_and_absence_is_not() -> None:
    scored = advantages([[0.0], [1.0], [0.0], [1.0]], num_generations=4)
    absent = advantages([[NAN], [1.0], [NAN], [1.0]], num_generations=4)
    assert scored.advantages_R[0] < 0
    assert absent.advantages_R.tolist() == [0.0] * 4


def test_a_whole_group_without_reward_gives_nothing() -> None:
    result = advantages([[NAN], [NAN], [1.0], [0.0]])
    assert result.advantages_R[:2].tolist() == [0.0, 0.0]
    assert result.advantages_R[2] > 0


@pytest.mark.parametrize("scale", ["batch", "none"])
def test_scales(scale: str) -> None:
    rewards = torch.tensor([1.0, 0.0, 0.2, 0.6])
    result = advantages([[r] for r in rewards.tolist()], scale_rewards=scale)
    centred = torch.tensor([0.5, -0.5, -0.2, 0.2])
    divisor = rewards.std() + 1e-4 if scale == "batch" else 1.0
    assert torch.allclose(result.advantages_R, centred / divisor)


def test_normalize_then_sum_is_the_formula_of_gdpo() -> None:
    table = torch.tensor([[1.0, 0.0], [0.0, 4.0], [1.0, 2.0], [0.5, 2.0]])
    grouped = table.view(2, 2, 2)
    per_function = ((grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)).view(4, 2)
    summed = per_function.sum(1)
    expected = (summed - summed.mean()) / (summed.std() + 1e-4)
    result = advantages(table.tolist(), aggregation="normalize_then_sum")
    assert torch.allclose(result.advantages_R, expected, atol=1e-6)


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("size", [2, 3, 5, 6, 7, 8, 12, 16])
def test_equal_rewards_are_constant_whatever_float32_makes_of_them(size: int, scale: str, aggregation: str) -> None:
    values = [k / n for n in (3, 5, 7, 10, 40, 1000) for k in range(n + 1)] + [-0.15, 1e-30, 1e9 / 3, 3e38]
    rewards = [[value] for value in values for _ in range(size)]
    result = advantages(rewards, num_generations=size, scale_rewards=scale, aggregation=aggregation)
    assert result.zero_variance_R.all()
    assert (result.advantages_R == 0.0).all()
    mixed = advantages([*rewards, *[[float(i)] for i in range(size)]], num_generations=size, aggregation=aggregation)
    assert mixed.zero_variance_R[:-size].all() and not mixed.zero_variance_R[-size:].any()
    assert (mixed.advantages_R[:-size] == 0.0).all() and (mixed.advantages_R[-size:] != 0.0).any()


def test_constancy_is_judged_on_what_is_summed() -> None:
    # 1, 1, 1, 1 summed with weights 1 and 0.5; normalised first, the second function counts half
    table = torch.tensor([[0.0, 2.0], [1.0, 0.0], [0.0, 2.0], [1.0, 0.0]])
    weights = torch.tensor([1.0, 0.5])
    settings: dict[str, Any] = {"num_generations": 4, "scale_rewards": "group"}
    summed = compute_advantages(table, weights, aggregation="sum_then_normalize", **settings)
    assert summed.zero_variance_R.all() and (summed.advantages_R == 0.0).all()
    normalised = compute_advantages(table, weights, aggregation="normalize_then_sum", **settings)
    assert not normalised.zero_variance_R.any()
    assert (normalised.advantages_R.sign() == torch.tensor([-1.0, 1.0, -1.0, 1.0])).all()
    # and the other way round: what cancels only once it is normalised, beside a group that does not
    both = torch.tensor([[0.0, 4.0], [1.0, 3.0], [0.3, 0.1], [0.1, 0.1]])
    settings |= {"num_generations": 2}
    cancelled = compute_advantages(both, torch.ones(2), aggregation="normalize_then_sum", **settings)
    assert cancelled.zero_variance_R.tolist() == [True, True, False, False]
    assert cancelled.advantages_R[:2].tolist() == [0.0, 0.0]


def test_sums_that_differ_by_rounding_only_are_equal() -> None:
    result = advantages([[0.1, 0.2], [0.3, 0.0], [0.15, 0.15], [0.0, 0.3]], num_generations=4)
    assert result.zero_variance_R.all() and (result.advantages_R == 0.0).all()
    # a constant that is large hides nothing: what varies beside it decides
    result = advantages([[1e6, 0.1], [1e6, 0.2], [1e6, 0.1], [1e6, 0.2]], num_generations=4)
    assert not result.zero_variance_R.any()


def test_absent_rewards_do_not_make_a_group_vary() -> None:
    result = advantages([[0.2, NAN], [NAN, NAN], [0.2, NAN]], num_generations=3)
    assert result.zero_variance_R.all() and result.scored_R.tolist() == [True, False, True]
    result = advantages([[0.2, NAN], [0.2, 0.5], [0.2, NAN]], num_generations=3)  # one function abstains for two
    assert not result.zero_variance_R.any()


def test_a_sum_that_float32_cannot_hold_is_no_reward() -> None:
    result = advantages([[3e38, 3e38], [1.0, 0.0], [0.0, 0.5], [0.0, 0.0]], num_generations=4)
    assert result.scored_R.tolist() == [False, True, True, True]
    assert result.overflowed_R.tolist() == [True, False, False, False]
    assert result.rewards_R[0].isnan() and result.advantages_R.isfinite().all()
    assert torch.allclose(result.advantages_R[1:], advantages([[1.0], [0.5], [0.0]], num_generations=3).advantages_R)


def test_the_deviation_of_equal_rewards_is_zero() -> None:
    assert nan_std(torch.full((24,), 0.2)) == 0.0
    assert nan_std(torch.tensor([0.2, NAN])) != nan_std(torch.tensor([0.2, NAN]))  # of one there is none


def test_constant_groups_are_paired_with_new_ones_that_vary() -> None:
    constant_N = torch.tensor([False, True, False, True])
    assert replace_groups(constant_N, torch.tensor([False, True])) == [(1, 1)]
    assert replace_groups(constant_N, torch.tensor([True, True, True])) == [(1, 0), (3, 1)]
    assert replace_groups(torch.zeros(2, dtype=torch.bool), torch.tensor([True])) == []
