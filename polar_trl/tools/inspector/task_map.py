"""Build the map of tasks by steps: the mean reward of each task's sessions in each step.

Where a run has more steps than columns fit on a page, neighbouring steps share one.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

MAX_COLUMNS = 60
MAX_TASKS = 500


def build_task_maps(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Build the JSON of both maps, of training and of evaluations, from the rows of the sessions table.

    Sessions without a reward are in no mean. A map without any session is None.
    """
    evaluated = [row for row in rows if row["use"] == "evaluation"]
    trained = [row for row in rows if row["use"] not in ("evaluation", None)]
    return {"train": _build_map(trained), "eval": _build_map(evaluated)}


def _build_map(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    known = [row for row in rows if row["step"] is not None and row["reward"] is not None]
    if not known:
        return None
    steps = sorted({row["step"] for row in known})
    width = -(-len(steps) // MAX_COLUMNS)
    column_of = {step: place // width for place, step in enumerate(steps)}
    columns = [[steps[start], steps[min(start + width, len(steps)) - 1]] for start in range(0, len(steps), width)]
    rewards: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in known:
        rewards[row["task"]][column_of[row["step"]]].append(row["reward"])
    tasks = [_build_task(name, cells) for name, cells in rewards.items()]
    tasks.sort(key=lambda task: (-task["mean"], task["task"]))
    values = [cell["mean"] for task in tasks for cell in task["cells"]]
    return {
        "columns": columns,
        "num_tasks": len(tasks),
        "tasks": tasks[:MAX_TASKS],
        "low": min(0.0, *values),
        "high": max(1.0, *values),
    }


def _build_task(name: str, cells: Mapping[int, Sequence[float]]) -> dict[str, Any]:
    everything = [reward for rewards in cells.values() for reward in rewards]
    return {
        "task": name,
        "mean": sum(everything) / len(everything),
        "sessions": len(everything),
        "cells": [
            {"column": column, "mean": sum(rewards) / len(rewards), "sessions": len(rewards)}
            for column, rewards in sorted(cells.items())
        ],
    }
