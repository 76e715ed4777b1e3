"""Hold each distinct request of a session while it is answered, and the answer from then on.

An agent sends the same request again because an answer was lost on its way, or because it wants another one: after an
empty answer, or when it cannot use what it got. The first are answered from the record.
"""

import asyncio
from dataclasses import dataclass, field

from polar_trl.errors import WireError
from polar_trl.recording.live import LiveReply
from polar_trl.recording.log import SessionLog
from polar_trl.types import Call

MAX_REPLAYS = 3
"""An answer is given again so often, each time at the cost of a call of the budget; then another one is sampled."""


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
    num_replays: int = 0
    was_given: bool = False
    """Whether a connection has left with the answer."""
    sampled: bool = False
    """From here on it is recorded, whoever hangs up."""

    def has_failed(self) -> bool:
        """Tell whether the turn ended without an answer."""
        return self.task.done() and (self.task.cancelled() or self.task.exception() is not None)

    def is_empty(self) -> bool:
        """Tell whether the answer has nothing that an agent could go on with: no text and no tool call."""
        if not self.task.done() or self.has_failed():
            return False
        message = self.task.result().message
        return not (message.text.strip() or message.tool_calls)

    def result(self) -> Call:
        """Return the recorded call, or raise the error that ended the turn."""
        if self.task.cancelled():
            raise session_ended()
        error = self.task.exception()
        if error is None or isinstance(error, WireError):
            return self.task.result()
        raise internal_error() from error


class Turns:
    """The turns of a session, found by the question that each answers or answered.

    Args:
        log: Has a counter for each way in which a repeated request is answered.
    """

    def __init__(self, log: SessionLog) -> None:
        self.num_replays = 0
        """Of all turns."""
        self._log = log
        self._turns: dict[bytes, Turn] = {}

    def add(self, turn: Turn) -> None:
        """Have a turn answer its question from now on."""
        self._turns[turn.question] = turn

    def forget(self, turn: Turn) -> None:
        """Have a turn answer its question no longer."""
        if self._turns.get(turn.question) is turn:
            del self._turns[turn.question]

    def find(self, question: bytes, *, is_budget_used_up: bool) -> Turn | None:
        """Find the turn whose answer a request is to get; None where it is a new one, or is to be sampled anew."""
        turn = self._turns.get(question)
        if turn is None or (turn.was_given and is_budget_used_up):
            return None
        if not turn.task.done():
            self._log.count("retries_joined")
            return turn
        if turn.was_given and turn.is_empty():
            self._log.count("empty_answers_resampled")
        elif turn.num_replays >= MAX_REPLAYS:
            self._log.count("repeats_resampled")
        else:
            self._log.count("retries_replayed")
            turn.num_replays += 1
            self.num_replays += 1
            return turn
        self.forget(turn)
        return None


def session_ended() -> WireError:
    """Build the error for a request of a session that is being closed."""
    return WireError("this session has ended", status=401, kind="authentication", reason="")


def internal_error() -> WireError:
    """Build the error for a request that met a fault of ours."""
    return WireError("the proxy failed on this request; its log has the reason", status=500, kind="internal")
