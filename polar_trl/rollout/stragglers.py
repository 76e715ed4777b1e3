"""Cut stragglers: limit the time of a batch's last agents by that of the others.

Once the stated share of a batch's agents has ended, the slowest of those sets the limit for all others: who has used
as much agent time is stopped, and who begins later gets as much and no more. Sessions that could not be prepared, and
those whose calls failed on our side, say nothing of how long a task takes and do not count.

Each of several ranks has a cut of its own for the same batch. They tell each other what they note while they wait for
sessions, not while they train.
"""

import math
import threading
from collections.abc import Sequence


class StragglerCut:
    """The time limit of one batch's agents. Used by the threads of its sessions.

    Args:
        num_sessions: Of the batch, on all ranks.
        quantile: The share (0 < q < 1) that has to have ended; None never cuts.
    """

    def __init__(self, num_sessions: int, quantile: float | None) -> None:
        self.limit_s = math.inf
        """Agent time (s, without what was held) at which an agent that still runs is a straggler."""
        self._num_counted = num_sessions
        self._quantile = quantile
        self._times_s: list[float] = []
        self._noted: list[float | None] = []
        self._lock = threading.Lock()

    def note(self, agent_s: float | None) -> None:
        """Note after how long an agent of this rank has ended (s); None for a session that does not count."""
        with self._lock:
            self._noted.append(agent_s)
            self._count(agent_s)

    def take_noted(self) -> list[float | None]:
        """Return what was noted here since the last time, for the other ranks."""
        with self._lock:
            noted, self._noted = self._noted, []
            return noted

    def note_others(self, noted: Sequence[float | None]) -> None:
        """Note what another rank has noted."""
        with self._lock:
            for agent_s in noted:
                self._count(agent_s)

    def _count(self, agent_s: float | None) -> None:
        if agent_s is None:
            self._num_counted -= 1
        else:
            self._times_s.append(agent_s)
        if self._quantile is None or not self._times_s or self.limit_s < math.inf:
            return
        # rounded, since 0.07 * 100 is a little more than 7
        if len(self._times_s) >= math.ceil(round(self._quantile * self._num_counted, 9)):
            self.limit_s = max(self._times_s)
