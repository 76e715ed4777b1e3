"""Tokens per second through the proxy and the engine, over those of offline vllm.LLM.generate, at 8, 64 and 256 sessions.

  bash scripts/gpu/run.sh throughput --model 135m --tokenizer .cache/models/SmolLM2-135M-Instruct
  bash scripts/gpu/run.sh throughput --model 4b --concurrency 64 --calls 6 --scale 0.5
  bash scripts/gpu/run.sh throughput --model tiny --concurrency 2 4 --calls 3 --scale 0.02 --session-calls 5    # a CPU

Both sides use one `LLM` in one process. "Proxy" is HTTP from other processes (OpenAI's Chat API), so many sessions at
once, each asking again as soon as it has its answer, in lengths of agents' sessions (session_lengths.py, "5k/30"; one
that ends is followed by the next). "Offline" is `LLM.generate` with exactly the prompt ids that the proxy's side gave to
the engine, in that order, each with as many sampled tokens.

What makes offline a strong baseline: it has all prompts in one list, so that it never waits for a request, and its
scheduler runs as many at a time as there were sessions: more would answer another question. The weights are random but
for the embedding and the last layer, which make every word be followed by one certain other word: both sides then
sample the same ids, and offline finds in its prefix cache what the proxy's side found in its own (real sampling would
make it compute every earlier answer again). Words are no stop tokens: the requests' max_tokens end the calls.

Two ratios. "whole" is all tokens over all seconds of either side. Offline begins with admitting all prompts while the GPU
stands still, and both sides end with fewer requests than slots; "steady" leaves out both: tokens of the engine's steps
from the first one to the last moment at which every slot had work.

"Added" is a call's time at its client without its time between `generate` and the step that ended it. "Hit" is the
share of prompt tokens that came from the prefix cache. A separate session of 40 calls, at a quarter of the lengths,
gives both at one session at once.
"""

import argparse
import gc
import json
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from agent_clients import ClientCall, Clients, ClientSession
from report import Report
from session_lengths import build_sessions

from polar_trl.engine.base import GenerationParams
from polar_trl.engine.colocate import set_environment
from polar_trl.errors import ConfigError
from polar_trl.types import Call, Completion, TokenIds

LLAMA, QWEN3 = "LlamaForCausalLM", "Qwen3ForCausalLM"
MODELS: dict[str, dict[str, Any]] = {
    # layers, hidden, feed-forward, heads, key-value heads, head size
    "tiny": {"class": LLAMA, "sizes": (2, 64, 128, 2, 1, 32), "calls": (4, 3, 2), "scale": 0.02},
    "135m": {"class": LLAMA, "sizes": (30, 576, 1536, 9, 3, 64), "calls": (16, 14, 6), "scale": 1.0},
    "0.6b": {"class": QWEN3, "sizes": (28, 1024, 3072, 16, 8, 128), "calls": (12, 12, 4), "scale": 0.5},
    "4b": {"class": QWEN3, "sizes": (36, 2560, 9728, 32, 8, 128), "calls": (6, 6, 2), "scale": 0.5},
}
"""SmolLM2-135M's, Qwen3-0.6B's and Qwen3-4B's sizes, with the vocabulary of the tokenizer that is given. `calls` a
session begins on average at 8, 64 and 256 sessions and the factor of lengths: what an H100 does in half a minute."""
CONCURRENCY = (8, 64, 256)
MAX_MODEL_LEN = 32768
NUM_WORDS = 4096
SESSION_SCALE = 0.25
SESSIONS_PER_CLIENT = 64
COLUMNS = {
    "model": "model",
    "sessions": "sessions at once",
    "calls": "calls",
    "prompt_tokens": "prompt tokens per call",
    "sampled_tokens": "sampled tokens",
    "proxy_tokens_per_s": "proxy tok/s",
    "offline_tokens_per_s": "offline tok/s",
    "whole_ratio": "ratio, whole",
    "steady_ratio": "ratio, steady",
    "added_p50_ms": "added p50 ms",
    "added_p95_ms": "added p95 ms",
    "proxy_hit": "hit, proxy",
    "offline_hit": "hit, offline",
    "proxy_step_ms": "step ms, proxy",
    "offline_step_ms": "step ms, offline",
    "proxy_waiting": "thread outside of steps, proxy",
}


@dataclass(frozen=True, slots=True)
class Step:
    """One `LLMEngine.step`. Seconds of the monotonic clock and of the thread's own processor time."""

    begun_s: float
    ended_s: float
    cpu_s: float
    num_tokens: int
    has_more: bool
    """Whether requests were left when it ended."""


class EngineWatch:
    """What both sides' `LLMEngine` did since `clear`."""

    def __init__(self, llm_engine: Any) -> None:
        self._engine = llm_engine
        self._run_step, llm_engine.step = llm_engine.step, self._step
        core = llm_engine.engine_core
        self._run_get_output, core.get_output = core.get_output, self._get_output
        self.clear()

    def clear(self) -> None:
        self.steps: list[Step] = []
        self.ended: dict[TokenIds, tuple[float, int]] = {}
        """Key of a prompt -> when its answer was there, and how much of it had been cached."""
        self._num_tokens = 0

    def _get_output(self) -> Any:
        outputs = self._run_get_output()
        self._num_tokens = sum(len(output.new_token_ids) for output in outputs.outputs)
        return outputs

    def _step(self) -> list[Any]:
        begun_s, cpu_s = time.monotonic(), time.thread_time()
        outputs: list[Any] = self._run_step()
        ended_s = time.monotonic()
        for output in outputs:
            if output.finished:
                self.ended[build_key(output.prompt_token_ids)] = (ended_s, output.num_cached_tokens or 0)
        has_more = self._engine.has_unfinished_requests()
        self.steps.append(Step(begun_s, ended_s, time.thread_time() - cpu_s, self._num_tokens, has_more))
        return outputs


class WatchedEngine:
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """One side's measurement."""

    begun_s: float
    ended_s: float
    busy_until_s: float
    """From here on, fewer requests ran than there were slots."""
    process_cpu_s: float
    steps: Sequence[Step]
    num_cached_tokens: int

    def describe(self, prefix: str) -> dict[str, float]:
        seconds = self.ended_s - self.begun_s
        steady = [step for step in self.steps if step.ended_s <= self.busy_until_s]
        steady_s = self.busy_until_s - self.steps[0].begun_s
        gaps = [(before, after.begun_s - before.ended_s) for before, after in zip(steady, steady[1:], strict=False)]
        between_s = sum(gap for before, gap in gaps if before.has_more)
        idle_s = sum(gap for before, gap in gaps if not before.has_more)
        cpu_s = sum(step.cpu_s for step in self.steps)
        figures = {
            "tokens_per_s": sum(step.num_tokens for step in self.steps) / seconds,
            "steady_tokens_per_s": sum(step.num_tokens for step in steady) / steady_s,
            "seconds": seconds,
            "steps": len(steady),
            "step_ms": 1000 * sum(step.ended_s - step.begun_s for step in steady) / len(steady),
            "step_cpu_ms": 1000 * sum(step.cpu_s for step in steady) / len(steady),
            "between_share": between_s / steady_s,
            "idle_share": idle_s / steady_s,
            "waiting": (between_s + idle_s) / steady_s,
            # of all other threads of this process, in processor seconds per second
            "other_cpu_share": (self.process_cpu_s - cpu_s) / seconds,
        }
        return {f"{prefix}_{name}": value for name, value in figures.items()}


class Bench:
    """One engine, one proxy, and what is measured on them."""

    def __init__(self, llm: Any, renderer: Any, words: Sequence[str], folder: Path, device: torch.device | None) -> None:
        from polar_trl.engine.vllm import VllmEngine
        from polar_trl.proxy import Proxy

        self._llm = llm
        self._words = words
        self._folder = folder
        self._watch = EngineWatch(llm.llm_engine)
        self._engine = VllmEngine(llm, device=device)
        self._watched = WatchedEngine(self._engine)
        self._proxy = Proxy(self._watched, renderer, params=GenerationParams(max_tokens=MAX_MODEL_LEN))
        self._proxy.start()
        self._num_sessions = 0

    def close(self) -> None:
        self._proxy.stop()
        self._engine.close()

    def measure(self, num_slots: int, calls_per_slot: int, scale: float) -> dict[str, Any]:
        """One row: both sides with so many sessions at once."""
        num_calls = num_slots * calls_per_slot
        # sessions end after some 27 calls and are followed by others
        lengths = build_lengths(num_slots * (calls_per_slot // 15 + 2), scale)
        proxy, calls, row = self._run_proxy_side(lengths, num_slots, num_calls)
        offline, num_same = self._run_offline_side(calls, num_slots)
        row |= offline.describe("offline") | {"same_ids_share": num_same / num_calls}
        row |= {
            "whole_ratio": row["proxy_tokens_per_s"] / row["offline_tokens_per_s"],
            "steady_ratio": row["proxy_steady_tokens_per_s"] / row["offline_steady_tokens_per_s"],
        }
        return row

    def measure_session(self, num_calls: int, scale: float) -> dict[str, Any]:
        """One session on its own: hit rate and added time."""
        _, calls, row = self._run_proxy_side(build_lengths(1, scale, num_calls), 1, num_calls)
        ordered = sorted(calls, key=lambda call: call.index)
        # what was computed before: the last call's prompt and answer, but for the last sampled token
        computed = sum(len(call.prompt_ids) + len(call.completion.token_ids) - 1 for call in ordered[:-1])
        return row | {"hit_of_what_was_computed": row["proxy_cached_tokens"] / computed}

    def _run_proxy_side(
        self, lengths: Sequence[SessionLengths], num_slots: int, num_calls: int
    ) -> tuple[Side, list[Call], dict[str, Any]]:
        """The side, its calls in the order in which the engine got them, and the row's figures of them."""
        sessions, logs = self._open_sessions(lengths)
        with Clients(self._folder, self._words, max(1, min(4, num_slots // SESSIONS_PER_CLIENT))) as clients:
            self._prepare(num_slots)
            cpu_s = time.process_time()
            times = clients.run(self._proxy.origin, sessions, num_slots, num_calls)
            cpu_s = time.process_time() - cpu_s
        for session in sessions:
            self._proxy.close_session(session.api_key)
        submitted, ended = self._watched.submitted, self._watch.ended
        recorded = {(number, call.index): call for number, log in logs.items() for call in log.calls}
        pairs = [(recorded[at.session, at.index], at) for at in times]
        pairs.sort(key=lambda pair: submitted[build_key(pair[0].prompt_ids)])
        calls = [call for call, _ in pairs]
        side = Side(
            begun_s=min(at.begun_s for at in times),
            ended_s=max(at.ended_s for at in times),
            busy_until_s=sorted(at for at, _ in ended.values())[num_calls - num_slots - 1],
            process_cpu_s=cpu_s,
            steps=self._watch.steps,
            num_cached_tokens=sum(cached for _, cached in ended.values()),
            num_prompt_tokens=sum(len(call.prompt_ids) for call in calls),
        )
        added = []
        for call, at in pairs:
            key = build_key(call.prompt_ids)
            added.append(1000 * (at.ended_s - at.begun_s - (ended[key][0] - submitted[key])))
        p50, p95 = torch.tensor(added).quantile(torch.tensor([0.5, 0.95])).tolist()
        row = {
            "sessions": num_slots,
            "calls": num_calls,
            "prompt_tokens": side.num_prompt_tokens // num_calls,
            "sampled_tokens": sum(len(call.completion.token_ids) for call in calls),
            "added_p50_ms": p50,
            "added_p95_ms": p95,
            "prompts_rendered_anew": sum(call.parent is None and call.index > 0 for call in calls),
            "stopped_early": sum(call.completion.finish_reason != "length" for call in calls),
        }
        return side, calls, row | side.describe("proxy")

    def _run_offline_side(self, calls: Sequence[Call], num_slots: int) -> tuple[Side, int]:
        """The side, and how many answers have the very ids of the proxy's."""
        prompts = [{"prompt_token_ids": list(call.prompt_ids)} for call in calls]
        params = [build_offline_params(len(call.completion.token_ids)) for call in calls]
        self._prepare(num_slots)
        with self._engine.paused():
            begun_s, cpu_s = time.monotonic(), time.process_time()
            outputs = self._llm.generate(prompts, params, use_tqdm=False)
            ended_s, cpu_s = time.monotonic(), time.process_time() - cpu_s
        side = Side(
            begun_s=begun_s,
            ended_s=ended_s,
            busy_until_s=sorted(at for at, _ in self._watch.ended.values())[len(calls) - num_slots - 1],
            process_cpu_s=cpu_s,
            steps=self._watch.steps,
            num_cached_tokens=sum(output.num_cached_tokens or 0 for output in outputs),
            num_prompt_tokens=sum(len(call.prompt_ids) for call in calls),
        )
        pairs = zip(outputs, calls, strict=True)
        return side, sum(tuple(output.outputs[0].token_ids) == call.completion.token_ids for output, call in pairs)

    def _open_sessions(
        self, lengths: Sequence[SessionLengths]
    ) -> tuple[list[ClientSession], dict[int, SessionLog]]:
        sessions, logs = [], {}
        for one in lengths:
            self._num_sessions += 1
            number, name = self._num_sessions, f"session-{self._num_sessions}"
            # recorded on disk, as in training
            log = SessionLog(session_id=name, task_id="t", group_id="g", path=self._folder / f"{name}.jsonl")
            endpoint = self._proxy.open_session(log, SessionLimits(max_calls=1 << 30))
            logs[number] = log
            sessions.append(build_client_session(one, number, endpoint.api_key))
        return sessions, logs

    def _prepare(self, num_slots: int) -> None:
        """The same start for either side: nothing cached, as many requests at a time as there are slots."""
        gc.collect()
        with self._engine.paused():
            self._llm.reset_prefix_cache()
            scheduler = self._llm.llm_engine.engine_core.engine_core.scheduler
            for name in ("max_num_running_reqs", "max_num_active_reqs"):  # newer versions of vLLM admit by the second
                if hasattr(scheduler, name):
                    setattr(scheduler, name, num_slots)
        self._watched.submitted = {}
        self._watch.clear()


def build_key(prompt_ids: Sequence[int]) -> TokenIds:
    """What no two prompts of a measurement share: the length, and the last ids, random words among them."""
    return (len(prompt_ids), *prompt_ids[-64:])


def build_lengths(num_sessions: int, scale: float, num_calls: int | None = None) -> list[SessionLengths]:
    """Sessions of a first prompt of 5,000 tokens, each cut where the model's length ends. With `num_calls`, exactly so
    many, or a `ConfigError`."""
    if num_calls is not None and num_calls > SETS["5k/30"].mean_calls:
        name = "20k/40"
        prompt_scale = SETS["5k/30"].prompt_tokens / SETS[name].prompt_tokens
    sessions = build_sessions("5k/30", num_groups=num_sessions, group_size=1, scale=scale)
    return sessions
