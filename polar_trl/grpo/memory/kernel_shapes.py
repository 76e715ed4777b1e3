"""Stand in for a GPU's fused kernels: the same memory, and no computation.

Each is an autograd function that makes the tensors of the kernel's forward and backward pass, in their shapes and
dtypes, and saves for the backward pass what the kernel saves, as read in the sources of torch 2.13 (FlexAttention),
fla-core 0.6.0 and liger-kernel 0.8.5. They are for tensors without data (`activations`), so that a machine without a
GPU, Triton or these packages can count a run that uses them.

Shapes: N tokens, H heads of values, G heads of queries and keys, K and V their sizes.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import ceil
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from polar_trl.grpo.packing import fla_kernels
from polar_trl.grpo.packing.fla_kernels import FlaKernels

_CHUNK = 64
"""Tokens per chunk of fla's delta rule (`chunk_size`), and per program of its convolution."""
_KEY_TILE = 128
"""Of the decay's gradient fla makes one copy per so many key dimensions (`chunk_bwd_dqkwg` on Hopper)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """The kernel packages that a run computes with."""

    fla: bool = False
    """flash-linear-attention, for gated delta nets; otherwise transformers' functions in torch."""
    liger: bool = False
    """`use_liger_kernel`: norms, SwiGLU and rotary embedding; otherwise torch, operation by operation."""


IN_TORCH = Kernels()


@contextmanager
def computed_with(kernels: Kernels, model: nn.Module) -> Iterator[None]:
    """Make forward passes of a model call the stand-ins of these packages."""
    with ExitStack() as stack:
        if kernels.fla:
            stack.enter_context(_computed_by_fla())
        if kernels.liger:
            stack.enter_context(_computed_by_liger(model))
        yield


@contextmanager
def _replaced(module: Any, name: str, function: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, function)
    try:
        yield
    finally:
        setattr(module, name, before)


# flash-linear-attention (fla-core 0.6.0).


@contextmanager
def _computed_by_fla() -> Iterator[None]:
    """Make gated delta nets that are given a layout call the stand-ins, on whichever device."""
    shapes = FlaKernels(rule=_run_rule, convolve=_convolve, norm=_gate)
    with _replaced(fla_kernels, "find_kernels", lambda _net, _device: shapes):
        yield


def _run_rule(query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, **_: Any) -> tuple[Tensor, None]:
    out: Tensor = _DeltaRule.apply(query, key, value, g, beta)
    return out, None


class _DeltaRule(Function):
    """`ChunkGatedDeltaRuleFunction` (fla/ops/gated_delta_rule/chunk.py).

    Saved: normalised queries and keys [N, G, K] with a float32 per head and token, values [N, H, V], summed decays and
    beta [N, H], and per chunk a matrix of tokens by tokens [N, H, 64]. States and the rest are computed again.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        query, key, value = (x.contiguous() for x in (query, key, value))  # of parts of one tensor: copies
        normal = [torch.empty_like(query), torch.empty_like(key)]
        normalisers = [x.new_empty(x.shape[:-1], dtype=torch.float32) for x in (query, key)]
        sums = torch.empty_like(decay, dtype=torch.float32)
        matrices = key.new_empty(*value.shape[:-1], _CHUNK)
        _temporary = _recompute(key, value)
        out = torch.empty_like(value)
        ctx.save_for_backward(*normal, *normalisers, value, sums, beta, matrices)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        query, key, _, _, value, sums, beta, _ = ctx.saved_tensors
        # all of these live until the function returns
        w, _u, states, _v = _recompute(key, value)
        grad_value, _grad_states = torch.empty_like(value), torch.empty_like(states)
        grad_value = torch.empty_like(value)  # beside the one that it replaces
        wide = [torch.empty_like(w) for _ in range(3)]
        grad_sums = sums.new_empty(ceil(key.shape[-1] / _KEY_TILE), *sums.shape)
        if w.shape != key.shape:
            wide[:2] = [torch.empty_like(query), torch.empty_like(key)]  # summed over the heads of a group
        _grad_key, grad_beta = torch.empty_like(w), torch.empty_like(beta)
        grad_value = torch.empty_like(value)
        return torch.empty_like(query), torch.empty_like(key), grad_value, grad_sums[0], grad_beta


def _recompute(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """w [1, N, H, K] and u [1, N, H, V], a state per chunk [1, N / 64, H, K, V], and new values [1, N, H, V]."""
    num_tokens, heads = value.shape[1:3]
    dims = key.shape[-1], value.shape[-1]
    states = key.new_empty(1, ceil(num_tokens / _CHUNK), heads, *dims)
    return key.new_empty(1, num_tokens, heads, dims[0]), torch.empty_like(value), states, torch.empty_like(value)


def _convolve(inputs: Tensor, weight: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    out: Tensor = _Convolution.apply(inputs, weight)
    return out, None


class _Convolution(Function):
    """`CausalConv1dFunction` (fla/modules/causal_conv1d/ops.py). Saved: its inputs [1, N, C]."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        return inputs.new_empty(inputs.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        inputs, weight = ctx.saved_tensors
        _parts = weight.new_empty(ceil(inputs.shape[1] / _CHUNK), *weight.shape, dtype=torch.float32)
        return torch.empty_like(inputs), torch.empty_like(weight)


def _gate(inputs: Tensor, gates: Tensor, weight: Tensor, *_: Any, **__: Any) -> Tensor:
    out: Tensor = _GatedNorm.apply(inputs, gates, weight)
    return out


class _GatedNorm(Function):
    """`LayerNormGatedFunction` (fla/modules/norm/fused_norm_gate.py). Saved: inputs and gates, a float32 per head."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, gates: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(inputs, gates, weight, inputs.new_empty(inputs.shape[:-1], dtype=torch.float32))
        return torch.empty_like(inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        inputs, gates, weight, _ = ctx.saved_tensors
        return torch.empty_like(inputs), torch.empty_like(gates), torch.empty_like(weight)


# Liger (liger-kernel 0.8.5).


@contextmanager
def _computed_by_liger(model: nn.Module) -> Iterator[None]:
    """Replace a model's norms and SwiGLU by the stand-ins, for good, and rotary embedding inside the block."""
    attentions = set()
    for module in model.modules():
        name = type(module).__name__
        if name.endswith("RMSNorm") or name.startswith("LigerRMSNorm"):
            module.forward = MethodType(_normalise, module)  # type: ignore[assignment]
        elif all(hasattr(module, part) for part in ("gate_proj", "up_proj", "down_proj")):
            module.forward = MethodType(_feed_forward, module)  # type: ignore[assignment]
        elif hasattr(module, "q_norm") or hasattr(module, "q_proj"):
            attentions.add(sys.modules[type(module).__module__])
    with ExitStack() as stack:
        for module in attentions:
            if (rotate := getattr(module, "apply_rotary_pos_emb", None)) is not None:
                stack.enter_context(_replaced(module, "apply_rotary_pos_emb", _rotate_or(rotate)))
        yield


def _normalise(norm: Any, inputs: Tensor) -> Tensor:
    out: Tensor = _Norm.apply(inputs, norm.weight)
    return out


class _Norm(Function):
    """`LigerRMSNormFunction` (liger_kernel/ops/rms_norm.py). Saved: its inputs, a float32 per vector."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        inputs = inputs.contiguous()
        ctx.save_for_backward(inputs, weight, inputs.new_empty(inputs.shape[:-1], dtype=torch.float32))
        return torch.empty_like(inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        inputs, weight, _ = ctx.saved_tensors
        return torch.empty_like(inputs), torch.empty_like(weight)


def _feed_forward(block: Any, inputs: Tensor) -> Tensor:
    out: Tensor = block.down_proj(_SwiGLU.apply(block.gate_proj(inputs), block.up_proj(inputs)))
    return out


class _SwiGLU(Function):
    """`LigerSiLUMulFunction` (liger_kernel/ops/swiglu.py). Saved: its inputs, which its gradients overwrite."""

    @staticmethod
    def forward(ctx: Any, gates: Tensor, inputs: Tensor) -> Tensor:
        ctx.save_for_backward(gates, inputs)
        return torch.empty_like(gates)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        gates, inputs = ctx.saved_tensors
        return gates, inputs


def _rotate_or(rotate: Callable[..., Any]) -> Callable[..., Any]:
    def choose(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        # Liger leaves models alone that rotate a part of each head (Qwen3.5)
        if cos.shape[-1] != query.shape[-1]:
            return rotate(query, key, cos, sin, *args, **kwargs)
        return _Rotation.apply(query, key)

    return choose


class _Rotation(Function):
    """`LigerRopeFunction` (liger_kernel/ops/rope.py): in place, both ways."""

    @staticmethod
    def forward(_ctx: Any, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return _in_place(query), _in_place(key)

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return _in_place(gradients[0]), _in_place(gradients[1])


def _in_place(heads_first: Tensor) -> Tensor:
    """[1, H, N, D] over the memory of [1, N, H, D]."""
    return heads_first.transpose(1, 2).contiguous().transpose(1, 2)
