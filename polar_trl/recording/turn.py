"""Hold one distinct request of a session while it is answered, and the answer from then on."""

import asyncio
from dataclasses import dataclass, field

from polar_trl.errors import WireError
from polar_trl.recording.live import LiveReply
from polar_trl.types import Call


@dataclass(eq=False, kw_only=True, slots=True)
class Turn:
    """One distinct request of a session: the task that answers it, and how many connections wait for it."""

    number: int
    question: bytes
    """Its identity, by which a retry is recognized (`ReadRequest.question`)."""
    started_s: float
    num_prompt_tokens: int
    live: LiveReply | None = None
    """What can be told of the answer before its end; None where nobody is to hear it."""
    task: "asyncio.Task[Call]" = field(init=False)
    num_waiting: int = 0
    sampled: bool = False
    """From here on it is recorded, whoever hangs up."""

    def has_failed(self) -> bool:
        """Tell whether the turn ended without an answer."""
        return self.task.done() and (self.task.cancelled() or self.task.exception() is not None)

    def result(self) -> Call:
        """Return the recorded call, or raise the error that ended the turn."""
        if self.task.cancelled():
            raise session_ended()
        error = self.task.exception()
        if error is None or isinstance(error, WireError):
            return self.task.result()
        raise internal_error() from error


def session_ended() -> WireError:
    """Build the error for a request of a session that is being closed."""
    return WireError("this session has ended", status=401, kind="authentication")


def internal_error() -> WireError:
    """Build the error for a request that met a fault of ours."""
    return WireError("the proxy failed on this request; its log has the reason", status=500, kind="internal")
