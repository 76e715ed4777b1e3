"""Trajectories with advantages -> the tensors that TRL's loss reads, one row per trajectory.

It refuses to let the number of rows speak: losses that average over rows are re-weighted so that they average over
rollouts, however many trajectories a rollout was split into, and rows that only fill up a batch train nothing.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polar_trl.errors import LawError
from polar_trl.types import Trajectory

ROLLOUT_MEAN_LOSSES = frozenset({"grpo", "sapo", "dr_grpo", "luspo"})
"""TRL losses that average over rows; `row_weights` makes them average over rollouts."""


_COMPLETION_KEYS = {
    "completion_ids",
    "completion_mask",
    "tool_mask",
    "sampling_per_token_logps",
    "old_per_token_logps",
    "ref_per_token_logps",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One trajectory to train, with its rollout's advantage."""

    trajectory: Trajectory
    advantage: float


def row_weights(rows: Sequence[Row], *, loss_type: str, num_rows: int, num_rollouts: int) -> list[float]:
    """Factors for the advantages of rows such that TRL's loss becomes a mean over rollouts.

    TRL's losses are linear in the advantage apart from its sign. With N rows over all ranks (fillers included), R
    rollouts, and T_j trainable tokens in row j of a rollout with T tokens in all:

    * "grpo" and "sapo" compute 1/N sum_j 1/T_j sum_t; the weight N/R * T_j/T makes that 1/R sum_i 1/T sum_j,t.
    * "dr_grpo" and "luspo" compute 1/N sum_j sum_t (over a constant); the weight is N/R.
    * "dapo", "cispo" and "vespo" divide by all tokens of the step; the weight is 1.
    * "bnpo" divides by the tokens of each micro-batch, which TRL defines as depending on the split; the weight is 1.

    Args:
        rows: Rows of this rank. All rows of a rollout are on one rank.
        num_rows: N.
        num_rollouts: R, the rollouts over all ranks that have a row.
    """
    if loss_type not in ROLLOUT_MEAN_LOSSES:
        return [1.0] * len(rows)
    scale = num_rows / max(1, num_rollouts)
    if loss_type in ("dr_grpo", "luspo"):
        return [scale] * len(rows)
    rollout_tokens: dict[str, int] = defaultdict(int)
    for row in rows:
        rollout_tokens[row.trajectory.rollout_id] += sum(row.trajectory.trainable)
    return [scale * sum(r.trajectory.trainable) / rollout_tokens[r.trajectory.rollout_id] for r in rows]


def split_batch(batch: Mapping[str, Any], num_parts: int, *, by_length: bool) -> list[dict[str, Any]]:
    """Equal parts of a batch's rows, for one forward pass each.

    Args:
        batch: Tensors whose first dimension is B; scalars (0-d) go to every part.
        num_parts: Divides B.
        by_length: Put rows of like length together, so that little is padded; else in random order, for parts that
            go to different optimizer steps.
    """
    num_rows = batch["completion_mask"].size(0)
    if by_length:
        order = (batch["prompt_mask"].sum(dim=1) + batch["completion_mask"].sum(dim=1)).argsort()
    else:
        order = torch.randperm(num_rows).to(batch["completion_mask"].device)
    return [
        trim_padding({key: tensor[rows] if tensor.dim() else tensor for key, tensor in batch.items()})
        for rows in order.chunk(num_parts)
    ]


def trim_padding(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The same rows without the columns in which none of them has a token.

    A generation batch is padded to its longest row before it is split; most of its parts are shorter.
    """
    prompts = batch["prompt_mask"].any(dim=0)
    completions = batch["completion_mask"].any(dim=0)
    start = int(prompts.int().argmax())
    length = max(1, int(completions.sum()))
    trimmed = dict(batch)
    for key in ("prompt_ids", "prompt_mask"):
        trimmed[key] = batch[key][:, start:]
    for key in _COMPLETION_KEYS & batch.keys():
        trimmed[key] = batch[key][:, :length]
    return trimmed


def build_batch(
    rows: Sequence[Row], weights: Sequence[float], *, num_rows: int, pad_token_id: int, device: torch.device
) -> dict[str, Tensor]:
    """Tensors of B = `num_rows` rows: the given ones, then fillers that train nothing.

    A row's prompt is everything before its first trainable token, padded on the left; its completion is the rest,
    padded on the right. Keys and their meaning are TRL's: `prompt_ids`, `prompt_mask` [B, P]; `completion_ids`,
    `completion_mask` (1 on real tokens), `tool_mask` (1 on trainable ones), `sampling_per_token_logps` [B, C];
    `advantages` [B].
    """
    if len(rows) > num_rows:
        raise LawError(f"{len(rows)} rows do not fit a batch of {num_rows}")
    starts = [row.trajectory.trainable.index(True) for row in rows]
    prompt_length = max(starts, default=1)
    completion_length = max(
        (len(r.trajectory.token_ids) - start for r, start in zip(rows, starts, strict=True)), default=1
    )
    prompt_ids = torch.full((num_rows, prompt_length), pad_token_id)
    prompt_mask = torch.zeros((num_rows, prompt_length), dtype=torch.long)
    completion_ids = torch.full((num_rows, completion_length), pad_token_id)
    completion_mask = torch.zeros((num_rows, completion_length), dtype=torch.long)
    tool_mask = torch.zeros((num_rows, completion_length), dtype=torch.long)
    logps = torch.zeros((num_rows, completion_length))
    advantages = torch.zeros(num_rows)
    for b, (row, start, weight) in enumerate(zip(rows, starts, weights, strict=True)):
        trajectory = row.trajectory
        length = len(trajectory.token_ids) - start
        prompt_ids[b, prompt_length - start :] = torch.tensor(trajectory.token_ids[:start])
        prompt_mask[b, prompt_length - start :] = 1
        completion_ids[b, :length] = torch.tensor(trajectory.token_ids[start:])
        completion_mask[b, :length] = 1
        tool_mask[b, :length] = torch.tensor(trajectory.trainable[start:], dtype=torch.long)
        logps[b, :length] = torch.tensor(trajectory.logprobs[start:])
        advantages[b] = row.advantage * weight
    # A row that attends to nothing has undefined attention; a filler attends to one pad token.
    prompt_mask[len(rows) :, -1] = 1
    batch = {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "tool_mask": tool_mask,
        "sampling_per_token_logps": logps,
        "advantages": advantages,
    }
    return {key: tensor.to(device) for key, tensor in batch.items()}
