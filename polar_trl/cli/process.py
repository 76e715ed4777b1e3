"""Set up the process of a subcommand that runs sessions: its signals, and its standard output.

Both are put back afterwards, but for signals that came: the process is ending then.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

LAUNCHERS = {
    *("accelerate", "accelerate-launch", "accelerate.commands.launch", "accelerate.commands.accelerate_cli"),
    *("torchrun", "torch.distributed.run", "torch.distributed.launch", "deepspeed", "deepspeed.launcher.launch"),
}
"""Commands and modules that start a script and wait for it."""
_POLL_INTERVAL_S = 0.5


@contextmanager
def sigterm_interrupts(*, with_launcher: bool = False) -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C inside the block. The second one is answered, the next signal ends the process at once.

    A second KeyboardInterrupt would break off the removal of sandboxes, or be printed by the interpreter at its end;
    and who stops a whole process group under torch's launcher sends two, one of them through the launcher.

    Args:
        with_launcher: Take the end of the launcher that started this process for such a signal too: `accelerate
            launch` passes none on. A shell, nohup or a container's init that ends is none.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    heeded = [number for number, handler in before.items() if number == signal.SIGTERM or handler != signal.SIG_IGN]
    came = False

    def interrupt(_signum: int, _frame: Any) -> None:
        nonlocal came
        came = True
        for number in heeded:
            signal.signal(number, answer)
        raise KeyboardInterrupt

    def answer(signum: int, _frame: Any) -> None:
        signal.signal(signum, signal.SIG_DFL)
        os.write(2, b"polar-trl: stopping, sandboxes are being removed; once more ends it at once\n")

    for number in heeded:
        signal.signal(number, interrupt)
    has_left = threading.Event()

    def watch(launcher: int) -> None:
        while os.getppid() == launcher:
            if has_left.wait(_POLL_INTERVAL_S):
                return
        if not came:
            with suppress(OSError):  # the terminal may be gone with it
                os.write(2, f"the launcher (process {launcher}) has ended, and so does what it started\n".encode())
            os.kill(os.getpid(), signal.SIGTERM)

    parent = os.getppid()
    if with_launcher and is_launcher(parent):
        threading.Thread(target=watch, args=(parent,), name="polar-launcher", daemon=True).start()
    try:
        yield
    finally:
        has_left.set()
        for number in heeded if not came else ():
            signal.signal(number, before[number])


@contextmanager
def interrupted_once() -> Iterator[None]:
    """Treat SIGTERM and the end of the terminal as Ctrl-C inside the block; a second signal ends the process at once.

    One that was ignored before, as nohup does, stays so.
    """
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    heeded = [number for number, handler in before.items() if handler != signal.SIG_IGN]

    def interrupt(_signum: int, _frame: Any) -> None:
        for number in heeded:
            signal.signal(number, signal.SIG_DFL)
        raise KeyboardInterrupt

    for number in heeded:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in heeded:
            signal.signal(number, before[number])


def is_launcher(pid: int) -> bool:
    """Tell whether a process is a launcher of training scripts, by its command line."""
    try:
        words = iter(Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0"))
    except OSError:
        return False
    program = Path(next(words)).name
    if not program.startswith("python"):
        return program in LAUNCHERS
    for word in words:  # the script, or the module after -m
        if word == "-m":
            return next(words, "") in LAUNCHERS
        if word in ("-W", "-X"):
            next(words, "")
        elif not word.startswith("-"):
            return Path(word).name in LAUNCHERS
    return False


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
