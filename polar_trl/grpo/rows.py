"""Build the training rows of rollouts with their advantages, and each row's share in the loss.

The number of rows does not count: shares are those of a rollout's tokens, however many trajectories it was split into.
Tokens that are left out are counted by their reason.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from polar_trl.grpo.packing.layout import Ids
from polar_trl.grpo.turns import TurnChoice
from polar_trl.reconstruct.truncate import keep_calls, truncate_trajectory
from polar_trl.rollout.session_run import RolloutResult
from polar_trl.types import Rollout, Trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One trajectory to train, with its rollout's advantage."""

    rollout_id: str
    advantage: float
    """Of the rollout; of its calls' the mean, where each has its own."""
    token_ids_T: Ids
    trainable_T: NDArray[np.bool_]
    """The loss mask. Never True on the first token, which nothing predicts."""
    logprobs_T: NDArray[np.float32]
    """Nats, under the behavior policy, which sampled; 0 where not trainable."""
    policy_versions_T: NDArray[np.int64]
    """-1 where not trainable."""
    call_indices: tuple[int, ...] = ()
    """The calls whose samples it trains."""
    advantages_T: NDArray[np.float32] | None = None
    """Of each token's call, with `turn_credit`; None: `advantage` for all."""
    record_path: str = ""
    """Of its session, in the run's folder; "" where there is none."""
    agent: str | None = None
    """Of its session, of those of the run."""

    @property
    def num_trainable(self) -> int:
        return int(self.trainable_T.sum())


def build_row(trajectory: Trajectory, advantage: float, record_path: str = "", agent: str | None = None) -> Row:
    """Build the row of a trajectory."""
    return Row(
        rollout_id=trajectory.rollout_id,
        advantage=advantage,
        token_ids_T=np.array(trajectory.token_ids, dtype=np.int64),
        trainable_T=np.array(trajectory.trainable, dtype=np.bool_),
        logprobs_T=np.array(trajectory.logprobs, dtype=np.float32),
        policy_versions_T=np.array(trajectory.policy_versions, dtype=np.int64),
        call_indices=trajectory.call_indices,
        record_path=record_path,
        agent=agent,
    )


def spread_advantages(trajectory: Trajectory, rollout: Rollout, of_calls: Mapping[int, float]) -> NDArray[np.float32]:
    """Return [T], the advantage of each sampled token's call; 0 where not trainable."""
    advantages_T = np.zeros(len(trajectory.token_ids), dtype=np.float32)
    for index in trajectory.call_indices:
        start = len(rollout.calls[index].prompt_ids)
        advantages_T[start : start + len(rollout.calls[index].completion.token_ids)] = of_calls[index]
    return advantages_T


def build_rows(
    results: Iterable[tuple[RolloutResult, float | Mapping[int, float]]],
    *,
    max_tokens: int,
    oldest_version: int,
    name_record: Callable[[Path | None], str] = lambda path: "",
    choose_turns: TurnChoice | None = None,
) -> tuple[list[Row], Counter[str]]:
    """Build the rows of the rollouts that are trained.

    Args:
        results: Rollouts and their advantages, or those of their calls by index.
        max_tokens: Trajectories that are longer are truncated after the last call that fits.
        oldest_version: Tokens that an older policy sampled are context only.
        name_record: What rows say of where their session is on disk.
        choose_turns: Calls that are trained; None: all.

    Returns:
        rows: One per trajectory, without those that nothing is left of to train.
        dropped: Sampled tokens that are not trained, by reason: "too_long", "not_chosen", "stale".
    """
    rows: list[Row] = []
    dropped: Counter[str] = Counter()
    for result, advantage in results:
        chosen = None if choose_turns is None else choose_turns(result)
        for whole in result.reconstruction.trajectories:
            trajectory = truncate_trajectory(whole, result.rollout, max_tokens)
            kept = 0 if trajectory is None else sum(trajectory.trainable)
            dropped["too_long"] += sum(whole.trainable) - kept
            if trajectory is not None and chosen is not None:
                trajectory = keep_calls(trajectory, result.rollout, chosen)
                dropped["not_chosen"] += kept - (0 if trajectory is None else sum(trajectory.trainable))
            if trajectory is None:
                continue
            of_rollout = advantage if isinstance(advantage, float) else fmean(advantage.values())
            row = build_row(trajectory, of_rollout, name_record(result.record_path), result.rollout.agent)
            if not isinstance(advantage, float):
                row = replace(row, advantages_T=spread_advantages(trajectory, result.rollout, advantage))
            is_fresh_T = row.policy_versions_T >= oldest_version
            dropped["stale"] += int((row.trainable_T & ~is_fresh_T).sum())
            row = replace(row, trainable_T=row.trainable_T & is_fresh_T)
            if row.num_trainable:
                rows.append(row)
    return rows, +dropped


def rollout_tokens(rows: Sequence[Row]) -> list[int]:
    """Count, for each row, the trained tokens of its rollout; all its rows are among the given ones."""
    totals: dict[str, int] = defaultdict(int)
    for row in rows:
        totals[row.rollout_id] += row.num_trainable
    return [totals[row.rollout_id] for row in rows]


def token_shares(rows: Sequence[Row], *, loss_type: str, max_completion_length: int) -> list[float]:
    """Return each row's weight of a token's loss: the loss is the weighted sum over all tokens.

    With R rollouts:

    * "grpo" and "sapo" average a rollout's tokens, then rollouts: 1 / rollout_tokens / R.
    * "luspo" and "dr_grpo" average rollouts' sums, the latter over a constant: 1 / R, 1 / R / max_completion_length.
    * "dapo", "cispo" and "vespo" divide by all tokens: 1 / all_tokens.

    A rollout of 3 tokens in rows of 2 and 1, beside one of 2 tokens in one row: "grpo" gives 1/6, 1/6 and 1/4, and
    "dapo" 1/5 for each, however the three tokens are split.

    Args:
        rows: All rows that are averaged over, of all ranks.
    """
    tokens = rollout_tokens(rows)
    num_rollouts = len({row.rollout_id for row in rows if row.num_trainable})
    if loss_type in ("grpo", "sapo"):
        return [1.0 / max(1, count * num_rollouts) for count in tokens]
    if loss_type in ("dr_grpo", "luspo"):
        return [1.0 / max(1, num_rollouts) / (max_completion_length if loss_type == "dr_grpo" else 1)] * len(rows)
    return [1.0 / max(1, sum(row.num_trainable for row in rows))] * len(rows)
