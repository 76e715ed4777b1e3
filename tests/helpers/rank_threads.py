"""Run several ranks as threads of this process."""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from polar_trl.rollout.ranks import Ranks

Result = TypeVar("Result")


class Shared:
    """What all ranks see."""

    def __init__(self, num_ranks: int) -> None:
        self.barrier = threading.Barrier(num_ranks, timeout=60)
        self.values: list[Any] = [None] * num_ranks
        self.counters: Counter[str] = Counter()
        self.lock = threading.Lock()


class ThreadRanks:
    """Implements `Ranks`: one of several threads."""

    def __init__(self, rank: int, num_ranks: int, shared: Shared) -> None:
        self.rank, self.num_ranks, self._shared = rank, num_ranks, shared

    def gather(self, value: Any) -> list[Any]:
        self._shared.values[self.rank] = value
        self._shared.barrier.wait()
        values = list(self._shared.values)
        self._shared.barrier.wait()
        return values

    def exchange(self, to_each: Sequence[Any]) -> list[Any]:
        return [sent[self.rank] for sent in self.gather(list(to_each))]

    def add(self, name: str, amount: int) -> int:
        with self._shared.lock:
            self._shared.counters[name] += amount
            return self._shared.counters[name]


def make_ranks(num_ranks: int) -> list[ThreadRanks]:
    shared = Shared(num_ranks)
    return [ThreadRanks(rank, num_ranks, shared) for rank in range(num_ranks)]


def run_ranks(num_ranks: int, function: Callable[[Ranks], Result]) -> list[Result]:
    """Call a function once per rank at the same time; what each returns, by rank."""
    with ThreadPoolExecutor(num_ranks) as threads:
        return list(threads.map(function, make_ranks(num_ranks)))
