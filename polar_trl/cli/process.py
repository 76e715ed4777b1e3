"""What a subcommand that runs sessions does with its process: SIGTERM, and what libraries print.

Both are put back as they were.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Inside the block SIGTERM is Ctrl-C; the second one ends the process at once."""

    def interrupt(signum: int, _frame: Any) -> None:
        signal.signal(signum, signal.SIG_DFL)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def stdout_on_stderr() -> Iterator[None]:
    """Inside the block, what anything prints, C++ included, goes to standard error: the answer stands alone."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
