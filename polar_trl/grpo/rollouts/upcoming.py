"""Look ahead at the batches that the data loader has fetched: order their sandboxes, and know their rows early.

Sandboxes of a batch are ordered only once the batch before it has been rolled out.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from polar_trl.grpo.dataset import DataRow
from polar_trl.sandbox.base import SandboxBackend
from polar_trl.types import Task


class UpcomingBatches:
    """Sits between the data loader and its collator. A loader fetches one batch ahead of the trainer.

    Args:
        backend: Takes orders for the batch after the current one, `depth` of them, once that one has been rolled
            out; None where none are to be made ahead.
        tasks: By id.
        repeats: How many times in a row the loader gives each generation batch.
    """

    def __init__(self, backend: SandboxBackend | None, tasks: Mapping[str, Task], *, repeats: int) -> None:
        self._backend = backend
        self._tasks = tasks
        self._repeats = repeats
        self._num_collated = 0
        self._batches: deque[list[DataRow]] = deque()

    def wrap(self, collate: Callable[[list[DataRow]], Any]) -> Callable[[list[DataRow]], Any]:
        """Wrap the collator so that the rows that pass through it are noted."""

        def note(rows: list[DataRow]) -> Any:
            if self._num_collated % self._repeats == 0:
                self._batches.append(rows)
                if len(self._batches) == 1:
                    self._order(rows)
            self._num_collated += 1
            return collate(rows)

        return note

    def skip(self, num_batches: int) -> None:
        """Count batches that were collated in an earlier process: the loader starts after them."""
        self._num_collated = num_batches

    @property
    def next_rows(self) -> list[DataRow] | None:
        """Rows of the batch after the current one; None where the loader has not fetched it, as at an epoch's end."""
        return self._batches[1] if len(self._batches) > 1 else None

    def finish_rollouts(self) -> None:
        """Drop the oldest batch, which was rolled out, and order the sandboxes of the next one."""
        if self._batches:
            self._batches.popleft()
        if self._batches:
            self._order(self._batches[0])

    def _order(self, rows: Sequence[DataRow]) -> None:
        if self._backend is not None:
            for row in rows[: self._backend.depth]:
                self._backend.order(self._tasks[row["task_id"]])
