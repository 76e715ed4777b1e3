"""Run many sessions at once, from jobs to rollouts, through stages with a concurrency limit each.

`run` is a batch from beginning to end. `start` and `take` let batches overlap (asynchronous rollouts): what was
started goes on until its turn to be taken, over any number of training steps, and `take` bounds its staleness by
`RolloutConfig.max_policy_lag`. `take_finished` is for policies that never change: first come, first served.

While the trainer trains, the proxy holds calls at its gate (`Proxy.hold`): agents wait for their answers, and
everything that needs no model goes on (tools, grading, the making of sandboxes).
"""

import atexit
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from polar_trl.errors import ConfigError
from polar_trl.grade.base import Grader
from polar_trl.harness.base import Harness, require_launch
from polar_trl.proxy import Proxy
from polar_trl.recording.session import SessionLimits
from polar_trl.rollout.progress import StageProgress
from polar_trl.rollout.session_run import STAGES, Job, RolloutResult, RunnerContext, SessionRun
from polar_trl.rollout.staleness import GroupState, choose_groups
from polar_trl.rollout.stragglers import StragglerCut
from polar_trl.sandbox.base import SandboxBackend

__all__ = ["STAGES", "Job", "RolloutConfig", "RolloutResult", "RolloutRunner"]


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

    Raises `ConfigError` where the agent's own prompt does not fit the engine's context window.
    """

    def __init__(
        self, *, proxy: Proxy, backend: SandboxBackend, harness: Harness, grader: Grader | None, config: RolloutConfig
    ) -> None:
        require_launch(harness, max_model_len=proxy.max_model_len, max_tokens=proxy.max_tokens)
        self.proxy = proxy
        self.backend = backend
        self.config = config
        self._progress = StageProgress(STAGES)
        self._context = RunnerContext(
            proxy=proxy,
            backend=backend,
            harness=harness,
            grader=grader,
            limits=config.limits,
            train_auxiliary=config.train_auxiliary,
            stage_slots={
                "prepare": threading.BoundedSemaphore(config.max_preparing),
                "agent": threading.BoundedSemaphore(config.max_agents),
                "grade": threading.BoundedSemaphore(config.max_grading),
            },
            progress=self._progress,
        )
        self._changed = threading.Condition()
        """Guards what follows; notified whenever a session ends."""
        self._groups: list[_Group] = []
        self._failure: BaseException | None = None

    def run(
        self, jobs: Sequence[Job], *, show_progress: bool = False, cut_stragglers: bool = True
    ) -> list[RolloutResult]:
        """Run all jobs and return their results in order. Groups that are open already stay so.

        Args:
            cut_stragglers: False where `straggler_quantile` is not to apply.

        Raises:
            LawError, DiskError: a law is broken, or a disk is full; every other session is stopped first.
            KeyboardInterrupt: every session is stopped and its sandbox removed first.
        """
        groups, members = self._start(jobs, self.config.straggler_quantile if cut_stragglers else None)
        self._wait_for(lambda: groups if all(group.is_finished for group in groups) else None, show_progress)
        return [member.result() for member in members]

    def start(self, jobs: Sequence[Job]) -> None:
        """Begin a batch of whole groups; `take` returns them. Raises `ValueError` for a group that is open already."""
        self._start(jobs, self.config.straggler_quantile)

    def take(self, num_groups: int, *, show_progress: bool = False) -> list[list[RolloutResult]]:
        """Wait for `num_groups` groups whose sessions have all ended and been graded; they are no longer open then.

        Groups that would exceed `max_policy_lag` at the next step come first (earliest deadline first), then those
        that finished first. Within a group, results come in the order of its jobs. The bound holds if each training
        step takes `num_groups` and grows the policy version by one.

        Raises:
            ValueError: fewer groups are open than asked for, or more than (1 + max_policy_lag) * num_groups, which
                cannot all be taken in time.
            LawError, KeyboardInterrupt: as in `run`.
        """
        num_open, lag = len(self._groups), self.config.max_policy_lag
        if not num_groups <= num_open <= num_groups * (1 + lag):
            raise ValueError(
                f"{num_open} groups are open: {num_groups} can be taken of {num_groups} to "
                f"{num_groups * (1 + lag)} open ones at max_policy_lag {lag}"
            )
        version = self.proxy.policy_version

        def choose() -> list[_Group] | None:
            states = [group.state() for group in self._groups]
            places = choose_groups(states, num_groups, version=version, max_policy_lag=lag)
            return None if places is None else [self._groups[place] for place in places]

        return [group.results() for group in self._wait_for(choose, show_progress)]

    def take_finished(self) -> list[RolloutResult]:
        """Wait for any open group to end, whatever its age, and take the one that finished first.

        Raises:
            ValueError: no group is open.
            LawError, KeyboardInterrupt: as in `run`.
        """
        if not self._groups:
            raise ValueError("no group is open")

        def choose() -> list[_Group] | None:
            finished = [group for group in self._groups if group.is_finished]
            return [min(finished, key=_Group.finished_s)] if finished else None

        (group,) = self._wait_for(choose, show_progress=False)
        return group.results()

    @property
    def oldest_version(self) -> int:
        """The oldest policy version whose tokens may be trained now, by `max_policy_lag`."""
        return self.proxy.policy_version - self.config.max_policy_lag

    def open_jobs(self) -> list[list[Job]]:
        """List the jobs that were started and not yet taken, group by group: after a crash, those to start again."""
        with self._changed:
            return [[member.job for member in group.members] for group in self._groups]

    def close(self) -> None:
        """Stop every open session; returns once they have ended and their sandboxes are gone. May be called twice."""
        atexit.unregister(self.close)
        with self._changed:
            groups, self._groups = self._groups, []
        members = [member for group in groups for member in group.members]
        # until they end: a command may be about to start
        while alive := [member for member in members if member.thread.is_alive()]:
            for member in alive:
                member.session.cancel()
            alive[-1].thread.join(timeout=0.2)

    def _start(self, jobs: Sequence[Job], straggler_quantile: float | None) -> tuple[list["_Group"], list["_Member"]]:
        """Begin sessions; their groups, in the order of first jobs, and the sessions in the order of the jobs."""
        cut = StragglerCut(len(jobs), straggler_quantile)
        by_group: dict[str, list[_Member]] = defaultdict(list)
        with self._changed:
            if opened := {group.id for group in self._groups} & {job.group_id for job in jobs}:
                raise ValueError(f"groups {sorted(opened)} are open already")
            members = [_Member(SessionRun(self._context, job, cut), self._end) for job in jobs]
            for member in members:
                by_group[member.job.group_id].append(member)
            groups = [_Group(id=group_id, members=group) for group_id, group in by_group.items()]
            self._groups += groups
        atexit.register(self.close)  # a trainer that failed may have left agents waiting at the gate
        for member in members:
            member.thread.start()
        return groups, members

    def _end(self, member: "_Member") -> None:
        """Note that a session has ended. On its own thread."""
        self._progress.finish()
        with self._changed:
            member.ended_s = time.monotonic()
            self._failure = self._failure or member.failure
            self._changed.notify_all()

    def _wait_for(self, choose: Callable[[], list["_Group"] | None], show_progress: bool) -> list["_Group"]:
        """Wait until `choose` gives groups, which are no longer open then. Any other end stops every session."""
        try:
            with self._showing(show_progress), self._changed:
                while self._failure is None:
                    if (chosen := choose()) is not None:
                        self._groups = [group for group in self._groups if group not in chosen]
                        return chosen
                    self._changed.wait()
                raise self._failure
        except BaseException:
            self.close()
            self._failure = None
            raise

    @contextmanager
    def _showing(self, show: bool) -> Iterator[None]:
        num_running = sum(member.ended_s is None for group in self._groups for member in group.members)
        with self._progress.showing(num_running) if show else nullcontext():
            yield


class _Member:
    """One session of a group, and its thread."""

    def __init__(self, session: SessionRun, on_end: Callable[["_Member"], None]) -> None:
        self.session = session
        self.job = session.job
        self.ended_s: float | None = None
        self.failure: BaseException | None = None
        self._result: RolloutResult | None = None
        self._on_end = on_end
        # a daemon, so that the end of the process is not waited for here but brought about by `RolloutRunner.close`
        self.thread = threading.Thread(target=self._run, name=f"polar-session-{self.job.rollout_id}", daemon=True)

    def result(self) -> RolloutResult:
        """Return the result of a session that has ended and did not fail."""
        assert self._result is not None
        return self._result

    def _run(self) -> None:
        try:
            self._result = self.session.run()
        except BaseException as failure:  # noqa: BLE001 - raised again by whoever waits
            self.failure = failure
        self._on_end(self)


@dataclass(eq=False, kw_only=True, slots=True)
class _Group:
    """The sessions of one group, in the order of its jobs."""

    id: str
    members: list[_Member]

    @property
    def is_finished(self) -> bool:
        return all(member.ended_s is not None for member in self.members)

    def finished_s(self) -> float:
        """Return when the last session ended, of those that have."""
        return max(member.ended_s for member in self.members if member.ended_s is not None)

    def state(self) -> GroupState:
        versions = [member.session.gate_stats.first_policy_version for member in self.members]
        return GroupState(
            first_policy_version=min((version for version in versions if version is not None), default=None),
            finished_s=self.finished_s() if self.is_finished else None,
        )

    def results(self) -> list[RolloutResult]:
        return [member.result() for member in self.members]
