"""Read the tasks that a trainer is given, and make the rows that TRL's samplers deal out."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from datasets import Dataset

from polar_trl.errors import TaskError
from polar_trl.tasks.jsonl import parse_test_spec
from polar_trl.types import Task


def read_tasks(tasks: Sequence[Task] | Dataset | None) -> dict[str, Task]:
    """Return tasks by id, in their order; none of None. A `Dataset` has a task per row, columns being `Task`'s fields.

    Raises:
        TaskError: there are no tasks, two have one id, or a column or a value is not a task's.
    """
    if tasks is None:
        return {}
    if isinstance(tasks, Dataset):
        tasks = [_row_to_task(row, f"row {index}") for index, row in enumerate(tasks)]
    if not tasks:
        raise TaskError("the task set is empty")
    by_id: dict[str, Task] = {}
    for task in tasks:
        if task.id in by_id:
            raise TaskError(f"task {task.id!r} is there twice; ids must be unique")
        by_id[task.id] = task
    return by_id


def build_dataset(tasks: Mapping[str, Task]) -> Dataset | None:
    """Return the rows that TRL's samplers deal out: `task_id`, and the `prompt` that TRL wants. None for no tasks."""
    rows = [{"prompt": build_prompt(task), "task_id": task_id} for task_id, task in tasks.items()]
    return Dataset.from_list(rows) if rows else None


def build_prompt(task: Task) -> list[dict[str, str]]:
    """Return the task's instruction as a conversation, for TRL's reward functions and tables."""
    return [{"role": "user", "content": task.instruction}]


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
