"""Replace groups whose rollouts all have one reward, which train nothing, by groups of other tasks.

Dynamic sampling of DAPO (arXiv:2503.14476), for a bounded number of rounds.
"""

from collections.abc import Callable

from torch import Tensor

from polar_trl.grpo.advantage import Advantages, replace_groups
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
    """Return the batch with constant groups replaced, and how many groups of all ranks were rolled out (a collective).

    Every rank rolls out as many new groups as the rank with the most constant ones needs, since rewards are gathered.
    Rewards are replaced on every rank alike, rollouts on the rank that has them.

    Args:
        results: Rollouts of this rank, groups of G adjacent.
        rewards_RF: Of all ranks' R rollouts.
    """
    size, num_rolled_out = source.num_generations["train"], 0
    for round_number in range(num_rounds):
        constant_WN = source.by_rank(advantages.zero_variance_R[::size])
        num_new = int(constant_WN.sum(dim=1).max())
        if num_new == 0:
            break
        num_rolled_out += num_new * source.num_ranks
        others = source.run_others(num_new, round_number)
        others_RF = compute_rewards(others)
        usable_WN = source.by_rank(~compute_advantages(others_RF).zero_variance_R[::size])
        rewards_RF, results = rewards_RF.clone(), list(results)
        for rank, pairs in enumerate(replace_groups(constant_WN, usable_WN)):
            for old, new in pairs:
                first, new_first = (rank * constant_WN.shape[1] + old) * size, (rank * num_new + new) * size
                rewards_RF[first : first + size] = others_RF[new_first : new_first + size]
                if rank == source.rank:
                    results[old * size : (old + 1) * size] = others[new * size : (new + 1) * size]
        advantages = compute_advantages(rewards_RF)
    return results, rewards_RF, advantages, num_rolled_out
