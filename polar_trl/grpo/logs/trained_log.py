"""Keep `trained.jsonl`: exactly the rollouts that the present weights were trained on, step by step.

A line about an update that a kill has undone does not stay: when a run is resumed from a checkpoint, the lines after
it are moved to `lost.jsonl`, and so are lines that something has damaged.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from transformers import TrainerCallback

from polar_trl.run_folder import TRAINED_FILE, append_lines, write_whole

logger = logging.getLogger(__name__)

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
            # a checkpoint that is on the disk must not know more than this
            append_lines(self._folder / TRAINED_FILE, json.dumps(line).encode() + b"\n", sync=True)


def rewind_trained(folder: Path, *, source: Path, step: int) -> None:
    """Rewind a run's file to what weights of `step` were trained on. One rank calls it.

    Args:
        source: Folder of the run that the weights come from.
        step: Optimizer steps behind the weights; 0 where the run begins.
    """
    path, kept, steps = folder / TRAINED_FILE, list[bytes](), set[int]()
    for line in _read_lines(source / TRAINED_FILE):
        number = _read_step(line)
        if number is None:
            logger.warning("%s: no line of a step: %.80r", source / TRAINED_FILE, line)
        elif number <= step and number not in steps:
            kept.append(line)
            steps.add(number)
    if missing := sorted(set(range(1, step + 1)) - steps):
        logger.warning(
            "%s lacks %d of the %d steps behind the weights (the first is step %d): which rollouts they were trained "
            "on is not known any more",
            *(source / TRAINED_FILE, len(missing), step, missing[0]),
        )
    lost = [line for line in _read_lines(path) if line not in set(kept)]
    if lost:
        # a kill between the two writes must not have them there twice
        known = set(_read_lines(folder / LOST_FILE))
        append_lines(folder / LOST_FILE, b"".join(line + b"\n" for line in lost if line not in known))
    if kept or lost:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, b"".join(line + b"\n" for line in kept))


def read_last_step(folder: Path) -> int:
    """Return the last step that a run made; 0 for none."""
    return max((_read_step(line) or 0 for line in _read_lines(folder / TRAINED_FILE)), default=0)


def _read_step(line: bytes) -> int | None:
    """Read the step of a line; None where something has damaged it."""
    try:
        number = json.loads(line)["step"]
        return number if type(number) is int and number > 0 else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _read_lines(path: Path) -> list[bytes]:
    """Read whole lines; a kill may have torn the last."""
    return [line for line in path.read_bytes().split(b"\n")[:-1] if line] if path.exists() else []
