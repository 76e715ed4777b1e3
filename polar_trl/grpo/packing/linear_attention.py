"""Gated delta nets (Qwen3.5, Qwen3-Next) over a `Layout`: each segment goes on from the state its parent ended with.

Such a layer carries two states from token to token: the last inputs of a short causal convolution, and a matrix per
head that the gated delta rule updates. `wrap_linear_attention` lets both follow the layout's segments, so that no row
sees another and a shared prefix is computed once; gradients of all that continues a prefix add up in its state. It
refuses a cache that has a past: rows begin at their beginning.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby, pairwise
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from polar_trl.grpo.packing import fla_kernels
from polar_trl.grpo.packing.fla_kernels import FlaKernels, Offsets
from polar_trl.grpo.packing.layout import Layout

_GATED_DELTA_NETS = frozenset({"Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"})
"""Classes of transformers whose forward `_forward_layout` follows."""
_RULE, _CONVOLUTION = "torch_chunk_gated_delta_rule", "causal_conv1d_fn"
"""Functions of the modules that those classes are in."""
_CHUNK_SIZE = 64
"""Tokens that the delta rule works on at a time: a shorter sequence costs as much."""


def wrap_linear_attention(model: nn.Module) -> int:
    """Let every gated delta net of a model take `layout=`; without it each is as before. Safe to call again.

    Returns:
        How many there are.
    """
    nets = [module for module in model.modules() if is_gated_delta_net(module)]
    for net in nets:
        if not hasattr(net, "forward_rows"):
            # bound methods, so that a deep copy of the model calls its own modules
            net.forward_rows = net.forward  # type: ignore[assignment]
            net.forward = MethodType(_forward, net)
    return len(nets)


def is_gated_delta_net(module: nn.Module) -> bool:
    """Whether `wrap_linear_attention` knows this layer."""
    return type(module).__name__ in _GATED_DELTA_NETS


@contextmanager
def computed_in_torch(model: nn.Module) -> Iterator[None]:
    """Forward passes without a layout call transformers' reference code, whichever kernels it has found."""
    modules = {sys.modules[type(module).__module__] for module in model.modules() if is_gated_delta_net(module)}
    before = [(module, name, getattr(module, name)) for module in modules for name in (_RULE, _CONVOLUTION)]
    for module, name, function in before:
        setattr(module, name, inspect.unwrap(function))
    try:
        yield
    finally:
        for module, name, function in before:
            setattr(module, name, function)


def _forward(net: Any, hidden_states: Tensor, *args: Any, layout: Layout | None = None, **kwargs: Any) -> Tensor:
    if layout is None:
        output: Tensor = net.forward_rows(hidden_states, *args, **kwargs)
        return output
    past = kwargs.get("cache_params")
    if past is not None and past.has_previous_state(net.layer_idx):
        raise ValueError("a layout's rows begin at their beginning: they cannot continue a cache")
    if hidden_states.shape[:2] != (1, layout.num_tokens):
        raise ValueError(
            f"hidden states {tuple(hidden_states.shape)} do not fit a layout of {layout.num_tokens} tokens"
        )
    return _forward_layout(net, hidden_states, layout)


def _forward_layout(net: Any, hidden_states: Tensor, layout: Layout) -> Tensor:
    """The steps of transformers' `Qwen3_5GatedDeltaNet.forward`, all but two of which treat each token alone.

    Args:
        hidden_states: [1, N, hidden].
    """
    plan = plan_layout(layout, net.conv_kernel_size - 1, hidden_states.device)
    fla = fla_kernels.find_kernels(net, hidden_states.device)
    qkv_NC, z, b_NH, a_NH = (x[0] for x in _project(net, hidden_states))
    beta_NH = b_NH.sigmoid()
    decay_NH = -net.A_log.float().exp() * functional.softplus(a_NH.float() + net.dt_bias)
    z_NHV = z.reshape(layout.num_tokens, -1, net.head_v_dim)
    if fla is None:
        qkv_NC = _convolve(net, qkv_NC, plan)
        out_NHV = _run_delta_rule(net, qkv_NC, decay_NH, beta_NH, plan)
        gated = net.norm(out_NHV.flatten(0, 1), z_NHV.flatten(0, 1)).view(layout.num_tokens, -1)
    else:
        qkv_NC = fla_kernels.convolve(fla, net, qkv_NC, plan.offsets, _gather_context(qkv_NC, plan))
        out_NHV = _run_generations(fla, net, (qkv_NC, decay_NH, beta_NH), plan)
        gated = fla_kernels.gate(fla, net, out_NHV, z_NHV)
    output: Tensor = net.out_proj(gated[None])
    return output


def _project(net: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inputs of the convolution (queries, keys, values) [1, N, C], the gate z, and b and a [1, N, H]."""
    if hasattr(net, "in_proj_qkv"):
        projections = (net.in_proj_qkv, net.in_proj_z, net.in_proj_b, net.in_proj_a)
        qkv, z, b, a = (projection(hidden_states) for projection in projections)
        return qkv, z, b, a
    # Qwen3-Next keeps them in two matrices, by head
    mixed = net.in_proj_qkvz(hidden_states), net.in_proj_ba(hidden_states)
    query, key, value, z, b, a = net.fix_query_key_value_ordering(*mixed)
    return torch.cat([x.flatten(2) for x in (query, key, value)], dim=-1), z, b, a


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """What a layout's S segments ask of a gated delta net whose convolution reaches R tokens back."""

    lengths: list[int]
    """[S]: tokens per segment."""
    parents: list[int | None]
    """[S]"""
    generations: list[list[int]]
    """Segments by the number of segments in their context: each generation needs only states of the one before."""
    offsets: Offsets
    """Of all segments in the layout's order."""
    generation_offsets: list[Offsets]
    """Per generation, its segments put one after the other."""
    parent_places: list[Tensor | None]
    """Per generation: which segments of the one before it its own go on from; None for the roots."""
    context: Tensor | None
    """[S, R]: of each segment, the R tokens before it in its rows; None where there is no shared prefix."""
    context_missing: Tensor
    """Bool, like `context`: there is no such token."""
    windows: Tensor
    """[(S - 1) * 2R]: of each segment but the first, the R tokens before it in its rows and its first R."""
    missing: Tensor
    """Bool, like `windows`: there is no such token."""
    heads: Tensor
    """Which tokens are among the first R of a segment but the first."""
    heads_in_windows: Tensor
    """Where in `windows` those are."""


def plan_layout(layout: Layout, reach: int, device: torch.device) -> _Plan:
    """Kept with the layout: all layers, and the recomputation of a checkpointed one, share it."""
    plans: dict[tuple[int, torch.device], _Plan] = layout.__dict__.setdefault("delta_net_plans", {})
    if (reach, device) not in plans:
        plans[reach, device] = _build_plan(layout, reach, device)
    return plans[reach, device]


def _build_plan(layout: Layout, reach: int, device: torch.device) -> _Plan:
    lengths, parents, generations, windows = [], [], list[list[int]](), list[int]()
    contexts: list[list[int]] = []
    generation_of: list[int] = []
    tails: list[list[int]] = []  # per segment: the last tokens, at most R, of its rows up to its end
    for index, segment in enumerate(layout.segments):
        parent = segment.parent
        generation = 0 if parent is None else generation_of[parent] + 1
        context = [] if parent is None else tails[parent]
        span = range(segment.start, segment.end)
        if generation == len(generations):
            generations.append([])
        generations[generation].append(index)
        generation_of.append(generation)
        lengths.append(len(span))
        parents.append(parent)
        tails.append([*context, *span[-reach:]][-reach:])
        contexts.append([-1] * (reach - len(context)) + context)
        if index and reach:
            head = span[:reach]
            windows += contexts[-1] + [*head] + [-1] * (reach - len(head))
    windows_T = torch.tensor(windows, dtype=torch.int64)
    is_head = (torch.arange(len(windows)) % max(2 * reach, 1) >= reach) & (windows_T >= 0)
    contexts_T = torch.tensor(contexts, dtype=torch.int64).view(len(contexts), reach)
    has_context = reach > 0 and len(generations) > 1
    return _Plan(
        lengths=lengths,
        parents=parents,
        generations=generations,
        offsets=Offsets.of(lengths, device),
        generation_offsets=[Offsets.of([lengths[i] for i in members], device) for members in generations],
        parent_places=[None, *(_find_places(b, a, parents, device) for a, b in pairwise(generations))],
        context=contexts_T.clamp(min=0).to(device) if has_context else None,
        context_missing=(contexts_T < 0).to(device),
        windows=windows_T.clamp(min=0).to(device),
        missing=(windows_T < 0).to(device),
        heads=windows_T[is_head].to(device),
        heads_in_windows=is_head.nonzero()[:, 0].to(device),
    )


def _find_places(members: list[int], earlier: list[int], parents: list[int | None], device: torch.device) -> Tensor:
    place_of: dict[int | None, int] = {segment: place for place, segment in enumerate(earlier)}
    return torch.tensor([place_of[parents[i]] for i in members]).to(device)


# With the kernels of flash-linear-attention.


def _gather_context(qkv_NC: Tensor, plan: _Plan) -> Tensor | None:
    """[S, C, R + 1]: the inputs before each segment, after one column that the convolution does not read."""
    if plan.context is None:
        return None
    inputs_SRC = qkv_NC.index_select(0, plan.context.flatten()).unflatten(0, plan.context.shape)
    inputs_SRC = inputs_SRC.masked_fill(plan.context_missing[:, :, None], 0.0)
    return functional.pad(inputs_SRC, (0, 0, 1, 0)).transpose(1, 2)


def _run_generations(fla: FlaKernels, net: Any, inputs: tuple[Tensor, Tensor, Tensor], plan: _Plan) -> Tensor:
    """[N, H, V]: the gated delta rule, a call for each generation of segments.

    Args:
        inputs: Queries, keys and values [N, C], decay and beta [N, H].
    """
    if len(plan.generations) == 1:
        return fla_kernels.run_rule(fla, net, *inputs, plan.offsets, initial_SHKV=None, with_final=False)[0]
    # split and cat, whose gradients are cat and split: picking by index would add up gradients atomically
    parts = [x.split(plan.lengths) for x in inputs]
    outs: list[Tensor] = [inputs[0]] * len(plan.lengths)
    states: Tensor | None = None
    for number, (members, offsets, places) in enumerate(
        zip(plan.generations, plan.generation_offsets, plan.parent_places, strict=True)
    ):
        out_NHV, states = fla_kernels.run_rule(
            *(fla, net, *(torch.cat([part[i] for i in members]) for part in parts), offsets),
            initial_SHKV=None if places is None or states is None else states.index_select(0, places),
            with_final=number + 1 < len(plan.generations),
        )
        for index, piece in zip(members, out_NHV.split([plan.lengths[i] for i in members]), strict=True):
            outs[index] = piece
    return torch.cat(outs)


# With transformers' functions.


def _convolve(net: Any, qkv_NC: Tensor, plan: _Plan) -> Tensor:
    """The short causal convolution: over all tokens, then over each segment's first again, in their own context."""
    out_NC = _convolve_rows(net, qkv_NC[None])[0]
    if len(plan.windows) == 0:
        return out_NC
    windows = qkv_NC.index_select(0, plan.windows).masked_fill(plan.missing[:, None], 0.0)
    again = _convolve_rows(net, windows.view(len(plan.lengths) - 1, -1, windows.shape[-1])).flatten(0, 1)
    return out_NC.index_copy(0, plan.heads, again.index_select(0, plan.heads_in_windows))


def _convolve_rows(net: Any, rows_BTC: Tensor) -> Tensor:
    convolve = _look_up(net, _CONVOLUTION, rows_BTC.device)
    weight = net.conv1d.weight.squeeze(1)
    out: Tensor = convolve(rows_BTC.transpose(1, 2), weight, net.conv1d.bias, activation=net.activation)
    return out.transpose(1, 2)


def _run_delta_rule(net: Any, qkv_NC: Tensor, decay_NH: Tensor, beta_NH: Tensor, plan: _Plan) -> Tensor:
    """[N, H, V]: the gated delta rule, one generation of segments after the other."""
    rule = _look_up(net, _RULE, qkv_NC.device)
    # split and cat, whose gradients are cat and split: picking by index would add up gradients atomically
    inputs = list(zip(*(x.split(plan.lengths) for x in (qkv_NC, decay_NH, beta_NH)), strict=True))
    outs: list[Tensor] = [qkv_NC] * len(inputs)
    states: dict[int, Tensor] = {}
    with_children = set(plan.parents)
    for generation in plan.generations:
        earlier, states = states, {}
        for group in _group_by_length(generation, plan.lengths):
            lengths = [plan.lengths[i] for i in group]
            starts = [earlier[parent] for i in group if (parent := plan.parents[i]) is not None]
            out, final = _apply_rule(
                net,
                rule,
                *(_fill_up(parts, max(lengths)) for parts in zip(*(inputs[i] for i in group), strict=True)),
                initial_state=torch.stack(starts) if starts else None,
                output_final_state=not with_children.isdisjoint(group),
            )
            for place, index in enumerate(group):
                outs[index] = out[place, : lengths[place]]
            if final is not None:
                rows = final.unbind()
                states.update({i: rows[place] for place, i in enumerate(group) if i in with_children})
    return torch.cat(outs)


def _fill_up(parts: tuple[Tensor, ...], length: int) -> Tensor:
    """[B, length, ...]: as rows, filled up with zeros.

    A token of zeros neither decays the state (the decay is a logarithm) nor adds to it (its key is zero): the state
    after a filled-up row is the state after the row.
    """
    return torch.stack([functional.pad(x, (0, 0, 0, length - len(x))) for x in parts])


def _apply_rule(
    net: Any, rule: Callable[..., Any], qkv: Tensor, decay: Tensor, beta: Tensor, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """The rule on [B, T, ...]: outputs [B, T, H, V] and, if wanted, final states [B, H, K, V]."""
    query, key, value = qkv.split([net.key_dim, net.key_dim, net.value_dim], dim=-1)
    query, key = (x.unflatten(-1, (-1, net.head_k_dim)) for x in (query, key))
    value = value.unflatten(-1, (-1, net.head_v_dim))
    repeats = net.num_v_heads // net.num_k_heads
    if repeats > 1:
        query, key = (x.repeat_interleave(repeats, dim=2) for x in (query, key))
    out, final = rule(query, key, value, g=decay, beta=beta, use_qk_l2norm_in_kernel=True, **kwargs)
    return out, final


def _group_by_length(segments: list[int], lengths: list[int]) -> list[list[int]]:
    """Segments to run as rows of one call: those of equally many chunks, so that filling up adds no work."""

    def count_chunks(index: int) -> int:
        return -(-lengths[index] // _CHUNK_SIZE)

    return [list(group) for _, group in groupby(sorted(segments, key=count_chunks), key=count_chunks)]


def _look_up(net: nn.Module, name: str, device: torch.device) -> Callable[..., Any]:
    """A function by the name under which the module's own forward calls it: transformers puts the fastest there.

    That is a GPU's kernel wherever its package is installed: on a CPU, what it stands for.
    """
    function: Callable[..., Any] = getattr(sys.modules[type(net).__module__], name)
    return inspect.unwrap(function) if device.type == "cpu" else function
