"""Notice that this process did not run for a while: stopped by a signal or a debugger, or its machine stood still.

The clocks by which agents and graders are judged go on meanwhile, and nobody answers model calls. A look that comes
late says little by itself, since another thread may have held the interpreter's lock; where the whole process used no
CPU time either, it did not run. A machine that sleeps is no such case: the monotonic clock sleeps with it.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

LOOK_INTERVAL_S = 0.25
MIN_STOP_S = 2.0
"""A shorter time is not told from a busy machine."""
MAX_CPU_SHARE = 0.1


class Heartbeat:
    """Counts the time for which this process was stopped, as long as somebody looks every `LOOK_INTERVAL_S`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stopped_s = 0.0
        self._last = (time.monotonic(), time.process_time())

    def look(self) -> float:
        """Return the seconds for which the process was stopped so far. From any thread."""
        with self._lock:
            now, cpu = time.monotonic(), time.process_time()
            gap_s = now - self._last[0]
            if gap_s > MIN_STOP_S and cpu - self._last[1] < MAX_CPU_SHARE * gap_s:
                self._stopped_s += gap_s
            self._last = (now, cpu)
            return self._stopped_s

    @contextmanager
    def looking(self) -> Iterator[Self]:
        """Look, from a thread of its own, while the block runs."""
        has_ended = threading.Event()

        def watch() -> None:
            while not has_ended.wait(LOOK_INTERVAL_S):
                self.look()

        thread = threading.Thread(target=watch, name="polar-heartbeat", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            has_ended.set()
            thread.join()
