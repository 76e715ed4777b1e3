"""Connect the ranks of a run by torch.distributed, on the CPU and apart from the gradients' collectives."""

import os
import pickle
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from polar_trl.rollout.ranks import OneRank, Ranks


class DistributedRanks:
    """Implements `Ranks` with gloo and a store of counters, which rank 0 keeps. Making one is a collective.

    Args:
        timeout_s: For how long a rank waits for the others before it fails, as in the collectives of gradients.
    """

    def __init__(self, timeout_s: float) -> None:
        timeout = timedelta(seconds=timeout_s)
        self.rank = dist.get_rank()
        self.num_ranks = dist.get_world_size()
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        is_first = self.rank == 0
        store = dist.TCPStore(host, 0, is_master=True, timeout=timeout, wait_for_workers=False) if is_first else None
        port = self.gather(store.port if store is not None else None)[0]
        self._store = store if store is not None else dist.TCPStore(host, port, is_master=False, timeout=timeout)

    def gather(self, value: Any) -> list[Any]:
        """Return the value of every rank."""
        values: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(values, value, group=self._group)
        return values

    def exchange(self, to_each: Sequence[Any]) -> list[Any]:
        """Send a value to each rank and return what each of them sent to this one."""
        parts = [pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL) for value in to_each]
        sizes = [len(part) for part in parts]
        received_sizes = [of_rank[self.rank] for of_rank in self.gather(sizes)]
        received = torch.empty(sum(received_sizes), dtype=torch.uint8)
        sent = torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)
        dist.all_to_all_single(received, sent, received_sizes, sizes, group=self._group)
        return [pickle.loads(part.numpy().tobytes()) for part in received.split(received_sizes)]

    def add(self, name: str, amount: int) -> int:
        """Add to a counter that all ranks share and return its new value, atomically. From any thread."""
        return int(self._store.add(name, amount))


def connect_ranks(num_ranks: int, *, timeout_s: float) -> Ranks:
    """Return the ranks of this run (a collective where there are several), see `DistributedRanks`."""
    return DistributedRanks(timeout_s) if num_ranks > 1 else OneRank()
