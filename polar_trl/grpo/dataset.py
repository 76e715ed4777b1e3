"""Read the tasks that a trainer is given, and make the rows that TRL's samplers deal out.

Two kinds of data set are read: tasks (`Task`, or rows whose columns are its fields), and TRL's kind, with a column
`prompt`. There the prompt is the agent's instruction, and all columns are in `Task.metadata` for graders and are given
to reward functions as keyword arguments.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from datasets import Dataset, IterableDataset, IterableDatasetDict

from polar_trl.errors import ConfigError, TaskError
from polar_trl.tasks.jsonl import read_task
from polar_trl.tasks.rules import check_spec
from polar_trl.types import Task

DataRow = dict[str, Any]
"""A row of the data set, not of the loss (that is `grpo.rows.Row`)."""
TaskSource: TypeAlias = Sequence[Task] | Sequence[Mapping[str, Any]] | Dataset
"""What a data set may be."""
_FIELDS = frozenset(field.name for field in dataclasses.fields(Task)) - {"id", "instruction", "metadata"}
_IMAGES = ("image", "images")
"""TRL's columns of pictures. `image` is a container's name here, and then a text."""
_TAKEN = (
    *("task", "rollouts", "prompts", "completions", "completion_ids"),
    *("trainer_state", "log_extra", "log_metric", "environments"),
)
"""Keyword arguments that reward functions get in any case."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptTask(Task):
    """A row of TRL's kind of data set."""

    prompt: str | Sequence[Mapping[str, Any]]
    """As it was given, and as reward functions get it: text, or a conversation."""


def read_tasks(tasks: TaskSource | None, name: str = "train_dataset") -> dict[str, Task]:
    """Return tasks by id, in their order; none of None.

    Args:
        tasks: `Task`s, or rows (a `Dataset` or mappings) with `Task`'s fields, or with a `prompt`.
        name: Of the argument, for errors.

    Raises:
        ConfigError: it is no data set that can be read here.
        TaskError: there are no tasks, two have one id, or a column or a value is not a task's.
    """
    if tasks is None:
        return {}
    if isinstance(tasks, IterableDataset | IterableDatasetDict):
        raise ConfigError(
            f"{name} is an {type(tasks).__name__}, and a run must know its tasks before it starts: load it without "
            "streaming, or take as many as you need, Dataset.from_list(list(it.take(1000)))"
        )
    if isinstance(tasks, Mapping):
        kind, splits = type(tasks).__name__, ", ".join(map(str, tasks))
        raise ConfigError(f"{name} is a {kind} of {splits}: give one of them")
    if isinstance(tasks, str) or not isinstance(tasks, Sequence | Dataset):
        raise ConfigError(f"{name} must be a list of Tasks or a datasets.Dataset, not a {type(tasks).__name__}")
    if not len(tasks):
        raise TaskError("the task set is empty")
    by_id: dict[str, Task] = {}
    for index, row in enumerate(tasks):
        task = row if isinstance(row, Task) else _read_row(row, f"{name}, row {index}", by_id)
        if task.id in by_id:
            raise TaskError(f"task {task.id!r} is there twice; ids must be unique")
        if task.tests is not None:
            check_spec(task.tests, f"task {task.id!r}")
        by_id[task.id] = task
    return by_id


def read_eval_sets(tasks: TaskSource | Mapping[str, TaskSource] | None) -> dict[str | None, dict[str, Task]]:
    """Return the evaluation sets by name; a single one has the name None.

    Raises as `read_tasks`, and `TaskError` where two sets have different tasks of one id.
    """
    if not isinstance(tasks, Mapping) or isinstance(tasks, IterableDatasetDict):
        return {None: found} if (found := read_tasks(tasks, "eval_dataset")) else {}
    sets: dict[str | None, dict[str, Task]] = {
        str(name): read_tasks(part, f"eval_dataset[{name!r}]") for name, part in tasks.items()
    }
    merge_sets(sets)
    return sets


def merge_sets(sets: Mapping[str | None, Mapping[str, Task]]) -> dict[str, Task]:
    """Return the tasks of all sets by id. Raises `TaskError` where two sets have different tasks of one id."""
    merged: dict[str, Task] = {}
    for name, tasks in sets.items():
        for task_id, task in tasks.items():
            if merged.setdefault(task_id, task) != task:
                raise TaskError(f"eval_dataset[{name!r}] has another task {task_id!r} than one before it")
    return merged


def build_dataset(tasks: Mapping[str, Task], agent: str = "") -> Dataset | None:
    """Return the rows that TRL's samplers deal out: `task_id`, `agent`, and the `prompt` that TRL wants. None for no
    tasks.

    Args:
        agent: That plays them; "" leaves it to the run.
    """
    # text, whatever the prompts are: Arrow has one type for a column, and nothing reads it
    rows = [{"prompt": task.instruction, "task_id": task_id, "agent": agent} for task_id, task in tasks.items()]
    return Dataset.from_list(rows) if rows else None


def build_eval_dataset(
    sets: Mapping[str | None, Mapping[str, Task]], agents: Sequence[str] = ()
) -> Dataset | dict[str, Dataset] | None:
    """Return the same for evaluation sets: a data set, or one for each name.

    Args:
        agents: Of a run that has several. Each set is evaluated inside each of them, under the name "AGENT" or
            "NAME_AGENT", without the tasks that name another agent.
    """
    if agents:
        pinned: dict[str, Dataset] = {}
        for name, tasks in sets.items():
            for agent in agents:
                own = {task_id: task for task_id, task in tasks.items() if task.agent in (None, agent)}
                whole = agent if name is None else f"{name}_{agent}"
                if whole in pinned:
                    raise ConfigError(f"two evaluations would have the name {whole!r}: rename a set or an agent")
                if (rows := build_dataset(own, agent)) is not None:
                    pinned[whole] = rows
        return pinned or None
    built = {name: build_dataset(tasks) for name, tasks in sets.items()}
    return built.get(None) if None in built or not built else built


def is_built(tasks: Any) -> bool:
    """Tell whether a data set is one that `build_dataset` made."""
    return isinstance(tasks, Dataset) and tasks.column_names == ["prompt", "task_id", "agent"]


def build_prompt(task: Task) -> Any:
    """Return the prompt as reward functions and tables get it: as it was given, or the instruction as a message."""
    if isinstance(task, PromptTask):
        return task.prompt
    return [{"role": "user", "content": task.instruction}]


def list_columns(tasks: Mapping[str, Task]) -> list[str]:
    """List the keyword arguments that reward functions get of tasks: the keys of their metadata."""
    names = (str(name) for task in tasks.values() for name in task.metadata)
    return [name for name in dict.fromkeys(names) if name not in _TAKEN]


def _read_row(row: Any, where: str, others: Mapping[str, Task]) -> Task:
    if not isinstance(row, Mapping):
        raise TaskError(f"{where}: a task is a Task or a mapping, not {type(row).__name__}")
    # Arrow gives every row every key that any row has, with None where the row has it not
    fields = _drop_nones(row)
    for name in ("files", "env", "tests"):
        if isinstance(fields.get(name), Mapping):
            fields[name] = _drop_nones(fields[name])
    if "prompt" in fields and "instruction" not in fields:
        return _read_prompt_row(fields, where, others)
    return read_task(fields, where)


def _read_prompt_row(row: Mapping[str, Any], where: str, others: Mapping[str, Task]) -> Task:
    """Read a row of TRL's kind. Without an `id` it is named by a digest of its content."""
    prompt = row["prompt"]
    if any(row.get(name) and not isinstance(row[name], str) for name in _IMAGES):
        raise TaskError(f"{where}: it has pictures, which agents are not given; take the column out")
    if taken := [name for name in row if name in _TAKEN]:
        raise TaskError(f"{where}: reward functions get something else under the name {taken[0]!r}; rename the column")
    instruction = _find_instruction(prompt, where)
    columns = {name: value for name, value in row.items() if name not in ("prompt", "metadata")}
    task_id = str(row["id"]) if "id" in row else _digest(row, others)
    given = {name: row[name] for name in _FIELDS if name in row}
    try:
        task = read_task({**given, "id": task_id, "instruction": instruction}, where)
    except TaskError as error:
        raise TaskError(f"{error} (a column with the name of a task's field is that field; else rename it)") from error
    values = {field.name: getattr(task, field.name) for field in dataclasses.fields(Task)}
    values["metadata"] = {**columns, **(row.get("metadata") or {})}
    return PromptTask(prompt=prompt, **values)


def _find_instruction(prompt: Any, where: str) -> str:
    """Return the one instruction of a prompt: its text, or the user's message after any of the system."""
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, Sequence) or not all(isinstance(m, Mapping) and "role" in m for m in prompt):
        raise TaskError(f"{where}: 'prompt' must be text or a list of messages, not {prompt!r:.100}")
    roles = [message["role"] for message in prompt]
    if not roles or roles[-1] != "user" or set(roles[:-1]) - {"system"}:
        raise TaskError(
            f"{where}: its prompt has the turns {', '.join(map(str, roles)) or 'of nobody'}, and an agent starts from "
            "one instruction: give one user message, after system messages if you like, and put any history into it"
        )
    contents = [message.get("content") for message in prompt]
    if not all(isinstance(content, str) for content in contents):
        raise TaskError(f"{where}: a message of its prompt is not text, and agents are given text only")
    return "\n\n".join(contents)


def _digest(row: Mapping[str, Any], others: Mapping[str, Task]) -> str:
    content = json.dumps(row, sort_keys=True, default=str)
    digest = hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    task_id, number = digest, 1
    while task_id in others:  # the same row again, as TRL allows
        number += 1
        task_id = f"{digest}-{number}"
    return task_id


def _drop_nones(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if value is not None}
