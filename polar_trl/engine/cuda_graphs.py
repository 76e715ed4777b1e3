"""Choose which batches of the engine run as CUDA graphs, and check which ones vLLM made of them.

Full graphs of mixed prefill and decode batches (vLLM's mode FULL) are refused, as a setting (`ConfigError`) and in a
built engine (`EngineError`): with FlashAttention 3 in vLLM 0.26.0 they answer short prompts with wrong text and wrong
log-probabilities, and without an error.
"""

from typing import Any, Literal

from polar_trl.errors import ConfigError, EngineError

CudaGraphs = Literal["default", "decode", "none"]
"""vLLM's own choice; graphs for pure decode batches and no torch.compile; neither graphs nor torch.compile."""

LLM_KWARGS: dict[str, dict[str, Any]] = {
    "default": {},
    # mode 0 is CompilationMode.NONE; compiling is what makes vLLM's own choice slow to start
    "decode": {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}},
    "none": {"enforce_eager": True},
}
"""Overrides for `vllm.LLM`, by setting."""

_WHY_NOT_FULL = (
    "full CUDA graphs of mixed prefill and decode batches (vLLM's mode FULL) give silently wrong text with "
    "FlashAttention 3 in vLLM 0.26.0"
)


def check_cuda_graphs(value: str) -> None:
    """Refuse settings that are none of `CudaGraphs`, in words of the setting `engine_cuda_graphs`.

    Raises:
        ConfigError: `value` is unknown, or asks for mode FULL.
    """
    if value in LLM_KWARGS:
        return
    if str(value).upper() == "FULL":
        raise ConfigError(
            f"engine_cuda_graphs must not be {value!r}: {_WHY_NOT_FULL}. Use 'decode' (FULL_DECODE_ONLY, starts in "
            "seconds) or 'default' (vLLM's own, FULL_AND_PIECEWISE with torch.compile)"
        )
    raise ConfigError(
        f"engine_cuda_graphs must be 'default' (vLLM's own: FULL_AND_PIECEWISE with torch.compile), 'decode' "
        f"(FULL_DECODE_ONLY without torch.compile) or 'none' (enforce_eager) (it is {value!r})"
    )


def require_safe_graphs(vllm_config: Any) -> str:
    """Return the mode that a built engine runs in, and refuse one whose mixed batches are full graphs.

    vLLM changes the mode that it was asked for, by model, attention backend and platform: what counts is what stands
    in its configuration once the engine is built. On a CPU that is NONE.

    Args:
        vllm_config: `LLM(...).llm_engine.vllm_config`.

    Returns:
        A name of vLLM's `CUDAGraphMode`.

    Raises:
        EngineError: mixed batches run as full graphs.
    """
    mode = vllm_config.compilation_config.cudagraph_mode
    if mode is None:  # never resolved: vLLM's runner takes that for NONE
        return "NONE"
    if mode.mixed_mode().name == "FULL":
        raise EngineError(
            f"the engine would run mixed batches as full CUDA graphs (vLLM resolved cudagraph_mode to {mode.name}): "
            f"{_WHY_NOT_FULL}. Set engine_cuda_graphs to 'decode' or 'none'"
        )
    return str(mode.name)
