"""flash-linear-attention's kernels for gated delta nets on a GPU, looked up where they are installed.

Three replace what transformers computes in torch: the short convolution, the gated delta rule (both over segments of
any lengths in one call, each going on from a state), and the gated norm after it. It refuses versions whose rule does
not take fewer heads of queries and keys than of values.
"""

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

OLDEST = (0, 6)
"""Of the package: as of this version it is known to take grouped heads and offsets kept on the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlaKernels:
    """Functions of flash-linear-attention under their own signatures."""

    rule: Callable[..., Any]
    """`chunk_gated_delta_rule`"""
    convolve: Callable[..., Any]
    """`causal_conv1d`"""
    norm: Callable[..., Any]
    """`rms_norm_gated`"""


def find_kernels(device: torch.device) -> FlaKernels | None:
    """The kernels for tensors of this device; None where transformers' functions have to do."""
    return _load() if device.type == "cuda" else None


@cache
def _load() -> FlaKernels | None:
    try:
        fla = importlib.import_module("fla")
        rule = importlib.import_module("fla.ops.gated_delta_rule")
        convolution = importlib.import_module("fla.modules.causal_conv1d")
        norm = importlib.import_module("fla.modules.norm.fused_norm_gate")
    except ImportError as error:
        logger.warning(
            "gated delta nets run in torch, many times slower than with flash-linear-attention: %s",
            error,
        )
        return None
    if _parse_version(fla.__version__) < OLDEST:
        logger.warning(
            "flash-linear-attention %s is too old to be used: gated delta nets run in torch, many times slower; "
            "install %s or newer",
            *(fla.__version__, ".".join(map(str, OLDEST))),
        )
        return None
    return FlaKernels(rule=rule.chunk_gated_delta_rule, convolve=convolution.causal_conv1d, norm=norm.rms_norm_gated)


def _parse_version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


@dataclass(frozen=True, slots=True, kw_only=True)
class Offsets:
    """Where sequences that lie one after the other begin, and the end: [S + 1], int64."""

    on_device: Tensor
    on_host: Tensor
    """The same: so that no call has to wait for the device to learn how many chunks there are."""

    @classmethod
    def of(cls, lengths: list[int], device: torch.device) -> "Offsets":
        on_host = torch.tensor([0, *lengths]).cumsum(0)
        return cls(on_device=on_host.to(device), on_host=on_host)

    @property
    def arguments(self) -> dict[str, Tensor]:
        """As the kernels name them."""
        return {"cu_seqlens": self.on_device, "cu_seqlens_cpu": self.on_host}


def convolve(fla: FlaKernels, net: Any, qkv_NC: Tensor, offsets: Offsets, states_SCW: Tensor | None) -> Tensor:
    """[N, C]: the short causal convolution with its activation over S segments.

    Args:
        net: A gated delta net of transformers.
        states_SCW: The W inputs before each segment, of which the first is not read; None for zeros.
    """
    out, _ = fla.convolve(
        qkv_NC[None],
        net.conv1d.weight.squeeze(1),
        net.conv1d.bias,
        initial_state=states_SCW,
        activation="silu",
        **offsets.arguments,
    )
    result: Tensor = out[0]
    return result


def run_rule(
    fla: FlaKernels,
    net: Any,
    qkv_NC: Tensor,
    decay_NH: Tensor,
    beta_NH: Tensor,
    offsets: Offsets,
    *,
    initial_SHKV: Tensor | None,
    with_final: bool,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule over S sequences: outputs [N, H, V] and, if wanted, final states [S, H, K, V]."""
    query, key, value = qkv_NC[None].split([net.key_dim, net.key_dim, net.value_dim], dim=-1)
    out, final = fla.rule(
        query.unflatten(-1, (-1, net.head_k_dim)),
        key.unflatten(-1, (-1, net.head_k_dim)),
        value.unflatten(-1, (-1, net.head_v_dim)),
        g=decay_NH[None],
        beta=beta_NH[None],
        initial_state=initial_SHKV,
        output_final_state=with_final,
        use_qk_l2norm_in_kernel=True,
        **offsets.arguments,
    )
    return out[0], final


def gate(fla: FlaKernels, net: Any, out_NHV: Tensor, z_NHV: Tensor) -> Tensor:
    """[N, H * V]: the outputs, normalised and gated."""
    result: Tensor = fla.norm(out_NHV, z_NHV, net.norm.weight, None, eps=net.norm.variance_epsilon)
    return result.flatten(1)
