"""Send what libraries print and log to a file of the run, so that the terminal has the run's own lines.

While an engine and a model are built, that is everything: also what C and C++ code writes to the standard streams.
While a run goes on it is what libraries log; prints are then the user's own, and a library's errors are shown, too.
"""

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from transformers.utils import logging as transformers_logging

LIBRARIES_FILE = "libraries.log"
LIBRARIES = (
    *("vllm", "transformers", "trl", "accelerate", "torch", "datasets", "peft", "huggingface_hub", "httpx"),
    *("DeepSpeed", "deepspeed", "bitsandbytes"),
)
"""Names of their loggers."""


class LibraryLog:
    """The file. Several ranks append to it.

    Args:
        folder: Of the run, which is there.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / LIBRARIES_FILE
        self._is_logged = False

    @contextmanager
    def everything(self) -> Iterator[None]:
        """Send all that is written to the standard streams inside the block to the file, but for our own warnings.

        An exception gets a note that names the file.
        """
        # never closed by hand: handlers of loggers that are made inside may hold it
        file = self.path.open("a", buffering=1, encoding="utf-8", errors="replace")
        streams = (sys.stdout, sys.stderr)
        for stream in streams:
            stream.flush()
        # in a notebook these streams do not lead to the file descriptors
        moved = {handler: handler.stream for handler in _list_handlers() if handler.stream in streams}
        for handler in moved:
            handler.setStream(file)
        kept = [os.dup(number) for number in (1, 2)]
        for number in (1, 2):
            os.dup2(file.fileno(), number)
        try:
            with _own_warnings(streams[1], kept[1]):
                sys.stdout = sys.stderr = file
                yield
        except BaseException as error:
            error.add_note(f"what libraries printed before is in {self.path}")
            raise
        finally:
            file.flush()
            sys.stdout, sys.stderr = streams
            for number, copy in zip((1, 2), kept, strict=True):
                os.dup2(copy, number)
                os.close(copy)
            for handler in _list_handlers():
                if handler.stream is file:
                    handler.setStream(moved.get(handler, sys.stderr))

    @contextmanager
    def logged(self) -> Iterator[None]:
        """Send what libraries log inside the block, and their warnings, to the file; errors are shown as well.

        A block within a block changes nothing.
        """
        if self._is_logged:
            yield
            return
        file = logging.FileHandler(self.path, encoding="utf-8", errors="replace")
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        shown = logging.StreamHandler()
        loggers = [logging.getLogger(name) for name in LIBRARIES]
        # those that print by logging's last resort alone; where somebody has set logging up, it is theirs
        bare = [logger for logger in loggers if not logger.handlers and not logging.root.handlers]
        levels = {handler: handler.level for handler in _list_handlers()}
        shown.setLevel(logging.ERROR)
        for handler, level in levels.items():
            handler.setLevel(max(level, logging.ERROR))
        for logger in loggers:
            logger.addHandler(file)
        for logger in bare:
            logger.addHandler(shown)
            logger.propagate = False
        self._is_logged = True
        try:
            with _warnings_of_libraries(file), _no_bars():
                yield
        finally:
            self._is_logged = False
            for logger in bare:
                logger.propagate = True
                logger.removeHandler(shown)
            for logger in loggers:
                logger.removeHandler(file)
            for handler, level in levels.items():
                handler.setLevel(level)
            file.close()


@contextmanager
def _own_warnings(stream: Any, descriptor: int) -> Iterator[None]:
    """Show the warnings of this package, which would be printed on standard error, on the stream.

    Args:
        descriptor: Where file descriptor 2 leads outside of the block.
    """
    if logging.root.handlers:  # they go where somebody wants them
        yield
        return
    try:
        is_plain = stream.fileno() == 2  # that of a notebook is not
    except (OSError, ValueError):
        is_plain = False
    target = os.fdopen(os.dup(descriptor), "w", encoding="utf-8", errors="replace") if is_plain else stream
    handler, ours = logging.StreamHandler(target), logging.getLogger("polar_trl")
    handler.setLevel(logging.WARNING)
    ours.addHandler(handler)
    ours.propagate, propagated = False, ours.propagate
    try:
        yield
    finally:
        ours.propagate = propagated
        ours.removeHandler(handler)
        if is_plain:
            target.close()


@contextmanager
def _warnings_of_libraries(file: logging.Handler) -> Iterator[None]:
    """Send warnings that installed packages raise inside the block to the handler; a user's own are shown."""
    show = warnings.showwarning

    def show_apart(message: Any, category: Any, filename: str, lineno: int, *rest: Any, **named: Any) -> None:
        if "site-packages" not in filename:
            show(message, category, filename, lineno, *rest, **named)
            return
        text = warnings.formatwarning(message, category, filename, lineno)
        file.handle(logging.LogRecord("py.warnings", logging.WARNING, filename, lineno, text, None, None))

    warnings.showwarning = show_apart
    try:
        yield
    finally:
        warnings.showwarning = show


@contextmanager
def _no_bars() -> Iterator[None]:
    """Keep transformers from drawing progress bars, as for each file of a checkpoint."""
    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()


def _list_handlers() -> "list[logging.StreamHandler[IO[str]]]":
    """List the handlers of libraries' loggers that write to a stream."""
    handlers: dict[int, Any] = {}
    for name in LIBRARIES:
        for handler in logging.getLogger(name).handlers:
            if isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler):
                handlers[id(handler)] = handler
    return list(handlers.values())
