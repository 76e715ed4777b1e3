"""The engine thread around a core whose steps the test lets go one by one."""

import asyncio
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from serving import wait_until

from polar_trl.engine import vllm
from polar_trl.engine.base import GenerationParams
from polar_trl.errors import EngineError
from polar_trl.types import Completion

PARAMS = GenerationParams(max_tokens=4)


class SteppedCore:
    """Stands in for vLLM's: a step lasts until `run_steps`, and ends the prompts that the test names."""

    def __init__(self) -> None:
        self.model_config = SimpleNamespace(max_model_len=256, dtype=None, get_vocab_size=lambda: 1000)
        self.vllm_config = SimpleNamespace(cache_config=SimpleNamespace(kv_cache_size_tokens=4096))
        self.admitted: list[list[int]] = [[]]
        """The first ids of the prompts that came before each step."""
        self.aborted: list[str] = []
        self.ending: dict[int, Any] = {}
        """First id of a prompt -> the output's completion, for the step that is running."""
        self.intervals: set[float] = set()
        self._ids: dict[int, str] = {}
        self._gone = threading.Semaphore(0)

    def add_request(self, request_id: str, prompt: dict[str, list[int]], params: Any) -> None:
        self._ids[prompt["prompt_token_ids"][0]] = request_id
        self.admitted[-1].append(prompt["prompt_token_ids"][0])

    def abort_request(self, request_ids: list[str]) -> None:
        self.aborted += request_ids

    def step(self) -> list[Any]:
        self.admitted.append([])
        self.intervals.add(sys.getswitchinterval())
        self._gone.acquire()
        ending, self.ending = self.ending, {}
        return [
            SimpleNamespace(finished=True, request_id=self._ids[first], outputs=[output], num_cached_tokens=0)
            for first, output in ending.items()
        ]

    @property
    def num_steps(self) -> int:
        return len(self.admitted) - 1

    def run_steps(self, count: int) -> None:
        """End the running step and those that follow it, until so many more have begun."""
        expected = self.num_steps + count
        self._gone.release(count)
        wait_until(lambda: self.num_steps == expected)

    def let_go(self) -> None:
        self._gone.release(10_000)


def build_output(*token_ids: int, finish_reason: str = "stop", logprob: float = -0.5) -> Any:
    flat = SimpleNamespace(token_ids=list(token_ids), logprobs=[logprob] * len(token_ids))
    return SimpleNamespace(token_ids=list(token_ids), finish_reason=finish_reason, logprobs=flat)


class Asker:
    """An event loop on a thread of its own, as the proxy's is."""

    def __init__(self, engine: vllm.VllmEngine) -> None:
        self._engine = engine
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def ask(self, first_id: int) -> Any:
        return asyncio.run_coroutine_threadsafe(self._engine.generate((first_id, 7), PARAMS), self._loop)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture()
def core() -> SteppedCore:
    return SteppedCore()


@pytest.fixture()
def engine(core: SteppedCore, monkeypatch: pytest.MonkeyPatch) -> Iterator[vllm.VllmEngine]:
    monkeypatch.setattr(vllm, "build_sampling_params", lambda params, *, live: params)
    engine = vllm.VllmEngine(SimpleNamespace(llm_engine=core))
    yield engine
    core.let_go()
    engine.close()


@pytest.fixture()
def askers(engine: vllm.VllmEngine) -> Iterator[list[Asker]]:
    """Two of them: an engine may be asked from several loops."""
    both = [Asker(engine), Asker(engine)]
    yield both
    engine._inbox.put(None)  # whoever still waits is told that the engine was closed
    engine._core.let_go()
    engine._thread.join()
    for asker in both:
        asker.close()


def start(core: SteppedCore, asker: Asker, num_requests: int) -> None:
    """Have so many requests in flight, and none admitted for a while."""
    for first_id in range(num_requests):
        asker.ask(first_id)
    wait_until(lambda: core.num_steps == 1)
    while sum(map(len, core.admitted)) < num_requests:
        core.run_steps(1)
    core.run_steps(vllm.MAX_STEPS_APART)


def put(asker: Asker, engine: vllm.VllmEngine, first_id: int) -> Any:
    """Ask, and wait until the request is in the inbox."""
    before = engine._inbox.qsize()
    future = asker.ask(first_id)
    wait_until(lambda: engine._inbox.qsize() == before + 1)
    return future


def test_requests_that_come_within_some_steps_are_admitted_together_while_many_run(
    core: SteppedCore, engine: vllm.VllmEngine, askers: list[Asker]
) -> None:
    start(core, askers[0], 4 * vllm.REQUESTS_PER_STEP_APART)  # so that four steps lie between
    begun = core.num_steps
    put(askers[0], engine, 101)
    core.run_steps(1)
    put(askers[0], engine, 102)
    core.run_steps(2)
    put(askers[0], engine, 103)
    core.run_steps(2)
    assert core.admitted[begun : begun + 5] == [[101], [], [], [], [102, 103]]


def test_requests_are_admitted_before_the_next_step_while_few_run(
    core: SteppedCore, engine: vllm.VllmEngine, askers: list[Asker]
) -> None:
    start(core, askers[0], vllm.REQUESTS_PER_STEP_APART)
    begun = core.num_steps
    for first_id in (101, 102, 103):
        put(askers[0], engine, first_id)
        core.run_steps(1)
    assert core.admitted[begun : begun + 3] == [[101], [102], [103]]


def test_a_pause_comes_after_the_requests_that_were_held_before_it(
    core: SteppedCore, engine: vllm.VllmEngine, askers: list[Asker]
) -> None:
    num_running = 4 * vllm.REQUESTS_PER_STEP_APART
    start(core, askers[0], num_running)
    put(askers[0], engine, 101)
    core.run_steps(1)  # admits it: the next waits
    held = put(askers[0], engine, 102)
    with ThreadPoolExecutor(1) as executor:

        def pause() -> int:
            with engine.paused(new_policy=False):
                return len(engine._live)

        paused = executor.submit(pause)
        wait_until(lambda: engine._inbox.qsize() == 2)
        core.run_steps(4)
        assert 102 in [first_id for ids in core.admitted for first_id in ids]
        core.ending = {first_id: build_output(first_id) for first_id in (*range(num_running), 101, 102)}
        core.let_go()
        assert paused.result(timeout=600) == 0
    assert held.result(timeout=600).token_ids == (102,)


def test_each_request_of_a_step_hears_its_own_outcome(
    core: SteppedCore, engine: vllm.VllmEngine, askers: list[Asker]
) -> None:
    """One wake-up brings a loop all of a step's: answers, failures, and one for a request that hung up."""
    futures = {first_id: askers[first_id % 2].ask(first_id) for first_id in range(8)}
    wait_until(lambda: core.num_steps == 1)
    while sum(map(len, core.admitted)) < 8:
        core.run_steps(1)
    # the engine thread is in a step that will end all of them when this one hangs up
    futures[2].cancel()
    wait_until(lambda: engine._inbox.qsize() == 1)
    core.ending = {first_id: build_output(100 + first_id, 900) for first_id in range(6)}
    core.ending[6] = build_output(106, finish_reason="abort")
    core.ending[7] = build_output(107)
    core.ending[7].logprobs.token_ids = [108]
    core.let_go()
    for first_id in (0, 1, 3, 4, 5):
        completion: Completion = futures[first_id].result(timeout=600)
        assert completion.token_ids == (100 + first_id, 900)
        assert completion.logprobs == (-0.5, -0.5)
    with pytest.raises(EngineError, match="ended the request with 'abort'"):
        futures[6].result(timeout=600)
    with pytest.raises(EngineError, match="cannot be used: logprobs of 1 tokens"):
        futures[7].result(timeout=600)
    assert futures[2].cancelled()
    # the loops are sound: the next request is answered too
    last = askers[0].ask(50)
    wait_until(lambda: [50] in core.admitted)
    core.ending = {50: build_output(150)}
    core.let_go()
    assert last.result(timeout=600).token_ids == (150,)


def test_a_loop_that_has_closed_takes_no_answer_from_the_others(
    core: SteppedCore, engine: vllm.VllmEngine, askers: list[Asker]
) -> None:
    gone = Asker(engine)
    gone.ask(1)
    kept = askers[0].ask(2)
    wait_until(lambda: core.num_steps == 1)
    while sum(map(len, core.admitted)) < 2:
        core.run_steps(1)
    gone.close()
    core.ending = {1: build_output(101), 2: build_output(102)}
    core.let_go()
    assert kept.result(timeout=600).token_ids == (102,)


def test_threads_switch_faster_while_requests_run_and_as_before_afterwards(
    core: SteppedCore, engine: vllm.VllmEngine, askers: list[Asker]
) -> None:
    before = sys.getswitchinterval()
    assert before != pytest.approx(vllm.SWITCH_INTERVAL_S)
    for first_id in (1, 2):
        future = askers[0].ask(first_id)
        wait_until(lambda first_id=first_id: [first_id] in core.admitted)
        core.ending = {first_id: build_output(101)}
        core._gone.release()
        assert future.result(timeout=600).token_ids == (101,)
        wait_until(lambda: sys.getswitchinterval() == before)
    assert list(core.intervals) == [pytest.approx(vllm.SWITCH_INTERVAL_S)]


def test_threads_switch_as_before_after_the_engine_has_failed(
    core: SteppedCore, engine: vllm.VllmEngine, askers: list[Asker], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sys.getswitchinterval()
    assert before != pytest.approx(vllm.SWITCH_INTERVAL_S)

    def fail() -> list[Any]:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(core, "step", fail)
    with pytest.raises(EngineError, match="out of memory"):
        askers[0].ask(1).result(timeout=600)
    engine._thread.join()
    assert sys.getswitchinterval() == before
