"""Truncation keeps each sampled token's context and trains it once."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from reconstruct_sessions import build_rollout, rollouts

from polar_trl.reconstruct import build_per_request, build_prefix_merged, digest
from polar_trl.reconstruct.truncate import keep_calls, take_calls
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


def test_one_turn_of_two_is_kept() -> None:
    rollout = build_rollout(([0], [100, 200]), ([0, 100, 200, 0], [101, 201]))
    (whole,) = build_prefix_merged(rollout).trajectories
    assert keep_calls(whole, rollout, {0}) == take_calls(whole, rollout, 0, 1)
    assert keep_calls(whole, rollout, {1}) == take_calls(whole, rollout, 1, 2)
    assert keep_calls(whole, rollout, {0, 1}) == whole
    assert keep_calls(whole, rollout, {5}) is None


@settings(max_examples=200, deadline=None)
@given(rollouts(), st.sets(st.integers(0, 12)))
def test_what_is_kept_is_the_samples_of_those_calls_in_their_context(rollout: Rollout, kept: set[int]) -> None:
    for whole in build_prefix_merged(rollout).trajectories:
        part = keep_calls(whole, rollout, kept)
        alone = [take_calls(whole, rollout, n, n + 1) for n, index in enumerate(whole.call_indices) if index in kept]
        if part is None:
            assert alone == []
            continue
        assert part.call_indices == tuple(index for index in whole.call_indices if index in kept)
        assert tuple(part.token_ids) == tuple(whole.token_ids[: len(part.token_ids)]) == tuple(alone[-1].token_ids)
        for position in range(len(part.token_ids)):
            covering = [one for one in alone if position < len(one.token_ids) and one.trainable[position]]
            assert part.trainable[position] == bool(covering)
            assert part.logprobs[position] == (covering[0].logprobs[position] if covering else 0.0)
            assert part.policy_versions[position] == (covering[0].policy_versions[position] if covering else -1)
