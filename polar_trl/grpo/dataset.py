"""Read the tasks that a trainer is given, and make the rows that TRL's samplers deal out."""

from collections.abc import Mapping, Sequence
from typing import Any

from datasets import Dataset

from polar_trl.errors import TaskError
from polar_trl.tasks.jsonl import read_task
from polar_trl.tasks.rules import check_spec
from polar_trl.types import Task

DataRow = dict[str, Any]
"""A row of the data set, not of the loss (that is `grpo.rows.Row`)."""


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
        if task.tests is not None:
            check_spec(task.tests, f"task {task.id!r}")
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
    # Arrow gives every row every key that any row has, with None where the row has it not
    fields = _drop_nones(row)
    for name in ("files", "env", "tests"):
        if isinstance(fields.get(name), Mapping):
            fields[name] = _drop_nones(fields[name])
    return read_task(fields, where)


def _drop_nones(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if value is not None}
