"""Run gated delta nets (Qwen3.5, Qwen3-Next) over a `Layout`: segments go on from the state their parent ended with.

Such a layer carries two states from token to token: the last X inputs of a short causal convolution, and per head a
matrix that the gated delta rule updates (arXiv:2412.06464). Neither has a mask, so both have to follow the segments:
no row sees another, a shared prefix is computed once, and gradients of all that continues it add up in its state. Rows
abcd and abefg, shared, with a convolution that reaches X = 3 tokens back:

    segment  tokens  parent  generation  inputs before it    delta rule
    0        a b     -       0           - - -               begins with zeros
    1        c d     0       1           - a b               begins with the state after b
    2        e f g   0       1           - a b               likewise

Segments of a generation do not wait for each other: the rule is called once for segment 0 and once for 1 and 2.

With flash-linear-attention, a call takes segments of any lengths, one after the other; in torch, segments of like
length are filled up to one length. A cache that has a past is refused (`ValueError`): rows begin at their beginning.
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
from polar_trl.grpo.packing.prefix import apply_prefix

_GATED_DELTA_NETS = frozenset({"Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"})
"""Classes of transformers whose forward `_forward_layout` follows."""
_RULE, _CONVOLUTION = "torch_chunk_gated_delta_rule", "causal_conv1d_fn"
"""Functions of the modules that those classes are in."""
_CHUNK_SIZE = 64
"""Tokens that the delta rule works on at a time: a shorter sequence costs as much."""


def wrap_linear_attention(model: nn.Module) -> int:
    """Let every gated delta net of a model take `layout=`; without it each is as before. Safe to call again.

    Returns:
        The number of gated delta nets.
    """
    nets = [module for module in model.modules() if is_gated_delta_net(module)]
    for net in nets:
        if not hasattr(net, "forward_rows"):
            # bound methods, so that a deep copy of the model calls its own modules
            net.forward_rows = net.forward  # type: ignore[assignment]
            net.forward = MethodType(_forward, net)
    return len(nets)


def is_gated_delta_net(module: nn.Module) -> bool:
    """Tell whether `wrap_linear_attention` knows this layer."""
    return type(module).__name__ in _GATED_DELTA_NETS


@contextmanager
def computed_in_torch(model: nn.Module) -> Iterator[None]:
    """Have forward passes without a layout call transformers' reference code, whichever kernels it has found."""
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
    """Follow transformers' `Qwen3_5GatedDeltaNet.forward`, of whose steps all but two treat each token alone.

    Args:
        hidden_states: [1, L, hidden].
    """
    plan = plan_layout(layout, net.conv_kernel_size - 1, hidden_states.device)
    fla = fla_kernels.find_kernels(net, hidden_states.device)
    qkv_LD, z, b_LH, a_LH = (x[0] for x in _project(net, hidden_states))
    beta_LH = b_LH.sigmoid()
    # the logarithm of the decay, which is in float32 whatever the layer computes in: the rule sums it over a chunk
    decay_LH = -net.A_log.float().exp() * functional.softplus(a_LH.float() + net.dt_bias)
    z_LHV = z.reshape(layout.num_tokens, -1, net.head_v_dim)
    part = (len(layout.prefix.token_ids) - plan.reach, plan.reach) if layout.prefix is not None else None
    with_before = apply_prefix(layout, net, 0, qkv_LD, dim=0, part=part)
    qkv_LD = with_before[len(with_before) - layout.num_tokens :]
    if fla is None:
        qkv_LD = _convolve(net, qkv_LD, with_before, plan)
        out_LHV = _run_delta_rule(net, (qkv_LD, decay_LH, beta_LH), plan, layout)
        gated = net.norm(out_LHV.flatten(0, 1), z_LHV.flatten(0, 1)).view(layout.num_tokens, -1)
    else:
        qkv_LD = fla_kernels.convolve(fla, net, qkv_LD, plan.offsets, _gather_context(with_before, plan))
        out_LHV = _run_generations(fla, net, (qkv_LD, decay_LH, beta_LH), plan, layout)
        gated = fla_kernels.gate(fla, net, out_LHV, z_LHV)
    output: Tensor = net.out_proj(gated[None])
    return output


def _project(net: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Project to inputs of the convolution (queries, keys, values) [1, L, D], the gate z, and b and a [1, L, H]."""
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
    """Indices of a layout's E segments for a gated delta net whose convolution reaches X tokens back.

    In `context` and `windows`, the last X tokens of a prefix that is read count as the first of the flat sequence.
    """

    reach: int
    """X"""
    lengths: list[int]
    """[E]: tokens per segment."""
    parents: list[int | None]
    """[E]"""
    generations: list[list[int]]
    """Segments by the number of segments in their context: each generation needs only states of the one before."""
    offsets: Offsets
    """Of all segments in the layout's order."""
    generation_offsets: list[Offsets]
    """Per generation, its segments put one after the other."""
    parent_places: list[Tensor | None]
    """Per generation: places, in the one before, of the segments that its own go on from; None for the roots."""
    context: Tensor | None
    """[E, X]: of each segment, the X tokens before it in its rows; None where there is no shared prefix."""
    context_missing: Tensor
    """Bool, like `context`: there is no such token."""
    windows: Tensor
    """[(E - 1) * 2X]: of each segment but the first, the X tokens before it in its rows and its first X. [E * 2X]
    where a prefix is read, which the first segment continues."""
    missing: Tensor
    """Bool, like `windows`: there is no such token."""
    heads: Tensor
    """Tokens that are among the first X of those segments."""
    heads_in_windows: Tensor
    """Places of those in `windows`."""


def plan_layout(layout: Layout, reach: int, device: torch.device) -> _Plan:
    """Plan the segments of a layout once: all layers, and the recomputation of a checkpointed one, share the plan."""
    plans: dict[tuple[int, torch.device], _Plan] = layout.__dict__.setdefault("delta_net_plans", {})
    if (reach, device) not in plans:
        plans[reach, device] = _build_plan(layout, reach, device)
    return plans[reach, device]


def _build_plan(layout: Layout, reach: int, device: torch.device) -> _Plan:
    parents = [segment.parent for segment in layout.segments]
    before = reach if layout.num_before else 0
    spans = [range(before + segment.start, before + segment.end) for segment in layout.segments]
    lengths = [len(span) for span in spans]
    generations: list[list[int]] = []
    generation_of: list[int] = []
    contexts: list[list[int]] = []
    tails: list[list[int]] = []  # per segment: the last tokens, at most X, of its rows up to its end
    for index, (parent, span) in enumerate(zip(parents, spans, strict=True)):
        generation = 0 if parent is None else generation_of[parent] + 1
        from_prefix = list(range(before)) if layout.segments[index].depth else []
        context = from_prefix if parent is None else tails[parent]
        if generation == len(generations):
            generations.append([])
        generations[generation].append(index)
        generation_of.append(generation)
        contexts.append([-1] * (reach - len(context)) + context)
        # a segment may be shorter than the convolution reaches: then some of its context is its children's, too
        tails.append([*context, *span[-reach:]][-reach:])
    heads = [[*span[:reach], *[-1] * (reach - len(span))] for span in spans]
    contexts_EX, heads_EX = (torch.tensor(x, dtype=torch.int64).view(len(spans), reach) for x in (contexts, heads))
    # a first segment that begins its rows has no tokens before it: the convolution over all tokens is right for it
    windows = torch.cat([contexts_EX, heads_EX], dim=1)[0 if before else 1 :]
    is_head = windows >= 0
    is_head[:, :reach] = False
    has_context = before > 0 or (reach > 0 and len(generations) > 1)
    return _Plan(
        reach=reach,
        lengths=lengths,
        parents=parents,
        generations=generations,
        offsets=Offsets.of(lengths, device),
        generation_offsets=[Offsets.of([lengths[i] for i in members], device) for members in generations],
        parent_places=[None, *(_find_places(b, a, parents, device) for a, b in pairwise(generations))],
        context=contexts_EX.clamp(min=0).to(device) if has_context else None,
        context_missing=(contexts_EX < 0).to(device),
        windows=windows.flatten().clamp(min=0).to(device),
        missing=(windows < 0).flatten().to(device),
        heads=(windows[is_head] - before).to(device),
        heads_in_windows=is_head.flatten().nonzero()[:, 0].to(device),
    )


def _find_places(members: list[int], earlier: list[int], parents: list[int | None], device: torch.device) -> Tensor:
    place_of: dict[int | None, int] = {segment: place for place, segment in enumerate(earlier)}
    return torch.tensor([place_of[parents[i]] for i in members]).to(device)


def _read_state(net: Any, layout: Layout, segments: list[int]) -> Tensor | None:
    """[E, H, K, V]: the states that these roots go on from, if a prefix is read: zeros for those that do not begin
    with it."""
    if layout.prefix is None or not layout.num_before:
        return None
    state_1HKV = layout.prefix.kept[net, 1]
    continues = [layout.segments[index].depth > 0 for index in segments]
    return torch.cat([state_1HKV if goes_on else torch.zeros_like(state_1HKV) for goes_on in continues])


def _has_prefix(layout: Layout) -> bool:
    """Tell whether the first segment is a prefix, the state after which is kept."""
    return layout.prefix is not None and layout.num_before == 0


# With the kernels of flash-linear-attention.


def _gather_context(qkv_LD: Tensor, plan: _Plan) -> Tensor | None:
    """[E, D, X + 1]: the inputs before each segment, after one column that the convolution does not read.

    Args:
        qkv_LD: With those of a prefix that is read in front.
    """
    if plan.context is None:
        return None
    inputs_EXD = qkv_LD.index_select(0, plan.context.flatten()).unflatten(0, plan.context.shape)
    inputs_EXD = inputs_EXD.masked_fill(plan.context_missing[:, :, None], 0.0)
    return functional.pad(inputs_EXD, (0, 0, 1, 0)).transpose(1, 2)


def _run_generations(
    fla: FlaKernels, net: Any, inputs: tuple[Tensor, Tensor, Tensor], plan: _Plan, layout: Layout
) -> Tensor:
    """[L, H, V]: the gated delta rule, a call for each generation of segments.

    Args:
        inputs: Queries, keys and values [L, D], decay and beta [L, H].
    """
    from_prefix, keeps = _read_state(net, layout, plan.generations[0]), _has_prefix(layout)
    if len(plan.generations) == 1 and not keeps:
        return fla_kernels.run_rule(fla, net, *inputs, plan.offsets, initial_EHKV=from_prefix, with_final=False)[0]
    # split and cat, whose gradients are cat and split: picking by index would add up gradients atomically
    parts = [x.split(plan.lengths) for x in inputs]
    outs: list[Tensor] = [inputs[0]] * len(plan.lengths)
    states: Tensor | None = None  # [segments of the generation before, H, K, V]
    for number, (members, offsets, places) in enumerate(
        zip(plan.generations, plan.generation_offsets, plan.parent_places, strict=True)
    ):
        out_LHV, states = fla_kernels.run_rule(
            *(fla, net, *(torch.cat([part[i] for i in members]) for part in parts), offsets),
            initial_EHKV=from_prefix if places is None or states is None else states.index_select(0, places),
            with_final=keeps or number + 1 < len(plan.generations),
        )
        if number == 0 and states is not None and keeps:
            states = apply_prefix(layout, net, 1, states, dim=0, part=(0, 1))
        for index, piece in zip(members, out_LHV.split([plan.lengths[i] for i in members]), strict=True):
            outs[index] = piece
    return torch.cat(outs)


# With transformers' functions.


def _convolve(net: Any, qkv_LD: Tensor, with_before: Tensor, plan: _Plan) -> Tensor:
    """Convolve over all tokens, then over each segment's first again, in their own context.

    Only the first X tokens of a segment see beyond it, in the flat sequence at tokens that are not before them. With
    the example above, c d and e f g are convolved again as rows - a b c d - and - a b e f g.
    """
    out_LD = _convolve_rows(net, qkv_LD[None])[0]
    if len(plan.windows) == 0:
        return out_LD
    windows = with_before.index_select(0, plan.windows).masked_fill(plan.missing[:, None], 0.0)
    again = _convolve_rows(net, windows.unflatten(0, (-1, 2 * plan.reach))).flatten(0, 1)
    return out_LD.index_copy(0, plan.heads, again.index_select(0, plan.heads_in_windows))


def _convolve_rows(net: Any, rows_BTD: Tensor) -> Tensor:
    convolve = _look_up(net, _CONVOLUTION, rows_BTD.device)
    weight = net.conv1d.weight.squeeze(1)
    out: Tensor = convolve(rows_BTD.transpose(1, 2), weight, net.conv1d.bias, activation=net.activation)
    return out.transpose(1, 2)


def _run_delta_rule(net: Any, inputs: tuple[Tensor, Tensor, Tensor], plan: _Plan, layout: Layout) -> Tensor:
    """[L, H, V]: the gated delta rule in torch, one generation of segments after the other.

    Args:
        inputs: As of `_run_generations`.
    """
    rule = _look_up(net, _RULE, inputs[0].device)
    # split and cat, whose gradients are cat and split: picking by index would add up gradients atomically
    parts = list(zip(*(x.split(plan.lengths) for x in inputs), strict=True))
    outs: list[Tensor] = [inputs[0]] * len(parts)
    states: dict[int, Tensor] = {}
    # only their states are kept: one is H x K x V numbers
    wanted = set(plan.parents) | ({0} if _has_prefix(layout) else set())
    for generation in plan.generations:
        earlier, states = states, {}
        for group in _group_by_length(generation, plan.lengths):
            lengths = [plan.lengths[i] for i in group]
            starts = [earlier[parent] for i in group if (parent := plan.parents[i]) is not None]
            out, final = _apply_rule(
                net,
                rule,
                *(_fill_up(pieces, max(lengths)) for pieces in zip(*(parts[i] for i in group), strict=True)),
                initial_state=torch.stack(starts) if starts else _read_state(net, layout, group),
                output_final_state=not wanted.isdisjoint(group),
            )
            for place, index in enumerate(group):
                outs[index] = out[place, : lengths[place]]
            if final is not None:
                rows = final.unbind()
                states.update({i: rows[place] for place, i in enumerate(group) if i in wanted})
                if 0 in group and _has_prefix(layout):
                    states[0] = apply_prefix(layout, net, 1, states[0][None], dim=0, part=(0, 1))[0]
    return torch.cat(outs)


def _fill_up(parts: tuple[Tensor, ...], length: int) -> Tensor:
    """[B, length, ...]: segments stacked as rows, filled up with zeros.

    A token of zeros neither decays the state (the decay is a logarithm) nor adds to it (its key is zero): the state
    after a filled-up row is the state after the row.
    """
    return torch.stack([functional.pad(x, (0, 0, 0, length - len(x))) for x in parts])


def _apply_rule(
    net: Any, rule: Callable[..., Any], qkv: Tensor, decay: Tensor, beta: Tensor, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Apply the rule to [B, T, ...]: outputs [B, T, H, V] and, if wanted, final states [B, H, K, V]."""
    query, key, value = fla_kernels.split_heads(net, qkv)
    repeats = net.num_v_heads // net.num_k_heads  # in torch, the rule wants as many heads of each
    if repeats > 1:
        query, key = (x.repeat_interleave(repeats, dim=2) for x in (query, key))
    out, final = rule(query, key, value, g=decay, beta=beta, use_qk_l2norm_in_kernel=True, **kwargs)
    return out, final


def _group_by_length(segments: list[int], lengths: list[int]) -> list[list[int]]:
    """Group segments to run as rows of one call: those of equally many chunks, so that filling up adds no work."""

    def count_chunks(index: int) -> int:
        return -(-lengths[index] // _CHUNK_SIZE)

    return [list(group) for _, group in groupby(sorted(segments, key=count_chunks), key=count_chunks)]


def _look_up(net: nn.Module, name: str, device: torch.device) -> Callable[..., Any]:
    """Look up a function as the module's own forward does: transformers puts the fastest under that name.

    That is a GPU's kernel wherever its package is installed: on a CPU, the torch code that it wraps.
    """
    function: Callable[..., Any] = getattr(sys.modules[type(net).__module__], name)
    return inspect.unwrap(function) if device.type == "cpu" else function
