"""pass@k and its interval: numbers worked out by hand, and how often the interval holds the truth."""

import random

import pytest

from polar_trl.errors import ConfigError
from polar_trl.grade.pass_at_k import TaskCount, estimate_gain, estimate_pass_rate, pass_at_k, wilson_interval


def counts(*pairs: tuple[int, int]) -> list[TaskCount]:
    return [TaskCount(num_graded=graded, num_passed=passed) for graded, passed in pairs]


@pytest.mark.parametrize(
    ("num_samples", "num_passed", "k", "expected"),
    [
        (5, 0, 1, 0.0),
        (5, 2, 1, 2 / 5),
        (5, 2, 2, 1 - 3 / 10),  # of 10 pairs, the 3 of the three that failed
        (4, 1, 2, 1 - 3 / 6),
        (4, 1, 4, 1.0),
        (4, 3, 2, 1.0),
        (200, 1, 100, 0.5),
    ],
)
def test_pass_at_k_by_hand(num_samples: int, num_passed: int, k: int, expected: float) -> None:
    assert pass_at_k(num_samples, num_passed, k) == pytest.approx(expected, abs=1e-15)


def test_pass_at_k_is_unbiased() -> None:
    """The mean over all outcomes of 6 samples that pass with chance 0.3 is the chance of k that one passes."""
    from math import comb

    for k in (1, 3, 6):
        mean = sum(comb(6, c) * 0.3**c * 0.7 ** (6 - c) * pass_at_k(6, c, k) for c in range(7))
        assert mean == pytest.approx(1 - 0.7**k, abs=1e-12)


@pytest.mark.parametrize(("num_samples", "num_passed", "k"), [(3, 1, 4), (3, 4, 1), (3, -1, 1), (3, 1, 0)])
def test_what_has_no_pass_at_k(num_samples: int, num_passed: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"no pass@{k} of 3 samples"):
        pass_at_k(num_samples, num_passed, k)


def test_wilson_by_hand() -> None:
    # z = 1.959964; centre (0.2 + z^2/20) / (1 + z^2/10), half width z sqrt(0.016 + z^2/400) / (1 + z^2/10)
    low, high = wilson_interval(0.2, 10)
    assert (low, high) == (pytest.approx(0.056682, abs=1e-6), pytest.approx(0.509838, abs=1e-6))
    assert wilson_interval(0.0, 10) == pytest.approx((0.0, 0.277533), abs=1e-6)
    assert wilson_interval(1.0, 10) == pytest.approx((0.722467, 1.0), abs=1e-6)


def test_one_sample_per_task_is_plain_wilson() -> None:
    found = estimate_pass_rate(counts(*[(1, 1)] * 2, *[(1, 0)] * 8), 1)
    assert (found.rate, found.num_tasks, found.num_left_out) == (pytest.approx(0.2), 10, 0)
    assert (found.low, found.high) == pytest.approx(wilson_interval(0.2, 10))


def test_the_variance_between_tasks_sets_the_size() -> None:
    # rates 0, 1/2, 1/2, 1: p = 1/2, v = 1/8, n_eff = (1/4) 4 / (1/8) = 8, and the cap is 4 x 2 = 8
    found = estimate_pass_rate(counts((2, 0), (2, 1), (2, 1), (2, 2)), 1)
    assert (found.low, found.high) == pytest.approx(wilson_interval(0.5, 8))
    # rates 0, 0, 1, 1: the second sample of a task told nothing new
    found = estimate_pass_rate(counts((2, 0), (2, 0), (2, 2), (2, 2)), 1)
    assert (found.low, found.high) == pytest.approx(wilson_interval(0.5, 4))
    # all 1/2: no variance between tasks, and no more than 2 x 6 independent samples
    found = estimate_pass_rate(counts((6, 3), (6, 3)), 1)
    assert (found.low, found.high) == pytest.approx(wilson_interval(0.5, 12))
    found = estimate_pass_rate(counts((6, 3), (6, 3)), 4)  # of any 4, one passed
    assert (found.rate, found.low) == (1.0, pytest.approx(wilson_interval(1.0, 2)[0]))


def test_tasks_with_too_few_samples_are_left_out() -> None:
    tasks = counts((4, 4), (4, 0), (1, 1), (0, 0))
    one, four = estimate_pass_rate(tasks, 1), estimate_pass_rate(tasks, 4)
    assert (one.rate, one.num_tasks, one.num_left_out) == (pytest.approx(2 / 3), 3, 1)
    assert (four.rate, four.num_tasks, four.num_left_out) == (0.5, 2, 2)


def test_nothing_graded_has_no_rate() -> None:
    found = estimate_pass_rate(counts((0, 0), (1, 1)), 2)
    assert (found.rate, found.low, found.high, found.num_tasks, found.num_left_out) == (None, None, None, 0, 2)
    assert estimate_pass_rate([], 1).rate is None
    with pytest.raises(ConfigError, match="k is 0"):
        estimate_pass_rate(counts((1, 1)), 0)


@pytest.mark.parametrize(
    ("num_tasks", "num_samples", "a", "b"), [(100, 1, 1.0, 2.0), (60, 4, 0.5, 1.0), (60, 4, 5, 5)]
)
def test_the_interval_holds_the_truth_as_often_as_it_says(
    num_tasks: int, num_samples: int, a: float, b: float
) -> None:
    """Tasks of chances from a Beta distribution (mean a / (a + b)); a seed, so that the shares are these."""
    rng = random.Random(7)
    truth, held, too_narrow = a / (a + b), 0, 0
    for _ in range(1000):
        tasks = []
        for _ in range(num_tasks):
            chance = rng.betavariate(a, b)
            tasks.append((num_samples, sum(rng.random() < chance for _ in range(num_samples))))
        found = estimate_pass_rate(counts(*tasks), 1)
        assert found.low is not None and found.high is not None and found.rate is not None
        held += found.low <= truth <= found.high
        # what taking all samples for independent would say
        low, high = wilson_interval(found.rate, num_tasks * num_samples)
        too_narrow += low <= truth <= high
    assert 930 <= held <= 970
    if num_samples > 1:
        assert too_narrow < held
    if a < 1:
        assert too_narrow < 850  # tasks that differ: 95 % would be a lie


def test_a_gain_is_paired_by_task() -> None:
    old, new = counts(*[(1, 1)] * 20, *[(1, 0)] * 80), counts(*[(1, 1)] * 30, *[(1, 0)] * 70)
    gain = estimate_gain(old, new)
    assert (gain.rate, gain.num_tasks) == (pytest.approx(0.1), 100)
    # Wilson: 20 of 100 is (0.133367, 0.288829), 30 of 100 is (0.218949, 0.395849); r = 14 / sqrt(16 x 21) = 0.763763
    assert (gain.low, gain.high) == pytest.approx((0.1 - 0.05884, 0.1 + 0.06222), abs=2e-5)
    # the same shares, of other tasks: no variance falls out
    apart = estimate_gain(old, list(reversed(new)))
    assert apart.rate == pytest.approx(0.1)
    assert apart.low is not None and apart.high is not None and apart.low < -0.03 and apart.high > 0.22
    # the other way round
    loss = estimate_gain(new, old)
    assert gain.low is not None and gain.high is not None
    assert (loss.low, loss.high) == pytest.approx((-gain.high, -gain.low))


def test_rounding_breaks_no_gain() -> None:
    generator = random.Random(0)
    for _ in range(2000):
        drawn = [(n := generator.choice([2, 4]), generator.randint(0, n)) for _ in range(generator.randint(2, 12))]
        old = counts(*drawn)
        same, mirrored = estimate_gain(old, old), estimate_gain(old, counts(*((n, n - c) for n, c in drawn)))
        assert same.rate == 0.0 and same.low is not None and same.high is not None
        assert same.low <= 0.0 <= same.high
        assert mirrored.low is not None and mirrored.high is not None and mirrored.low <= mirrored.high


def test_equal_rates_have_no_correlation() -> None:
    """Of seven times 1/3 the mean is rounded, and what is left of the squares is noise."""
    for number in range(2, 40):
        same, other = counts(*[(3, 1)] * number), counts(*[(1, place % 2) for place in range(number)])
        gain = estimate_gain(same, other)
        new, old = estimate_pass_rate(other, 1), estimate_pass_rate(same, 1)
        assert None not in (gain.low, gain.rate, new.rate, new.low, old.rate, old.high)
        sides = ((new.rate or 0) - (new.low or 0), (old.high or 0) - (old.rate or 0))
        assert gain.low == pytest.approx((gain.rate or 0) - (sides[0] ** 2 + sides[1] ** 2) ** 0.5)


def test_no_gain_on_few_tasks_is_not_certain() -> None:
    gain = estimate_gain(counts((1, 0), (1, 0), (0, 0)), counts((2, 0), (2, 0), (2, 2)))
    low, high = wilson_interval(0.0, 2)
    assert (gain.rate, gain.num_tasks) == (0.0, 2)
    assert (gain.low, gain.high) == pytest.approx((low - high, high - low), abs=1e-9)
    assert estimate_gain(counts((0, 0)), counts((1, 1))).rate is None
    with pytest.raises(ValueError, match="zip"):
        estimate_gain(counts((1, 1)), [])


def test_the_interval_of_a_gain_holds_the_truth_as_often_as_it_says() -> None:
    rng, held = random.Random(11), 0
    for _ in range(1000):
        old, new = [], []
        for _ in range(80):
            chance = rng.betavariate(0.6, 1.4)
            old.append((1, int(rng.random() < chance)))
            new.append((1, int(rng.random() < 0.7 * chance + 0.3 * rng.random())))
        gain = estimate_gain(counts(*old), counts(*new))
        assert gain.low is not None and gain.high is not None
        held += gain.low <= 0.7 * 0.3 + 0.3 * 0.5 - 0.3 <= gain.high
    assert 930 <= held <= 975
