"""Test scripts/table/numbers.py: pass@1 over tasks and seeds, and gains."""

import math
import random

import pytest
from table.numbers import estimate_gain_over_seeds, estimate_over_seeds, t_quantile

from polar_trl.grade.pass_at_k import TaskCount, estimate_pass_rate, wilson_interval


def counts(*passed: int, graded: int = 1) -> dict[str, TaskCount]:
    return {f"t{i}": TaskCount(num_graded=graded, num_passed=number) for i, number in enumerate(passed)}


def test_one_seed_has_the_interval_of_an_evaluation() -> None:
    found = estimate_over_seeds([counts(1, 0, 1, 1)])
    assert found is not None and found.rate == estimate_pass_rate(list(counts(1, 0, 1, 1).values()), 1)
    assert estimate_over_seeds([]) is None and estimate_over_seeds([{}, counts(1)]) is None


@pytest.mark.parametrize(
    ("freedom", "value"), [(1, 12.7062), (2, 4.30265), (10, 2.22814), (30, 2.04227), (200, 1.97190)]
)
def test_quantiles_of_student(freedom: float, value: float) -> None:
    assert t_quantile(0.975, freedom) == pytest.approx(value, abs=1e-4)


def test_intervals_over_seeds_of_known_answer() -> None:
    # seeds that agree: 11 tasks, 10 degrees of freedom
    found = estimate_over_seeds([counts(*[1] * 4, *[0] * 7)] * 3)
    assert found is not None
    assert (found.rate.low, found.rate.high) == pytest.approx(wilson_interval(4 / 11, 11 * (1.959964 / 2.228139) ** 2))
    assert found.share_of_tasks == 1.0
    # seeds of which one solves all and one nothing: V = 1 / 4, one draw with one degree of freedom
    found = estimate_over_seeds([counts(1, 1, 1), counts(0, 0, 0)])
    assert found is not None and found.by_seed == [1.0, 0.0] and found.share_of_tasks == 0.0
    assert (found.rate.low, found.rate.high) == pytest.approx(wilson_interval(0.5, (1.959964 / 12.706205) ** 2))
    assert (found.rate.low, found.rate.high) == pytest.approx((0.0016, 0.9984), abs=1e-4)
    # all alike: no surer than one sample of each task
    found = estimate_over_seeds([counts(4, 4, 4, graded=4)] * 3)
    assert found is not None and (found.rate.low, found.rate.high) == wilson_interval(1.0, 3)
    # also where the mean of equal rates is rounded
    found = estimate_over_seeds([counts(*[1] * 8, graded=3)] * 3)
    assert found is not None and (found.rate.low, found.rate.high) == pytest.approx(wilson_interval(1 / 3, 8))
    # a task that one seed has no grade for is in none
    found = estimate_over_seeds([counts(1, 0), counts(1)])
    assert found is not None and (found.by_task, found.rate.num_tasks) == ({"t0": 1.0}, 1)


@pytest.mark.parametrize("spread", [0.0, 0.5, 1.5])
def test_the_interval_holds_the_true_rate(spread: float) -> None:
    """Tasks and seeds drawn anew for each table: log-odds of a session are normal in both."""
    rng, held, num_tables = random.Random(7), 0, 200
    for _ in range(num_tables):
        tasks = [rng.gauss(0, 1) for _ in range(24)]
        seeds = []
        for of_seed in [rng.gauss(0, spread) for _ in range(3)]:
            seeds.append(counts(*(int(rng.random() < 1 / (1 + math.exp(-x - of_seed))) for x in tasks)))
        found = estimate_over_seeds(seeds)
        assert found is not None and found.rate.low is not None and found.rate.high is not None
        held += found.rate.low <= 0.5 <= found.rate.high  # by symmetry
    assert held >= 0.9 * num_tables


def test_a_gain_over_seeds_falls_with_what_tasks_share() -> None:
    hard, seeds = counts(1, 1, 0, 0, 0, 0), [counts(1, 1, 1, 0, 0, 0), counts(1, 1, 0, 1, 0, 0)]
    alike, apart = (estimate_gain_over_seeds([hard], after) for after in (seeds, [counts(0, 0, 1, 1, 1, 0)] * 2))
    assert alike is not None and apart is not None
    assert alike.rate == apart.rate == pytest.approx(1 / 6)
    assert alike.low is not None and apart.low is not None and alike.low > apart.low
    assert estimate_gain_over_seeds([], seeds) is None
