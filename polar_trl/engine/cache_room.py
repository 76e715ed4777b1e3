"""Choose whose calls the engine gets, by the room of its key-value cache. Pure.

With more sessions than the cache has room for, they push each other's histories out while their tools run, and every
call prefills its own again. So only some sessions are resident: their calls go to the engine at once and find their
history there; the others wait until a resident ends. Where all histories fit, all sessions are resident.

A session is resident from its first admitted call to its end. Residents grow, so room is kept for most of what
sessions have come to by their end. When they no longer fit all the same, those are evicted whose tools have run
longest, whose blocks are also the ones that the engine drops first (LRU). The sessions that wait come in the order of
their first calls.
"""

from collections import Counter, deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from polar_trl.types import TokenIds

CHUNK = 256
"""Tokens by which first prompts are compared: what sessions share there is in the cache once."""
NUM_ENDED = 64
"""Sessions, the last to end, of which the mean length is taken."""
RESERVED = 0.9
"""Share of that mean for which every resident has room. Simulated with 4 agents per slot (scripts/bench/bench_cache.py
--reserved 0 0.6 0.9): with none, 11 tokens are prefilled per sampled one, with this 3.0, as with an unlimited cache,
and 7% fewer tokens trained per second than with 0.6."""


@dataclass(eq=False, slots=True)
class _Session:
    chunks: tuple[int, ...]
    """Of its first prompt, each with a hash of all up to its end."""
    num_tokens: int
    """Of its longest prompt."""
    num_inside: int = 0
    """Calls in the engine."""
    is_resident: bool = False

    @property
    def num_own(self) -> int:
        """Tokens that no other session can share."""
        return self.num_tokens - CHUNK * len(self.chunks)


class CacheRoom:
    """Sessions of one engine, and which of them are resident.

    Args:
        capacity: Tokens of histories that the cache has room for.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._sessions: dict[Hashable, _Session] = {}
        """Residents in the order of last use, and all others."""
        self._shared: Counter[int] = Counter()
        """Chunk -> residents that have it."""
        self._num_own = 0
        self._num_inside = 0
        self._ended: deque[int] = deque(maxlen=NUM_ENDED)
        """Tokens of sessions that have ended."""

    @property
    def num_used(self) -> int:
        """Tokens of the residents' histories, shared ones once."""
        return self._num_own + CHUNK * len(self._shared)

    def is_resident(self, key: Hashable) -> bool:
        """Tell whether calls of a session are admitted at once."""
        return key in self._sessions and self._sessions[key].is_resident

    def admit(self, key: Hashable, prompt_ids: TokenIds) -> bool:
        """Admit a call of a session, or say that it has to wait. Each admitted one is followed by a `leave`.

        Never all wait: into an engine without a call every call is admitted.
        """
        session = self._sessions.get(key)
        if session is None:
            session = self._sessions[key] = _Session(_hash_chunks(prompt_ids), len(prompt_ids))
        if not session.is_resident:
            num_more = session.num_own + CHUNK * sum(chunk not in self._shared for chunk in session.chunks)
            num_growing = self._expect_growth([session])
            if self._num_inside and self.num_used + num_more + num_growing > self._capacity:
                return False
            self._settle(session)
        grown = max(len(prompt_ids) - session.num_tokens, 0)
        session.num_tokens += grown
        self._num_own += grown
        session.num_inside += 1
        self._num_inside += 1
        self._touch(key)
        self._evict()
        return True

    def leave(self, key: Hashable) -> None:
        """Note that a call has its answer."""
        self._num_inside -= 1
        if key in self._sessions:  # a session's last call may outlive it
            self._sessions[key].num_inside -= 1
            self._touch(key)

    def forget(self, key: Hashable) -> None:
        """Note that a session has ended."""
        session = self._sessions.pop(key, None)
        if session is None:
            return
        self._ended.append(session.num_tokens)
        if session.is_resident:
            self._unsettle(session)

    def _expect_growth(self, newcomers: Iterable[_Session]) -> float:
        """Tokens that residents and newcomers lack of what they are expected to come to."""
        if not self._ended:
            return 0.0
        expected = RESERVED * sum(self._ended) / len(self._ended)
        residents = (session for session in self._sessions.values() if session.is_resident)
        return sum(max(expected - session.num_tokens, 0.0) for session in (*residents, *newcomers))

    def _touch(self, key: Hashable) -> None:
        self._sessions[key] = self._sessions.pop(key)

    def _evict(self) -> None:
        """Down to what fits; sessions with a call in the engine stay."""
        for session in self._sessions.values():
            if self.num_used <= self._capacity:
                return
            if session.is_resident and not session.num_inside:
                self._unsettle(session)

    def _settle(self, session: _Session) -> None:
        session.is_resident = True
        self._num_own += session.num_own
        self._shared.update(session.chunks)

    def _unsettle(self, session: _Session) -> None:
        session.is_resident = False
        self._num_own -= session.num_own
        self._shared.subtract(session.chunks)
        for chunk in session.chunks:
            if not self._shared[chunk]:
                del self._shared[chunk]


def _hash_chunks(prompt_ids: TokenIds) -> tuple[int, ...]:
    """Hash every whole chunk together with what precedes it."""
    chunks: list[int] = []
    for start in range(0, len(prompt_ids) - CHUNK + 1, CHUNK):
        chunks.append(hash((chunks[-1] if chunks else 0, *prompt_ids[start : start + CHUNK])))
    return tuple(chunks)
