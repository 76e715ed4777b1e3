"""Test advantages of single calls: their formulas, their bias, and that rows change nothing about them."""

import itertools
from statistics import fmean, stdev
from typing import Any

import pytest
import torch
from reconstruct_sessions import build_rollout

from polar_trl.errors import ConfigError
from polar_trl.grpo.config import PolarGRPOConfig
from polar_trl.grpo.credit.advantage import EPSILON, Advantages, compute_advantages
from polar_trl.grpo.credit.turn_credit import average_credits, credit_turns
from polar_trl.grpo.packing.batch import build_micro_batch
from polar_trl.grpo.rows import build_rows
from polar_trl.reconstruct import build_per_request, build_prefix_merged
from polar_trl.rollout.session_run import RolloutResult

NAN = float("nan")


def group(rewards: list[float], scale: str = "none") -> Advantages:
    weights = torch.ones(1)
    given = torch.tensor(rewards, dtype=torch.float64)[:, None]
    return compute_advantages(
        given, weights, num_generations=len(rewards), scale_rewards=scale, aggregation="sum_then_normalize"
    )


def credit(rewards: list[float], calls: list[list[float]], kind: str, scale: str = "none", weight: float = 1.0) -> Any:
    return credit_turns(
        group(rewards, scale), calls, kind=kind, weight=weight, num_generations=len(rewards), scale_rewards=scale
    )


def test_return_to_go() -> None:
    # returns: 1 + (0 + 2), 1 + 2 | 0 + 1 | 0 + (0 + 0), 0
    found = credit([1, 0, 0], [[0, 2], [1], [0, 0]], "return_to_go")
    assert found == [[3 - 0.5, 3 - 0], [1 - 1.5], [0 - 2, 0 - 3]]
    # the second call of one rollout alone: against the whole returns of the others
    assert credit([1, 0, 0], [[0, 2], [1], [0]], "return_to_go")[0][1] == 3 - 0.5
    # weights, and the deviation of whole returns
    first, second = [1 + 0.5 * 2, 0.5, 0.0], [2.0, 0.0]
    squares = [[(value - fmean(of_turn)) ** 2 for value in of_turn] for of_turn in (first, second)]
    spread = (((squares[0][0] + squares[1][0]) / 2 + squares[0][1] + (squares[0][2] + squares[1][1]) / 2) / 2) ** 0.5
    scaled = credit([1, 0, 0], [[0, 2], [1], [0, 0]], "return_to_go", "group", weight=0.5)
    assert scaled[1][0] == pytest.approx((0.5 - 1.0) / (spread + EPSILON))


def test_equal_returns_have_no_advantage_and_no_scale() -> None:
    """One mistake each, at other turns: the whole returns are equal, and those of the second call are not."""
    found = credit([0, 0], [[-0.2, 0], [0, -0.2]], "return_to_go", "group")
    assert [of[0] for of in found] == [0, 0]
    assert [of[1] for of in found] == pytest.approx([2, -2], rel=1e-2)
    for kind in ("return_to_go", "by_turn"):
        for size in (3, 6, 12):
            alike = credit([0.1] * size, [[-0.2, 0.7, -0.05]] * size, kind, "group")
            assert alike == [[0, 0, 0]] * size
        # the same sum in another order
        assert credit([0, 0], [[0.1, 0.2, 0.3], [0.3, 0.2, 0.1]], "return_to_go", "none")[0][0] == 0


def test_by_turn() -> None:
    rewards, calls = [1.0, 0.0, 0.5], [[0.0, 2.0], [1.0], [0.0, 0.0]]
    own = group(rewards, "group").advantages_R.tolist()
    found = credit(rewards, calls, "by_turn", "group", weight=2.0)
    first, second = [0.0, 1.0, 0.0], [2.0, 0.0]
    assert found[1] == pytest.approx([own[1] + 2 * (1 - fmean(first)) / (stdev(first) + EPSILON)])
    assert found[0][1] == pytest.approx(own[0] + 2 * (2 - fmean(second)) / (stdev(second) + EPSILON))
    assert credit(rewards, calls, "by_turn")[2] == pytest.approx([-1 / 3, -1.0])


def test_without_rewards_of_calls_it_is_grpo() -> None:
    rewards, calls = [1.0, 0.0, 0.25, 1.0], [[0.0] * 3] * 4
    own = group(rewards, "group").advantages_R.tolist()
    assert [of[0] for of in credit(rewards, calls, "by_turn", "group")] == pytest.approx(own)
    # the mean of the others, and not of all: longer by G / (G - 1)
    found = credit(rewards, calls, "return_to_go", "group")
    assert [value for of in found for value in of] == pytest.approx([a * 4 / 3 for a in own for _ in range(3)])


def test_without_a_reward_it_is_in_no_baseline() -> None:
    for kind in ("by_turn", "return_to_go"):
        with_lost = credit([1, NAN, 0, 0], [[0, 2], [50, 50], [1], [0, 0]], kind)
        assert with_lost[1] == [0, 0]
        assert [with_lost[i] for i in (0, 2, 3)] == credit([1, 0, 0], [[0, 2], [1], [0, 0]], kind)
    assert credit([NAN, 1.0], [[3], [4]], "return_to_go") == [[0], [0]]
    assert credit([NAN, NAN], [[3], []], "by_turn") == [[0], []]


def test_a_group_of_one_reward_may_teach_by_its_calls() -> None:
    advantages, calls = group([1, 1]), [[1.0], [0.0]]
    credits = credit_turns(advantages, calls, kind="return_to_go", weight=1.0, num_generations=2, scale_rewards="none")
    assert advantages.zero_variance_R.all()
    averaged = average_credits(advantages, credits, 2)
    assert averaged.advantages_R.tolist() == [1.0, -1.0] and not averaged.zero_variance_R.any()
    assert average_credits(advantages, [[0.0], []], 2).zero_variance_R.all()


# A problem whose gradient is known: go on with probability P, and then be right with probability Q. To stop earns
# nothing. Whoever goes on earns BONUS by the second call, and 1 more by being right.
P, Q, BONUS = 0.4, 0.3, 2.0
PATHS = {
    # (went on, was right): probability, reward, rewards of calls, and derivatives of the logarithm of its probability
    # with respect to the two logits
    "stop": (1 - P, 0.0, [0.0], [(-P, 0.0)]),
    "wrong": (P * (1 - Q), 0.0, [0.0, BONUS], [(1 - P, 0.0), (0.0, -Q)]),
    "right": (P * Q, 1.0, [0.0, BONUS], [(1 - P, 0.0), (0.0, 1 - Q)]),
}
TRUE_GRADIENT = (P * (1 - P) * (BONUS + Q), P * Q * (1 - Q))


def expect_gradient(size: int, estimate: Any) -> tuple[float, float]:
    """The expectation over all groups of a size, each with its probability; no sampling."""
    total = [0.0, 0.0]
    for names in itertools.product(PATHS, repeat=size):
        paths = [PATHS[name] for name in names]
        probability = 1.0
        for path in paths:
            probability *= path[0]
        credits = estimate([path[1] for path in paths], [path[2] for path in paths])
        for (_, _, _, scores), of_calls in zip(paths, credits, strict=True):
            for score, value in zip(scores, of_calls, strict=True):
                for axis in (0, 1):
                    total[axis] += probability * value * score[axis] / size
    return total[0], total[1]


def add_up_normalized_turns(rewards: list[float], calls: list[list[float]]) -> list[list[float]]:
    """The construction with the bias: subtract each turn's mean, and then add up what follows."""
    own = group(rewards).advantages_R.tolist()
    centered = []
    for i, of_calls in enumerate(calls):
        means = [fmean(other[k] for other in calls if len(other) > k) for k in range(len(of_calls))]
        differences = [reward - mean for reward, mean in zip(of_calls, means, strict=True)]
        centered.append([own[i] + sum(differences[k:]) for k in range(len(of_calls))])
    return centered


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_return_to_go_has_the_true_gradient(size: int) -> None:
    found = expect_gradient(size, lambda rewards, calls: credit(rewards, calls, "return_to_go"))
    assert found == pytest.approx(TRUE_GRADIENT, abs=1e-12)


def test_normalized_turns_that_are_added_up_teach_to_stop() -> None:
    to_go_on, to_be_right = expect_gradient(4, add_up_normalized_turns)
    # what going on earns by its later calls is gone from the gradient of the decision to go on
    assert to_go_on < 0.25 * TRUE_GRADIENT[0]
    assert to_be_right > 0


def test_by_turn_credits_a_call_with_its_own_reward_only() -> None:
    to_go_on, _ = expect_gradient(4, lambda rewards, calls: credit(rewards, calls, "by_turn"))
    assert to_go_on == pytest.approx(P * (1 - P) * Q * 3 / 4)  # TRL's mean over the whole group, its own included


def test_rows_change_nothing() -> None:
    """Law 5: the same advantage for each sampled token, whether a session is one row or a row for each call."""
    rollout = build_rollout(([0], [100, 200]), ([0, 100, 200, 0], [101, 201]), ([9], [102]))
    of_calls = {0: 0.5, 1: -2.0, 2: 3.0}
    found = []
    for build in (build_prefix_merged, build_per_request):
        result = RolloutResult(rollout=rollout, reconstruction=build(rollout))
        rows, _ = build_rows([(result, of_calls)], max_tokens=100, oldest_version=0)
        batch = build_micro_batch(rows, [1.0] * len(rows), [5] * len(rows), kind="packed", device=torch.device("cpu"))
        mask = batch["completion_mask"].bool()
        tokens = batch["completion_ids"][mask].tolist()
        found.append(sorted(zip(tokens, batch["advantages"][mask].tolist(), strict=True)))
        assert all(row.advantage == pytest.approx(0.5) for row in rows)
    assert found[0] == found[1] == [(100, 0.5), (101, -2.0), (102, 3.0), (200, 0.5), (201, -2.0)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"turn_credit": "each"}, "turn_credit must be one of by_turn, none, return_to_go"),
        ({"importance_sampling_level": "sequence"}, "importance_sampling_level must be 'token' with turn_credit"),
        ({"resample_zero_variance": 1}, "resample_zero_variance must be 0 with turn_credit"),
        ({"loss_type": "vespo"}, "loss_type must not be 'vespo' with turn_credit"),
        ({"off_policy_mask_threshold": 0.5}, "off_policy_mask_threshold must be None with turn_credit"),
    ],
)
def test_settings_that_have_one_advantage_for_a_rollout(tmp_path: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PolarGRPOConfig(output_dir=str(tmp_path), use_cpu=True, **{"turn_credit": "return_to_go", **settings})
