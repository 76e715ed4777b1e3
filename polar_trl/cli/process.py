"""Set up the process of a subcommand that runs sessions: its signals, and its standard output.

Both are put back afterwards, but for signals that came: the process is ending then.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C inside the block. The second one is answered, the next signal ends the process at once.

    A second KeyboardInterrupt would break off the removal of sandboxes, or be printed by the interpreter at its end.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    heeded = [number for number, handler in before.items() if number == signal.SIGTERM or handler != signal.SIG_IGN]
    came = False

    def interrupt(_signum: int, _frame: Any) -> None:
        nonlocal came
        came = True
        for number in heeded:
            signal.signal(number, answer if number == signal.SIGINT else signal.SIG_DFL)
        raise KeyboardInterrupt

    def answer(signum: int, _frame: Any) -> None:
        signal.signal(signum, signal.SIG_DFL)
        os.write(2, b"polar-trl: stopping, sandboxes are being removed; once more ends it at once\n")

    for number in heeded:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in heeded if not came else ():
            signal.signal(number, before[number])


@contextmanager
def stdout_on_stderr() -> Iterator[None]:
    """Send all prints inside the block, C++ included, to standard error: the answer stands alone."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
