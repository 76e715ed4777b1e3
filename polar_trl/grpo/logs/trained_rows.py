"""Write the trained tokens of each step to `rows/ATTEMPT/train_00003.jsonl` in the run's folder.

A "rollout" line has the reward, the advantage and the drop reason of each rollout of a generation batch; a "row" line
has the trained spans of a row, its advantage (with `turn_credit` that of each span, too), and the trainer's
log-probability of each token. Both name their session's record by its path; `polar-trl inspect` shows them, with the
advantages of rollouts. Figures stay on their device until all passes are done.
"""

import json
import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from polar_trl.grpo.rows import Row
from polar_trl.rollout.reasons import find_reason
from polar_trl.run_folder import ROWS_FOLDER, append_lines
from polar_trl.types import Rollout


class TrainedRows:
    """Write one process's files, a file per optimizer step and kind of batch.

    Args:
        folder: The run's.
        attempt: Name of this process's part of the run.
    """

    def __init__(self, folder: Path, attempt: str) -> None:
        self.run, self.attempt = folder, attempt
        self._folder = folder / ROWS_FOLDER / attempt
        self._passes: list[tuple[Sequence[Mapping[str, Any]], Tensor]] = []

    def name_record(self, path: Path | None) -> str:
        """Return a record's path relative to the run's folder; "" where there is none."""
        return "" if path is None else path.relative_to(self.run).as_posix()

    def write_rollouts(self, mode: str, step: int, rollouts: Sequence[Mapping[str, Any]]) -> None:
        """Write a line for each rollout of a generation batch.

        Args:
            mode: "train" or "eval".
            step: The optimizer step that comes next; of an evaluation, the one before it.
            rollouts: From `describe_rollout`.
        """
        self._append(f"{mode}_{step:05d}.jsonl", [{"type": "rollout", **rollout} for rollout in rollouts])

    def note(self, rows: Sequence[Mapping[str, Any]], logprobs_BC: Tensor) -> None:
        """Note the rows of a pass (see `describe_row`), and the trainer's logprobs of their trained tokens."""
        self._passes.append((rows, logprobs_BC.detach()))

    def forget(self) -> None:
        """Forget the noted rows: they are not trained after all."""
        self._passes = []

    def write_rows(self, step: int) -> None:
        """Write a line for each row that was noted for an optimizer step."""
        passes, self._passes = self._passes, []
        lines = []
        for rows, logprobs_BC in passes:
            values_BC = logprobs_BC.float().cpu().numpy()
            for row, values_C in zip(rows, values_BC, strict=False):  # a pass may have room for more rows
                logprobs = values_C[: row["num_trainable"]].astype(float).round(7).tolist()
                lines.append({"type": "row", "step": step, **row, "logprobs": logprobs})
        self._append(f"train_{step:05d}.jsonl", lines)

    def _append(self, name: str, lines: Sequence[Mapping[str, Any]]) -> None:
        if not lines:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
        append_lines(self._folder / name, text.encode())


def describe_rollout(
    rollout: Rollout, record_path: str, reward: float, advantage: float, *, dropped: str | None
) -> dict[str, Any]:
    """Return a rollout's line, as JSON values; `reward` is NaN where there is none."""
    reason = find_reason(rollout)
    return {
        "rollout": rollout.id,
        "record": record_path,
        "task": rollout.task_id,
        "group": rollout.group_id,
        "reward": None if math.isnan(reward) else reward,
        "advantage": advantage,
        "dropped": dropped,
        **({} if reason is None else {"reason": reason.name, "detail": reason.detail}),
    }


def describe_row(row: Row) -> dict[str, Any]:
    """Return a row's line, as JSON values: `trained` are the spans [start, end) of its trained tokens."""
    return {
        "rollout": row.rollout_id,
        "record": row.record_path,
        "agent": row.agent,
        "calls": list(row.call_indices),
        "num_tokens": len(row.token_ids_T),
        "num_trainable": row.num_trainable,
        "trained": find_spans(row.trainable_T),
        "advantage": row.advantage,
        **({} if row.advantages_T is None else {"advantages": list_by_span(row)}),
    }


def list_by_span(row: Row) -> list[float]:
    """List the advantage of each span of `trained`: that of its first token, since a call has one."""
    assert row.advantages_T is not None
    return [float(row.advantages_T[start]) for start, _ in find_spans(row.trainable_T)]


def find_spans(mask_T: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Find the runs of True: [start, end) each."""
    spans, position = [], 0
    for value, run in groupby(mask_T.tolist()):
        length = sum(1 for _ in run)
        if value:
            spans.append((position, position + length))
        position += length
    return spans
