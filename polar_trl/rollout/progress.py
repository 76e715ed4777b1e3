"""Show a progress bar of how many sessions are in each stage."""

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tqdm import tqdm


class StageProgress:
    """The bar. Sessions enter and leave stages whether it is shown or not.

    Args:
        stages: Those that it names.
    """

    def __init__(self, stages: Sequence[str]) -> None:
        self._stages = stages
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._bar = tqdm(disable=True)

    @contextmanager
    def showing(self, num_sessions: int) -> Iterator[None]:
        """Show a bar inside the block, which is full when so many sessions have ended; on a terminal alone."""
        self._bar = tqdm(total=num_sessions, desc="rollouts", unit="session", leave=False, disable=None)
        try:
            yield
        finally:
            self._bar.close()

    def enter(self, stage: str) -> None:
        """Count a session into a stage."""
        self._change(stage, +1)

    def leave(self, stage: str) -> None:
        """Count a session out of a stage."""
        self._change(stage, -1)

    def show_ended(self, num_sessions: int) -> None:
        """Show how many sessions have ended, on all ranks; stages are those of this one."""
        with self._lock:
            self._bar.update(num_sessions - self._bar.n)

    def _change(self, stage: str, by: int) -> None:
        with self._lock:
            self._counts[stage] += by
            self._bar.set_postfix({name: self._counts[name] for name in self._stages}, refresh=False)
            self._bar.update(0)
