"""Overlap rollouts with training: the next batch begins early, and groups stay open until a step takes them.

How stale a group may get is the runner's to bound (`RolloutRunner.take`).
"""

from collections.abc import Callable, Sequence

from polar_trl.grpo.dataset import DataRow
from polar_trl.rollout.runner import Job, RolloutResult, RolloutRunner


class CarryOver:
    """Hands each step as many groups as its batch has, of those that are ready.

    One batch is begun ahead of the current one, which is as far as the data loader looks. So the first step has two
    batches open and each later one begins one more.

    Args:
        build_jobs: The jobs of data rows, in order.
        num_generations: Rollouts per group; groups are adjacent in a batch.
    """

    def __init__(
        self,
        runner: RolloutRunner,
        build_jobs: Callable[[Sequence[DataRow]], list[Job]],
        *,
        max_policy_lag: int,
        num_generations: int,
    ) -> None:
        self._runner = runner
        self._build_jobs = build_jobs
        self._max_policy_lag = max_policy_lag
        self._num_generations = num_generations
        self._row_of: dict[str, DataRow] = {}
        """Rollout id -> data row, of all that is open."""
        self._is_begun = False

    def roll_out(
        self, rows: Sequence[DataRow], next_rows: Sequence[DataRow] | None, *, show_progress: bool
    ) -> tuple[list[DataRow], list[RolloutResult]]:
        """Data rows and results of as many rollouts as `rows` has, in whole groups.

        Args:
            rows: The current batch; begun here unless it was begun as the next one before.
            next_rows: The batch after it; None where there is none.
        """
        if not self._is_begun:
            self._begin(rows)
        self._is_begun = next_rows is not None
        if next_rows is not None:
            self._begin(next_rows)
        num_groups = len(rows) // self._num_generations
        groups = self._runner.take(num_groups, max_policy_lag=self._max_policy_lag, show_progress=show_progress)
        finished = [result for group in groups for result in group]
        return [self._row_of.pop(result.rollout.id) for result in finished], finished

    def open_rows(self) -> list[DataRow]:
        """Data rows of all open groups, to be given to `reopen` after a crash."""
        return [self._row_of[job.rollout_id] for group in self._runner.open_jobs() for job in group]

    def reopen(self, rows: Sequence[DataRow]) -> None:
        """Begin anew what was open when the run was killed; the current batch is among it."""
        if rows:
            self._begin(rows)
            self._is_begun = True

    def _begin(self, rows: Sequence[DataRow]) -> None:
        jobs = self._build_jobs(rows)
        self._row_of |= {job.rollout_id: row for job, row in zip(jobs, rows, strict=True)}
        self._runner.start(jobs)
