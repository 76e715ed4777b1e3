"""Sample token ids and logprobs from the vLLM engine that lives in this process.

One thread owns the engine and steps it; requests come from any event loop at any time and are batched
continuously. Nobody else may step the engine while the thread runs: weight pushes, sleep and wake happen inside
`paused()`, where the thread is known to stand still and no request is half done.
"""

import asyncio
import itertools
import logging
import queue
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from polar_trl.engine.base import GenerationParams, TokenEngine
from polar_trl.errors import EngineError
from polar_trl.types import Completion, TokenIds

logger = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 5e-5
"""Python's switch interval while requests run. A step gives up the interpreter's lock at every operation of torch, and
waits this long for each if another thread, such as the proxy's, has taken it: at Python's own 5 ms, a proxy that works
half of the time makes steps of a small model half as fast again."""

MAX_STEPS_APART = 8
REQUESTS_PER_STEP_APART = 8
"""With so many requests in flight as these make, new ones are admitted every eighth step; with fewer, sooner in
proportion. A step that computes prompts takes two to four times as long as one that only decodes, whether with one new
prompt or with five, and at 64 sessions a third of all steps were such. A request that comes alone does not wait."""

NUM_SETTLING_STEPS = 10
"""Steps without a request after which no block of the cache may be in use."""

_Outcome = Completion | EngineError


@dataclass(slots=True, eq=False)
class _Request:
    """One call of `generate`, owned by the engine thread once it is in the inbox."""

    id: str
    prompt_ids: list[int]
    params: Any
    """`vllm.SamplingParams`"""
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Completion]
    so_far: list[int] | None = None
    """Filled as ids are sampled, where somebody looks at it."""
    first_policy_version: int = 0

    def settle(self, outcome: _Outcome) -> None:
        """Answer it. Runs on the loop's thread."""
        if self.future.done():
            return
        if isinstance(outcome, EngineError):
            self.future.set_exception(outcome)
        else:
            self.future.set_result(outcome)


@dataclass(slots=True, eq=False)
class _Pause:
    """Asks the engine thread to finish what it has and stand still until `resumed`."""

    standing: threading.Event = field(default_factory=threading.Event)
    resumed: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True, slots=True)
class _Abort:
    id: str


class VllmEngine(TokenEngine):
    """The engine of a colocated `vllm.LLM`.

    Args:
        llm: A `vllm.LLM` made with `logprobs_mode="processed_logprobs"` and an in-process engine core.
        device: CUDA device of the engine, which each thread has to select for itself; None on a CPU.
    """

    def __init__(self, llm: Any, *, device: torch.device | None = None) -> None:
        self._llm = llm
        self._core = llm.llm_engine
        self._device = device
        self.max_model_len: int = self._core.model_config.max_model_len
        self.vocab_size: int = self._core.model_config.get_vocab_size()
        self.dtype: torch.dtype = self._core.model_config.dtype
        # of a hybrid model, in sessions of full length
        self.cache_tokens: int | None = self._core.vllm_config.cache_config.kv_cache_size_tokens
        self._policy_version = 0
        self._inbox: queue.SimpleQueue[_Request | _Abort | _Pause | None] = queue.SimpleQueue()
        self._live: dict[str, _Request] = {}
        self._num_steps_since = 0
        """Steps since a request was admitted."""
        self._ids = itertools.count()
        # (all, cached) tokens of prompts, ever: one object, which the engine thread alone replaces
        self._prompt_tokens = self._taken_prompt_tokens = (0, 0)
        self._failure: EngineError | None = None
        self._idle_interval_s = sys.getswitchinterval()
        self._thread = threading.Thread(target=self._run, name="polar-engine", daemon=True)
        self._thread.start()

    @property
    def policy_version(self) -> int:
        return self._policy_version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        """Count on from where a killed run stood. Only while nothing is sampled."""
        self._policy_version = version

    def take_prompt_cached(self) -> float | None:
        """Return the share of prompt tokens that the prefix cache had, of completions since the last call; None
        without any. One thread calls it, while requests may run."""
        (old, old_cached), (new, new_cached) = self._taken_prompt_tokens, self._prompt_tokens
        self._taken_prompt_tokens = new, new_cached
        return (new_cached - old_cached) / (new - old) if new > old else None

    async def generate(self, prompt_ids: TokenIds, params: GenerationParams) -> Completion:
        """Sample one completion; see `Engine.generate`. Cancelling the await aborts the request."""
        return await self._generate(prompt_ids, params, None)

    async def generate_live(self, prompt_ids: TokenIds, params: GenerationParams, so_far: list[int]) -> Completion:
        """Sample the same, with the ids in `so_far` after each step of the engine."""
        return await self._generate(prompt_ids, params, so_far)

    async def _generate(self, prompt_ids: TokenIds, params: GenerationParams, so_far: list[int] | None) -> Completion:
        if self._failure is not None:
            raise self._failure
        loop = asyncio.get_running_loop()
        try:
            # here and not between two steps of the engine
            sampling = build_sampling_params(params, live=so_far is not None)
        except Exception as error:  # its class changes with the version of vLLM
            raise EngineError(f"the engine refused the request: {error}") from error
        request = _Request(f"polar-{next(self._ids)}", list(prompt_ids), sampling, loop, loop.create_future(), so_far)
        self._inbox.put(request)
        if self._failure is not None:  # the engine has ended since the look above: nobody may read the inbox again
            request.settle(self._failure)
        try:
            return await request.future
        except asyncio.CancelledError:
            self._inbox.put(_Abort(request.id))
            raise

    @contextmanager
    def paused(self, *, new_policy: bool = False) -> Iterator[None]:
        """Let requests in flight finish, hold later ones, and keep the engine still inside the block.

        Args:
            new_policy: The block changes the weights: the policy version grows, and what was cached under the old
                weights is forgotten.
        """
        if self._failure is not None:
            raise self._failure
        pause = _Pause()
        self._inbox.put(pause)
        while not pause.standing.wait(timeout=1.0):
            if not self._thread.is_alive():
                raise self._failure or EngineError("the engine thread has ended")
        try:
            yield
            if new_policy:
                self._forget_cache()
                self._policy_version += 1
        finally:
            pause.resumed.set()

    def _forget_cache(self) -> None:
        """Drop all keys and values of the old weights. Raises `EngineError` where vLLM keeps some."""
        for _ in range(NUM_SETTLING_STEPS):
            if self._llm.reset_prefix_cache():
                return
            self._core.step()  # an aborted request may keep its blocks until the batch that it is in has ended
        raise EngineError("vLLM keeps keys and values of the old weights: blocks of its cache are still in use")

    def close(self) -> None:
        """Fail what is in flight, end the thread, and release the engine. Safe to call twice."""
        self._inbox.put(None)
        self._thread.join()
        self._llm = self._core = None

    # Everything below runs on the engine thread.

    def _run(self) -> None:
        try:
            if self._device is not None:
                torch.cuda.set_device(self._device)
            while self._is_filling() or self._take_from_inbox():
                self._step()
            self._stop(EngineError("the engine was closed"))
        except Exception as error:
            logger.exception("the engine failed")
            failure = EngineError(f"the engine failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._stop(failure)

    def _is_filling(self) -> bool:
        """Tell whether what arrives is still left in the inbox, so that more can be admitted with it."""
        return self._num_steps_since < min(MAX_STEPS_APART, len(self._live) // REQUESTS_PER_STEP_APART)

    def _step(self) -> None:
        if self._live:
            self._num_steps_since += 1
            self._deliver(self._core.step())

    def _take_from_inbox(self) -> bool:
        """Handle what has arrived; wait for something only when there is nothing to step. False to close."""
        while True:
            try:
                item = self._inbox.get_nowait() if self._live else self._wait_for_item()
            except queue.Empty:
                return True
            if item is None:
                return False
            if isinstance(item, _Request):
                self._admit(item)
            elif isinstance(item, _Abort):
                if self._live.pop(item.id, None) is not None:
                    self._core.abort_request([item.id])
            else:
                while self._live:
                    self._step()
                item.standing.set()
                item.resumed.wait()

    def _wait_for_item(self) -> "_Request | _Abort | _Pause | None":
        sys.setswitchinterval(self._idle_interval_s)
        item = self._inbox.get()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        return item

    def _admit(self, request: _Request) -> None:
        request.first_policy_version = self._policy_version
        try:
            self._core.add_request(request.id, {"prompt_token_ids": request.prompt_ids}, request.params)
        except Exception as error:  # noqa: BLE001 - nothing was sampled yet: the request fails alone, whatever it was
            _answer([(request, EngineError(f"the engine refused the request: {error}"))])
            return
        self._live[request.id] = request
        self._num_steps_since = 0

    def _deliver(self, outputs: list[Any]) -> None:
        answers: list[tuple[_Request, _Outcome]] = []
        for output in outputs:
            if not output.finished:
                self._show(output)
                continue
            # The core may answer for an id that was aborted in the meantime.
            request = self._live.pop(output.request_id, None)
            if request is not None:
                answers.append((request, self._read_output(output, request)))
        _answer(answers)

    def _read_output(self, output: Any, request: _Request) -> _Outcome:
        num, num_cached = self._prompt_tokens
        self._prompt_tokens = num + len(request.prompt_ids), num_cached + (output.num_cached_tokens or 0)
        choice = output.outputs[0]
        if choice.finish_reason not in ("stop", "length"):
            return EngineError(f"the engine ended the request with {choice.finish_reason!r}")
        token_ids = tuple(choice.token_ids)
        try:
            return Completion(
                token_ids=token_ids,
                logprobs=_take_logprobs(choice.logprobs, token_ids),
                finish_reason=choice.finish_reason,
                first_policy_version=request.first_policy_version,
                last_policy_version=self._policy_version,
            )
        except (EngineError, ValueError) as error:  # the request fails alone: the others' answers may be right
            return EngineError(f"the engine's answer cannot be used: {error}")

    def _show(self, output: Any) -> None:
        """Let who looks at a request see its ids so far. Of others the core gives no unfinished output."""
        request = self._live.get(output.request_id)
        if request is not None and request.so_far is not None:
            request.so_far.extend(output.outputs[0].token_ids[len(request.so_far) :])

    def _stop(self, error: EngineError) -> None:
        """Fail everyone who waits, now and later."""
        sys.setswitchinterval(self._idle_interval_s)
        self._failure = error
        _answer([(request, error) for request in self._live.values()])
        if self._live:
            self._core.abort_request(list(self._live))
        self._live.clear()
        while True:
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                return
            if isinstance(item, _Request):
                _answer([(item, error)])


def _answer(answers: Sequence[tuple[_Request, _Outcome]]) -> None:
    """Answer requests on their event loops, each of which is woken once."""
    by_loop: defaultdict[asyncio.AbstractEventLoop, list[tuple[_Request, _Outcome]]] = defaultdict(list)
    for request, outcome in answers:
        by_loop[request.loop].append((request, outcome))
    for loop, of_loop in by_loop.items():
        try:
            loop.call_soon_threadsafe(_settle, of_loop)
        except RuntimeError:
            logger.debug("an event loop is closed; nobody waits for %d answers", len(of_loop))


def _settle(answers: Sequence[tuple[_Request, _Outcome]]) -> None:
    for request, outcome in answers:
        request.settle(outcome)


def build_sampling_params(params: GenerationParams, *, live: bool = False) -> Any:
    """Build `vllm.SamplingParams` for one completion, with the logprob of each sampled token and no other's.

    Args:
        live: Have all ids so far after each step; else the whole alone, in the end.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        n=1,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        max_tokens=params.max_tokens,
        stop_token_ids=list(params.stop_token_ids),
        stop=list(params.stop) or None,
        include_stop_str_in_output=True,
        detokenize=bool(params.stop),
        logprobs=0,
        # plain lists, and not a dictionary and an object for every token, which the garbage collector would visit
        flat_logprobs=True,
        output_kind=RequestOutputKind.CUMULATIVE if live else RequestOutputKind.FINAL_ONLY,
    )


def _take_logprobs(flat: Any, token_ids: TokenIds) -> tuple[float, ...]:
    """Take logprobs [C] from vLLM's `FlatLogprobs`: one entry per sampled token where no others were asked for."""
    if tuple(flat.token_ids) != token_ids:
        raise EngineError(f"logprobs of {len(flat.token_ids)} tokens that are not the {len(token_ids)} sampled ones")
    return tuple(flat.logprobs)
