"""Tasks -> the rows that TRL's samplers deal out, and back."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from datasets import Dataset

from polar_trl.errors import TaskError
from polar_trl.tasks.jsonl import read_task, read_test_spec
from polar_trl.types import Task


def build_dataset(tasks: Sequence[Task] | Dataset) -> Dataset:
    """One row per task: `prompt` (a conversation, for TRL's tables and reward functions) and `task` (JSON).

    A `Dataset` is read as one task per row, columns being `Task`'s fields; one that was built here passes through.
    """
    if isinstance(tasks, Dataset):
        if set(tasks.column_names) == {"prompt", "task"}:
            return tasks
        tasks = [_row_to_task(row, f"row {index}") for index, row in enumerate(tasks)]
    if not tasks:
        raise TaskError("the task set is empty")
    seen: set[str] = set()
    for task in tasks:
        if task.id in seen:
            raise TaskError(f"task {task.id!r} is there twice; ids must be unique")
        seen.add(task.id)
    return Dataset.from_list(
        [
            {"prompt": [{"role": "user", "content": task.instruction}], "task": json.dumps(_to_dict(task))}
            for task in tasks
        ]
    )


def parse_task(row: Mapping[str, Any]) -> Task:
    """The task of a row that `build_dataset` made."""
    fields = json.loads(row["task"])
    if fields["tests"] is not None:
        fields["tests"] = read_test_spec(fields["tests"], f"task {fields['id']!r}")
    return Task(**fields)


def _to_dict(task: Task) -> dict[str, Any]:
    fields = {f.name: getattr(task, f.name) for f in dataclasses.fields(task)}
    return fields | {"tests": None if task.tests is None else dataclasses.asdict(task.tests)}


def _row_to_task(row: Mapping[str, Any], where: str) -> Task:
    # Arrow gives every row every key that any row has, with None where the row has it not
    fields = _drop_nones(row)
    for name in ("files", "env", "tests"):
        if isinstance(fields.get(name), Mapping):
            fields[name] = _drop_nones(fields[name])
    return read_task(fields, where)


def _drop_nones(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if value is not None}
