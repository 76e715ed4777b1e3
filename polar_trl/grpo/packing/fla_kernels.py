"""Call flash-linear-attention's kernels for gated delta nets on a GPU, where they are installed and right.

Three replace transformers' code in torch: the short convolution, the gated delta rule (both over segments of any
lengths in one call, each going on from a state), and the gated norm after it. Versions whose rule does not take fewer
heads of queries and keys than of values are left alone, and so are cards on which the rule's gradients are wrong: some
pairs of card and Triton compile it wrongly without an error, so it is compared with the plain recurrence once.
"""

import importlib
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

logger = logging.getLogger(__name__)

OLDEST = (0, 6)
"""First version of the package that is known to take grouped heads and offsets kept on the host."""
MAX_ERROR = 0.05
"""Most relative error of the rule in bfloat16, whose own is 0.01; that of known wrong kernels is 0.5."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlaKernels:
    """Functions of flash-linear-attention under their own signatures."""

    rule: Callable[..., Any]
    """`chunk_gated_delta_rule`"""
    convolve: Callable[..., Any]
    """`causal_conv1d`"""
    norm: Callable[..., Any]
    """`rms_norm_gated`"""


def find_kernels(net: Any, device: torch.device) -> FlaKernels | None:
    """Return the kernels for a gated delta net of transformers; None where transformers' functions have to do."""
    fla = load_kernels(device)
    if fla is None or net.activation != "silu":
        return None
    heads = Heads(groups=net.num_k_heads, heads=net.num_v_heads, key_dim=net.head_k_dim, value_dim=net.head_v_dim)
    return fla if _is_right(fla, device, heads) else None


def load_kernels(device: torch.device) -> FlaKernels | None:
    """Return the kernels that are installed, if this device can run them."""
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
    logger.warning("flash-linear-attention tunes its kernels during the first step, which takes minutes for it")
    return FlaKernels(rule=rule.chunk_gated_delta_rule, convolve=convolution.causal_conv1d, norm=norm.rms_norm_gated)


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Sizes of a gated delta net. Kernels are tuned for them, and a check of other sizes would tune others."""

    groups: int
    """Of queries and keys."""
    heads: int
    """Of values."""
    key_dim: int
    value_dim: int


@cache
def _is_right(fla: FlaKernels, device: torch.device, heads: Heads) -> bool:
    """Tell whether outputs and gradients of the rule are those of the recurrence, in bfloat16, on this card."""
    if heads.key_dim >= 128:
        # The package stops where Triton 3.4 to 3.7.0 compiles for Hopper, as tiles of 64 come out wrong there (its
        # issue 640). Heads of 128 have tiles of 128. What follows would see it if they were wrong too.
        chunk_o: Any = importlib.import_module("fla.ops.common.chunk_o")
        chunk_o.TRITON_ABOVE_3_7_1 = True
    try:
        # on a thread of its own: this may be inside of a checkpointed forward pass, which counts what is saved for
        # gradients, under autocast, or where gradients are off; all of these are of a thread
        with ThreadPoolExecutor(1) as thread:
            error = thread.submit(_measure_error, fla, device, heads).result()
    except RuntimeError as refusal:
        logger.warning("gated delta nets run in torch, many times slower: %s", str(refusal).splitlines()[0])
        return False
    logger.info("flash-linear-attention against the recurrence: relative error %.2g", error)
    if error > MAX_ERROR:
        logger.warning(
            "gated delta nets run in torch, many times slower: flash-linear-attention's kernels are wrong on this "
            "card with this Triton (relative error %.2g in outputs or gradients)",
            error,
        )
    return error <= MAX_ERROR


def _measure_error(fla: FlaKernels, device: torch.device, heads: Heads) -> float:
    """Measure the largest relative error (of norms) of the rule's outputs and five gradients, on two sequences."""
    lengths = [150, 70]  # of several chunks of 64, the last of which is not full
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(sum(lengths), *shape, generator=generator).to(device)

    query, key = draw(heads.groups, heads.key_dim), draw(heads.groups, heads.key_dim)
    value, weights = draw(heads.heads, heads.value_dim), draw(heads.heads, heads.value_dim)
    decay = -torch.rand(sum(lengths), heads.heads, generator=generator).to(device)
    beta = draw(heads.heads).sigmoid()
    inputs = [x.bfloat16() for x in (query, key, value)] + [decay, beta.bfloat16()]

    def run(rule: Callable[..., Tensor], dtype: torch.dtype | None) -> list[Tensor]:
        leaves = [x.to(dtype or x.dtype).detach().requires_grad_() for x in inputs]
        out = rule(*leaves)
        (out.float() * weights).sum().backward()
        return [out.detach().float(), *(leaf.grad.float() for leaf in leaves if leaf.grad is not None)]

    def by_kernel(q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor) -> Tensor:
        offsets = Offsets.of(lengths, device)
        out: Tensor = fla.rule(
            *(q[None], k[None], v[None]),
            g=g[None],
            beta=b[None],
            initial_state=None,
            output_final_state=False,
            use_qk_l2norm_in_kernel=True,
            **offsets.arguments,
        )[0][0]
        return out

    def by_recurrence(*whole: Tensor) -> Tensor:
        return torch.cat([recur(*parts) for parts in zip(*(x.split(lengths) for x in whole), strict=True)])

    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        pairs = zip(run(by_kernel, None), run(by_recurrence, torch.float32), strict=True)
    return max(float((got - wanted).norm() / wanted.norm()) for got, wanted in pairs)


def recur(query_TQK: Tensor, key_TQK: Tensor, value_THV: Tensor, decay_TH: Tensor, beta_TH: Tensor) -> Tensor:
    """[T, H, V]: the gated delta rule token by token (arXiv:2412.06464, eq. 10), on normalized queries and keys.

    Per head, with decay a = exp(g): S <- a S + k (b (v - (a S)^T k))^T, and the output is S^T q / sqrt(K). So the
    value that is stored under a key moves by the share b to the new value, where a sum of k v^T would only add it.
    """
    repeats = value_THV.shape[1] // query_TQK.shape[1]
    query, key = (functional.normalize(x, dim=-1).repeat_interleave(repeats, dim=1) for x in (query_TQK, key_TQK))
    state_HKV = value_THV.new_zeros(value_THV.shape[1], query_TQK.shape[2], value_THV.shape[2])
    outs = []
    for q, k, v, g, b in zip(query, key, value_THV, decay_TH, beta_TH, strict=True):
        state_HKV = state_HKV * g.exp()[:, None, None]
        read = (state_HKV * k[:, :, None]).sum(dim=1)
        state_HKV = state_HKV + k[:, :, None] * (b[:, None] * (v - read))[:, None, :]
        outs.append((state_HKV * q[:, :, None]).sum(dim=1) * query_TQK.shape[2] ** -0.5)
    return torch.stack(outs)


def _parse_version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


@dataclass(frozen=True, slots=True, kw_only=True)
class Offsets:
    """Starts of E sequences that lie one after the other, and the end: [E + 1], int64."""

    on_device: Tensor
    on_host: Tensor
    """The same, so that no call has to wait for the device to learn how many chunks there are."""

    @classmethod
    def of(cls, lengths: list[int], device: torch.device) -> "Offsets":
        on_host = torch.tensor([0, *lengths]).cumsum(0)
        return cls(on_device=on_host.to(device), on_host=on_host)

    @property
    def arguments(self) -> dict[str, Tensor]:
        """The offsets under the kernels' own names."""
        return {"cu_seqlens": self.on_device, "cu_seqlens_cpu": self.on_host}


def convolve(fla: FlaKernels, net: Any, qkv_LD: Tensor, offsets: Offsets, states: Tensor | None) -> Tensor:
    """[L, D]: the short causal convolution with its activation over E segments.

    Args:
        net: A gated delta net of transformers.
        states: [E, D, X + 1] inputs before each segment, of which the first is not read; None for zeros.
    """
    out, _ = fla.convolve(
        qkv_LD[None],
        net.conv1d.weight.squeeze(1),
        net.conv1d.bias,
        initial_state=states,
        activation="silu",
        **offsets.arguments,
    )
    result: Tensor = out[0]
    return result


def run_rule(
    fla: FlaKernels,
    net: Any,
    qkv_LD: Tensor,
    decay_LH: Tensor,
    beta_LH: Tensor,
    offsets: Offsets,
    *,
    initial_EHKV: Tensor | None,
    with_final: bool,
) -> tuple[Tensor, Tensor | None]:
    """Run the gated delta rule over E sequences: outputs [L, H, V] and, if wanted, final states [E, H, K, V]."""
    out, final = fla.rule(
        *split_heads(net, qkv_LD[None]),
        g=decay_LH[None],
        beta=beta_LH[None],
        initial_state=initial_EHKV,
        output_final_state=with_final,
        use_qk_l2norm_in_kernel=True,
        **offsets.arguments,
    )
    return out[0], final


def split_heads(net: Any, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split [..., D] outputs of the convolution into queries and keys [..., Q, K] and values [..., H, V]."""
    query, key, value = qkv.split([net.key_dim, net.key_dim, net.value_dim], dim=-1)
    query, key = (x.unflatten(-1, (-1, net.head_k_dim)) for x in (query, key))
    return query, key, value.unflatten(-1, (-1, net.head_v_dim))


def gate(fla: FlaKernels, net: Any, out_LHV: Tensor, z_LHV: Tensor) -> Tensor:
    """[L, H * V]: the outputs, normalized and gated."""
    result: Tensor = fla.norm(out_LHV, z_LHV, net.norm.weight, None, eps=net.norm.variance_epsilon)
    return result.flatten(1)
