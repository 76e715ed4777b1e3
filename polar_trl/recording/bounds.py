"""End a session that goes past what it may use, as its agent's own doing."""

from collections.abc import Callable

from polar_trl.errors import WireError
from polar_trl.recording.log import SessionLog
from polar_trl.recording.turn import session_ended

BUDGET_TEXT = "The budget of this session is used up. Stop here: no further work will be counted."
MAX_BUDGET_MESSAGES = 20
"""A session out of budget is told so this often, and on record; later requests are refused without being read."""


class SessionBounds:
    """Limits of one session; past them it ends, and its requests get `WireError`.

    Args:
        log: Has the counter of the limit that the session went past.
        on_exceeded: Stops what is running.
        max_requests: Requests and new connections, whatever becomes of them.
    """

    def __init__(self, log: SessionLog, on_exceeded: Callable[[], None], *, max_requests: int) -> None:
        self.is_closed = False
        self._log = log
        self._on_exceeded = on_exceeded
        self._max_requests = max_requests
        self._num_requests = 0
        self._num_budget_messages = 0

    @property
    def has_ended(self) -> bool:
        """True once no further request is answered."""
        return self.is_closed or bool(self._log.exceeded)

    def check_open(self) -> None:
        """Raise the `WireError` for a request that is not answered any more."""
        if self.is_closed:
            raise session_ended()
        if self._log.exceeded:
            message = f"this session went past its limit of {self._log.exceeded} and has ended"
            raise WireError(message, status=403, kind="authentication", reason="")
        if self._num_budget_messages >= MAX_BUDGET_MESSAGES:
            self.count_budget_message()
            raise WireError(BUDGET_TEXT, status=403, kind="authentication", reason="")

    def count_budget_message(self) -> None:
        """Count a request that came after the budget was used up."""
        self._num_budget_messages += 1
        self._log.count("budget_messages")

    def count_request(self) -> None:
        """Count a request or a new connection."""
        self._num_requests += 1
        if self._num_requests > self._max_requests:
            self.exceed("requests")

    def exceed(self, limit: str) -> None:
        """End the session because it went past a limit. What was sampled is still recorded."""
        if not self.has_ended:
            self._log.note_exceeded(limit)
            self._on_exceeded()
