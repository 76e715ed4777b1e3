"""Replace groups whose rollouts all have one reward, which train nothing, by groups of other tasks.

Dynamic sampling of DAPO (arXiv:2503.14476), for a bounded number of rounds.
"""

from collections.abc import Callable

from torch import Tensor

from polar_trl.grpo.credit.advantage import Advantages, replace_groups
from polar_trl.grpo.rollouts.source import RolloutSource
from polar_trl.rollout.session_run import RolloutResult


def resample_constant_groups(
    results: list[RolloutResult],
    rewards_RF: Tensor,
    advantages: Advantages,
    *,
    source: RolloutSource,
    num_rounds: int,
    compute_rewards: Callable[[list[RolloutResult]], Tensor],
    compute_advantages: Callable[[Tensor], Advantages],
) -> tuple[list[RolloutResult], Tensor, Advantages, int]:
    """Return the batch with constant groups replaced, and how many groups were rolled out (a collective).

    As many new groups are rolled out as are constant, and a few more where the ranks could not share their rollouts
    evenly. Rewards are replaced on every rank alike, rollouts on the ranks that have them.

    Args:
        results: This rank's rollouts; those of a group are adjacent, and may go on on the next rank.
        rewards_RF: Of all ranks' R rollouts.
    """
    size, ranks, num_rolled_out = source.num_generations["train"], source.runner.ranks, 0
    for round_number in range(num_rounds):
        constant_N = advantages.zero_variance_R[::size]
        num_new = int(constant_N.sum())
        if num_new == 0:
            break
        while num_new * size % ranks.num_ranks:
            num_new += 1
        num_rolled_out += num_new
        others = source.run_others(num_new, round_number)
        others_RF = compute_rewards(others)
        usable_N = ~compute_advantages(others_RF).zero_variance_R[::size]
        rewards_RF, results = rewards_RF.clone(), list(results)
        to_each: list[dict[int, RolloutResult]] = [{} for _ in range(ranks.num_ranks)]
        for old_group, new_group in replace_groups(constant_N, usable_N):
            for index in range(size):
                old, new = old_group * size + index, new_group * size + index
                rewards_RF[old] = others_RF[new]
                if new // len(others) == ranks.rank:
                    to_each[old // len(results)][old % len(results)] = others[new % len(others)]
        for replaced in ranks.exchange(to_each):
            for place, result in replaced.items():
                results[place] = result
        advantages = compute_advantages(rewards_RF)
    return results, rewards_RF, advantages, num_rolled_out
