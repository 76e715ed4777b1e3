"""Say how the processes of a run share its sessions: what they exchange, and which of them begins a job.

A job is begun by one rank, which claims it first. Each rank's part of a batch is a queue: its own rank takes jobs from
the front, and a rank that has places free and no job of its own left takes the last one of the longest queue.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

Job = TypeVar("Job")

_LAST = 1 << 32
"""One claim from the end of a queue; one from its front is 1. A counter of both is changed in one atomic addition."""


class Ranks(Protocol):
    """The processes of a run. `gather` and `exchange` are collectives, which one thread of each rank calls."""

    rank: int
    num_ranks: int

    def gather(self, value: Any) -> list[Any]:
        """Return the value of every rank."""

    def exchange(self, to_each: Sequence[Any]) -> list[Any]:
        """Send a value to each rank and return what each of them sent to this one."""

    def add(self, name: str, amount: int) -> int:
        """Add to a counter that all ranks share and return its new value, atomically. From any thread."""


class OneRank:
    """A run of one process."""

    rank = 0
    num_ranks = 1

    def __init__(self) -> None:
        self._counters: Counter[str] = Counter()

    def gather(self, value: Any) -> list[Any]:
        """Return its own value."""
        return [value]

    def exchange(self, to_each: Sequence[Any]) -> list[Any]:
        """Return what it sent."""
        return list(to_each)

    def add(self, name: str, amount: int) -> int:
        """Add to one of its counters. The caller sees to it that no other thread does."""
        self._counters[name] += amount
        return self._counters[name]


class JobQueues(Generic[Job]):
    """The jobs of one batch, as this rank sees and claims them. One thread at a time uses it.

    Claims of a queue are counted: with f from the front and e from the end, in whatever order, the jobs of a queue of
    n are all claimed once f + e = n. So a claim that makes the sum at most n has the f-th job from the front, or the
    e-th from the end, and no other rank has it.

    Args:
        name: Of the batch, the same on all ranks.
        jobs: Of the batch, alike on all ranks; each rank's queue has an equal part of them, in order.
    """

    def __init__(self, ranks: Ranks, name: str, jobs: Sequence[Job]) -> None:
        if len(jobs) % ranks.num_ranks:
            raise ValueError(f"{len(jobs)} jobs cannot be divided among {ranks.num_ranks} ranks")
        self._ranks = ranks
        self._name = name
        self._jobs = jobs
        self._length = len(jobs) // ranks.num_ranks
        self._waiting = set(range(ranks.num_ranks)) if jobs else set()
        """Ranks whose queues may have jobs left."""
        self.is_shared = False
        """Whether other ranks' jobs may be claimed: once every rank has begun those of its own that it has places
        for."""

    @property
    def is_empty(self) -> bool:
        """Whether all jobs are known to be claimed."""
        return not self._waiting

    def claim(self) -> Job | None:
        """Claim the first job of this rank, or else the last one of the longest queue; None where none is left."""
        job = self._claim(self._ranks.rank, 1)
        while job is None and self.is_shared and self._waiting:
            job = self._claim(max(sorted(self._waiting), key=self._count_left), _LAST)
        return job

    def _claim(self, queue: int, amount: int) -> Job | None:
        if queue not in self._waiting:
            return None
        from_end, from_front = divmod(self._ranks.add(self._key(queue), amount), _LAST)
        if from_front + from_end >= self._length:
            self._waiting.discard(queue)
        if from_front + from_end > self._length:
            return None
        index = from_front - 1 if amount == 1 else self._length - from_end
        return self._jobs[queue * self._length + index]

    def _count_left(self, queue: int) -> int:
        from_end, from_front = divmod(self._ranks.add(self._key(queue), 0), _LAST)
        return self._length - from_front - from_end

    def _key(self, queue: int) -> str:
        return f"{self._name}/{queue}"


def claim_oldest(waiting: list[JobQueues[Job]]) -> Job | None:
    """Claim a job of the oldest batch that has one for this rank; batches that are empty are removed."""
    for queues in list(waiting):
        job = queues.claim()
        if queues.is_empty:
            waiting.remove(queues)
        if job is not None:
            return job
    return None
