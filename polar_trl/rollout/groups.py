"""Keep the groups of sessions that are open: which of them run here, and what all ranks together know of them."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from polar_trl.rollout.ranks import JobQueues, Ranks
from polar_trl.rollout.session_run import Job, RolloutResult, SessionRun
from polar_trl.rollout.staleness import GroupState
from polar_trl.rollout.stragglers import StragglerCut


class Member:
    """One session of a group that runs on this rank, and its thread."""

    def __init__(self, session: SessionRun, on_end: Callable[["Member"], None]) -> None:
        self.session = session
        self.ended_s: float | None = None
        self.failure: BaseException | None = None
        self._result: RolloutResult | None = None
        self._on_end = on_end
        # a daemon, so that the end of the process is not waited for here but brought about by `RolloutRunner.close`
        name = f"polar-session-{session.job.rollout_id}"
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def result(self) -> RolloutResult:
        """Return the result of a session that has ended and did not fail."""
        assert self._result is not None
        return self._result

    def _run(self) -> None:
        try:
            self._result = self.session.run()
            if again := self.session.begin_again(self._result):
                self.session = again
                self._result = again.run()
        except BaseException as failure:  # noqa: BLE001 - raised again by whoever waits
            self.failure = failure
        self._on_end(self)


class GroupReport(NamedTuple):
    """What one rank knows of a group."""

    first_policy_version: int | None
    """Of its sessions' first tokens; None where it has sampled none."""
    num_ended: int
    age_s: float | None
    """Since when the last one that ended has ended (s): ranks of several machines have no clock in common."""


@dataclass(eq=False, kw_only=True, slots=True)
class Group:
    """The sessions of one group, wherever they run."""

    id: str
    batch: "Batch"
    jobs: list[Job] = field(default_factory=list)
    members: dict[int, Member] = field(default_factory=dict)
    """Those that run on this rank, by their places in `jobs`."""

    def report(self) -> GroupReport:
        """Say how far this rank's sessions are."""
        versions = [member.session.gate_stats.first_policy_version for member in self.members.values()]
        ended = [member.ended_s for member in self.members.values() if member.ended_s is not None]
        return GroupReport(
            first_policy_version=min((version for version in versions if version is not None), default=None),
            num_ended=len(ended),
            age_s=time.monotonic() - max(ended) if ended else None,
        )

    def merge(self, reports: Sequence[GroupReport]) -> GroupState:
        """Return the state of the group from what every rank knows of it."""
        versions = [report.first_policy_version for report in reports if report.first_policy_version is not None]
        is_finished = sum(report.num_ended for report in reports) == len(self.jobs)
        ages_s = [report.age_s for report in reports if report.age_s is not None]
        return GroupState(
            first_policy_version=min(versions, default=None), finished_s=-min(ages_s) if is_finished else None
        )


class Batch:
    """What one `start` began: groups, the queues of its jobs, and the cut of its stragglers.

    Args:
        jobs: Of all ranks.
        name: The same on all ranks, and of no other batch.
    """

    def __init__(self, jobs: Sequence[Job], ranks: Ranks, *, name: str, straggler_quantile: float | None) -> None:
        by_id: dict[str, Group] = {}
        self.places: list[tuple[Group, int]] = []
        """Of each job: its group, and its place there."""
        for job in jobs:
            group = by_id.setdefault(job.group_id, Group(id=job.group_id, batch=self))
            self.places.append((group, len(group.jobs)))
            group.jobs.append(job)
        self.groups = list(by_id.values())
        self.queues = JobQueues(ranks, name, self.places)
        self.cut = StragglerCut(len(jobs), straggler_quantile)
        self.started_s = time.monotonic()


class Report(NamedTuple):
    """What one rank tells the others while it waits."""

    failure: BaseException | None
    groups: list[GroupReport]
    agent_times_s: list[list[float | None]]
    """Of agents that ended since the last report, by open batch (`StragglerCut.take_noted`)."""


def list_batches(groups: Sequence[Group]) -> list[Batch]:
    """List the batches that groups are of, in their order."""
    return list(dict.fromkeys(group.batch for group in groups))


def exchange_results(places: Sequence[tuple[Group, int]], ranks: Ranks) -> list[RolloutResult]:
    """Return this rank's part of the results of sessions that have ended: with W ranks, the r-th of W equal parts.

    Token ids and log-probabilities of a session are some megabytes, which are sent only where they ran elsewhere.
    """
    length = len(places) // ranks.num_ranks
    to_each: list[dict[int, RolloutResult]] = [{} for _ in range(ranks.num_ranks)]
    for place, (group, index) in enumerate(places):
        if member := group.members.get(index):
            to_each[place // length][place] = member.result()
    mine = {place: result for part in ranks.exchange(to_each) for place, result in part.items()}
    return [mine[place] for place in sorted(mine)]
