"""Attend over rows that share nothing, by FlashAttention's kernels for sequences of different lengths.

torch's `varlen_attn` computes causal attention within each row of a flat sequence. That is what FlexAttention computes
for a layout whose segments all begin a row; one with a shared prefix is not of that kind.
"""

from inspect import signature
from typing import Any, cast

import torch
from torch import Tensor

from polar_trl.grpo.packing.layout import Layout


def holds_whole_rows(layout: Layout) -> bool:
    """Tell whether no two rows of a layout share a token."""
    return all(segment.parent is None for segment in layout.segments)


def attend_to_rows(query: Tensor, key: Tensor, value: Tensor, layout: Layout, scaling: float | None) -> Tensor:
    """Attend from queries [1, H, L, D] to keys and values [1, G, L, D] of their own row, causally.

    Returns:
        [1, H, L, D]
    """
    from torch.nn.attention.varlen import varlen_attn

    known = signature(varlen_attn).parameters  # torch 2.10 has `is_causal`, and neither scale nor groups of heads
    options: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    if scaling is not None and scaling != query.shape[-1] ** -0.5:
        query = query * (scaling * query.shape[-1] ** 0.5)
    groups = query.shape[1] // key.shape[1]
    if "enable_gqa" in known:
        options["enable_gqa"] = groups > 1
    elif groups > 1:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    # of what is outside of autocast's reach, values are in the dtype of the pass
    rows = [x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value)]
    ends, longest = _find_rows(layout, query.device)
    out = cast("Tensor", varlen_attn(*rows, ends, ends, longest, longest, **options))
    return out.transpose(0, 1)[None]


def _find_rows(layout: Layout, device: torch.device) -> tuple[Tensor, int]:
    """Return where rows begin and the last one ends, [B + 1], and the longest row's tokens; kept with the layout."""
    found = layout.__dict__.get("row_ends")
    if found is None:
        starts = [segment.start for segment in layout.segments] + [layout.num_tokens]
        longest = max(segment.end - segment.start for segment in layout.segments)
        found = layout.__dict__["row_ends"] = torch.tensor(starts, dtype=torch.int32, device=device), longest
    return cast("tuple[Tensor, int]", found)
