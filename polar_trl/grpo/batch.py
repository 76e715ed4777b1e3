"""Rows of one forward pass -> what TRL's loss reads: the trainable tokens, padded, and the flat sequence they are in.

It refuses to pad what is forwarded: only the figures per trainable token are a rectangle.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polar_trl.grpo.forward import LayoutKind, pack_rows
from polar_trl.grpo.rows import Row


def build_micro_batch(
    rows: Sequence[Row], weights: Sequence[float], *, num_rows: int, kind: LayoutKind, device: torch.device
) -> dict[str, Any]:
    """What one forward pass of B rows needs; without rows, one that trains nothing and costs two tokens.

    TRL's losses look at a row's trainable tokens only, so those are all that "completion" has here: C is the most
    trainable tokens of a row. The tokens themselves are forwarded from "packed".

    Args:
        weights: Factor of each row's advantage.
        num_rows: B, at least one: the most rows that any rank has in this pass, since TRL gathers figures of rows.
            What the given rows do not fill stays empty.

    Returns:
        `prompt_ids`, `prompt_mask` [B, 0]; `completion_ids`, `completion_mask`, `sampling_per_token_logps` [B, C];
        `advantages` [B]; `packed`, a `PackedRows`.
    """
    if not rows:
        # a pass that every rank has to make: one token is scored so that all parameters are used, and masked
        filled = build_micro_batch([build_filler()], [0.0], num_rows=num_rows, kind=kind, device=device)
        return filled | {"completion_mask": torch.zeros((num_rows, 1), dtype=torch.long, device=device)}
    counts = [row.num_trainable for row in rows]
    shape = (num_rows, max(counts))
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
    )
    advantages = torch.zeros(num_rows)
    advantages[: len(rows)] = torch.tensor([row.advantage * weight for row, weight in zip(rows, weights, strict=True)])
    nothing = torch.zeros((num_rows, 0), dtype=torch.long, device=device)
    return {
        "prompt_ids": nothing,
        "prompt_mask": nothing,
        "completion_ids": completion_ids.to(device),
        "completion_mask": completion_mask.to(device),
        "sampling_per_token_logps": sampling_logps.to(device),
        "advantages": advantages.to(device),
        "packed": packed,
    }


def build_filler() -> Row:
    """A row of two tokens that stands for none."""
    return Row(
        rollout_id="",
        advantage=0.0,
        token_ids_T=np.zeros(2, dtype=np.int64),
        trainable_T=np.array([False, True]),
        logprobs_T=np.zeros(2, dtype=np.float32),
        policy_versions_T=np.full(2, -1),
    )


def to_rows(values_S: Tensor, batch: dict[str, Any]) -> Tensor:
    """[S] values of a micro-batch's scored tokens as [B, C], 0 elsewhere; differentiable."""
    num_rows, num_columns = batch["completion_ids"].shape
    counts_B = torch.bincount(batch["packed"].row_of_S, minlength=num_rows)
    mask_BC = torch.arange(num_columns, device=counts_B.device)[None] < counts_B[:, None]
    # scored tokens come row by row and in order, as the mask's entries do
    return values_S.new_zeros(mask_BC.shape).masked_scatter(mask_BC, values_S)
