"""Groups that a training step takes: the bound on staleness, and the order within it."""

import random

import pytest

from polar_trl.rollout.staleness import GroupState, choose_groups


def state(first_policy_version: int | None, finished_s: float | None = None) -> GroupState:
    return GroupState(first_policy_version=first_policy_version, finished_s=finished_s)


def test_those_that_finished_first_come_first() -> None:
    groups = [state(0), state(0, 9.0), state(0, 3.0), state(0, 5.0)]
    assert choose_groups(groups, 2, version=0, max_policy_lag=1) == [2, 3]


def test_too_few_have_finished() -> None:
    assert choose_groups([state(0, 1.0), state(0)], 2, version=0, max_policy_lag=1) is None


def test_a_group_at_its_limit_is_waited_for() -> None:
    assert choose_groups([state(0), state(0, 1.0)], 1, version=0, max_policy_lag=1) == [1]
    assert choose_groups([state(0), state(1, 1.0)], 1, version=1, max_policy_lag=1) is None
    assert choose_groups([state(0, 9.0), state(1, 1.0)], 1, version=1, max_policy_lag=1) == [0]


def test_without_lag_everything_is_waited_for() -> None:
    assert choose_groups([state(4, 1.0), state(4)], 2, version=4, max_policy_lag=0) is None
    assert choose_groups([state(4, 2.0), state(4, 1.0)], 2, version=4, max_policy_lag=0) == [0, 1]


def test_older_groups_come_first_before_too_many_of_them_are_at_their_limit() -> None:
    # at lag 2: were the two newer ones taken now, all four of the older would be due at the next step, which takes two
    older, newer = [state(0, 5.0), state(0, 6.0), state(0, 7.0), state(0)], [state(1, 1.0), state(1, 2.0)]
    assert choose_groups(older + newer, 2, version=1, max_policy_lag=2) == [0, 1]
    assert choose_groups([state(0)] * 3 + [state(0, 5.0)] + newer, 2, version=1, max_policy_lag=2) is None


@pytest.mark.parametrize("max_policy_lag", [0, 1, 2, 3])
@pytest.mark.parametrize("num_groups", [1, 3])
def test_no_token_grows_older_than_the_lag_and_no_step_finds_too_many_due(
    max_policy_lag: int, num_groups: int
) -> None:
    """Groups that begin and finish at random, with as many open as the lag allows."""
    generator = random.Random(7)
    oldest: list[int | None] = []
    finished: list[float | None] = []
    for version in range(200):
        while len(oldest) < num_groups * (1 + max_policy_lag):
            oldest.append(None)
            finished.append(None)
        clock = 0.0
        while True:
            groups = [state(version_, end) for version_, end in zip(oldest, finished, strict=True)]
            chosen = choose_groups(groups, num_groups, version=version, max_policy_lag=max_policy_lag)
            if chosen is not None:
                break
            waiting = [place for place, end in enumerate(finished) if end is None]
            assert waiting, "every group has finished, and still nothing is chosen"
            place = generator.choice(waiting)
            clock += 1.0
            if oldest[place] is None:
                oldest[place] = version
            else:
                finished[place] = version * 1000.0 + clock
        assert len(chosen) == num_groups
        for place in chosen:
            begun = oldest[place]
            assert begun is not None
            assert version - begun <= max_policy_lag
        oldest = [begun for place, begun in enumerate(oldest) if place not in chosen]
        finished = [end for place, end in enumerate(finished) if place not in chosen]


def test_never_more_than_asked_for() -> None:
    # more groups are due than the bound allows; the oldest rule must not hand out a batch that is too large
    groups = [GroupState(first_policy_version=0, finished_s=float(place)) for place in range(5)]
    assert choose_groups(groups, 2, version=1, max_policy_lag=1) == [0, 1]
