"""Trajectories with advantages -> rows to train, and rows of one forward pass -> what TRL's loss reads.

It refuses to let the number of rows speak: losses that average over rows are re-weighted so that they average over
rollouts, however many trajectories a rollout was split into and however rows are spread over forward passes.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polar_trl.grpo.forward import LayoutKind, pack_rows
from polar_trl.grpo.layout import Ids
from polar_trl.types import Trajectory

ROLLOUT_MEAN_LOSSES = frozenset({"grpo", "sapo", "dr_grpo", "luspo"})
"""TRL losses that average over rows; `row_weights` makes them average over rollouts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One trajectory to train, with its rollout's advantage."""

    rollout_id: str
    advantage: float
    token_ids_T: Ids
    trainable_T: NDArray[np.bool_]
    """Never on the first token, which nothing predicts."""
    logprobs_T: NDArray[np.float32]
    """Nats, under the policy that sampled; 0 where not trainable."""
    policy_versions_T: NDArray[np.int64]
    """-1 where not trainable."""

    @property
    def num_trainable(self) -> int:
        return int(self.trainable_T.sum())


def build_row(trajectory: Trajectory, advantage: float) -> Row:
    """The trajectory as arrays."""
    return Row(
        rollout_id=trajectory.rollout_id,
        advantage=advantage,
        token_ids_T=np.array(trajectory.token_ids, dtype=np.int64),
        trainable_T=np.array(trajectory.trainable, dtype=np.bool_),
        logprobs_T=np.array(trajectory.logprobs, dtype=np.float32),
        policy_versions_T=np.array(trajectory.policy_versions, dtype=np.int64),
    )


def row_weights(rows: Sequence[Row], *, loss_type: str) -> list[float]:
    """The weight of each row's loss in the mean over rollouts that a loss type declares.

    With T_j trainable tokens in row j of a rollout with T tokens in all, and R rollouts:

    * "grpo" and "sapo" average a rollout's tokens, then rollouts: T_j / T / R for a row's mean over its tokens.
    * "dr_grpo" and "luspo" average rollouts' sums (over a constant): 1 / R for a row's sum.
    * "dapo", "cispo" and "vespo" divide by all tokens of the step, which TRL does: 1.
    * "bnpo" divides by the tokens of each forward pass, which TRL defines as depending on the split: 1.

    Args:
        rows: All rows that are averaged over, of all ranks.
    """
    if loss_type not in ROLLOUT_MEAN_LOSSES:
        return [1.0] * len(rows)
    rollout_tokens: dict[str, int] = defaultdict(int)
    for row in rows:
        rollout_tokens[row.rollout_id] += row.num_trainable
    num_rollouts = max(1, len(rollout_tokens))
    if loss_type in ("dr_grpo", "luspo"):
        return [1.0 / num_rollouts] * len(rows)
    return [row.num_trainable / rollout_tokens[row.rollout_id] / num_rollouts for row in rows]


def build_micro_batch(
    rows: Sequence[Row], weights: Sequence[float], *, num_rows: int, kind: LayoutKind, device: torch.device
) -> dict[str, Any]:
    """What one forward pass of B rows needs; without rows, one that trains nothing and costs two tokens.

    TRL's losses look at a row's trainable tokens only, so those are all that "completion" has here: C is the most
    trainable tokens of a row. The tokens themselves are forwarded from "packed".

    Args:
        weights: Factor of each row's advantage.
        num_rows: B, at least one: the most rows that any rank has in this pass, since TRL gathers figures of rows. What
            the given rows do not fill stays empty.

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
    mask_BC = torch.zeros_like(batch["completion_ids"], dtype=torch.bool)
    row_of_S = batch["packed"].row_of_S
    counts_B = torch.bincount(row_of_S, minlength=len(mask_BC))
    mask_BC |= torch.arange(mask_BC.shape[1], device=mask_BC.device)[None] < counts_B[:, None]
    # scored tokens come row by row and in order, as the mask's entries do
    return values_S.new_zeros(mask_BC.shape).masked_scatter(mask_BC, values_S)
