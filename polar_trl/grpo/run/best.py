"""Choose the best checkpoint of a run by its evaluations, and name it in `best.json`."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainingArguments

from polar_trl.errors import ConfigError
from polar_trl.grpo.logs.evaluations import FIGURES, find_evaluations, list_evaluations
from polar_trl.run_folder import BEST_FILE, write_whole


def name_best_metric(metric: str, sets: Sequence[str]) -> str:
    """Return the metric's name among several evaluation sets: the first set's where it names none of them."""
    metric = metric.removeprefix("eval_")
    return metric if any(metric.startswith(f"{name}_") for name in sets) else f"{sets[0]}_{metric}"


def find_best(
    log_history: Sequence[Mapping[str, Any]], folder: Path, args: TrainingArguments
) -> dict[str, Any] | None:
    """Find the best evaluation among those whose step has a checkpoint, or among all where none has; the first of
    equal ones, as in transformers.

    Args:
        folder: The run's.
        args: The metric, and whether a greater one is better.

    Returns:
        `step`, `metric`, `value`, `set` and the figures of that evaluation, and `checkpoint`, the name of its folder
        or None. None where nothing was evaluated, or there is no metric.
    """
    key = _name_key(args)
    sign = -1 if args.greater_is_better is False else 1
    points = [
        (entry["step"], entry[key])
        for entry in log_history
        # at step 0 there is no checkpoint
        if entry.get("step") and isinstance(entry.get(key), int | float) and math.isfinite(entry[key])
    ]
    if not points:
        return None
    saved = [point for point in points if (folder / f"checkpoint-{point[0]}").is_dir()]
    step, value = max(saved or points, key=lambda point: sign * point[1])
    figures = [found for found in list_evaluations(log_history) if found["step"] == step]
    sets = [found for found in figures if key.startswith(_name_prefix(found["set"]))]
    of_set = max(sets, key=lambda found: len(found["set"]), default={})
    name = f"checkpoint-{step}" if saved else None
    return {**of_set, "step": step, "metric": key, "value": value, "checkpoint": name}


def write_best(
    log_history: Sequence[Mapping[str, Any]], folder: Path, args: TrainingArguments
) -> dict[str, Any] | None:
    """Find the best evaluation, and write it to `best.json` if it has a checkpoint."""
    best = find_best(log_history, folder, args)
    if best is not None and best["checkpoint"] is not None:
        write_whole(folder / BEST_FILE, (json.dumps(best, indent=2) + "\n").encode())
    return best


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

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, Any], **kwargs: Any) -> None:
        """Make an evaluation without a graded session comparable for transformers: NaN is never the best.

        Raises `ConfigError` for a metric that evaluations do not have.
        """
        key = _name_key(args)
        prefixes = [prefix for name in ("", *self._names) if key.startswith(prefix := _name_prefix(name))]
        if args.metric_for_best_model is None or max(prefixes, key=len) not in find_evaluations(metrics):
            return  # of another set
        if metrics.get(key) is None:
            if key not in metrics and not key.endswith(tuple(f"_{name}" for name in FIGURES)):
                known = ", ".join(sorted(name.removeprefix("eval_") for name in metrics if name.startswith("eval_")))
                name = args.metric_for_best_model
                raise ConfigError(f"metric_for_best_model is {name!r}, which no evaluation has; they have {known}")
            metrics[key] = math.nan

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the best one so far, on rank 0."""
        if state.is_world_process_zero:
            write_best(state.log_history, self._folder, args)


def _name_key(args: TrainingArguments) -> str:
    return f"eval_{(args.metric_for_best_model or '').removeprefix('eval_')}"


def _name_prefix(name: str) -> str:
    """Return how the metrics of an evaluation set begin; "" is the only set."""
    return f"eval_{name}_" if name else "eval_"
