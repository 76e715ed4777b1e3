"""Look ahead in the data loader: order sandboxes for the next batch, and give its rows for an early start.

Sandboxes for a later batch are ordered once the earlier ones have theirs.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from polar_trl.grpo.dataset import DataRow, parse_task
from polar_trl.sandbox.pool import WarmPool


class UpcomingBatches:
    """Sits between the data loader and its collator. A loader fetches one batch ahead of the trainer.

    Args:
        pool: Takes orders for the batch after the current one, `depth` of them, once that one has been rolled out;
            None where sandboxes are not made ahead.
        repeats: How many times in a row the loader gives each generation batch.
    """

    def __init__(self, pool: WarmPool | None, *, repeats: int) -> None:
        self._pool = pool
        self._repeats = repeats
        self._num_collated = 0
        self._batches: deque[list[DataRow]] = deque()

    def wrap(self, collate: Callable[[list[DataRow]], Any]) -> Callable[[list[DataRow]], Any]:
        """The collator, which notes what passes through."""

        def note(rows: list[DataRow]) -> Any:
            if self._num_collated % self._repeats == 0:
                self._batches.append(rows)
                if len(self._batches) == 1:
                    self._order(rows)
            self._num_collated += 1
            return collate(rows)

        return note

    def skip(self, num_batches: int) -> None:
        """The loader starts after so many batches, which were collated in an earlier process."""
        self._num_collated = num_batches

    @property
    def next_rows(self) -> list[DataRow] | None:
        """Rows of the batch after the current one; None where the loader has not fetched it, as at an epoch's end."""
        return self._batches[1] if len(self._batches) > 1 else None

    def finish_rollouts(self) -> None:
        """The oldest batch was rolled out; the next one's sandboxes may be made."""
        if self._batches:
            self._batches.popleft()
        if self._batches:
            self._order(self._batches[0])

    def _order(self, rows: Sequence[DataRow]) -> None:
        if self._pool is not None:
            for row in rows[: self._pool.depth]:
                self._pool.order(parse_task(row))
