"""Estimate pass@1 over tasks and training seeds with a 95 % interval, and its gain over another model.

With one seed, rate and interval are those of `polar_trl.grade.pass_at_k`, over tasks. With S seeds on the same T
tasks, x is the rate of a task under a seed, p the mean of all, and the variance of p has a part of each axis:

    V_T = sum over tasks of (mean over seeds of x - p)^2 / T^2
    V_S = sum over seeds of (mean over tasks of x - p)^2 / (S (S - 1))

Their sum is the two-way clustered variance of Cameron, Gelbach and Miller (2011) without its third term, which is
subtracted there: ours is never below it, and never negative. The interval is Wilson's at the effective sample size
p (1 - p) / V, times (z / t)^2 for Student's t in the place of the normal quantile z, as Korn and Graubard (1998) do
for surveys (with the t of n - 1, which is nearly z, for z). The degrees of freedom are Satterthwaite's (1946) for
V_T + V_S. Three seeds that agree cost little; three that do not make it wide, as they should.

A gain is Newcombe's difference of two such rates; what tasks have in common falls out of it, seeds are taken as
independent.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean

from polar_trl.grade.pass_at_k import (
    CONFIDENCE,
    Gain,
    PassRate,
    TaskCount,
    correlate,
    estimate_pass_rate,
    subtract_rates,
    wilson_interval,
)

Counts = Mapping[str, TaskCount]
"""Graded and passed sessions by task id, of one trained model inside one agent."""
_ROUNDING = 1e-20
"""The mean of equal rates is rounded: a variance below this is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SeedsRate:
    """pass@1 of a way of training, over tasks and seeds."""

    rate: PassRate
    by_task: Mapping[str, float]
    """Mean over seeds. Of tasks that were graded under every seed."""
    by_seed: Sequence[float]
    share_of_tasks: float
    """Of the variance, the part that is between tasks, 0 to 1."""


def estimate_over_seeds(seeds: Sequence[Counts]) -> SeedsRate | None:
    """Estimate the mean over seeds of pass@1; None where no task was graded under every seed."""
    tasks = [task for task in (seeds[0] if seeds else {}) if all(task in c and c[task].num_graded for c in seeds)]
    if not tasks:
        return None
    rates = [[counts[task].num_passed / counts[task].num_graded for task in tasks] for counts in seeds]
    by_seed = [fmean(of_seed) for of_seed in rates]
    by_task = [fmean(of_task) for of_task in zip(*rates, strict=True)]
    rate = estimate_pass_rate([seeds[0][task] for task in tasks], 1)
    share = 1.0
    if len(seeds) > 1:
        p = fmean(by_task)
        low, high, share = _find_interval(p, by_task, by_seed, most=sum(c[t].num_graded for c in seeds for t in tasks))
        rate = PassRate(k=1, rate=p, low=low, high=high, num_tasks=len(tasks), num_left_out=0)
    return SeedsRate(rate=rate, by_task=dict(zip(tasks, by_task, strict=True)), by_seed=by_seed, share_of_tasks=share)


def estimate_gain_over_seeds(before: Sequence[Counts], after: Sequence[Counts]) -> Gain | None:
    """Estimate pass@1 of one way of training less that of another, on the tasks of both; None where there are none."""
    both = [task for task in (before[0] if before else {}) if all(task in counts for counts in (*before, *after))]
    old, new = (estimate_over_seeds([{t: counts[t] for t in both} for counts in side]) for side in (before, after))
    if old is None or new is None:
        return None
    tasks = [task for task in old.by_task if task in new.by_task]
    r = correlate([old.by_task[task] for task in tasks], [new.by_task[task] for task in tasks])
    # of the two estimates only what is between tasks is correlated
    return subtract_rates(new.rate, old.rate, r * math.sqrt(old.share_of_tasks * new.share_of_tasks))


def _find_interval(
    p: float, by_task: Sequence[float], by_seed: Sequence[float], *, most: int
) -> tuple[float, float, float]:
    """Return the bounds, and the tasks' share of the variance."""
    num_tasks, num_seeds = len(by_task), len(by_seed)
    of_tasks = sum((x - p) ** 2 for x in by_task) / num_tasks**2
    of_seeds = sum((x - p) ** 2 for x in by_seed) / (num_seeds * (num_seeds - 1))
    variance = of_tasks + of_seeds
    if variance < _ROUNDING:  # all tasks and seeds alike: as sure as one sample of each task would be
        return *wilson_interval(p, num_tasks), 1.0
    freedom = variance**2 / (of_tasks**2 / max(1, num_tasks - 1) + of_seeds**2 / (num_seeds - 1))
    ratio = NormalDist().inv_cdf((1 + CONFIDENCE) / 2) / t_quantile((1 + CONFIDENCE) / 2, freedom)
    size = min(p * (1 - p) / variance, most) * ratio**2
    return *wilson_interval(p, size), of_tasks / variance


def t_quantile(share: float, freedom: float) -> float:
    """Compute the quantile of Student's t for a share above 0.5 by bisection, to 1e-9.

    With t = sqrt(v) tan(a), the density becomes C cos(a)^(v - 1) on 0 to pi / 2, C = G((v + 1) / 2) / (sqrt(pi)
    G(v / 2)), which Simpson's rule integrates.
    """
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)

    def integrate(angle: float, steps: int = 400) -> float:
        width = angle / steps
        values = [math.cos(place * width) ** (freedom - 1) for place in range(steps + 1)]
        return scale * width / 3 * (values[0] + values[-1] + 4 * sum(values[1::2]) + 2 * sum(values[2:-1:2]))

    low, high = 0.0, math.pi / 2 - 1e-9
    while high - low > 1e-12:
        middle = (low + high) / 2
        low, high = (middle, high) if integrate(middle) < share - 0.5 else (low, middle)
    return math.sqrt(freedom) * math.tan(low)
