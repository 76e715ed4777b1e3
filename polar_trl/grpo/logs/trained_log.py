"""Keep `trained.jsonl`: exactly the rollouts that the present weights were trained on, step by step.

A line about an update that a kill has undone does not stay: when a run is resumed from a checkpoint, the lines after
it are moved to `lost.jsonl`.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from transformers import TrainerCallback

from polar_trl.run_folder import TRAINED_FILE

LOST_FILE = "lost.jsonl"


class TrainedLog(TrainerCallback):
    """Append a line per optimizer step on rank 0: `step`, `rollouts` (ids, sorted), `rows`, `tokens` (trained).

    A step that was not made trained nothing: it also has `skipped`, the reason, and `not_trained`, its rollouts.

    Args:
        folder: The run's.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rollouts: set[str] = set()
        self._num_rows = 0
        self._num_tokens = 0
        self._skipped: dict[str, Any] = {}

    def note_rows(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Take the rows of this rank (see `describe_row`) that go into the coming optimizer step (a collective)."""
        of_all = gather_object([(row["rollout"], row["num_trainable"]) for row in rows])
        self._rollouts.update(rollout_id for rollout_id, _ in of_all)
        self._num_rows += len(of_all)
        self._num_tokens += sum(count for _, count in of_all)

    def skip(self, reason: str) -> None:
        """Note that the coming optimizer step is skipped: nothing that was noted for it is trained."""
        self._skipped = {"skipped": reason, "not_trained": sorted(self._rollouts)}
        self._rollouts, self._num_rows, self._num_tokens = set(), 0, 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the step's line."""
        line = {
            "step": state.global_step,
            "rollouts": sorted(self._rollouts),
            "rows": self._num_rows,
            "tokens": self._num_tokens,
            **self._skipped,
        }
        self._rollouts, self._num_rows, self._num_tokens = set(), 0, 0
        self._skipped = {}
        if state.is_world_process_zero:
            with (self._folder / TRAINED_FILE).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
                file.flush()
                os.fsync(file.fileno())  # a checkpoint that is on the disk must not know more than this


def rewind_trained(folder: Path, *, source: Path, step: int) -> None:
    """Rewind a run's file to what weights of `step` were trained on. One rank calls it.

    Args:
        source: Folder of the run that the weights come from.
        step: Optimizer steps behind the weights; 0 where the run begins.
    """
    kept = [line for line in _read_lines(source / TRAINED_FILE) if json.loads(line)["step"] <= step]
    lost = [line for line in _read_lines(folder / TRAINED_FILE) if line not in set(kept)]
    if lost:
        # a kill between the two writes must not have them there twice
        known = set(_read_lines(folder / LOST_FILE))
        with (folder / LOST_FILE).open("a", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in lost if line not in known)
    if kept or lost:
        part = folder / (TRAINED_FILE + ".part")
        part.parent.mkdir(parents=True, exist_ok=True)
        part.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        os.replace(part, folder / TRAINED_FILE)


def _read_lines(path: Path) -> list[str]:
    """Read whole lines; a kill may have torn the last."""
    if not path.exists():
        return []
    return [line.rstrip("\n") for line in path.read_text(encoding="utf-8").splitlines(True) if line.endswith("\n")]
