"""Load a model into vLLM in this process without a trainer, to evaluate or to collect.

The same engine as the trainer's (`VllmEngine`), made ready in the same way (`colocate.prepare_vllm`), so that a model
is sampled in an evaluation as in training. The GPU is the engine's alone: there is no sleep and no weight sync.

vLLM rounds a float32 checkpoint to nearest, which undoes changes smaller than half a spacing, such as SFT's of a model
that was published in bfloat16. `dither_weights` rounds it as a run does that begins from it (docs/precision.md).
"""

import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig

from polar_trl.engine import cuda_graphs
from polar_trl.engine.colocate import prepare_vllm, set_environment
from polar_trl.engine.cuda_graphs import CudaGraphs, require_safe_graphs
from polar_trl.engine.rounding import HALF_DTYPES, round_weight
from polar_trl.engine.vllm import VllmEngine
from polar_trl.errors import ConfigError

logger = logging.getLogger(__name__)

MAX_BATCHED_TOKENS = 8192
"""Prompt tokens that are read in one step, beside those that are sampled."""


def build_standalone_engine(
    model: str,
    *,
    cpu: bool,
    max_model_len: int | None,
    max_num_seqs: int,
    gpu_memory_utilization: float = 0.9,
    graphs: CudaGraphs = "default",
    dtype: str | None = None,
    dithered: bool = True,
    engine_kwargs: Mapping[str, Any] = {},
    trust_remote_code: bool = False,
    seed: int = 0,
) -> VllmEngine:
    """Load a model; whoever gets the engine closes it.

    Args:
        model: A full model's folder or hub name.
        max_model_len: Tokens of a prompt and its answer together; None: as many as the model has positions for.
        max_num_seqs: Requests that are sampled at once.
        dtype: What the engine computes in, as `engine_dtype` of a run; None: what vLLM chooses for the model.
        dithered: Round a float32 checkpoint for half precision as a run does; else as vLLM does, to nearest.
        engine_kwargs: Others for `vllm.LLM`.
        seed: Of sampling. The same requests in the same order give the same tokens.

    Raises `ConfigError` where vLLM cannot load it, with vLLM's reason.
    """
    set_environment(cpu=cpu)
    kwargs = prepare_vllm(AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code), cpu=cpu)
    from vllm import LLM

    try:
        llm: Any = LLM(
            model=model,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=MAX_BATCHED_TOKENS,
            gpu_memory_utilization=gpu_memory_utilization,
            logprobs_mode="processed_logprobs",
            trust_remote_code=trust_remote_code,
            seed=seed,
            **{**kwargs, **({"dtype": dtype} if dtype else {}), **cuda_graphs.LLM_KWARGS[graphs], **engine_kwargs},
        )
    except (ValueError, RuntimeError, OSError, SafetensorError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        # pydantic's first line counts the errors, the next names the class
        reason = next((line for line in lines if line.startswith("Value error")), lines[0] if lines else repr(error))
        raise ConfigError(f"vLLM cannot load {model}: {reason}") from error
    require_safe_graphs(llm.llm_engine.vllm_config)
    used = llm.llm_engine.vllm_config.model_config.dtype
    if dithered and used in HALF_DTYPES and dither_weights(llm, list_float32_files(model), used):
        text = "%s is float32: its weights are rounded to %s with fixed random offsets, as where a run begins from it"
        logger.warning(text, model, str(used).removeprefix("torch."))
    return VllmEngine(llm, device=None if cpu else torch.device("cuda", torch.cuda.current_device()))


def list_float32_files(model: str) -> list[Path]:
    """List the files of a checkpoint whose weights are all float32; none of any other, and none in torch's old format.

    Checkpoints in half precision keep some weights in float32, quantized ones their scales: those stay as they are.

    Args:
        model: A folder, or the name of a model on the hub that has been downloaded.
    """

    def find(name: str) -> Path | None:
        path = Path(model) / name if Path(model).is_dir() else try_to_load_from_cache(model, name)
        return Path(path) if isinstance(path, str | Path) and Path(path).is_file() else None

    index, whole = find("model.safetensors.index.json"), find("model.safetensors")
    files = [whole] if whole else []
    if index is not None:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        files = [index.parent / name for name in sorted(set(names))]
    for path in files:
        with safe_open(path, framework="pt") as file:
            if any(file.get_slice(name).get_dtype() != "F32" for name in file.keys()):  # noqa: SIM118  # no mapping
                return []
    return files


def dither_weights(llm: Any, files: Iterable[Path], dtype: torch.dtype) -> int:
    """Replace weights of an engine by those of float32 files, rounded to `dtype` with fixed random offsets.

    Returns how many were off the grid: those of a run's own model lie on it, and stay.
    """
    load, count = llm.llm_engine.model_executor.driver_worker.model_runner.model.load_weights, 0
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # it is no mapping
                weight = file.get_tensor(name)
                if not torch.equal(weight.to(dtype).float(), weight):
                    load([(name, round_weight(weight, name, dtype, seed=0, dithered=True))])
                    count += 1
    return count
