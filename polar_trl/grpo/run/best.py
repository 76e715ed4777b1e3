"""Choose the best checkpoint of a run by its evaluations, and name it in `best.json`."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from polar_trl.grpo.logs.evaluations import list_evaluations
from polar_trl.run_folder import BEST_FILE, write_whole


def name_best_metric(metric: str, sets: Sequence[str]) -> str:
    """Return the metric's name among several evaluation sets: the first set's where it names none of them."""
    metric = metric.removeprefix("eval_")
    return metric if any(metric.startswith(f"{name}_") for name in sets) else f"{sets[0]}_{metric}"


def find_best(
    log_history: Sequence[Mapping[str, Any]], folder: Path, *, metric: str | None, greater_is_better: bool | None
) -> dict[str, Any] | None:
    """Find the best evaluation during training, as transformers does: the first of equal ones.

    Returns:
        `step`, `metric`, `value`, `set` and the figures of that evaluation, and `checkpoint`, the name of its folder
        (None where none was saved at that step). None where nothing was evaluated, or there is no metric.
    """
    key = f"eval_{(metric or '').removeprefix('eval_')}"
    sign = -1 if greater_is_better is False else 1
    points = [
        (entry["step"], entry[key])
        for entry in log_history
        # at step 0 there is no checkpoint
        if entry.get("step") and isinstance(entry.get(key), int | float) and math.isfinite(entry[key])
    ]
    if not points:
        return None
    step, value = max(points, key=lambda point: sign * point[1])
    figures = [found for found in list_evaluations(log_history) if found["step"] == step]
    of_set = next((f for f in figures if not f["set"] or key.startswith(f"eval_{f['set']}_")), {})
    name = f"checkpoint-{step}"
    is_there = (folder / name).is_dir()
    return {**of_set, "step": step, "metric": key, "value": value, "checkpoint": name if is_there else None}


class BestCheckpoint(TrainerCallback):
    """Choose by the first of several evaluation sets, unless one is named, and write `best.json` at each checkpoint.

    Args:
        folder: The run's.
        sets: Evaluation sets, a mapping where there are several.
    """

    def __init__(self, folder: Path, sets: Any = None) -> None:
        self._folder = folder
        self._names = list(sets) if isinstance(sets, Mapping) else []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Name the set that decides; transformers looks for the metric under its whole name."""
        if self._names and args.metric_for_best_model is not None:
            args.metric_for_best_model = name_best_metric(args.metric_for_best_model, self._names)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the best one so far, on rank 0."""
        best = find_best(
            state.log_history,
            self._folder,
            metric=args.metric_for_best_model,
            greater_is_better=args.greater_is_better,
        )
        if best is not None and state.is_world_process_zero:
            write_whole(self._folder / BEST_FILE, (json.dumps(best, indent=2) + "\n").encode())
