"""Build the data set that TRL samples from, a row per task, and parse its rows back into tasks."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from datasets import Dataset

from polar_trl.errors import TaskError
from polar_trl.tasks.jsonl import parse_test_spec
from polar_trl.types import Task

DataRow = dict[str, Any]
"""A row of the data set, not of the loss (that is `grpo.rows.Row`)."""


def build_dataset(tasks: Sequence[Task] | Dataset) -> Dataset:
    """Build one row per task: `prompt` (a conversation, for TRL's tables and reward functions) and `task` (JSON).

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
    """Parse the task of a row that `build_dataset` made."""
    fields = json.loads(row["task"])
    if fields["tests"] is not None:
        fields["tests"] = parse_test_spec(fields["tests"], f"task {fields['id']!r}")
    return Task(**fields)


def _to_dict(task: Task) -> dict[str, Any]:
    fields = {f.name: getattr(task, f.name) for f in dataclasses.fields(task)}
    return fields | {"tests": None if task.tests is None else dataclasses.asdict(task.tests)}


def _row_to_task(row: Mapping[str, Any], where: str) -> Task:
    known = {f.name for f in dataclasses.fields(Task)}
    fields = {key: value for key, value in row.items() if value is not None}
    if unknown := sorted(set(fields) - known):
        raise TaskError(f"{where}: unknown columns {unknown}; a task has {sorted(known)}")
    for name in ("id", "instruction"):
        if not isinstance(fields.get(name), str):
            raise TaskError(f"{where}: {name!r} is missing or not text")
    for name in ("files", "env"):
        # Arrow gives every row every key that any row has, with None where the row has it not.
        if isinstance(fields.get(name), Mapping):
            fields[name] = {key: value for key, value in fields[name].items() if value is not None}
    if "tests" in fields:
        spec = fields["tests"]
        if isinstance(spec, Mapping):
            spec = {key: value for key, value in spec.items() if value is not None}
        fields["tests"] = parse_test_spec(spec, where)
    return Task(**fields)
