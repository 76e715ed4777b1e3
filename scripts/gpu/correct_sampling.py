"""Sample batches of requests from a freshly built engine, each batch from a cold prefix cache.

The engine is built, and given the trainer's weights, by the trainer's own code. One process has one engine: vLLM does
not give all of its memory back. Used by correct.py. In mode FULL, an engine that `colocate` refuses samples all the
same, and the error is written beside the samples.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MAX_MODEL_LEN = 2048
MAX_NUM_SEQS = 64
FULL = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL"}}
"""What the trainer refuses; here to show why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One prompt. It arrives `delay_s` seconds after its batch began."""

    prompt_ids: list[int]
    max_tokens: int
    delay_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Requests that the engine answers together; temperature 0 is greedy."""

    name: str
    temperature: float
    requests: list[Request]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Sample of one request: C token ids and their logprobs (nats), and when (s from the start)."""

    token_ids: list[int]
    logprobs: list[float]
    started_s: float
    ended_s: float


def write_batches(path: Path, batches: Sequence[Batch]) -> None:
    path.write_text(json.dumps([asdict(batch) for batch in batches]))


def read_batches(path: Path) -> list[Batch]:
    return [
        Batch(**{**batch, "requests": [Request(**request) for request in batch["requests"]]})
        for batch in json.loads(path.read_text())
    ]


def read_samples(path: Path) -> tuple[dict[str, Any] | None, dict[str, list[Sample]]]:
    """Read what the engine's process has written so far: how the engine was built, and samples by batch."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    samples = {line["batch"]: [Sample(**sample) for sample in line["samples"]] for line in lines[1:]}
    return (lines[0] if lines else None), samples


def run_sampling(model: str, mode: str, batches_path: Path, samples_path: Path, *, memory_share: float) -> None:
    """Build the engine in a mode (a setting of `engine_cuda_graphs`, or "full") and answer every batch.

    Imports first, then waits for a line on standard input, so that imports of one process can go beside another's
    work on the GPU. A line of JSON is appended per batch.
    """
    import sys

    import torch

    from polar_trl.engine.colocate import set_environment

    on_gpu = torch.cuda.is_available()
    set_environment(cpu=not on_gpu)
    import trl.trainer.grpo_trainer  # noqa: F401 - with vllm, the slow imports
    import vllm  # noqa: F401

    sys.stdin.readline()
    started = time.monotonic()
    colocated, refusal = build_engine(model, mode, on_gpu=on_gpu, memory_share=memory_share)
    colocated.sync_weights(new_policy=False)
    config = colocated.llm.llm_engine.vllm_config
    header = {
        "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
        "compilation_mode": str(config.compilation_config.mode),
        "v2_model_runner": bool(config.use_v2_model_runner),
        "dtype": str(colocated.engine.dtype).removeprefix("torch."),
        "refusal": refusal,
        "start_s": round(time.monotonic() - started, 1),
    }
    with samples_path.open("w") as lines:
        print(json.dumps(header), file=lines, flush=True)
        for batch in read_batches(batches_path):
            with colocated.engine.paused():
                colocated.llm.reset_prefix_cache()
            samples = asyncio.run(_answer(colocated.engine, batch))
            line = {"batch": batch.name, "samples": [asdict(sample) for sample in samples]}
            print(json.dumps(line), file=lines, flush=True)
    colocated.engine.close()


def build_engine(model: str, mode: str, *, on_gpu: bool, memory_share: float) -> tuple[Any, str | None]:
    """A `ColocatedVllm` over a float32 model, as a trainer has it, and what it was refused for, if it was."""
    import torch
    from accelerate import Accelerator
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from polar_trl.engine import colocate
    from polar_trl.engine.cuda_graphs import LLM_KWARGS, require_safe_graphs
    from polar_trl.errors import EngineError

    refusals = []

    def note_refusal(vllm_config: Any) -> str:
        try:
            return require_safe_graphs(vllm_config)
        except EngineError as error:
            refusals.append(str(error))
            return "FULL"

    if mode == "full":
        # only here does an engine that is refused go on: to show what it answers
        colocate.require_safe_graphs = note_refusal
    accelerator = Accelerator(cpu=not on_gpu)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(accelerator.device).eval()
    colocated = colocate.ColocatedVllm(
        policy,
        accelerator,
        AutoTokenizer.from_pretrained(model),
        llm_kwargs={"max_num_seqs": MAX_NUM_SEQS, **(FULL if mode == "full" else LLM_KWARGS[mode])},
        gpu_memory_utilization=memory_share,
        max_model_length=MAX_MODEL_LEN,
    )
    return colocated, (refusals[0] if refusals else None)


async def _answer(engine: Any, batch: Batch) -> list[Sample]:
    from polar_trl.engine.base import GenerationParams

    began = time.monotonic()

    async def answer(request: Request) -> Sample:
        await asyncio.sleep(request.delay_s)
        params = GenerationParams(max_tokens=request.max_tokens, temperature=batch.temperature)
        started = time.monotonic() - began
        completion = await engine.generate(tuple(request.prompt_ids), params)
        return Sample(
            token_ids=list(completion.token_ids),
            logprobs=list(completion.logprobs),
            started_s=started,
            ended_s=time.monotonic() - began,
        )

    return await asyncio.gather(*(answer(request) for request in batch.requests))
