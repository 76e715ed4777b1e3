"""Cutting keeps each sampled token's context and trains it once."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reconstruct_sessions import build_rollout, rollouts

from polar_trl.reconstruct import build_per_request, build_prefix_merged, check_laws, cut_trajectory, digest
from polar_trl.types import Rollout


def build_conversation(num_turns: int) -> Rollout:
    history: tuple[int, ...] = (0,)
    turns = []
    for turn in range(num_turns):
        sampled = (100 + turn, 200 + turn)
        turns.append((history, sampled))
        history = (*history, *sampled, turn)
    return build_rollout(*turns)


@pytest.mark.parametrize("num_parts", [1, 2, 7])
def test_seven_turns_in_parts(num_parts: int) -> None:
    rollout = build_conversation(7)
    merged = build_prefix_merged(rollout)
    (whole,) = merged.trajectories
    parts = cut_trajectory(whole, rollout, num_parts)
    check_laws(rollout, replace(merged, trajectories=parts))
    expected = {
        1: [(0, 1, 2, 3, 4, 5, 6)],
        2: [(0, 1, 2), (3, 4, 5, 6)],
        7: [(0,), (1,), (2,), (3,), (4,), (5,), (6,)],
    }
    assert [part.call_indices for part in parts] == expected[num_parts]
    if num_parts == 1:
        assert parts == (whole,)
    for part in parts:
        assert part.token_ids == whole.token_ids[: len(part.token_ids)]


def test_two_turns_in_two_exactly() -> None:
    rollout = build_conversation(2)
    (whole,) = build_prefix_merged(rollout).trajectories
    first, second = cut_trajectory(whole, rollout, [1])
    assert first.token_ids == (0, 100, 200)
    assert first.trainable == (False, True, True)
    assert second.token_ids == (0, 100, 200, 0, 101, 201)
    assert second.trainable == (False, False, False, False, True, True)
    assert second.logprobs == (0.0, 0.0, 0.0, 0.0, *rollout.calls[1].completion.logprobs)
    assert second.policy_versions == (-1, -1, -1, -1, 0, 0)


def test_spans_that_touch_are_told_apart() -> None:
    # No id between the two answers: the mask is one run, and only the calls say where to cut.
    rollout = build_rollout(([1], [10]), ([1, 10], [11, 12]))
    first, second = build_per_request(rollout).trajectories
    touching = replace(
        second,
        call_indices=(0, 1),
        trainable=(False, True, True, True),
        logprobs=first.logprobs[:2] + second.logprobs[2:],
        policy_versions=(-1, 0, 0, 0),
    )
    assert cut_trajectory(touching, rollout, 2) == (first, second)


@pytest.mark.parametrize("parts", [0, -1, [0], [3], [2, 1], [1, 1]])
def test_a_cut_that_cannot_be_is_refused(parts: int | list[int]) -> None:
    rollout = build_conversation(3)
    (whole,) = build_prefix_merged(rollout).trajectories
    with pytest.raises(ValueError, match="cannot cut"):
        cut_trajectory(whole, rollout, parts)


@settings(max_examples=200, deadline=None)
@given(rollouts(), st.integers(1, 7))
def test_any_cut_obeys_the_laws(rollout: Rollout, num_parts: int) -> None:
    merged = build_prefix_merged(rollout)
    parts = tuple(part for row in merged.trajectories for part in cut_trajectory(row, rollout, num_parts))
    check_laws(rollout, replace(merged, trajectories=parts))


@settings(max_examples=200, deadline=None)
@given(rollouts())
def test_cut_between_all_calls_it_is_per_request(rollout: Rollout) -> None:
    rows = build_prefix_merged(rollout).trajectories
    parts = [part for row in rows for part in cut_trajectory(row, rollout, len(row.call_indices))]
    assert digest(parts) == digest(build_per_request(rollout).trajectories)
    assert sorted(parts, key=lambda part: part.call_indices) == list(build_per_request(rollout).trajectories)
