"""Attend over a `Layout` (tree attention): each token to itself and to what comes before it in its own rows.

Registered in transformers as the attention implementation "polar", so that any model that asks that interface for its
attention can be forwarded on a flat sequence of rows. Sliding windows count positions within a row, in a tree the
depth of a token. Calls without a layout are answered for a batch of sequences.

The rows abcd and abe as segments ab, cd and e of one flat sequence; x where a query (down) attends to a key (across):

         a b c d e
      a  x . . . .
      b  x x . . .
      c  x x x . .      on a CPU: SDPA per segment, keys ab + cd for the queries cd
      d  x x x x .      on a GPU: FlexAttention with one number per key, the end of its subtree (5 5 4 4 5)
      e  x x . . x      a window of 2 leaves b to e, whose position is 2, and to c; and c to d
"""

from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import dropout as drop_out
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from polar_trl.grpo.packing.layout import Layout
from polar_trl.grpo.packing.prefix import apply_prefix

ATTENTION = "polar"
BLOCK_SIZE = 128
"""Tokens per side of the blocks that FlexAttention skips or computes; a layout on a GPU is padded to a multiple."""

QUERIES_PER_CALL = 256
"""Most queries that are given a mask at a time on a CPU."""


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a layer makes weights of its queries and keys, in transformers' words for the arguments."""

    scaling: float | None = None
    """None for 1 / sqrt(K)."""
    sliding_window: int | None = None
    """A query at position p of its row sees the keys at positions above p - sliding_window. None for all."""
    softcap: float | None = None
    """Scores s become softcap * tanh(s / softcap) (Gemma 2)."""
    s_aux: Tensor | None = None
    """[H]: attention sinks, one more score per head that takes weight and has no value (gpt-oss)."""
    dropout: float = 0.0

    @property
    def is_explicit(self) -> bool:
        """Whether SDPA does not know how these scores are made."""
        return self.softcap is not None or self.s_aux is not None


def register_attention() -> None:
    """Make "polar" known to transformers. Safe to call again."""
    AttentionInterface.register(ATTENTION, attend)
    AttentionMaskInterface.register(ATTENTION, build_mask)


def build_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Build SDPA's mask, or None where it is plainly causal: over a flat sequence it would have L x L entries."""
    lengths = kwargs.get("q_length"), kwargs.get("kv_length")
    if kwargs.get("attention_mask") is None and lengths[0] == lengths[1]:
        return None
    return cast("Tensor | None", sdpa_mask(*args, **kwargs))


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: Layout | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend in transformers' calling convention.

    Args:
        query: [1, H, L, K], of H heads; `key` [1, H_kv, L, K] and `value` [1, H_kv, L, V] of as many or fewer.
        layout: Rows and segments of the L tokens; None for a batch of sequences.
        scaling: It and the next four are the fields of `Scoring`.

    Returns:
        [1, L, H, V], and no weights.

    Raises:
        ValueError: the queries are not those of the layout.
    """
    if layout is None:
        scoring = Scoring(scaling, sliding_window, softcap, s_aux, dropout)
        return _attend_in_batch(module, query, key, value, attention_mask, scoring, **kwargs), None
    if query.shape[0] != 1 or query.shape[2] != layout.num_tokens:
        raise ValueError(f"queries {tuple(query.shape)} do not fit a layout of {layout.num_tokens} tokens")
    # along the tokens as they lie in memory: with other strides FlexAttention would be compiled anew
    key, value = (
        apply_prefix(layout, module, index, x.transpose(1, 2), dim=1).transpose(1, 2)
        for index, x in enumerate((key, value))
    )
    if sliding_window is not None and sliding_window > layout.position_ids_L.max():
        sliding_window = None  # it reaches over every row: computed as a full layer, whose mask it shares
    scoring = Scoring(scaling, sliding_window, softcap, s_aux, dropout)
    out = (_attend_in_blocks if query.is_cuda else _attend_by_segment)(query, key, value, layout, scoring)
    return out.transpose(1, 2).contiguous(), None


def _attend_in_batch(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scoring: Scoring,
    **kwargs: Any,
) -> Tensor:
    """Answer a batch of sequences as transformers does. `build_mask` leaves out masks that follow from the lengths."""
    num_queries, num_keys = query.shape[2], key.shape[2]
    window = scoring.sliding_window
    if mask is None and (scoring.is_explicit or (window is not None and window < num_keys)):
        mask = _see(range(num_keys - num_queries, num_keys), range(num_keys), window, query.device)
    if scoring.is_explicit:
        return _weigh(query, key, value, mask, scoring).transpose(1, 2).contiguous()
    options = {"scaling": scoring.scaling, "dropout": scoring.dropout}
    return cast("Tensor", sdpa_attention_forward(module, query, key, value, mask, **options, **kwargs)[0])


def _see(queries: range, keys: range, window: int | None, device: torch.device) -> Tensor:
    """[Q, K]: which keys each query sees, by their positions in a row."""
    distances = torch.arange(queries.start, queries.stop, device=device)[:, None]
    distances = distances - torch.arange(keys.start, keys.stop, device=device)
    return (distances >= 0) if window is None else (distances >= 0) & (distances < window)


def _weigh(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scoring: Scoring) -> Tensor:
    """Attend under a mask, or causally without one: by SDPA, or where that does not know the scores, by their matrix.

    Soft caps, sinks and the softmax are computed in float32, as in transformers' eager attention.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    if not scoring.is_explicit:
        return scaled_dot_product_attention(
            query, key, value, mask, dropout_p=scoring.dropout, is_causal=mask is None, scale=scoring.scaling
        )
    assert mask is not None
    scale = scoring.scaling if scoring.scaling is not None else query.shape[-1] ** -0.5
    scores = (query @ key.transpose(2, 3)).float() * scale
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)  # finite: padding may see no key at all
    if scoring.s_aux is not None:
        sinks = scoring.s_aux.float()[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(dim=-1)[..., : key.shape[2]]
    return drop_out(weights, p=scoring.dropout).to(value.dtype) @ value


def _attend_by_segment(query: Tensor, key: Tensor, value: Tensor, layout: Layout, scoring: Scoring) -> Tensor:
    """Attend segment by segment, with what a segment's first query sees of its context gathered in front of it.

    A whole segment that sees no context is SDPA's own causal attention. Else queries stand at the lower right of a
    mask, whose masked pairs are computed too: so queries go in blocks, each with the keys that some query of it sees.
    """
    window = scoring.sliding_window
    outs = []
    before = layout.num_before  # keys of a prefix that is read lie in front
    for index, segment in enumerate(layout.segments):
        length = segment.end - segment.start
        earliest = _earliest_seen(segment.depth, window)
        spans = [
            slice(before + part.start + max(earliest - part.depth, 0), before + part.end)
            for part in (*layout.context_of(index), segment)
            if part.depth + part.end - part.start > earliest
        ]
        keys = torch.cat([key[:, :, span] for span in spans], dim=2)
        values = torch.cat([value[:, :, span] for span in spans], dim=2)
        queries = query[:, :, segment.start : segment.end]
        if not scoring.is_explicit and keys.shape[2] == length and (window is None or length <= window):
            outs.append(_weigh(queries, keys, values, None, scoring))
            continue
        for first in range(0, length, QUERIES_PER_CALL):
            block = queries[:, :, first : first + QUERIES_PER_CALL]
            start, end = segment.depth + first, segment.depth + first + block.shape[2]  # positions of its queries
            low = _earliest_seen(start, window)
            seen = slice(low - earliest, end - earliest)
            mask = _see(range(start, end), range(low, end), window, query.device)
            outs.append(_weigh(block, keys[:, :, seen], values[:, :, seen], mask, scoring))
    return torch.cat(outs, dim=2)


def _earliest_seen(position: int, window: int | None) -> int:
    """The first position that a query at this one sees."""
    return 0 if window is None else max(position - window + 1, 0)


def _attend_in_blocks(query: Tensor, key: Tensor, value: Tensor, layout: Layout, scoring: Scoring) -> Tensor:
    """Call FlexAttention, compiled once, over the blocks in which some token attends to some other."""
    from torch.nn.attention.flex_attention import AuxRequest

    flex = _compiled_flex_attention()
    options: dict[str, Any] = {
        "block_mask": build_block_mask(layout, query.device, scoring.sliding_window),
        "score_mod": None if scoring.softcap is None else _cap_scores(scoring.softcap, query.device),
        "scale": scoring.scaling,
        "enable_gqa": True,
    }
    if scoring.s_aux is None:
        return cast("Tensor", flex(query, key, value, **options))
    out, aux = flex(query, key, value, **options, return_aux=AuxRequest(lse=True))
    # one more term exp(sink) in the denominator exp(lse): all weights shrink by exp(lse) / (exp(lse) + exp(sink))
    kept = torch.sigmoid(aux.lse - scoring.s_aux.float()[None, :, None])
    return (out * kept[..., None]).to(out.dtype)


@cache
def _cap_scores(softcap: float, device: torch.device) -> Any:
    """FlexAttention's `score_mod` of a soft cap; one function per cap, so that layers share what is compiled."""
    # a tensor: a float of a closure is one that torch.compile with dynamic shapes fails on
    cap_1 = torch.full((1,), softcap, device=device)

    def cap(score: Tensor, _b: Tensor, h: Tensor, _q: Tensor, _k: Tensor) -> Tensor:
        return cap_1[0] * torch.tanh(score / cap_1[0])

    return cap


def build_block_mask(layout: Layout, device: torch.device, window: int | None = None) -> Any:
    """Build FlexAttention's `BlockMask` of a layout from its subtrees' ends, without anything of size L x L.

    It is kept with the layout, one for each window: all layers of a kind, and the recomputation of a checkpointed one,
    share it.
    """
    masks = layout.__dict__.setdefault("block_masks", {})
    if window not in masks:
        masks[window] = _build_block_mask(layout, device, window)
    return masks[window]


def _build_block_mask(layout: Layout, device: torch.device, window: int | None) -> Any:
    from torch.nn.attention.flex_attention import BlockMask

    before = layout.num_before
    if layout.num_tokens % BLOCK_SIZE or before % BLOCK_SIZE:
        raise ValueError(f"a layout of {before} + {layout.num_tokens} tokens is not one of multiples of {BLOCK_SIZE}")
    # keys of a prefix that is read are before all others, and their subtree is what continues it
    ends_of_keys = np.concatenate([np.full(before, layout.num_continuing), layout.subtree_ends_L])
    ends_K = torch.from_numpy(ends_of_keys).to(device=device, dtype=torch.int32)
    ends = ends_K.view(-1, BLOCK_SIZE)  # [blocks of keys, keys of a block]
    num_blocks, blocks_before = layout.num_tokens // BLOCK_SIZE, before // BLOCK_SIZE
    starts = torch.arange(num_blocks, device=device) * BLOCK_SIZE  # [blocks of queries]
    # All [blocks of queries, blocks of keys]. Left of the diagonal a block is full, and computed without a mask, where
    # all subtrees of its keys reach the end of its queries; it is empty where none reaches their start. On the
    # diagonal some query always comes before some key.
    not_right = torch.ones(num_blocks, len(ends), dtype=torch.bool, device=device).tril(blocks_before)
    is_left = not_right.tril(blocks_before - 1)
    is_full = is_left & (ends.amin(dim=1)[None, :] >= starts[:, None] + BLOCK_SIZE)
    is_needed = is_left & (ends.amax(dim=1)[None, :] > starts[:, None])
    is_needed |= not_right & ~is_left
    shift = torch.tensor(before, device=device)  # a tensor, as a number would be compiled anew for each prefix

    def is_in_context(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q + shift) & (q < ends_K[k])

    is_seen = is_in_context
    if window is not None:
        places = np.concatenate([np.arange(before), layout.position_ids_L])
        positions_K = torch.from_numpy(places).to(device=device, dtype=torch.int32)
        lows_L = positions_K[before:] - window  # a tensor: a number would be compiled in, or guarded, window by window
        positions, lows = positions_K.view(-1, BLOCK_SIZE), lows_L.view(-1, BLOCK_SIZE)
        is_full &= positions.amin(dim=1)[None, :] > lows.amax(dim=1)[:, None]
        is_needed &= positions.amax(dim=1)[None, :] > lows.amin(dim=1)[:, None]

        def is_in_window(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return is_in_context(_b, _h, q, k) & (positions_K[k] > lows_L[q])

        is_seen = is_in_window
    return BlockMask.from_kv_blocks(
        *_list_blocks(is_needed & ~is_full), *_list_blocks(is_full), BLOCK_SIZE=BLOCK_SIZE, mask_mod=is_seen
    )


def _list_blocks(is_needed: Tensor) -> tuple[Tensor, Tensor]:
    """Per block of queries, how many blocks of keys are needed and which, those first."""
    counts = is_needed.sum(dim=1, dtype=torch.int32)
    order = is_needed.to(torch.int8).argsort(dim=1, descending=True, stable=True).to(torch.int32)
    return counts[None, None], order[None, None].contiguous()


@cache
def _compiled_flex_attention() -> Any:
    from torch import _dynamo
    from torch.nn.attention.flex_attention import flex_attention

    # Compiled anew for each kind of layer, dtype, and with or without gradients. Past the limit, 8 unless raised,
    # torch would run it uncompiled, with all L x L scores.
    _dynamo.config.recompile_limit = max(_dynamo.config.recompile_limit, 64)
    return torch.compile(flex_attention, dynamic=True)  # lengths differ at every micro-batch
