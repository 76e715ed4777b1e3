"""Hold model calls in front of the engine while the weights change.

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


class Gate:
    """Lets calls through until it is told to hold them. Everything happens on one event loop."""

    def __init__(self) -> None:
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._num_inside = 0
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    @asynccontextmanager
    async def passing(self, gate_stats: GateStats) -> AsyncIterator[None]:
        """Wait while calls are held; a `hold` waits for the end of the block."""
        while not self._is_open.is_set():  # they may be held again since this call was woken
            gate_stats.begin_wait()
            try:
                await self._is_open.wait()
            finally:
                gate_stats.end_wait()
        self._num_inside += 1
        self._is_empty.clear()
        try:
            yield
        finally:
            self._num_inside -= 1
            if self._num_inside == 0:
                self._is_empty.set()

    async def hold(self) -> None:
        """Hold calls from now on, and wait for those that were let through. Holding twice is holding once."""
        self._is_open.clear()
        await self._is_empty.wait()

    def release(self) -> None:
        """Let every call through that waits or comes."""
        self._is_open.set()
