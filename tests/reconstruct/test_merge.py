"""Calls become rows by prefix merging: exact ids and masks in named cases, and a slow restatement at random."""

from dataclasses import replace

from hypothesis import given, settings
from reconstruct_sessions import build_rollout, rollouts

from polar_trl.reconstruct import BUILDERS, build_per_request, build_prefix_merged, check_laws, digest
from polar_trl.types import Call, Rollout, share_ids


def show(rollout: Rollout, builder: str = "prefix_merging") -> list[tuple[tuple[int, ...], str, tuple[int, ...]]]:
    """Ids, mask and call indices of each trajectory, the laws checked."""
    reconstruction = BUILDERS[builder](rollout)
    check_laws(rollout, reconstruction)
    return [
        (row.token_ids, "".join(".*"[flag] for flag in row.trainable), row.call_indices)
        for row in reconstruction.trajectories
    ]


def test_three_turns_are_one_trajectory() -> None:
    rollout = build_rollout(([1, 2], [10, 11]), ([1, 2, 10, 11, 3], [12]), ([1, 2, 10, 11, 3, 12, 4, 5], [13, 14]))
    (row,) = build_prefix_merged(rollout).trajectories
    assert row.token_ids == (1, 2, 10, 11, 3, 12, 4, 5, 13, 14)
    assert row.trainable == (False, False, True, True, False, True, False, False, True, True)
    assert row.call_indices == (0, 1, 2)
    first, second, third = (call.completion.logprobs for call in rollout.calls)
    assert row.logprobs == (0.0, 0.0, *first, 0.0, *second, 0.0, 0.0, *third)
    assert row.policy_versions == (-1, -1, 0, 0, -1, 0, -1, -1, 0, 0)
    assert build_prefix_merged(rollout).counters == {"forks": 0, "superseded_calls": 0, "auxiliary_calls": 0}


def test_a_rewritten_history_forks_and_loses_nothing() -> None:
    # The template dropped the reasoning token 10 from the history once a new user turn began.
    rollout = build_rollout(
        ([1], [10, 11]), ([1, 10, 11, 2], [12]), ([1, 11, 2, 12, 3], [13]), ([1, 11, 2, 12, 3, 13, 4], [14])
    )
    assert show(rollout) == [
        ((1, 10, 11, 2, 12), ".**.*", (0, 1)),
        ((1, 11, 2, 12, 3, 13, 4, 14), ".....*.*", (2, 3)),
    ]
    assert build_prefix_merged(rollout).counters["forks"] == 1


def test_a_second_child_has_the_shared_part_untrained() -> None:
    rollout = build_rollout(([1], [10]), ([1, 10, 2], [11]), ([1, 10, 3], [12]), ([1, 10, 2, 11, 4], [13]))
    assert show(rollout) == [((1, 10, 2, 11, 4, 13), ".*.*.*", (0, 1, 3)), ((1, 10, 3, 12), "...*", (2,))]


def test_a_sub_agent_between_the_turns_of_its_parent() -> None:
    rollout = build_rollout(([1], [10]), ([7], [20]), ([1, 10, 2], [11]), ([7, 20, 8], [21]))
    assert show(rollout) == [((1, 10, 2, 11), ".*.*", (0, 2)), ((7, 20, 8, 21), ".*.*", (1, 3))]


def test_the_longest_prefix_wins() -> None:
    # Both [1, 10] (second conversation, begun with the same ids) and [1, 10, 2, 11] are prefixes of the last prompt.
    rollout = build_rollout(([1, 10, 2], [11]), ([1], [10]), ([1, 10, 2, 11, 3], [12]))
    assert show(rollout) == [((1, 10, 2, 11, 3, 12), "...*.*", (0, 2)), ((1, 10), ".*", (1,))]


def test_a_prompt_that_adds_nothing_is_no_strict_continuation() -> None:
    rollout = build_rollout(([1], [10]), ([1, 10], [11]))
    assert show(rollout) == [((1, 10), ".*", (0,)), ((1, 10, 11), "..*", (1,))]


def test_of_a_retry_the_continued_copy_is_kept() -> None:
    rollout = build_rollout(([1], [10]), ([1], [20]), ([1, 10, 2], [11]))
    assert show(rollout) == [((1, 10, 2, 11), ".*.*", (0, 2))]
    reconstruction = build_prefix_merged(rollout)
    assert reconstruction.dropped == {"superseded": 1}
    assert reconstruction.counters["superseded_calls"] == 1


def test_of_a_retry_that_nobody_continued_the_last_is_kept() -> None:
    assert show(build_rollout(([1], [10]), ([1], [20]), ([1], [30, 31]))) == [((1, 30, 31), ".**", (2,))]


def test_of_a_retry_that_was_continued_twice_both_are_kept() -> None:
    rollout = build_rollout(([1], [10]), ([1], [20]), ([1], [30]), ([1, 10, 2], [11]), ([1, 20, 2], [21]))
    assert show(rollout) == [((1, 10, 2, 11), ".*.*", (0, 3)), ((1, 20, 2, 21), ".*.*", (1, 4))]
    assert build_prefix_merged(rollout).dropped == {"superseded": 1}


def test_of_equal_copies_the_later_one_is_continued() -> None:
    rollout = build_rollout(([1], [10]), ([1], [10]), ([1, 10, 2], [11]))
    assert show(rollout) == [((1, 10, 2, 11), ".*.*", (1, 2))]


def test_a_call_without_samples_shows_which_copy_went_on_and_trains_nothing() -> None:
    rollout = build_rollout(([1], [10]), ([1], [20]), ([1, 10, 2], []))
    assert show(rollout) == [((1, 10), ".*", (0,))]


def test_auxiliary_calls_are_dropped_and_counted() -> None:
    rollout = build_rollout(
        ([9], [90, 91], "auxiliary"), ([1], [10]), ([1, 10, 9], [92], "auxiliary"), ([1, 10, 2], [11])
    )
    assert show(rollout) == [((1, 10, 2, 11), ".*.*", (1, 3))]
    reconstruction = build_prefix_merged(rollout)
    assert reconstruction.dropped == {"auxiliary": 3}
    assert reconstruction.counters == {"forks": 0, "superseded_calls": 0, "auxiliary_calls": 2}


def test_per_request_has_one_trajectory_per_trained_call() -> None:
    rollout = build_rollout(
        ([1], [20]), ([1], [10]), ([1, 10, 2], [11]), ([9], [90], "auxiliary"), ([1, 10, 2, 11, 3], [])
    )
    assert show(rollout, "per_request") == [((1, 10), ".*", (1,)), ((1, 10, 2, 11), "...*", (2,))]
    assert build_per_request(rollout).dropped == {"superseded": 1, "auxiliary": 1}


def test_no_calls_give_no_trajectories() -> None:
    assert show(build_rollout()) == []
    assert build_prefix_merged(build_rollout()).counters["forks"] == 0


def restate_chains(rollout: Rollout) -> list[tuple[int, ...]]:
    """The rule again, from its words and without any care for speed."""

    def get_end(call: Call) -> tuple[int, ...]:
        return call.prompt_ids + call.completion.token_ids

    def find_parent(call: Call, among: list[Call]) -> Call | None:
        earlier = [c for c in among if c.index < call.index and call.prompt_ids[: len(get_end(c))] == get_end(c)]
        return max(earlier, key=lambda c: (len(get_end(c)), c.index), default=None)

    policy = [call for call in rollout.calls if call.purpose == "policy" and call.completion.token_ids]
    kept = []
    for call in policy:
        copies = [other for other in policy if other.prompt_ids == call.prompt_ids]
        continued = [copy for copy in copies if any(find_parent(c, copies) is copy for c in rollout.calls)]
        if call in (continued or copies[-1:]):
            kept.append(call)
    chains: list[list[Call]] = []
    for call in kept:
        fitting = [
            chain for chain in chains if find_parent(call, chain[-1:]) and call.prompt_ids != get_end(chain[-1])
        ]
        if fitting:
            max(fitting, key=lambda chain: (len(get_end(chain[-1])), chain[-1].index)).append(call)
        else:
            chains.append([call])
    return [tuple(call.index for call in chain) for chain in chains]


def share(rollout: Rollout) -> Rollout:
    """The same rollout as sessions hold it: a prompt that goes on from another one shares its ids."""
    calls: list[Call] = []
    for call in rollout.calls:
        before = [other.prompt_ids for other in calls if call.goes_on_from(other)]
        calls.append(replace(call, prompt_ids=share_ids(call.prompt_ids, before[-1] if before else ())))
    return replace(rollout, calls=tuple(calls))


@settings(max_examples=400, deadline=None)
@given(rollouts())
def test_any_session_obeys_the_laws_and_the_rule(rollout: Rollout) -> None:
    merged, per_request = build_prefix_merged(rollout), build_per_request(rollout)
    check_laws(rollout, merged)
    check_laws(rollout, per_request)
    assert [row.call_indices for row in merged.trajectories] == restate_chains(rollout)
    trained = sorted(index for row in merged.trajectories for index in row.call_indices)
    assert [row.call_indices for row in per_request.trajectories] == [(index,) for index in trained]
    assert merged.dropped == per_request.dropped
    shared = share(rollout)
    assert shared == rollout
    for builder, rows in ((build_prefix_merged, merged), (build_per_request, per_request)):
        assert builder(shared) == rows
        assert digest(builder(shared).trajectories) == digest(rows.trajectories)
        check_laws(shared, rows)
        check_laws(rollout, builder(shared))
