"""Estimate pass@k over a task set with a confidence interval. Pure.

pass@k of one task with n samples, c of which passed, is the unbiased estimate of Chen et al. (2021, "Evaluating Large
Language Models Trained on Code", equation 1): 1 - C(n - c, k) / C(n, k). Of a set it is the mean over its tasks.

The interval is by tasks: what varies from one task set to the next is which tasks are in it, and the samples of one
task say little of another. It is Wilson's score interval (1927) of the mean rate p at an effective sample size, which
is Kish's (1965) with the variance between tasks in the place of the design's:

    n_eff = p (1 - p) / (v / m),     v = (1 / m) sum over tasks of (x - p)^2

for m tasks with the rates x. At one sample per task, x is 0 or 1, v is p (1 - p), and n_eff is m: plain Wilson. More
samples per task lower v and narrow the interval, but never below what as many independent draws would give: n_eff is
at most the sum of floor(n / k). Where every task has one and the same rate, 0 or 1, n_eff is m.

A task with fewer than k samples has no unbiased pass@k: it is left out, and counted (`num_left_out`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from polar_trl.errors import ConfigError

CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskCount:
    """The graded samples of one task."""

    num_graded: int
    num_passed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PassRate:
    """pass@k of a task set."""

    k: int
    rate: float | None
    """None where no task has k graded samples; so are the bounds."""
    low: float | None
    high: float | None
    """Bounds of the 95 % interval."""
    num_tasks: int
    """Tasks that the rate is a mean over."""
    num_left_out: int
    """Tasks with fewer than k graded samples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gain:
    """The difference in pass@1 of one model to another."""

    rate: float | None
    """Difference of pass@1; None where no task was graded for both."""
    low: float | None
    high: float | None
    """Bounds of the 95 % interval."""
    num_tasks: int


def estimate_pass_rate(counts: Sequence[TaskCount], k: int) -> PassRate:
    """Estimate pass@k and its interval over tasks. Raises `ConfigError` for a k below 1."""
    if k < 1:
        raise ConfigError(f"k is {k}; it must be at least 1")
    used = [count for count in counts if count.num_graded >= k]
    left_out = len(counts) - len(used)
    if not used:
        return PassRate(k=k, rate=None, low=None, high=None, num_tasks=0, num_left_out=left_out)
    rates = [pass_at_k(count.num_graded, count.num_passed, k) for count in used]
    rate = math.fsum(rates) / len(rates)
    size = _find_effective_size(rates, rate, most=sum(count.num_graded // k for count in used))
    low, high = wilson_interval(rate, size)
    return PassRate(k=k, rate=rate, low=low, high=high, num_tasks=len(used), num_left_out=left_out)


def estimate_gain(before: Sequence[TaskCount], after: Sequence[TaskCount]) -> Gain:
    """Estimate pass@1 of one model less that of another on the same tasks, with the interval of `subtract_rates`.

    Most of the variance is between tasks and falls out; and no gain on three tasks is not taken for certain, as by a
    standard error of 0.

    Args:
        before, after: A count per task, in one order. Tasks that have no graded sample in one of them are left out.
    """
    pairs = [pair for pair in zip(before, after, strict=True) if all(count.num_graded for count in pair)]
    if not pairs:
        return Gain(rate=None, low=None, high=None, num_tasks=0)
    old, new = (estimate_pass_rate([pair[side] for pair in pairs], 1) for side in (0, 1))
    r = correlate(*([pair[side].num_passed / pair[side].num_graded for pair in pairs] for side in (0, 1)))
    return subtract_rates(new, old, r)


def subtract_rates(new: PassRate, old: PassRate, r: float) -> Gain:
    """Subtract two rates of the same tasks, with the 95 % interval of Newcombe (1998).

    Square-and-add for paired shares: from the bounds (l1, u1) of p1, the old one, and (l2, u2) of p2, and the
    correlation r of the two estimates, the lower bound of p2 - p1 is

        p2 - p1 - sqrt((p2 - l2)^2 - 2 r (p2 - l2) (u1 - p1) + (u1 - p1)^2)

    and the upper one likewise.
    """
    p1, l1, u1, p2, l2, u2 = (bound or 0.0 for rate in (old, new) for bound in (rate.rate, rate.low, rate.high))
    # rounding must not leave the root of something below 0, where r is 1 and both widths are equal
    below = math.sqrt(max(0.0, (p2 - l2) ** 2 - 2 * r * (p2 - l2) * (u1 - p1) + (u1 - p1) ** 2))
    above = math.sqrt(max(0.0, (u2 - p2) ** 2 - 2 * r * (u2 - p2) * (p1 - l1) + (p1 - l1) ** 2))
    return Gain(rate=p2 - p1, low=p2 - p1 - below, high=p2 - p1 + above, num_tasks=new.num_tasks)


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Return the chance that at least one of k samples passes, drawn from these without replacement."""
    if not (1 <= k <= num_samples and 0 <= num_passed <= num_samples):
        raise ValueError(f"no pass@{k} of {num_samples} samples of which {num_passed} passed")
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


def wilson_interval(rate: float, size: float, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Compute Wilson's score interval of a share `rate` among `size` draws (any number above 0)."""
    z = NormalDist().inv_cdf((1.0 + confidence) / 2.0)
    center = rate + z * z / (2.0 * size)
    half = z * math.sqrt(rate * (1.0 - rate) / size + (z / (2.0 * size)) ** 2)
    scale = 1.0 + z * z / size
    return max(0.0, (center - half) / scale), min(1.0, (center + half) / scale)


def _find_effective_size(rates: Sequence[float], rate: float, most: int) -> float:
    """Compute n_eff of this file's docstring, from the number of tasks to `most`."""
    num_tasks = len(rates)
    if rate in (0.0, 1.0):
        return float(num_tasks)
    variance = math.fsum((other - rate) ** 2 for other in rates) / num_tasks
    size = rate * (1.0 - rate) * num_tasks / variance if variance > 0.0 else math.inf
    return min(max(size, float(num_tasks)), float(most))


def correlate(first: Sequence[float], second: Sequence[float]) -> float:
    """Compute Pearson's r, from -1 to 1 whatever the rounding; 0 where one of the two does not vary."""
    if any(min(values) == max(values) for values in (first, second)):
        return 0.0  # not left to the squares: the mean of equal values is rounded, too
    means = [math.fsum(values) / len(values) for values in (first, second)]
    pairs = [(x - means[0], y - means[1]) for x, y in zip(first, second, strict=True)]
    squares = [math.fsum(pair[side] ** 2 for pair in pairs) for side in (0, 1)]
    r = math.fsum(x * y for x, y in pairs) / math.sqrt(squares[0] * squares[1])
    return min(1.0, max(-1.0, r))
