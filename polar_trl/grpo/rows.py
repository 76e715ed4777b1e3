"""Rollouts and their advantages -> the rows that train them, and each row's share in the loss.

It refuses to let the number of rows speak: losses that average over rows are re-weighted so that they average over
rollouts, however many trajectories a rollout was split into. What is left out is counted by its reason.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from polar_trl.grpo.layout import Ids
from polar_trl.reconstruct.cut import clip_trajectory
from polar_trl.rollout import Finished
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
    call_indices: tuple[int, ...] = ()
    """The calls whose samples it trains."""
    record: str = ""
    """Path of its session's record in the run's folder; "" where there is none."""

    @property
    def num_trainable(self) -> int:
        return int(self.trainable_T.sum())


def build_row(trajectory: Trajectory, advantage: float, record: str = "") -> Row:
    """The trajectory as arrays."""
    return Row(
        rollout_id=trajectory.rollout_id,
        advantage=advantage,
        token_ids_T=np.array(trajectory.token_ids, dtype=np.int64),
        trainable_T=np.array(trajectory.trainable, dtype=np.bool_),
        logprobs_T=np.array(trajectory.logprobs, dtype=np.float32),
        policy_versions_T=np.array(trajectory.policy_versions, dtype=np.int64),
        call_indices=trajectory.call_indices,
        record=record,
    )


def build_rows(
    results: Iterable[tuple[Finished, float]],
    *,
    max_tokens: int,
    oldest_version: int,
    name_record: Callable[[Path | None], str] = lambda path: "",
) -> tuple[list[Row], Counter[str]]:
    """Rows of the rollouts that are trained.

    Args:
        results: Rollouts and their advantages.
        max_tokens: Trajectories that are longer are cut after the last call that fits.
        oldest_version: Tokens that an older policy sampled are context only.
        name_record: What rows say of where their session is on disk.

    Returns:
        rows: One per trajectory, without those that nothing is left of to train.
        dropped: Sampled tokens that are not trained, by reason: "too_long", "stale".
    """
    rows: list[Row] = []
    dropped: Counter[str] = Counter()
    for result, advantage in results:
        for whole in result.reconstruction.trajectories:
            trajectory = clip_trajectory(whole, result.rollout, max_tokens)
            kept = 0 if trajectory is None else sum(trajectory.trainable)
            dropped["too_long"] += sum(whole.trainable) - kept
            if trajectory is None:
                continue
            row = build_row(trajectory, advantage, name_record(result.record_path))
            is_fresh_T = row.policy_versions_T >= oldest_version
            dropped["stale"] += int((row.trainable_T & ~is_fresh_T).sum())
            row = replace(row, trainable_T=row.trainable_T & is_fresh_T)
            if row.num_trainable:
                rows.append(row)
    return rows, +dropped


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
