"""Calls that wait at the gate for room in the engine's cache."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from serving import CHAT, HELLO, GatedEngine, http, new_log, serve, wait_until

from polar_trl.engine.gate import Gate, GateStats


class Caller:
    """One session, whose calls stay in the engine until they are told to end."""

    def __init__(self, gate: Gate, number: int) -> None:
        self.gate, self.number, self.stats = gate, number, GateStats()

    async def call(self, length: int) -> asyncio.Task[None]:
        self.is_inside, self.ending = False, asyncio.Event()
        task = asyncio.create_task(self._call(length))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return task

    async def _call(self, length: int) -> None:
        async with self.gate.passing(self.stats, (self.number,) * length):
            self.is_inside = True
            await self.ending.wait()


def test_one_without_room_waits_and_the_oldest_is_first() -> None:
    async def scenario() -> None:
        gate = Gate(100)
        a, b, c = (Caller(gate, number) for number in range(3))
        calls = [await a.call(80), await b.call(60), await c.call(10)]
        # c would fit, but would then go before b for ever
        assert (a.is_inside, b.is_inside, c.is_inside) == (True, False, False)
        a.ending.set()
        await calls[0]
        # its tool runs, and nothing is in the engine: it makes room for the next
        await asyncio.sleep(0)
        assert (b.is_inside, c.is_inside) == (True, True)
        assert b.stats.held_s > 0 and a.stats.held_s == 0
        b.ending.set()
        c.ending.set()
        await asyncio.gather(*calls)

    asyncio.run(scenario())


def test_a_resident_goes_before_those_that_wait() -> None:
    async def scenario() -> None:
        gate = Gate(100)
        a, b, c = (Caller(gate, number) for number in range(3))
        first = await a.call(50)
        a.ending.set()
        await first
        inside, waiting = await b.call(40), await c.call(40)
        again = await a.call(55)
        assert a.is_inside and not c.is_inside
        for caller in (a, b):
            caller.ending.set()
        await asyncio.gather(again, inside)
        gate.forget(a.stats)
        await asyncio.sleep(0)
        assert c.is_inside
        c.ending.set()
        await waiting

    asyncio.run(scenario())


def test_one_that_gives_up_takes_no_room() -> None:
    async def scenario() -> None:
        gate = Gate(100)
        a, b, c = (Caller(gate, number) for number in range(3))
        calls = [await a.call(80), await b.call(60), await c.call(60)]
        calls[1].cancel()
        a.ending.set()
        with suppress(asyncio.CancelledError):
            await calls[1]
        await calls[0]
        gate.forget(a.stats)
        await asyncio.sleep(0)
        assert c.is_inside and not b.is_inside
        c.ending.set()
        await calls[2]
        await gate.hold()  # nobody is left inside

    asyncio.run(scenario())


def test_one_that_gives_up_in_the_moment_it_is_let_in_leaves() -> None:
    async def scenario() -> None:
        gate = Gate()
        holding = asyncio.create_task(gate.hold())
        await holding
        a = Caller(gate, 0)
        call = await a.call(1)
        gate.release()
        call.cancel()
        with suppress(asyncio.CancelledError):
            await call
        assert not a.is_inside
        await gate.hold()

    asyncio.run(scenario())


def test_held_calls_wait_for_the_release_whatever_room_there_is() -> None:
    async def scenario() -> None:
        gate = Gate(100)
        await gate.hold()
        a, b = Caller(gate, 0), Caller(gate, 1)
        calls = [await a.call(10), await b.call(200)]
        assert not a.is_inside
        gate.release()
        await asyncio.sleep(0)
        assert a.is_inside and not b.is_inside
        a.ending.set()
        await calls[0]
        await asyncio.sleep(0)
        assert b.is_inside
        b.ending.set()
        await calls[1]

    asyncio.run(scenario())


def test_a_session_that_ends_lets_the_next_one_in_through_a_real_proxy() -> None:
    engine = GatedEngine()
    engine.cache_tokens = 1
    with serve(engine) as proxy, ThreadPoolExecutor() as threads:
        stats = [GateStats(), GateStats()]
        endpoints = [proxy.open_session(new_log(f"s{i}"), gate_stats=stats[i]) for i in range(2)]
        first = threads.submit(http(endpoints[0]).post, CHAT, json={"messages": HELLO})
        assert engine.entered.acquire(timeout=600)
        second = threads.submit(http(endpoints[1]).post, CHAT, json={"messages": HELLO})
        wait_until(lambda: stats[1].held_s > 0.0)
        assert engine.num_requests == 1 and not first.done()
        proxy.close_session(endpoints[0].api_key)
        assert engine.entered.acquire(timeout=600)
        engine.gate.set()
        assert second.result().status_code == 200
    assert stats[0].held_s == 0.0
