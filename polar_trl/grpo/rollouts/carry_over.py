"""Carry sessions over from one generation batch to the next: the next one begins early, and groups stay open until a
step takes them.

Their staleness is the runner's to bound (`RolloutRunner.take`).
"""

from collections.abc import Callable, Sequence

from polar_trl.rollout.runner import Job, RolloutRunner
from polar_trl.rollout.session_run import RolloutResult


class CarryOver:
    """Hands each step as many groups as its batch has, of those that are ready.

    One batch is begun ahead of the current one, which is as far as the data loader looks. So the first step has two
    batches open and each later one begins one more.

    Args:
        build_jobs: The jobs of a batch on all ranks, given the task of each rollout on this one, the batch's number,
            and the agents if they are known (a collective).
        group_size: Rollouts per group; groups are adjacent in a batch.
    """

    def __init__(self, runner: RolloutRunner, build_jobs: Callable[..., list[Job]], *, group_size: int) -> None:
        self._runner = runner
        self._build_jobs = build_jobs
        self._group_size = group_size
        self._is_begun = False

    def roll_out(
        self, task_ids: Sequence[str], next_ids: Sequence[str] | None, *, number: int, show_progress: bool
    ) -> list[RolloutResult]:
        """Return as many rollouts as `task_ids` has, this rank's part of the groups that all take (a collective).

        Args:
            task_ids: This rank's part of the current batch; begun here unless it was begun as the next one before.
            next_ids: The batch after it; None where there is none.
            number: Of the current batch.
        """
        if not self._is_begun:
            self._begin(task_ids, number=number)
        self._is_begun = next_ids is not None
        if next_ids is not None:
            self._begin(next_ids, number=number + 1)
        num_groups = len(task_ids) * self._runner.ranks.num_ranks // self._group_size
        return self._runner.take(num_groups, show_progress=show_progress)

    def list_open(self) -> list[tuple[str, str]]:
        """List task and agent ("" where the run has one) of each rollout of the open groups, this rank's part of them:
        `reopen` takes it after a crash. Batches are open or taken as a whole number of times their size, so that the
        parts are equal."""
        opened = [(job.task.id, job.agent or "") for group in self._runner.open_jobs() for job in group]
        ranks = self._runner.ranks
        length = len(opened) // ranks.num_ranks
        return opened[ranks.rank * length : (ranks.rank + 1) * length]

    def reopen(self, opened: Sequence[tuple[str, str]]) -> None:
        """Begin anew what was open when the run was cut off (a collective); the current batch is among it."""
        if opened:
            self._begin([task_id for task_id, _ in opened], number=0, agents=[agent for _, agent in opened])
            self._is_begun = True

    def _begin(self, task_ids: Sequence[str], *, number: int, agents: Sequence[str] | None = None) -> None:
        self._runner.start(self._build_jobs(task_ids, number=number, agents=agents))
