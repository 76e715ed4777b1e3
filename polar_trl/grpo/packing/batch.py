"""Build the tensors of a forward pass: the trained tokens as a padded rectangle, and the flat sequence they are in.

Only figures per trained token are padded, never the tokens that are forwarded.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polar_trl.grpo.packing.forward import LayoutKind, pack_rows
from polar_trl.grpo.packing.prefix import SharedPrefix
from polar_trl.grpo.rows import Row


def build_micro_batch(
    rows: Sequence[Row],
    shares: Sequence[float],
    rollout_tokens: Sequence[int],
    *,
    kind: LayoutKind,
    device: torch.device,
    prefix: SharedPrefix | None = None,
    is_read: bool = True,
) -> dict[str, Any]:
    """Build a forward pass of B rows; without rows, one that trains nothing and costs two tokens.

    The loss looks at a row's trainable tokens only, so those are all that is in the rectangle: C is the most trainable
    tokens of a row. The tokens themselves are forwarded from "packed".

    Args:
        shares: [B] factors of the loss of each row's tokens.
        rollout_tokens: [B] trained tokens of each row's rollout.
        prefix, is_read: As of `pack_rows`.

    Returns:
        `completion_ids`, `completion_mask`, `sampling_per_token_logps` [B, C]; `shares`, `rollout_tokens` [B];
        `advantages` [B], or [B, C] where calls have their own; `packed`, a `PackedRows`.
    """
    if not rows:
        # a pass that every rank has to make: one token is scored so that all parameters are used, and masked
        filled = build_micro_batch([build_filler()], [0.0], [1], kind=kind, device=device)
        return filled | {"completion_mask": torch.zeros((1, 1), dtype=torch.long, device=device)}
    counts = [row.num_trainable for row in rows]
    shape = (len(rows), max(counts))
    completion_ids = torch.zeros(shape, dtype=torch.long)
    completion_mask = torch.zeros(shape, dtype=torch.long)
    sampling_logps = torch.zeros(shape)
    for b, (row, count) in enumerate(zip(rows, counts, strict=True)):
        completion_ids[b, :count] = torch.from_numpy(row.token_ids_T[row.trainable_T])
        completion_mask[b, :count] = 1
        sampling_logps[b, :count] = torch.from_numpy(row.logprobs_T[row.trainable_T])
    packed = pack_rows(
        [row.token_ids_T for row in rows],
        [row.trainable_T for row in rows],
        kind=kind,
        device=device,
        prefix=prefix,
        is_read=is_read,
    )
    return {
        "completion_ids": completion_ids.to(device),
        "completion_mask": completion_mask.to(device),
        "sampling_per_token_logps": sampling_logps.to(device),
        "advantages": _build_advantages(rows, shape).to(device),
        "shares": torch.tensor(list(shares), device=device),
        "rollout_tokens": torch.tensor([max(1, count) for count in rollout_tokens], device=device),
        "packed": packed,
    }


def _build_advantages(rows: Sequence[Row], shape: tuple[int, int]) -> Tensor:
    if all(row.advantages_T is None for row in rows):
        return torch.tensor([row.advantage for row in rows])
    advantages_BC = torch.zeros(shape)
    for b, row in enumerate(rows):
        if row.advantages_T is not None:
            advantages_BC[b, : row.num_trainable] = torch.from_numpy(row.advantages_T[row.trainable_T])
    return advantages_BC


def build_filler() -> Row:
    """Build a row of two tokens that stands for none."""
    return Row(
        rollout_id="",
        advantage=0.0,
        token_ids_T=np.zeros(2, dtype=np.int64),
        trainable_T=np.array([False, True]),
        logprobs_T=np.zeros(2, dtype=np.float32),
        policy_versions_T=np.full(2, -1),
    )


def to_rows(values_S: Tensor, batch: dict[str, Any]) -> Tensor:
    """Scatter values [S] of a micro-batch's scored tokens to [B, C], 0 elsewhere; differentiable."""
    num_rows, num_columns = batch["completion_ids"].shape
    counts_B = torch.bincount(batch["packed"].row_of_S, minlength=num_rows)
    mask_BC = torch.arange(num_columns, device=counts_B.device)[None] < counts_B[:, None]
    # scored tokens come row by row and in order, as the mask's entries do
    return values_S.new_zeros(mask_BC.shape).masked_scatter(mask_BC, values_S)
