"""Close what a trainer holds open (sessions, proxy, sandboxes, engine) also where nobody calls `close`.

That is at the end of the interpreter, when the trainer is garbage, and before another trainer is built in the same
process, since vLLM's settings and process group are one per process.
"""

import atexit
import threading
import weakref
from collections.abc import Callable
from typing import Any

from polar_trl.errors import ConfigError

_OPEN: list["OpenParts"] = []
"""Of this process, oldest first."""


class OpenParts:
    """What has to be closed, the newest first. Knows nothing of its owner, whose garbage it outlives.

    Args:
        owner: Once it is garbage, everything is closed.
    """

    def __init__(self, owner: Any) -> None:
        self._parts: list[tuple[Any, Callable[[], None]]] = []
        # on a thread of its own: garbage is collected on any thread, also on one that closing waits for
        closing = weakref.finalize(owner, lambda: threading.Thread(target=self.close, name="polar-close").start())
        closing.atexit = False
        _OPEN.append(self)

    def add(self, part: Any, close: Callable[[], None]) -> None:
        """Have a part closed."""
        self._parts.append((part, close))

    def __bool__(self) -> bool:
        return bool(self._parts)

    def require(self) -> None:
        """Raise `ConfigError` if the owner, a trainer, is closed."""
        if not self._parts:
            raise ConfigError(
                'this trainer is closed; build another one, whose train(resume_from_checkpoint="auto") goes on'
            )

    def close(self, *, but: Any = None) -> None:
        """Close every part that is open, all of them also where one raises; then the first error is raised.

        Args:
            but: A part that somebody else goes on to use.
        """
        if self in _OPEN:
            _OPEN.remove(self)
        errors: list[BaseException] = []
        while self._parts:
            part, close = self._parts.pop()
            if part is not but:
                try:
                    close()
                except BaseException as error:  # noqa: BLE001 - raised below, once the others are closed
                    errors.append(error)
        if errors:
            raise errors[0]


def take_over(owner: Any, *, but: Any = None) -> OpenParts:
    """Close the parts of earlier trainers of this process, and begin the list of the next one's.

    Args:
        but: A part that the next one goes on to use.
    """
    close_all(but=but)
    return OpenParts(owner)


def close_all(*, but: Any = None) -> None:
    """Close the parts of every trainer of this process, but for a part that is still used."""
    while _OPEN:
        _OPEN[-1].close(but=but)


atexit.register(close_all)
