"""Take a part of a trajectory, between calls and never inside one: what fits a number of tokens, or what is chosen.

A part has all ids up to the end of its last call, and only its own calls are trainable: every sampled token keeps
exactly the context that it was sampled in.
"""

from collections.abc import Collection
from dataclasses import replace

from polar_trl.types import Rollout, Trajectory


def truncate_trajectory(trajectory: Trajectory, rollout: Rollout, max_tokens: int) -> Trajectory | None:
    """Return the trajectory up to the last call that ends within `max_tokens`; None if not even the first does."""
    if len(trajectory.token_ids) <= max_tokens:
        return trajectory
    ends = (
        len(rollout.calls[index].prompt_ids) + len(rollout.calls[index].completion.token_ids)
        for index in trajectory.call_indices
    )
    num_calls = sum(end <= max_tokens for end in ends)
    return take_calls(trajectory, rollout, 0, num_calls) if num_calls else None


def keep_calls(trajectory: Trajectory, rollout: Rollout, kept: Collection[int]) -> Trajectory | None:
    """Return the trajectory in which only these calls are trainable, up to the last of them; None if it has none."""
    positions = [place for place, index in enumerate(trajectory.call_indices) if index in kept]
    if not positions:
        return None
    part = take_calls(trajectory, rollout, positions[0], positions[-1] + 1)
    trainable, logprobs, versions = list(part.trainable), list(part.logprobs), list(part.policy_versions)
    for index in part.call_indices:
        if index not in kept:
            start = len(rollout.calls[index].prompt_ids)
            span = slice(start, start + len(rollout.calls[index].completion.token_ids))
            count = span.stop - span.start
            trainable[span], logprobs[span], versions[span] = [False] * count, [0.0] * count, [-1] * count
    return replace(
        part,
        call_indices=tuple(index for index in part.call_indices if index in kept),
        trainable=tuple(trainable),
        logprobs=tuple(logprobs),
        policy_versions=tuple(versions),
    )


def take_calls(trajectory: Trajectory, rollout: Rollout, first: int, end: int) -> Trajectory:
    """Return the part that trains the calls at positions `first` to `end` (excluded) of `call_indices`.

    The spans of two calls may touch, so the rollout's calls say where each begins.
    """
    call_indices = trajectory.call_indices[first:end]
    last = rollout.calls[call_indices[-1]]
    start_T = len(rollout.calls[call_indices[0]].prompt_ids)
    end_T = len(last.prompt_ids) + len(last.completion.token_ids)
    return Trajectory(
        rollout_id=trajectory.rollout_id,
        call_indices=call_indices,
        token_ids=trajectory.token_ids[:end_T],
        trainable=(False,) * start_T + trajectory.trainable[start_T:end_T],
        logprobs=(0.0,) * start_T + trajectory.logprobs[start_T:end_T],
        policy_versions=(-1,) * start_T + trajectory.policy_versions[start_T:end_T],
    )
