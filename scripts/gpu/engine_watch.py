"""Note when each step of a vLLM engine ran, when each prompt came, and when its answer was there.

Whoever steps the engine is watched: our thread, or `LLM.generate`. Samples stay the same. Two prompts of one length
that end alike are not told apart; see `build_key`.
"""

import gc
import resource
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from polar_trl.engine.base import GenerationParams, TokenEngine
from polar_trl.types import Completion, TokenIds


@dataclass(frozen=True, slots=True)
class Step:
    """One `LLMEngine.step`. Seconds of the monotonic clock and of the thread's own processor time."""

    begun_s: float
    ended_s: float
    cpu_s: float
    num_tokens: int
    has_more: bool
    """Whether requests were left when it ended."""
    gc_s: float
    """Of `cpu_s`, what Python's garbage collector took on this thread, whoever made the garbage."""
    num_requests: int
    """In the batch that the step put together."""
    is_mixed: bool
    """Whether that batch computed prompts too: it cannot use the graphs of batches of one token per request."""
    system_s: float
    """Of `cpu_s`, what the operating system took: page faults, handing over the interpreter's lock."""
    num_waits: int
    """Times the thread gave up its processor to wait: for the interpreter's lock, or for the GPU."""
    num_faults: int
    """Page faults: memory that was given back to the system and asked for again."""


class EngineWatch:
    """Watch what both sides' `LLMEngine` does from `clear` on."""

    def __init__(self, llm_engine: Any) -> None:
        self._engine = llm_engine
        self._run_step, llm_engine.step = llm_engine.step, self._step
        core = llm_engine.engine_core
        self._run_get_output, core.get_output = core.get_output, self._get_output
        scheduler = core.engine_core.scheduler
        self._run_schedule, scheduler.schedule = scheduler.schedule, self._schedule
        self._collector = CollectorWatch()
        self.clear()

    def close(self) -> None:
        self._collector.close()

    def clear(self) -> None:
        self.steps: list[Step] = []
        self.ended: dict[TokenIds, tuple[float, int]] = {}
        """Key of a prompt -> when its answer was there, and how much of it had been cached."""
        self._num_tokens = 0
        self._num_requests, self._is_mixed = 0, False

    def _schedule(self, *args: Any, **kwargs: Any) -> Any:
        batch = self._run_schedule(*args, **kwargs)
        self._num_requests = len(batch.num_scheduled_tokens)
        self._is_mixed |= batch.total_num_scheduled_tokens > self._num_requests
        return batch

    def _get_output(self) -> Any:
        outputs = self._run_get_output()
        self._num_tokens = sum(len(output.new_token_ids) for output in outputs.outputs)
        return outputs

    def _step(self) -> list[Any]:
        self._num_requests, self._is_mixed = 0, False
        self._collector.begin()
        before = resource.getrusage(resource.RUSAGE_THREAD)
        begun_s, cpu_s = time.monotonic(), time.thread_time()
        outputs: list[Any] = self._run_step()
        ended_s, cpu_s = time.monotonic(), time.thread_time() - cpu_s
        after = resource.getrusage(resource.RUSAGE_THREAD)
        for output in outputs:
            if output.finished:
                self.ended[build_key(output.prompt_token_ids)] = (ended_s, output.num_cached_tokens or 0)
        has_more = self._engine.has_unfinished_requests()
        self.steps.append(
            Step(
                begun_s=begun_s,
                ended_s=ended_s,
                cpu_s=cpu_s,
                num_tokens=self._num_tokens,
                has_more=has_more,
                gc_s=self._collector.seconds,
                num_requests=self._num_requests,
                is_mixed=self._is_mixed,
                system_s=after.ru_stime - before.ru_stime,
                num_waits=after.ru_nvcsw - before.ru_nvcsw,
                num_faults=after.ru_minflt - before.ru_minflt,
            )
        )
        return outputs


class CollectorWatch:
    """Processor seconds of Python's garbage collector on the thread that called `begin`, since it did.

    A collection runs on whichever thread allocates the object that makes it due.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._thread = 0
        self._begun_s = 0.0
        gc.callbacks.append(self._notice)

    def begin(self) -> None:
        self.seconds, self._thread = 0.0, threading.get_ident()

    def close(self) -> None:
        gc.callbacks.remove(self._notice)

    def _notice(self, phase: str, info: dict[str, int]) -> None:
        if threading.get_ident() != self._thread:
            return
        if phase == "start":
            self._begun_s = time.thread_time()
        else:
            self.seconds += time.thread_time() - self._begun_s


class WatchedEngine(TokenEngine):
    """The engine that the proxy is given: notes when each prompt came."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.max_model_len: int = engine.max_model_len
        self.submitted: dict[TokenIds, float] = {}

    @property
    def policy_version(self) -> int:
        return int(self._engine.policy_version)

    async def generate(self, prompt_ids: TokenIds, params: GenerationParams) -> Completion:
        self.submitted[build_key(prompt_ids)] = time.monotonic()
        completion: Completion = await self._engine.generate(prompt_ids, params)
        return completion


def find_busy(ended_s: Iterable[float], num_slots: int) -> tuple[float, float]:
    """`Side.busy_s` of the times at which requests ended, of which there must be more than twice as many as slots."""
    ordered = sorted(ended_s)
    return ordered[num_slots - 1], ordered[len(ordered) - num_slots - 1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """One side's measurement."""

    begun_s: float
    ended_s: float
    busy_s: tuple[float, float]
    """From the end of the first requests, as many as there are slots, to the end of the last but so many."""
    process_cpu_s: float
    steps: Sequence[Step]
    num_cached_tokens: int
    num_prompt_tokens: int

    def describe(self, prefix: str) -> dict[str, float]:
        """Figures of a row, each name behind `prefix`."""
        seconds = self.ended_s - self.begun_s
        steady = [step for step in self.steps if self.busy_s[0] < step.ended_s <= self.busy_s[1]]
        steady_s = self.busy_s[1] - self.busy_s[0]
        gaps = [(before, after.begun_s - before.ended_s) for before, after in pairwise(steady)]
        between_s = sum(gap for before, gap in gaps if before.has_more)
        idle_s = sum(gap for before, gap in gaps if not before.has_more)
        cpu_s = sum(step.cpu_s for step in self.steps)
        mixed = [step for step in steady if step.is_mixed]
        plain = [step for step in steady if not step.is_mixed]
        figures = {
            "tokens_per_s": sum(step.num_tokens for step in self.steps) / seconds,
            "steady_tokens_per_s": sum(step.num_tokens for step in steady) / steady_s,
            "seconds": seconds,
            "cached_tokens": self.num_cached_tokens,
            "hit": self.num_cached_tokens / self.num_prompt_tokens,
            "steps": len(steady),
            "step_ms": 1000 * sum(step.ended_s - step.begun_s for step in steady) / len(steady),
            "step_cpu_ms": _find_cpu_ms(steady),
            "mixed_share": len(mixed) / len(steady),
            "mixed_cpu_ms": _find_cpu_ms(mixed),
            "plain_cpu_ms": _find_cpu_ms(plain),
            "step_requests": sum(step.num_requests for step in steady) / len(steady),
            "gc_share": sum(step.gc_s for step in steady) / sum(step.cpu_s for step in steady),
            "step_system_ms": 1000 * sum(step.system_s for step in steady) / len(steady),
            "step_waits": sum(step.num_waits for step in steady) / len(steady),
            "step_faults": sum(step.num_faults for step in steady) / len(steady),
            "gc_max_ms": 1000 * max(step.gc_s for step in steady),
            "between_share": between_s / steady_s,
            "idle_share": idle_s / steady_s,
            "waiting": (between_s + idle_s) / steady_s,
            # of all other threads of this process, in processor seconds per second
            "other_cpu_share": (self.process_cpu_s - cpu_s) / seconds,
        }
        return {f"{prefix}_{name}": value for name, value in figures.items()}


def _find_cpu_ms(steps: Sequence[Step]) -> float:
    """Mean of a step; 0 without steps."""
    return 1000 * sum(step.cpu_s for step in steps) / max(1, len(steps))


def build_key(prompt_ids: Sequence[int]) -> TokenIds:
    """Build a key that no two prompts of a measurement share: the length, and the last ids, random words all."""
    return (len(prompt_ids), *prompt_ids[-64:])
