"""Compute an advantage for each model call from rewards of calls, in the place of one for the rollout (`turn_credit`).

Write r(i, k) for the reward of the k-th call of rollout i, R(i) for that of the rollout, and w for
`turn_credit_weight`.

* "by_turn": A(i, k) = A(i) + w (r(i, k) - mean) / std, over the k-th calls of the rollouts of the group that made one.
  A(i) is the rollout's own advantage. The formula is MT-GRPO's (Zeng et al. 2025, arXiv:2505.11821), for any number of
  calls. A call is credited with its own reward, and not with what it leads to.
* "return_to_go": G(i, k) = R(i) + w (r(i, k) + r(i, k + 1) + ...), and A(i, k) = G(i, k) - mean of G(j, k), over the
  other rollouts j of the group that made a k-th call; where none did, over the whole returns G(j, 0) of the others.

A baseline may depend on anything but what the rollout does from call k on; then it adds nothing to the expected
gradient (Williams 1992). That is why rewards are added up before a baseline is subtracted, and why it is that of the
others. Normalizing the rewards of each turn first and adding up the results subtracts as many means as the rollout has
turns left: whoever goes on pays for it, and where later calls earn something the policy learns to stop. The test of
this file shows the one and the other on a problem whose gradient is known.

With `scale_rewards`, A(i, k) of "return_to_go" is divided by one deviation for the group or the batch: of G(i, k) from
its mean over the k-th calls, averaged over the calls of a rollout and then over rollouts. Where no call has a reward
that is the deviation of R(i). Equal returns have an advantage of exactly 0, as in `advantage.py`.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import torch

from polar_trl.grpo.credit.advantage import EPSILON, ROUNDING, Advantages

TURN_CREDITS = ("none", "by_turn", "return_to_go")


def credit_turns(
    advantages: Advantages,
    call_rewards: Sequence[Sequence[float]],
    *,
    kind: str,
    weight: float,
    num_generations: int,
    scale_rewards: str,
) -> list[list[float]]:
    """Return an advantage for each call of R rollouts; 0 for those without a reward.

    Args:
        advantages: Of the rollouts, in groups of `num_generations`.
        call_rewards: Of each rollout, those of the policy's calls in their order.
        kind: "by_turn" or "return_to_go".
        weight: Of rewards of calls beside those of rollouts.
        scale_rewards: "group", "batch" or "none", as of `compute_advantages`.
    """
    rewards: list[float] = advantages.rewards_R.tolist()
    scored: list[bool] = advantages.scored_R.tolist()
    own: list[float] = advantages.advantages_R.tolist()
    returns = [
        [reward + weight * sum(calls[k:]) for k in range(len(calls))]
        for reward, calls in zip(rewards, call_rewards, strict=True)
    ]
    whole = [made[0] if made else reward for made, reward in zip(returns, rewards, strict=True)]
    of_batch = _deviation([made for made, is_scored in zip(returns, scored, strict=True) if is_scored])
    credits: list[list[float]] = [[0.0] * len(calls) for calls in call_rewards]
    for start in range(0, len(rewards), num_generations):
        group = [i for i in range(start, start + num_generations) if scored[i]]
        of_group = _deviation([returns[i] for i in group])
        scale = {"group": of_group + EPSILON, "batch": of_batch + EPSILON}.get(scale_rewards, 1.0)
        for i in group:
            for k in range(len(call_rewards[i])):
                others = [j for j in group if j != i and len(call_rewards[j]) > k]
                if kind == "by_turn":
                    values = [call_rewards[j][k] for j in (i, *others)]
                    spread = 1.0 if scale_rewards == "none" else _deviation([[value] for value in values]) + EPSILON
                    credits[i][k] = own[i] + weight * _center(values, fmean(values)) / spread
                elif len(group) > 1:
                    compared = [returns[j][k] for j in others] or [whole[j] for j in group if j != i]
                    credits[i][k] = _center([returns[i][k], *compared], fmean(compared)) / scale
    return credits


def average_credits(advantages: Advantages, credits_R: Sequence[Sequence[float]], num_generations: int) -> Advantages:
    """Return advantages with the mean of a rollout's calls; a group is constant where those of all its calls are 0."""
    taught = [any(of_calls) for of_calls in credits_R]
    is_constant = [
        not any(taught[start : start + num_generations]) for start in range(0, len(taught), num_generations)
    ]
    return replace(
        advantages,
        advantages_R=advantages.advantages_R.new_tensor([fmean(of_calls or [0.0]) for of_calls in credits_R]),
        zero_variance_R=torch.tensor(is_constant, device=advantages.zero_variance_R.device).repeat_interleave(
            num_generations
        ),
    )


def _center(values: Sequence[float], mean: float) -> float:
    """Return the first value less a mean of them; 0 where all are one number, up to the rounding of sums."""
    is_one = max(values) - min(values) <= ROUNDING * max(map(abs, values))
    return 0.0 if is_one else values[0] - mean


def _deviation(returns: Sequence[Sequence[float]]) -> float:
    """Return the sample deviation of the rollouts' returns from the means over calls of one number."""
    columns: dict[int, list[float]] = defaultdict(list)
    for of_calls in returns:
        for k, value in enumerate(of_calls):
            columns[k].append(value)
    means = {k: fmean(column) for k, column in columns.items()}
    squares = [fmean(_center([v, *columns[k]], means[k]) ** 2 for k, v in enumerate(made)) for made in returns if made]
    return math.sqrt(sum(squares) / (len(squares) - 1)) if len(squares) > 1 else 0.0
