"""Measure prefix-cache hits of sessions that wait for tools, with admission by cache room, host offload and FP8.

  bash scripts/gpu/run.sh cache --model .cache/models/SmolLM2-135M-Instruct
  bash scripts/gpu/run.sh cache --model MODEL --sizes tiny --slots 2 --seconds 4 --scale 0.02 --tool-s 0.1   # a CPU

Sessions as agents have them, in one process with the engine: a shared prompt and one of its own, then calls that each
add an answer and a tool's result; a tool takes its time, and a session that ends is followed by the next. They begin
in the midst of their lives, so that histories have their lasting lengths at once. Weights are random and of true
sizes, key-value caches equal in bytes. A row is a window of time after all sessions' first calls have been answered.
"Prefilled per sampled" is what was not found in the cache, per sampled token.

The last rows are of a model with weights: tokens per second of few sessions that quote their prompts, and the gap to
transformers in float32, plain, with drafts from the prompt (n-gram), and with keys and values in FP8.

Each engine has a process of its own: what fails, fails alone. They import while others measure.
"""

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from model_sizes import QWEN3_4B, QWEN35_4B, VOCABULARY, build_sizes
from report import Report
from tiny_hybrid import find_vision_ids, write_processor
from transformers import AutoConfig, Qwen3_5Config

from polar_trl.engine.base import GenerationParams
from polar_trl.engine.colocate import prepare_vllm, set_environment
from polar_trl.engine.cuda_graphs import LLM_KWARGS
from polar_trl.engine.gate import Gate, GateStats
from polar_trl.engine.vllm import VllmEngine

COLUMNS = {
    "engine": "engine",
    "agents_per_slot": "agents per slot",
    "admission": "admission",
    "capacity": "room (tokens)",
    "history": "mean history",
    "hit": "hit",
    "prefilled_per_sampled": "prefilled per sampled",
    "tokens_per_s": "tok/s",
    "calls": "calls",
    "gap": "gap mean / p99 / max",
    "seconds": "seconds in all",
}
TINY = build_sizes(4, 64, 128, 2, 1, 32)
TINY_DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
TINY_DELTA |= {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
SIZES = {
    "true": {"qwen3": QWEN3_4B, "qwen3.5": QWEN35_4B},
    "tiny": {"qwen3": TINY, "qwen3.5": TINY | TINY_DELTA},
}
DELTA = {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "full_attention_interval": 4}
"""Of Qwen3.5-4B's gated delta nets."""
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
MODEL_ENGINES = ("model plain", "model n-gram", "model FP8")
ENGINES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3 host": {"kv_offloading_size": 64.0},
    "qwen3 FP8": {"kv_cache_dtype": "fp8"},
    "qwen3.5": {"enable_prefix_caching": True},
    "model plain": {},
    "model n-gram": {"speculative_config": NGRAM},
    "model FP8": {"kv_cache_dtype": "fp8"},
}
ARMS: dict[str, list[tuple[int, bool]]] = {
    "qwen3": [(1, False), (4, False), (4, True)],
    "qwen3 host": [(4, False)],
    "qwen3 FP8": [(4, True)],
    "qwen3.5": [(4, False), (4, True)],
}
"""Engine -> its windows: agents per slot, and whether the gate admits by room."""
QUOTED = "def area(width, height):\n    return width * height\n\ndef volume(width, height, depth):\n    return area("


class NotingEngine(VllmEngine):
    """Keeps how much of each prompt was cached."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.ended: list[tuple[float, int, int, int]] = []
        """Time, prompt tokens, cached of them, sampled tokens."""
        super().__init__(*args, **kwargs)

    def _read_output(self, output: Any, request: Any) -> Any:
        num_sampled = len(output.outputs[0].token_ids)
        cached = output.num_cached_tokens or 0
        self.ended.append((time.monotonic(), len(request.prompt_ids), cached, num_sampled))
        return super()._read_output(output, request)


# In the process of an engine.


def build_llm(args: argparse.Namespace) -> Any:
    """As the trainer builds it, but for the weights and the cache's size."""
    from vllm import LLM

    on_gpu = torch.cuda.is_available()
    kwargs: dict[str, Any] = dict(LLM_KWARGS["decode"]) if on_gpu else {}
    if args.child in MODEL_ENGINES:
        folder, kwargs["max_model_len"] = args.model, 2048
    else:
        folder = Path(tempfile.mkdtemp(prefix="cache-"))
        kind = args.child.split()[0]
        tokenizer = write_processor(args.model, folder)
        vocab_size = VOCABULARY[kind] if args.sizes == "true" else len(tokenizer)
        config = build_config(kind, SIZES[args.sizes][kind], vocab_size, find_vision_ids(tokenizer))
        (folder / "config.json").write_text(json.dumps(config))
        kwargs |= {"load_format": "dummy", "max_model_len": 40960 if args.sizes == "true" else 1536}
        if on_gpu:
            kwargs["kv_cache_memory_bytes"] = int(args.cache_gb * 1e9)
        else:
            kwargs["num_gpu_blocks_override"] = args.cpu_blocks
    kwargs = {"dtype": "bfloat16", **prepare_vllm(AutoConfig.from_pretrained(folder), cpu=not on_gpu), **kwargs}
    extra = dict(ENGINES[args.child])
    if not on_gpu and "kv_offloading_size" in extra:
        raise SystemExit("host copies need a GPU")
    return LLM(
        model=str(folder),
        max_num_seqs=args.slots,
        max_num_batched_tokens=4096,
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
        **(kwargs | extra),
    )


def build_config(kind: str, sizes: dict[str, int], vocab_size: int, vision_ids: dict[str, int]) -> dict[str, Any]:
    """A decoder; of Qwen3.5 the published class, whose vision tower is small here."""
    text: dict[str, Any] = {
        "vocab_size": vocab_size,
        **sizes,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
        "dtype": "bfloat16",
    }
    if kind == "qwen3":
        qwen3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu"}
        return {**qwen3, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, **text}
    vision = {"depth": 1, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "num_position_embeddings": 256}
    config = Qwen3_5Config(
        text_config=DELTA | text,
        vision_config=vision | {"out_hidden_size": sizes["hidden_size"]},
        tie_word_embeddings=True,
        **vision_ids,
    )
    return {**config.to_dict(), "architectures": ["Qwen3_5ForConditionalGeneration"], "dtype": "bfloat16"}


class Load:
    """Sessions one after the other, so many at once, until they are told to stop."""

    def __init__(self, engine: NotingEngine, gate: Gate, args: argparse.Namespace, num_agents: int) -> None:
        self._engine, self._gate, self._args = engine, gate, args
        self._num_agents = num_agents
        self._random = random.Random(1)
        self._shared = self._draw_ids(args.scale * 3000)
        self.begun: set[int] = set()
        """Agents whose first call has been answered."""

    async def run(self, seconds: float, limit_s: float) -> tuple[float, float]:
        """When the window begins and ends."""
        agents = [asyncio.create_task(self._run_agent(number)) for number in range(self._num_agents)]
        limit = time.monotonic() + limit_s
        try:
            # those that wait for room begin later: what is warm by then is what matters
            while len(self.begun) < self._num_agents and time.monotonic() < limit:
                for agent in agents:
                    if agent.done():
                        agent.result()
                await asyncio.sleep(0.05)
            begun = time.monotonic()
            await asyncio.sleep(seconds)
            return begun, time.monotonic()
        finally:
            for agent in agents:
                agent.cancel()
            await asyncio.gather(*agents, return_exceptions=True)

    async def _run_agent(self, number: int) -> None:
        skipped = self._random.random()
        while True:
            await self._run_session(number, skipped)
            skipped = 0.0

    async def _run_session(self, number: int, skipped: float) -> None:
        args, draw = self._args, self._random
        num_calls = draw.randint(10, 20)
        first = int(skipped * num_calls)
        ids = [*self._shared, *self._draw_ids(args.scale * (2000 + 920 * first))]
        stats = GateStats()
        for _ in range(first, num_calls):
            max_tokens = max(2, int(args.scale * min(220 * draw.lognormvariate(0, 0.8), 2000)))
            prompt_ids = tuple(ids)
            async with self._gate.passing(stats, prompt_ids):
                reply = await self._engine.generate(prompt_ids, GenerationParams(max_tokens=max_tokens))
            self.begun.add(number)
            ids += [*reply.token_ids, *self._draw_ids(args.scale * 700)]
            await asyncio.sleep(args.tool_s * draw.lognormvariate(0, 1.0))
        self._gate.forget(stats)

    def _draw_ids(self, count: float) -> list[int]:
        return [self._random.randrange(500) for _ in range(int(count))]


def measure_windows(llm: Any, args: argparse.Namespace) -> None:
    engine = NotingEngine(llm, device=torch.device("cuda", 0) if torch.cuda.is_available() else None)
    capacity = engine.cache_tokens
    asyncio.run(engine.generate((1,) * 300, GenerationParams(max_tokens=8)))  # kernels
    for agents_per_slot, has_admission in ARMS[args.child]:
        begun = time.monotonic()
        gate = Gate(capacity if has_admission else None)
        with engine.paused():
            llm.reset_prefix_cache(reset_connector=True)
        engine.ended.clear()
        load = Load(engine, gate, args, agents_per_slot * args.slots)
        start, end = asyncio.run(load.run(args.seconds, args.warm_s))
        calls = [call for call in engine.ended if start < call[0] <= end]
        prompt, cached, sampled = (sum(call[place] for call in calls) for place in (1, 2, 3))
        tell(
            engine=args.child,
            agents_per_slot=agents_per_slot,
            admission="yes" if has_admission else "no",
            capacity=capacity,
            history=prompt // max(1, len(calls)),
            hit=cached / max(1, prompt),
            prefilled_per_sampled=(prompt - cached) / max(1, sampled),
            tokens_per_s=sampled / (end - start),
            calls=len(calls),
            begun=len(load.begun),
            seconds=time.monotonic() - begun,
        )
    engine.close()


@torch.no_grad()
def measure_model(llm: Any, args: argparse.Namespace) -> None:
    """Tokens per second, and the gap of what was sampled to transformers in float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    begun = time.monotonic()
    engine = VllmEngine(llm, device=torch.device("cuda", 0) if torch.cuda.is_available() else None)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    prompts = [tuple(tokenizer(f"# {number}\n{QUOTED * 3}")["input_ids"]) for number in range(args.slots)]
    params = GenerationParams(max_tokens=256 if args.sizes == "true" else 16)

    async def sample() -> list[Any]:
        return list(await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts)))

    asyncio.run(sample())  # kernels
    started = time.monotonic()
    replies = asyncio.run(sample())
    sampling_s = time.monotonic() - started
    engine.close()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(device).eval()
    gaps = []
    for prompt, reply in zip(prompts, replies, strict=True):
        ids = torch.tensor([[*prompt, *reply.token_ids]], device=device)
        logps = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        sampled = logps.gather(1, ids[0, len(prompt) :, None])[:, 0]
        gaps.append((sampled.cpu() - torch.tensor(reply.logprobs)).abs())
    gap = torch.cat(gaps)
    tell(
        engine=args.child,
        tokens_per_s=len(gap) / sampling_s,
        calls=len(replies),
        gap=f"{gap.mean():.2g} / {gap.quantile(0.99):.2g} / {gap.max():.2g}",
        seconds=time.monotonic() - begun,
    )


def tell(**row: Any) -> None:
    print("ROW " + json.dumps(row), flush=True)


def run_child(args: argparse.Namespace) -> None:
    set_environment(cpu=not torch.cuda.is_available())
    import vllm  # noqa: F401 - which takes half a minute

    print("READY", flush=True)
    sys.stdin.readline()
    llm = build_llm(args)
    tell_started = time.monotonic()
    (measure_model if args.child in MODEL_ENGINES else measure_windows)(llm, args)
    print(f"measured in {time.monotonic() - tell_started:.0f} s", flush=True)


# In the process that reports.


def start_child(name: str, args: argparse.Namespace) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--child", name]
    for key in ("model", "sizes", "cache_gb", "cpu_blocks", "slots", "seconds", "warm_s", "scale", "tool_s"):
        command += [f"--{key.replace('_', '-')}", str(getattr(args, key))]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def read_child(child: subprocess.Popen[str], name: str, report: Report) -> None:
    """Add the rows of an engine as they come."""
    assert child.stdin is not None and child.stdout is not None
    report.say(f"{name}: starts")
    child.stdin.write("go\n")
    child.stdin.flush()
    for line in child.stdout:
        if line.startswith("ROW "):
            report.add(**json.loads(line[4:]))
    if child.wait():
        report.fail(RuntimeError(f"ended with {child.returncode}; its last lines are above"), engine=name)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of a model with weights, for the last rows")
    parser.add_argument("--engines", nargs="+", choices=tuple(ENGINES), default=list(ENGINES))
    parser.add_argument("--sizes", choices=tuple(SIZES), default="true")
    parser.add_argument("--cache-gb", type=float, default=29.0, help="of keys and values (default: %(default)s)")
    parser.add_argument("--cpu-blocks", type=int, default=64, help="of 32 tokens, on a CPU (default: %(default)s)")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each window")
    parser.add_argument("--warm-s", type=float, default=12.0, help="the longest wait for the window")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of all lengths")
    parser.add_argument("--tool-s", type=float, default=1.5, help="median of a tool's time")
    parser.add_argument("--limit", type=float, default=340.0, help="seconds after which no engine is started")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder for the figures")
    parser.add_argument("--child", choices=tuple(ENGINES), help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.child:
        run_child(args)
        return
    report = Report("cache", args.out, COLUMNS)
    children = {name: start_child(name, args) for name in args.engines[:2]}
    for place, name in enumerate(args.engines):
        if place + 1 < len(args.engines) and (following := args.engines[place + 1]) not in children:
            children[following] = start_child(following, args)
        if report.elapsed_s > args.limit:
            report.fail(RuntimeError("no time was left"), engine=name)
            children[name].kill()
            continue
        read_child(children[name], name, report)
    report.finish()


if __name__ == "__main__":
    main()
