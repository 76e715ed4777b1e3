"""Count and log the requests of a session that are answered with an error of the client's (HTTP 4xx).

An agent that is refused may end there, with an exit code of 0: its work then says nothing of the model.
"""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from polar_trl.errors import WireError
from polar_trl.recording.log import SessionLog

_log = logging.getLogger(__name__)


class Refusals:
    """The refused requests of one session.

    Args:
        log: Has a counter for each reason, and the words of the last refusal.
    """

    def __init__(self, log: SessionLog) -> None:
        self._log = log
        self._told: set[str] = set()

    def note(self, error: WireError, *, is_call: bool) -> None:
        """Count an error if it is a refusal, and log the first of each reason.

        Args:
            error: What the agent is told.
            is_call: Whether the model was asked, and not for a count of tokens or a path that nobody serves.
        """
        if not (error.reason and 400 <= error.status < 500 and error.kind != "overloaded"):
            return
        name = "context_overflows" if error.kind == "context_overflow" else f"refused_{error.reason}"
        self._log.count(name)
        if error.reason not in self._told:
            self._told.add(error.reason)
            _log.warning("session %s: a request was refused (HTTP %d): %s", self._log.session_id, error.status, error)
        self._log.last_refusal = str(error)
        if is_call and not error.is_agents_own:
            self._log.unanswered_refusal = str(error)

    @asynccontextmanager
    async def noting(self, *, is_call: bool) -> AsyncIterator[None]:
        """Note the refusals that are raised in the block."""
        try:
            yield
        except WireError as error:
            self.note(error, is_call=is_call)
            raise

    def go_on(self) -> None:
        """Note that the policy was asked something that is answered: the session does not end on a refusal."""
        self._log.unanswered_refusal = ""
