"""Attend over a `Layout` (tree attention): each token to itself and to what comes before it in its own rows.

Registered in transformers as the attention implementation "polar", so that any model that asks that interface for its
attention can be forwarded on a flat sequence of rows. Calls without a layout are answered by SDPA. Sliding windows and
attention sinks are not known here: `find_unsupported` finds them before a run starts.

The rows abcd and abe as segments ab, cd and e of one flat sequence; x where a query (down) attends to a key (across):

         a b c d e
      a  x . . . .
      b  x x . . .
      c  x x x . .      on a CPU: SDPA per segment, keys ab + cd for the queries cd
      d  x x x x .      on a GPU: FlexAttention with one number per key, the end of its subtree (5 5 4 4 5)
      e  x x . . x
"""

from functools import cache
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from polar_trl.grpo.packing.layout import Layout
from polar_trl.grpo.packing.prefix import attach_keys

ATTENTION = "polar"
BLOCK_SIZE = 128
"""Tokens per side of the blocks that FlexAttention skips or computes; a layout on a GPU is padded to a multiple."""

QUERIES_PER_CALL = 256
"""Most queries of a segment with context that SDPA is given at a time on a CPU."""


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
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend in transformers' calling convention.

    Args:
        query: [1, H, L, K], of H heads; `key` [1, H_kv, L, K] and `value` [1, H_kv, L, V] of as many or fewer.
        layout: Rows and segments of the L tokens; None for a batch of sequences, which SDPA answers.

    Returns:
        [1, L, H, V], and no weights.

    Raises:
        ValueError: the queries are not those of the layout.
    """
    if layout is None:
        return cast(
            "tuple[Tensor, None]",
            sdpa_attention_forward(
                module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
            ),
        )
    if query.shape[0] != 1 or query.shape[2] != layout.num_tokens:
        raise ValueError(f"queries {tuple(query.shape)} do not fit a layout of {layout.num_tokens} tokens")
    key, value = attach_keys(module, layout, key, value)
    if query.is_cuda:
        out = _attend_in_blocks(query, key, value, layout, scaling)
    else:
        out = _attend_by_segment(query, key, value, layout, scaling, dropout)
    return out.transpose(1, 2).contiguous(), None


def _attend_by_segment(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, scaling: float | None, dropout: float
) -> Tensor:
    """Call SDPA per segment, with its context gathered in front of it.

    Without context that is SDPA's own causal attention. With it, queries stand at the lower right of a mask, and SDPA
    computes the masked pairs too: so queries go in blocks, each with the keys up to its end.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    outs = []
    before = layout.num_before  # keys of a prefix that is read lie in front
    for index, segment in enumerate(layout.segments):
        context = layout.context_of(index)
        spans = [slice(before + part.start, before + part.end) for part in (*context, segment)]
        if before and layout.continues_prefix(index):
            spans.insert(0, slice(0, before))
        keys = torch.cat([key[:, :, span] for span in spans], dim=2)
        values = torch.cat([value[:, :, span] for span in spans], dim=2)
        queries = query[:, :, segment.start : segment.end]
        if not segment.depth:
            outs.append(
                scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scaling, dropout_p=dropout)
            )
            continue
        for first in range(0, queries.shape[2], QUERIES_PER_CALL):
            block = queries[:, :, first : first + QUERIES_PER_CALL]
            # query i of the block is at position depth + first + i, and sees the keys up to there
            end = segment.depth + first + block.shape[2]
            mask = torch.ones(block.shape[2], end, dtype=torch.bool, device=query.device).tril(segment.depth + first)
            outs.append(
                scaled_dot_product_attention(
                    block, keys[:, :, :end], values[:, :, :end], attn_mask=mask, scale=scaling, dropout_p=dropout
                )
            )
    return torch.cat(outs, dim=2)


def _attend_in_blocks(query: Tensor, key: Tensor, value: Tensor, layout: Layout, scaling: float | None) -> Tensor:
    """Call FlexAttention, compiled once, over the blocks in which some token attends to some other."""
    flex = _compiled_flex_attention()
    mask = build_block_mask(layout, query.device)
    return cast("Tensor", flex(query, key, value, block_mask=mask, scale=scaling, enable_gqa=True))


def build_block_mask(layout: Layout, device: torch.device) -> Any:
    """Build FlexAttention's `BlockMask` of a layout from its subtrees' ends, without anything of size L x L.

    It is kept with the layout: all layers, and the recomputation of a checkpointed one, share it.
    """
    cached = layout.__dict__.get("block_mask")
    if cached is None:
        cached = layout.__dict__["block_mask"] = _build_block_mask(layout, device)
    return cached


def _build_block_mask(layout: Layout, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import BlockMask

    if layout.num_tokens % BLOCK_SIZE or layout.num_before % BLOCK_SIZE:
        raise ValueError(
            f"a layout of {layout.num_before} + {layout.num_tokens} tokens is not one of multiples of {BLOCK_SIZE}"
        )
    # A prefix that is read is before them all: its keys' subtree is what continues it, which lies first.
    before = layout.num_before
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
    is_partial = is_left & (ends.amax(dim=1)[None, :] > starts[:, None]) & ~is_full
    is_partial |= not_right & ~is_left

    shift = torch.tensor(before, device=device)  # a tensor, as a number would be compiled anew for each prefix

    def is_in_context(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q + shift) & (q < ends_K[k])

    return BlockMask.from_kv_blocks(
        *_list_blocks(is_partial), *_list_blocks(is_full), BLOCK_SIZE=BLOCK_SIZE, mask_mod=is_in_context
    )


def _list_blocks(is_needed: Tensor) -> tuple[Tensor, Tensor]:
    """Per block of queries, how many blocks of keys are needed and which, those first."""
    counts = is_needed.sum(dim=1, dtype=torch.int32)
    order = is_needed.to(torch.int8).argsort(dim=1, descending=True, stable=True).to(torch.int32)
    return counts[None, None], order[None, None].contiguous()


@cache
def _compiled_flex_attention() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)  # lengths differ at every micro-batch
