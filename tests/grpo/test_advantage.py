"""Advantages against hand-made numbers and TRL's own formulas."""

import math

import pytest
import torch

from polar_trl.grpo.advantage import compute_advantages

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
