"""Run many sessions at once, from jobs to rollouts, through stages with a concurrency limit each.

`run` is a batch from beginning to end. `start` and `take` let batches overlap (asynchronous rollouts): what was
started goes on until its turn to be taken, over any number of training steps, and `take` bounds its staleness by
`RolloutConfig.max_policy_lag`. `take_finished` is for policies that never change: first come, first served.

With several ranks, these are collectives: each rank gives all jobs of a batch and gets its equal part of the results,
by their order. Where a session runs depends on which rank has a place for it (`JobQueues`); which groups are taken is
decided by every rank from the same reports of all, so that all choose the same ones, and their results are exchanged.

While the trainer trains, the proxy holds calls at its gate (`Proxy.hold`): agents wait for their answers, and
everything that needs no model goes on (tools, grading, the making of sandboxes).
"""

import atexit
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from polar_trl.errors import ConfigError, PolarError
from polar_trl.grade.base import Grader
from polar_trl.harness.base import Harness, require_launch
from polar_trl.proxy import Proxy
from polar_trl.recording.session import SessionLimits
from polar_trl.rollout.groups import Batch, Group, Member, Report, exchange_results, list_batches
from polar_trl.rollout.progress import StageProgress
from polar_trl.rollout.ranks import JobQueues, OneRank, Ranks, claim_oldest
from polar_trl.rollout.session_run import STAGES, Job, RolloutResult, RunnerContext, SessionRun
from polar_trl.rollout.staleness import GroupState, choose_groups
from polar_trl.rollout.stragglers import StragglerCut
from polar_trl.sandbox.base import SandboxBackend
from polar_trl.user_code import describe_error

__all__ = ["STAGES", "Job", "RolloutConfig", "RolloutResult", "RolloutRunner"]

REPORT_INTERVAL_S = 0.2
"""How often ranks that wait for sessions report to each other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutConfig:
    """Concurrency limits of the stages, staleness, and whether auxiliary calls are trained."""

    max_preparing: int = 4
    max_agents: int = 16
    """Agents that run at once. More than the engine has slots for keep it busy while their tools run."""
    max_grading: int = 4
    limits: SessionLimits = SessionLimits()
    train_auxiliary: bool = False
    """Train what the agent asked beside its task (titles, summaries) like the rest."""
    max_policy_lag: int = 0
    """The most policy versions that a token may be older than the policy which trains on it (see `take`)."""
    straggler_quantile: float | None = None
    """Once this share of the agents of a batch (one `start`) has ended, those that have used as much time as the
    slowest of them are stopped, graded and trained; the rest may use as much. None waits for all."""

    retry_lost_sessions: bool = False
    """Begin a session once more whose node was lost."""

    def __post_init__(self) -> None:
        quantile = self.straggler_quantile
        if quantile is not None and not 0.0 < quantile < 1.0:
            raise ConfigError(
                f"straggler_quantile is {quantile!r}: give a share between 0 and 1, such as 0.9, or None"
            )


class RolloutRunner:
    """Runs sessions, a thread each. One per process; one thread at a time calls it.

    Args:
        proxy: A started proxy.
        grader: None where rewards come from elsewhere; the rollouts then have none of their own.
        ranks: The processes that share the jobs; None where this is the only one.

    Raises `ConfigError` where the agent's own prompt does not fit the engine's context window.
    """

    def __init__(
        self,
        *,
        proxy: Proxy,
        backend: SandboxBackend,
        harness: Harness,
        grader: Grader | None,
        config: RolloutConfig,
        ranks: Ranks | None = None,
    ) -> None:
        require_launch(harness, max_model_len=proxy.max_model_len, max_tokens=proxy.max_tokens)
        self.proxy = proxy
        self.harness = harness
        self.backend = backend
        self.config = config
        self.ranks: Ranks = ranks or OneRank()
        self._progress = StageProgress(STAGES)
        self._context = RunnerContext(
            proxy=proxy,
            backend=backend,
            harness=harness,
            grader=grader,
            limits=config.limits,
            train_auxiliary=config.train_auxiliary,
            retry_lost_sessions=config.retry_lost_sessions,
            stage_slots={
                "prepare": threading.BoundedSemaphore(config.max_preparing),
                "agent": threading.BoundedSemaphore(config.max_agents),
                "grade": threading.BoundedSemaphore(config.max_grading),
            },
            progress=self._progress,
            on_agent_end=self._leave_place,
        )
        self._claiming = threading.Lock()
        """Guards the next two; held while sessions are begun."""
        self._waiting: list[JobQueues[tuple[Group, int]]] = []
        """Of batches with jobs that nobody has begun, as far as this rank knows."""
        self._placed: set[str] = set()
        """Sessions that were begun and whose agents have not ended."""
        self._changed = threading.Condition()
        """Guards what follows; notified whenever a session ends."""
        self._num_changes = 0
        self._groups: list[Group] = []
        self._alone: set[Member] = set()
        """Of `run_one`."""
        self._failure: BaseException | None = None
        self._num_batches = 0

    def run(
        self, jobs: Sequence[Job], *, show_progress: bool = False, cut_stragglers: bool = True
    ) -> list[RolloutResult]:
        """Run all jobs and return their results in order. Groups that are open already stay so.

        Args:
            jobs: Of all ranks, alike on each.
            cut_stragglers: False where `straggler_quantile` is not to apply.

        Returns:
            This rank's part of the results: with W ranks, the r-th of W equal parts.

        Raises:
            LawError, DiskError: a law is broken, or a disk is full, on any rank; every other session is stopped first.
            KeyboardInterrupt: every session is stopped and its sandbox removed first.
        """
        batch = self._start(jobs, self.config.straggler_quantile if cut_stragglers else None)

        def choose(states: Sequence[GroupState]) -> list[Group] | None:
            pairs = zip(self._groups, states, strict=True)
            finished = [group for group, state in pairs if group.batch is batch and state.finished_s is not None]
            return finished if len(finished) == len(batch.groups) else None

        self._wait_for(choose, show_progress)
        return exchange_results(batch.places, self.ranks)

    def start(self, jobs: Sequence[Job]) -> None:
        """Begin a batch of whole groups; `take` returns them. Raises `ValueError` for a group that is open already.

        Args:
            jobs: Of all ranks, alike on each.
        """
        self._start(jobs, self.config.straggler_quantile)

    def take(self, num_groups: int, *, show_progress: bool = False) -> list[RolloutResult]:
        """Wait for `num_groups` groups whose sessions have all ended and been graded; they are no longer open then.

        Groups that would exceed `max_policy_lag` at the next step come first (earliest deadline first), then those
        that finished first. Results come group by group, and within a group in the order of its jobs; each rank gets
        its part of them, as from `run`. The bound holds if each training step takes `num_groups` and grows the policy
        version by one.

        Args:
            num_groups: Of all ranks.

        Raises:
            ValueError: fewer groups are open than asked for, or more than (1 + max_policy_lag) * num_groups, which
                cannot all be taken in time.
            LawError, DiskError, KeyboardInterrupt: as in `run`.
        """
        num_open, lag = len(self._groups), self.config.max_policy_lag
        if not num_groups <= num_open <= num_groups * (1 + lag):
            raise ValueError(
                f"{num_open} groups are open: {num_groups} can be taken of {num_groups} to "
                f"{num_groups * (1 + lag)} open ones at max_policy_lag {lag}"
            )
        version = self.proxy.policy_version

        def choose(states: Sequence[GroupState]) -> list[Group] | None:
            places = choose_groups(states, num_groups, version=version, max_policy_lag=lag)
            return None if places is None else [self._groups[place] for place in places]

        return self._exchange(self._wait_for(choose, show_progress))

    def take_finished(self) -> list[RolloutResult]:
        """Wait for any open group to end, whatever its age, and take the one that finished first.

        Raises:
            ValueError: no group is open.
            LawError, DiskError, KeyboardInterrupt: as in `run`.
        """
        if not self._groups:
            raise ValueError("no group is open")

        def choose(states: Sequence[GroupState]) -> list[Group] | None:
            ended = [(state.finished_s, place) for place, state in enumerate(states) if state.finished_s is not None]
            return [self._groups[min(ended)[1]]] if ended else None

        return self._exchange(self._wait_for(choose, show_progress=False))

    def run_one(self, job: Job) -> RolloutResult:
        """Run one session, of no batch, and wait for it. From any number of threads. Raises as `run`."""
        member = Member(SessionRun(self._context, job, StragglerCut(1, None)), lambda member: None)
        with self._changed:
            self._alone.add(member)
            member.thread.start()
        member.thread.join()
        with self._changed:
            self._alone.discard(member)
        if member.failure is not None:
            raise member.failure
        return member.result()

    @property
    def oldest_version(self) -> int:
        """The oldest policy version whose tokens may be trained now, by `max_policy_lag`."""
        return self.proxy.policy_version - self.config.max_policy_lag

    def open_jobs(self) -> list[list[Job]]:
        """List the jobs of all ranks that were started and not yet taken, group by group: after a crash, those to
        start again."""
        return [list(group.jobs) for group in self._groups]

    def close(self) -> None:
        """Stop every open session; returns once they have ended and their sandboxes are gone. May be called twice."""
        atexit.unregister(self.close)
        with self._claiming, self._changed:
            self._waiting.clear()
            groups, self._groups = self._groups, []
            members = [*self._alone, *(member for group in groups for member in group.members.values())]
        # until they end: a command may be about to start
        while alive := [member for member in members if member.thread.is_alive()]:
            for member in alive:
                member.session.cancel()
            alive[-1].thread.join(timeout=0.2)

    def _start(self, jobs: Sequence[Job], straggler_quantile: float | None) -> Batch:
        name = f"batch-{self._num_batches}"
        batch = Batch(jobs, self.ranks, name=name, straggler_quantile=straggler_quantile)
        if opened := {group.id for group in self._groups} & {group.id for group in batch.groups}:
            raise ValueError(f"groups {sorted(opened)} are open already")
        self._num_batches += 1
        atexit.register(self.close)  # a trainer that failed may have left agents waiting at the gate
        with self._claiming, self._changed:
            self._groups += batch.groups
            self._waiting.append(batch.queues)
        self._begin_sessions()
        self.ranks.gather(None)  # all have begun what they have places for: jobs that are left do wait
        batch.queues.is_shared = True
        self._begin_sessions()
        return batch

    def _begin_sessions(self) -> None:
        """Begin sessions that wait, those of the oldest batch first, while there are places. From any thread.

        There are places for as many as run and are prepared at once: a rank that claimed more would keep jobs from
        others that could begin them.
        """
        with self._claiming:
            while len(self._placed) < self.config.max_agents + self.config.max_preparing:
                if (claimed := claim_oldest(self._waiting)) is None:
                    return
                group, index = claimed
                job, batch = group.jobs[index], group.batch
                queue_s = time.monotonic() - batch.started_s
                member = Member(SessionRun(self._context, job, batch.cut, queue_s=queue_s), self._end)
                self._placed.add(job.rollout_id)
                with self._changed:
                    group.members[index] = member
                member.thread.start()

    def _leave_place(self, job: Job) -> None:
        """Give a session's place to another one. On its own thread; again, nothing happens."""
        with self._claiming:
            self._placed.discard(job.rollout_id)
        try:
            self._begin_sessions()
        except BaseException as failure:  # noqa: BLE001 - not this session's; raised again by whoever waits
            self._note(failure)

    def _end(self, member: Member) -> None:
        """Note that a session has ended. On its own thread."""
        self._leave_place(member.session.job)
        with self._changed:
            member.ended_s = time.monotonic()
        self._note(member.failure)

    def _note(self, failure: BaseException | None) -> None:
        """Tell whoever waits that something has changed."""
        with self._changed:
            self._failure = self._failure or failure
            self._num_changes += 1
            self._changed.notify_all()

    def _wait_for(
        self, choose: Callable[[Sequence[GroupState]], list[Group] | None], show_progress: bool
    ) -> list[Group]:
        """Wait until `choose` gives groups, which are no longer open then. Any other end stops every session."""
        interval_s = None if self.ranks.num_ranks == 1 else REPORT_INTERVAL_S
        num_left = sum(len(group.jobs) for group in self._groups)
        try:
            with self._progress.showing(num_left) if show_progress else nullcontext():
                while True:
                    with self._changed:
                        seen, report = self._num_changes, self._report()
                    states = self._merge(self.ranks.gather(report))
                    if (chosen := choose(states)) is not None:
                        with self._changed:
                            self._groups = [group for group in self._groups if group not in chosen]
                        return chosen
                    with self._changed:
                        if self._num_changes == seen:
                            self._changed.wait(interval_s)
        except BaseException:
            self.close()
            self._failure = None
            raise

    def _report(self) -> Report:
        failure = self._failure
        if failure is not None and self.ranks.num_ranks > 1 and not isinstance(failure, PolarError):
            failure = PolarError(describe_error(failure))  # other ranks may be unable to read it
        return Report(
            failure=failure,
            groups=[group.report() for group in self._groups],
            agent_times_s=[batch.cut.take_noted() for batch in list_batches(self._groups)],
        )

    def _merge(self, reports: Sequence[Report]) -> list[GroupState]:
        """Return the states of the open groups. Raises what failed on any rank."""
        for report in reports:
            if report.failure is not None:
                raise self._failure or report.failure
        for rank, report in enumerate(reports):
            if rank != self.ranks.rank:
                for batch, times_s in zip(list_batches(self._groups), report.agent_times_s, strict=True):
                    batch.cut.note_others(times_s)
        of_groups = zip(*(report.groups for report in reports), strict=True)
        self._progress.show_ended(sum(group.num_ended for report in reports for group in report.groups))
        return [group.merge(of_ranks) for group, of_ranks in zip(self._groups, of_groups, strict=True)]

    def _exchange(self, groups: Sequence[Group]) -> list[RolloutResult]:
        return exchange_results([(group, index) for group in groups for index in range(len(group.jobs))], self.ranks)
