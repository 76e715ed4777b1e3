"""Score the trainable tokens of a micro-batch: log-probabilities without padding and without logits of prompts.

`prepare_model` teaches a causal language model two more arguments, `layout` and `scored_positions`; called without
them it is as before. `choose_layout` refuses to pack rows for models whose layers cannot be kept from looking across
(`ConfigError`).
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from polar_trl.errors import ConfigError
from polar_trl.grpo.packing.adapters import fuse_adapters
from polar_trl.grpo.packing.attention import ATTENTION, BLOCK_SIZE, register_attention
from polar_trl.grpo.packing.layout import Ids, Layout, build_layout, build_layout_after
from polar_trl.grpo.packing.linear_attention import wrap_linear_attention
from polar_trl.grpo.packing.prefix import SharedPrefix
from polar_trl.grpo.packing.supported import find_unsupported

logger = logging.getLogger(__name__)

LayoutKind = Literal["tree", "packed", "single"]
"""Rows in one flat sequence with shared prefixes once, in one with every row whole, or in a forward pass each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedRows:
    """B rows as one flat sequence of L tokens, of which S are scored."""

    kind: LayoutKind
    layout: Layout
    input_ids: Tensor
    """[1, L]"""
    position_ids: Tensor
    """[1, L]"""
    scored_positions: Tensor
    """[S]: positions in the flat sequence whose hidden state predicts a scored token."""
    labels: Tensor
    """[1, S]: those tokens."""
    row_of_S: Tensor
    """[S]: the row that each scored token is in."""


def choose_layout(model: PreTrainedModel, wanted: str | None) -> LayoutKind:
    """Choose how rows of this model are forwarded: as the setting says, or the best that the model allows.

    Args:
        wanted: `sequence_layout` of the config.

    Raises:
        ConfigError: the model's layers would look across rows.
    """
    problem = find_unsupported(model)
    if problem and wanted in ("tree", "packed"):
        raise ConfigError(f"sequence_layout {wanted!r} is not for this model: {problem}; set it to 'single'")
    if wanted is not None:
        return cast("LayoutKind", wanted)
    if problem:
        logger.warning("rows are forwarded one at a time: %s", problem)
        return "single"
    return "tree"


def prepare_model(model: PreTrainedModel, kind: LayoutKind) -> None:
    """Let a model that has TRL's fused LM head be called with `scored_positions`, and with a `layout`."""
    if kind != "single":
        register_attention()
        model.set_attn_implementation(ATTENTION)
        wrap_linear_attention(model)
    fuse_adapters(model)
    scored = _ScoredOnly()
    model.base_model.register_forward_pre_hook(scored.take, with_kwargs=True)
    model.base_model.register_forward_hook(scored.apply)


class _ScoredOnly:
    """Hand the LM head only the hidden states that are scored: logits of the others would not be used."""

    def __init__(self) -> None:
        self._positions: Tensor | None = None

    def take(self, _module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        self._positions = kwargs.pop("scored_positions", None)  # no layer has to know it
        return args, kwargs

    def apply(self, _module: Any, _args: Any, output: Any) -> Any:
        if self._positions is not None:
            output.last_hidden_state = output.last_hidden_state.index_select(1, self._positions)
            self._positions = None
        return output


def pack_rows(
    rows: Sequence[Ids],
    scored: Sequence[NDArray[np.bool_]],
    *,
    kind: LayoutKind,
    device: torch.device,
    prefix: SharedPrefix | None = None,
    is_read: bool = True,
) -> PackedRows:
    """Lay rows out for one forward pass.

    Args:
        rows: Token ids [T] of each row.
        scored: [T] of each row: the tokens whose log-probability is wanted.
        prefix: That rows of several passes begin with; none of its tokens is scored or predicts a scored one.
        is_read: Of the prefix: this pass is not the last that begins with it, and reads it from memory.

    Raises:
        ValueError: a row's first token is to be scored.
    """
    if prefix is None:
        layout = build_layout(rows, share_prefixes=kind == "tree")
    else:
        layout = build_layout_after(rows, prefix, is_read=is_read)
    if device.type == "cuda" and kind != "single":
        layout = layout.pad(BLOCK_SIZE)
    positions, labels, row_of = [], [], []
    for index, (ids, wanted) in enumerate(zip(rows, scored, strict=True)):
        at = np.flatnonzero(wanted)
        if len(at) and at[0] == 0:
            raise ValueError(f"row {index}: its first token has no context to be scored in")
        # The token before predicts it: in its row, which in the flat sequence may be far away. Rows that share a
        # token score it once each, at one position.
        places = layout.positions_of(index)
        positions.append(places[at - 1 - (len(ids) - len(places))])
        labels.append(ids[at])
        row_of.append(np.full(len(at), index))

    def move(array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(device)

    return PackedRows(
        kind=kind,
        layout=layout,
        input_ids=move(layout.token_ids_L)[None],
        position_ids=move(layout.position_ids_L)[None],
        scored_positions=move(np.concatenate(positions)),
        labels=move(np.concatenate(labels).astype(np.int64))[None],
        row_of_S=move(np.concatenate(row_of)),
    )


def score(model: Any, packed: PackedRows) -> tuple[Tensor, Tensor]:
    """Compute log-probabilities and entropies (nats) [S] of the scored tokens, at the model's sampling temperature.

    TRL's head of a reference model gives no entropies; they are NaN then.
    """
    layout = {} if packed.kind == "single" else {"layout": packed.layout}
    outputs = model(
        input_ids=packed.input_ids,
        position_ids=packed.position_ids,
        **layout,
        scored_positions=packed.scored_positions,
        shift_labels=packed.labels,
        fused_lm_head=True,
    )
    logps = outputs.log_probs[0]
    return logps, torch.full_like(logps, torch.nan) if outputs.entropy is None else outputs.entropy[0]
