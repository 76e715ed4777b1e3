"""Truncation keeps each sampled token's context and trains it once."""

from dataclasses import replace

from hypothesis import given, settings
from reconstruct_sessions import build_rollout, rollouts

from polar_trl.reconstruct import build_per_request, build_prefix_merged, digest
from polar_trl.reconstruct.truncate import take_calls
from polar_trl.types import Rollout


def test_two_turns_in_two_exactly() -> None:
    rollout = build_rollout(([0], [100, 200]), ([0, 100, 200, 0], [101, 201]))
    (whole,) = build_prefix_merged(rollout).trajectories
    first, second = take_calls(whole, rollout, 0, 1), take_calls(whole, rollout, 1, 2)
    assert first.token_ids == (0, 100, 200)
    assert first.trainable == (False, True, True)
    assert second.token_ids == (0, 100, 200, 0, 101, 201)
    assert second.trainable == (False, False, False, False, True, True)
    assert second.logprobs == (0.0, 0.0, 0.0, 0.0, *rollout.calls[1].completion.logprobs)
    assert second.policy_versions == (-1, -1, -1, -1, 0, 0)


def test_spans_that_touch_are_told_apart() -> None:
    # No id between the two answers: the mask is one run, and only the calls say where one ends.
    rollout = build_rollout(([1], [10]), ([1, 10], [11, 12]))
    first, second = build_per_request(rollout).trajectories
    touching = replace(
        second,
        call_indices=(0, 1),
        trainable=(False, True, True, True),
        logprobs=first.logprobs[:2] + second.logprobs[2:],
        policy_versions=(-1, 0, 0, 0),
    )
    assert take_calls(touching, rollout, 0, 1) == first
    assert take_calls(touching, rollout, 1, 2) == second


@settings(max_examples=200, deadline=None)
@given(rollouts())
def test_taken_call_by_call_it_is_per_request(rollout: Rollout) -> None:
    rows = build_prefix_merged(rollout).trajectories
    parts = [take_calls(row, rollout, n, n + 1) for row in rows for n in range(len(row.call_indices))]
    assert digest(parts) == digest(build_per_request(rollout).trajectories)
    assert sorted(parts, key=lambda part: part.call_indices) == list(build_per_request(rollout).trajectories)
