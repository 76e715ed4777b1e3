"""A JSONL file to tasks, one object with `Task`'s fields per line, and back.

It refuses a row that it would have to guess about, and names the file, the line, the task and the field.
"""

import dataclasses
import difflib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polar_trl.errors import TaskError
from polar_trl.tasks.rules import RUNNERS, check_paths, check_task, collect_tasks, require_limit
from polar_trl.types import Task, TestSpec

_FIELDS = {field.name for field in dataclasses.fields(Task)}
_SPEC_FIELDS = [field.name for field in dataclasses.fields(TestSpec)]
_TEXTS = ("id", "instruction", "image", "grader", "workspace", "workdir", "build_context")
_TEXT_MAPS = ("files", "env")
_REQUIRED = ("id", "instruction")
_SPEC_TEXTS = ("runner", "folder", "gold_patch", "python", "requirements")


def load_tasks(path: Path, *, limit: int | None = None) -> list[Task]:
    """The file's tasks, the first `limit` of them if that is given. Raises `TaskError`."""
    require_limit(limit)
    try:
        # only a newline ends a line: JSON text may hold U+2028 and others that `splitlines` cuts at
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except FileNotFoundError:
        raise TaskError(f"no task file at {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"cannot read {path}: {error}") from error
    numbered = ((f"{path}:{number}", line) for number, line in enumerate(lines, start=1) if line.strip())
    tasks = collect_tasks(((where, _parse_row(line, where)) for where, line in numbered), limit)
    if not tasks:
        raise TaskError(f"{path} holds no task; write one JSON object per line")
    return tasks


def save_tasks(path: Path, tasks: Sequence[Task]) -> None:
    """Write the tasks, fields at their defaults left out."""
    defaults = dataclasses.asdict(Task(id="", instruction=""))
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for task in tasks:
            row = {name: value for name, value in dataclasses.asdict(task).items() if value != defaults[name]}
            file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")


def parse_test_spec(value: Any, where: str) -> TestSpec:
    """A `TestSpec` from JSON. Raises `TaskError`, which begins with `where` and names the field."""
    if not isinstance(value, Mapping):
        raise TaskError(f"{where}: 'tests' must be an object, not {value!r}")
    fields: dict[str, Any] = {}
    for name, item in value.items():
        if name not in _SPEC_FIELDS:
            near = difflib.get_close_matches(name, _SPEC_FIELDS, n=1)
            raise TaskError(
                f"{where}: unknown field 'tests.{name}'" + (f"; did you mean {near[0]!r}?" if near else "")
            )
        if name in _SPEC_TEXTS:
            if not (isinstance(item, str) or (name in ("gold_patch", "requirements") and item is None)):
                raise TaskError(f"{where}: 'tests.{name}' must be text, not {item!r}")
            fields[name] = item
        elif isinstance(item, Sequence) and not isinstance(item, str) and all(isinstance(text, str) for text in item):
            fields[name] = tuple(item)
        else:
            raise TaskError(f"{where}: 'tests.{name}' must be a list of texts, not {item!r:.100}")
    if not fields.get("fail_to_pass"):
        raise TaskError(f"{where}: 'tests.fail_to_pass' is missing or empty")
    spec = TestSpec(**fields)
    if spec.runner not in RUNNERS:
        raise TaskError(f"{where}: 'tests.runner' must be one of {', '.join(RUNNERS)}, not {spec.runner!r}")
    for name in ("files", "removed"):
        check_paths(f"tests.{name}", fields.get(name, ()), where)
    for name in ("paths", "import_roots"):
        check_paths(f"tests.{name}", fields.get(name, ()), where, is_folder=True)
    return spec


def _parse_row(line: str, where: str) -> Task:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise TaskError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(row, dict):
        raise TaskError(f"{where}: a task is a JSON object, not {type(row).__name__}")
    if isinstance(row.get("id"), str):
        where = f"{where} (task {row['id']!r})"
    for name in row.keys() - _FIELDS:
        near = difflib.get_close_matches(name, _FIELDS, n=1)
        raise TaskError(f"{where}: unknown field {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    for name in _REQUIRED:
        if not row.get(name):
            raise TaskError(f"{where}: {name!r} is missing or empty")
    for name, value in row.items():
        if complaint := _complain(name, value):
            raise TaskError(f"{where}: {name!r} must be {complaint}, not {value!r}")
    if row.get("tests") is not None:
        row["tests"] = parse_test_spec(row["tests"], where)
    task = Task(**row)
    check_task(task, where)
    return task


def _complain(name: str, value: Any) -> str | None:
    """What a field must be, if `value` is not that."""
    if name in _TEXTS:
        optional = name not in _REQUIRED and value is None
        return None if isinstance(value, str) or optional else "text"
    if name in _TEXT_MAPS:
        is_map = isinstance(value, Mapping) and all(isinstance(v, str) for v in value.values())
        return None if is_map else "an object of texts"
    if name.endswith("_timeout_s"):
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return None if is_number and math.isfinite(value) and value > 0 else "a number of seconds above 0"
    if name == "network":
        return None if value in ("none", "public") else "'none' or 'public'"
    if name == "writable_root":
        return None if isinstance(value, bool) else "true or false"
    if name == "tests" and value is None:
        return None
    return None if isinstance(value, Mapping) else "an object"
