"""Load tasks from a JSONL file, one object with `Task`'s fields per line, and save them.

Folders and files that a line names are relative to the task file, so that it can be moved along with them.
Refuses unknown fields and values of another type (`TaskError`, naming the file, the line, the task and the field).
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polar_trl.errors import TaskError
from polar_trl.tasks.fields import read_fields, require_type
from polar_trl.tasks.rules import check_spec, check_task, collect_tasks, require_limit
from polar_trl.types import Task, TestSpec


def load_tasks(path: Path, *, limit: int | None = None) -> list[Task]:
    """Load a file's tasks, at most the first `limit`. Raises `TaskError`."""
    require_limit(limit)
    folder = path.absolute().parent
    numbered = ((f"{path}:{number}", line) for number, line in read_lines(path))
    tasks = collect_tasks(((where, _parse_line(line, where, folder)) for where, line in numbered), limit)
    if not tasks:
        raise TaskError(f"{path} holds no task; write one JSON object per line")
    return tasks


def read_lines(path: Path) -> list[tuple[int, str]]:
    """Read the lines that hold anything, with their numbers, from 1. Raises `TaskError`."""
    try:
        # only a newline ends a line: JSON text may hold U+2028 and others that `splitlines` cuts at
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except FileNotFoundError:
        raise TaskError(f"no task file at {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"cannot read {path}: {error}") from error
    return [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]


def read_object(line: str, where: str) -> dict[str, Any]:
    """Read a line's JSON object. Raises `TaskError`, which begins with `where`."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise TaskError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(row, dict):
        raise TaskError(f"{where}: a task is a JSON object, not {type(row).__name__}")
    return row


def save_tasks(path: Path, tasks: Sequence[Task]) -> None:
    """Write tasks as JSON lines, fields at their defaults left out."""
    defaults = dataclasses.asdict(Task(id="", instruction=""))
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for task in tasks:
            row = {name: value for name, value in dataclasses.asdict(task).items() if value != defaults[name]}
            file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")


def read_task(row: Mapping[str, Any], where: str) -> Task:
    """Build a task from a JSON object. Raises `TaskError`, which begins with `where` and names the field."""
    fields = read_fields(Task, row, where)
    if fields.get("tests") is not None:
        fields["tests"] = read_test_spec(fields["tests"], where)
    return Task(**fields)


def read_test_spec(value: Any, where: str) -> TestSpec:
    """Build a `TestSpec` from JSON. Raises `TaskError`, which begins with `where` and names the field."""
    require_type("tests", value, Mapping[str, Any], where)
    spec = TestSpec(**read_fields(TestSpec, value, where, prefix="tests."))
    if spec.runner == "pytest" and "paths" not in value:
        files = dict.fromkeys(name.partition("::")[0] for name in (*spec.fail_to_pass, *spec.pass_to_pass))
        spec = dataclasses.replace(spec, paths=tuple(files))
    check_spec(spec, where)
    return spec


def _parse_line(line: str, where: str, folder: Path) -> Task:
    row = read_object(line, where)
    if isinstance(row.get("id"), str):
        where = f"{where} (task {row['id']!r})"
    task = _resolve_paths(read_task(row, where), folder)
    check_task(task, where)
    return task


def _resolve_paths(task: Task, folder: Path) -> Task:
    """Make the paths of this machine that a task names absolute. "" stays, for the check that refuses it."""

    def resolve(path: str | None) -> str | None:
        return str(folder / path) if path else path

    tests = task.tests
    if tests is not None:
        tests = dataclasses.replace(
            tests,
            folder=resolve(tests.folder) or "",
            requirements=resolve(tests.requirements),
            gold_patch=resolve(tests.gold_patch),
        )
    return dataclasses.replace(
        task, workspace=resolve(task.workspace), build_context=resolve(task.build_context), tests=tests
    )
