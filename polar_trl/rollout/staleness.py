"""Choose which open groups a training step takes: earliest deadline first, under a bound on staleness. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupState:
    """One open group."""

    first_policy_version: int | None
    """Policy version of its first token; None where nothing was sampled yet."""
    finished_s: float | None
    """When its last session ended, on any one clock; None while one has not."""


def choose_groups(
    groups: Sequence[GroupState], num_groups: int, *, version: int, max_policy_lag: int
) -> list[int] | None:
    """Choose `num_groups` groups to train at policy `version`; None where one of them has not finished.

    Returns:
        Places in `groups`, in order.

    A group begun at version b can be taken at step b + max_policy_lag at the latest. Each step takes `num_groups`, so
    of the groups that are due within j further steps, no more than j * num_groups may be left open: the others come
    first. Then those come that finished first. This is the feasibility test of earliest-deadline-first scheduling with
    `num_groups` jobs of one length at a time (Liu and Layland, 1973). It can hold for at most
    (1 + max_policy_lag) * num_groups open groups.
    """
    finished = sorted((group.finished_s, place) for place, group in enumerate(groups) if group.finished_s is not None)
    chosen: list[int] = []

    def is_due(place: int, num_steps: int) -> bool:
        begun = groups[place].first_policy_version
        return begun is not None and begun + max_policy_lag <= version + num_steps

    for num_steps in range(max_policy_lag + 1):
        num_due = sum(is_due(place, num_steps) for place in range(len(groups)))
        num_needed = num_due - num_steps * num_groups - len(chosen)
        ready = [place for _, place in finished if place not in chosen and is_due(place, num_steps)]
        if num_needed > len(ready):
            return None
        chosen += ready[: max(0, num_needed)]
    ready = [place for _, place in finished if place not in chosen]
    num_left = num_groups - len(chosen)
    if len(ready) < num_left:
        return None
    return sorted((chosen + ready[: max(0, num_left)])[:num_groups])
