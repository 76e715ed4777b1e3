"""Choose the sessions that the grader accepted, and compute the acceptance rate of each repository.

A session without a reward was not rejected: it is in no rate, and counted apart.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from polar_trl.eval.sample_tasks import SampleResult

NO_REPO = "(none)"
"""Stands for the repository of tasks that name none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Acceptance:
    """Counts of graded and accepted sessions of one repository, or of all."""

    tasks: int
    """Tasks that were graded at least once."""
    attempts: int
    """Sessions with a reward."""
    accepted: int
    failed: int
    """Sessions without one: the infrastructure failed."""

    @property
    def rate(self) -> float | None:
        """Share of the attempts; None where there was none."""
        return self.accepted / self.attempts if self.attempts else None


def is_accepted(result: SampleResult, min_reward: float) -> bool:
    """Return whether the session's reward is at least `min_reward`."""
    return result.reward is not None and result.reward >= min_reward


def choose_accepted(
    results: Sequence[SampleResult], *, min_reward: float, max_per_task: int | None = None
) -> list[SampleResult]:
    """Return the accepted sessions by task id and sample, at most `max_per_task` of each task: the first samples."""
    chosen: list[SampleResult] = []
    kept: Counter[str] = Counter()
    for result in sorted(results, key=lambda result: (result.task, result.sample, result.attempt)):
        if is_accepted(result, min_reward) and (max_per_task is None or kept[result.task] < max_per_task):
            kept[result.task] += 1
            chosen.append(result)
    return chosen


def count_acceptance(results: Sequence[SampleResult], *, min_reward: float) -> dict[str, Acceptance]:
    """Count the sessions of each repository, the highest acceptance rate first."""
    by_repo: defaultdict[str, list[SampleResult]] = defaultdict(list)
    for result in results:
        by_repo[result.repo or NO_REPO].append(result)
    counts = {repo: _count(members, min_reward) for repo, members in by_repo.items()}
    return dict(sorted(counts.items(), key=lambda item: (-(item[1].rate or 0.0), item[0])))


def total_acceptance(results: Sequence[SampleResult], *, min_reward: float) -> Acceptance:
    """Count the sessions of all repositories together."""
    return _count(results, min_reward)


def _count(results: Sequence[SampleResult], min_reward: float) -> Acceptance:
    graded = [result for result in results if result.reward is not None]
    return Acceptance(
        tasks=len({result.task for result in graded}),
        attempts=len(graded),
        accepted=sum(is_accepted(result, min_reward) for result in graded),
        failed=len(results) - len(graded),
    )
