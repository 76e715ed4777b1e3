"""Hold model calls in front of the engine while the weights change, or its cache has no room for their session.

Sessions stay open over a training step this way: an agent waits for its HTTP answer, hears pings, and knows nothing of
it. No call is cut in two: `hold` returns once every call that was let through has its answer, so all tokens of a call
have one policy version.

Sampling is stopped in four ways, each with a verb of its own:

| verb | of | what stops |
|---|---|---|
| hold, release | `Gate`, `Proxy` | further calls wait here; those that were let through get their answers first |
| pause | `VllmEngine.paused` | the engine thread finishes what it has and stands still: weights can be pushed |
| sleep, wake | `ColocatedVllm` | the engine's memory is the trainer's |
| close | `VllmEngine`, `OpenAIServer` | everything, for good; requests in flight fail |
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from polar_trl.engine.cache_room import CacheRoom
from polar_trl.types import TokenIds


class GateStats:
    """Policy version and held time of one session's calls. Written on the event loop, read from any thread."""

    def __init__(self) -> None:
        self.first_policy_version: int | None = None
        """The version that the session's first call was let through to; None before that."""
        self._num_waiting = 0
        # one value, so that a reader never sees half of a change
        self._held: tuple[float, float | None] = (0.0, None)

    @property
    def held_s(self) -> float:
        """Seconds for which at least one call was held, up to now."""
        total, since = self._held
        return total if since is None else total + time.monotonic() - since

    def begin_wait(self) -> None:
        """Note that one more call is held."""
        self._num_waiting += 1
        if self._num_waiting == 1:
            self._held = (self._held[0], time.monotonic())

    def end_wait(self) -> None:
        """Note that one call less is held."""
        self._num_waiting -= 1
        if self._num_waiting == 0:
            self._held = (self.held_s, None)


@dataclass(eq=False, slots=True)
class _Call:
    """A call at the gate."""

    gate_stats: GateStats
    prompt_ids: TokenIds
    admitted: asyncio.Future[None]


class Gate:
    """Lets calls through until it is told to hold them. Everything happens on one event loop.

    Args:
        capacity: Tokens for which the engine's key-value cache has room: sessions beyond it wait here, see
            `CacheRoom`. None lets all through.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self._room = None if capacity is None else CacheRoom(capacity)
        self._is_open = True
        self._waiting: list[_Call] = []
        self._first_calls: dict[GateStats, int] = {}
        """Session -> the order of its first call."""
        self._num_sessions = 0
        self._num_inside = 0
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    @asynccontextmanager
    async def passing(self, gate_stats: GateStats, prompt_ids: TokenIds = ()) -> AsyncIterator[None]:
        """Wait while calls are held, or the session's history has no room; a `hold` waits for the end of the block.

        Args:
            gate_stats: The session's own.
            prompt_ids: [P], of the call.
        """
        if gate_stats not in self._first_calls:
            self._num_sessions += 1
            self._first_calls[gate_stats] = self._num_sessions
        call = _Call(gate_stats, prompt_ids, asyncio.get_running_loop().create_future())
        self._waiting.append(call)
        self._let_in()
        try:
            if not call.admitted.done():
                gate_stats.begin_wait()
                try:
                    await call.admitted
                finally:
                    gate_stats.end_wait()
            yield
        finally:
            if call in self._waiting:
                self._waiting.remove(call)
            else:
                self._leave(call)
            self._let_in()

    async def hold(self) -> None:
        """Hold calls from now on, and wait for those that were let through. Holding twice is holding once."""
        self._is_open = False
        await self._is_empty.wait()

    def release(self) -> None:
        """Let every call through that waits or comes."""
        self._is_open = True
        self._let_in()

    def forget(self, gate_stats: GateStats) -> None:
        """Give the room of a session that has ended to those that wait."""
        self._first_calls.pop(gate_stats, None)
        if self._room is not None:
            self._room.forget(gate_stats)
            self._let_in()

    def _let_in(self) -> None:
        """Residents first, then the oldest sessions, up to the first that has no room."""
        if not self._is_open:
            return
        for call in sorted(self._waiting, key=self._rank):
            if self._room is not None and not self._room.admit(call.gate_stats, call.prompt_ids):
                return
            self._waiting.remove(call)
            self._num_inside += 1
            self._is_empty.clear()
            if not call.admitted.done():  # it may have been cancelled, and leaves as soon as it notices
                call.admitted.set_result(None)

    def _rank(self, call: _Call) -> tuple[bool, int]:
        is_resident = self._room is not None and self._room.is_resident(call.gate_stats)
        return not is_resident, self._first_calls.get(call.gate_stats, 0)

    def _leave(self, call: _Call) -> None:
        if self._room is not None:
            self._room.leave(call.gate_stats)
        self._num_inside -= 1
        if self._num_inside == 0:
            self._is_empty.set()
