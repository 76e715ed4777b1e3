"""One trajectory -> several that together train the same tokens once. Cuts between calls, never inside one.

A part has all ids up to the end of its last call, and only its own calls are trainable: every sampled token keeps
exactly the context that it was sampled in.
"""

from collections.abc import Sequence
from itertools import pairwise

from polar_trl.types import Rollout, Trajectory


def cut_trajectory(trajectory: Trajectory, rollout: Rollout, parts: int | Sequence[int]) -> tuple[Trajectory, ...]:
    """Cut at call boundaries, which come from the rollout's calls since the spans of two calls may touch.

    Args:
        parts: How many parts, as equal in calls as can be and at most one per call; or the positions in
            `trajectory.call_indices` at which a new part begins, rising.

    Raises:
        ValueError: No parts, or a position that is not between two calls.
    """
    num_calls = len(trajectory.call_indices)
    if isinstance(parts, int):
        if parts < 1:
            raise ValueError(f"cannot cut a trajectory into {parts} parts; ask for 1 or more")
        num_parts = min(parts, num_calls)
        starts = [k * num_calls // num_parts for k in range(1, num_parts)]
    else:
        starts = list(parts)
    edges = [0, *starts, num_calls]
    if any(left >= right for left, right in pairwise(edges)):
        raise ValueError(
            f"cannot cut a trajectory of {num_calls} calls at {starts}; positions rise within 1..{num_calls - 1}"
        )
    return tuple(_build_part(trajectory, rollout, first, end) for first, end in pairwise(edges))


def clip_trajectory(trajectory: Trajectory, rollout: Rollout, max_tokens: int) -> Trajectory | None:
    """The trajectory up to the last call that ends within `max_tokens`; None if not even the first does."""
    if len(trajectory.token_ids) <= max_tokens:
        return trajectory
    ends = (
        len(rollout.calls[index].prompt_ids) + len(rollout.calls[index].completion.token_ids)
        for index in trajectory.call_indices
    )
    num_calls = sum(end <= max_tokens for end in ends)
    return _build_part(trajectory, rollout, 0, num_calls) if num_calls else None


def _build_part(trajectory: Trajectory, rollout: Rollout, first: int, end: int) -> Trajectory:
    """The part that trains the calls at positions `first` to `end` (excluded)."""
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
