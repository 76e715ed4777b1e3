"""Map the columns of any data set to tasks: templates in which `{column}` is a column of the row.

With `instruction` among the keys they are fields of `Task`. Without it they are columns that SWE-bench's reader reads,
in the place of the row's own, and fields of the task that it makes. `{a.b}` is the entry `b` of the column `a`;
`{test_files}` are the files of `test_patch`, quoted for a shell; `${name}` is left to the shell.
"""

import ast
import dataclasses
import json
import re
import shlex
from collections.abc import Mapping
from typing import Any, get_args, get_origin, get_type_hints

from polar_trl.errors import ConfigError, TaskError
from polar_trl.names import list_patched_paths
from polar_trl.tasks.fields import read_fields
from polar_trl.tasks.jsonl import read_task
from polar_trl.tasks.rules import COLUMNS, READ_COLUMNS, check_task
from polar_trl.tasks.swebench import parse_row
from polar_trl.types import Task, TestSpec

TEST_FILES = "test_files"
_PLACEHOLDER = re.compile(r"(?<!\$)\{(\w+(?:\.\w+)*)\}")
_SWEBENCH = (*COLUMNS, *READ_COLUMNS, "FAIL_TO_PASS", "PASS_TO_PASS", "image")
_OF_TASK = {field.name for field in dataclasses.fields(Task)} - {"id", "instruction", "tests", "metadata", "image"}
_PARSED = {"FAIL_TO_PASS", "PASS_TO_PASS"} | {
    name
    for kind in (Task, TestSpec)
    for name, annotation in get_type_hints(kind).items()
    if not set(get_args(annotation)) <= {str, type(None)} or get_origin(annotation) in (tuple, Mapping)
}
"""Keys of lists and objects, which a column may have as a text."""


def check_mapping(columns: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for a key that neither a task nor SWE-bench's reader has."""
    known = {field.name for field in dataclasses.fields(Task)} if "instruction" in columns else {*_SWEBENCH, *_OF_TASK}
    if unknown := sorted(set(columns) - known):
        what = "a task has" if "instruction" in columns else "without `instruction`, there are"
        raise ConfigError(f"columns: {unknown[0]!r} is unknown; {what} {', '.join(sorted(known))}")


def map_row(columns: Mapping[str, Any], row: Mapping[str, Any], where: str) -> Task:
    """Build the task of one row. Raises `TaskError` with the column or the field.

    Args:
        columns: Templates by key, see `check_mapping`.
        row: JSON values by column.
        where: The row's place, as errors name it.
    """
    if not isinstance(row, Mapping):
        raise TaskError(f"{where}: a row is an object, not {type(row).__name__}")
    filled = {key: fill(template, row, f"{where}: columns.{key}", key) for key, template in columns.items()}
    if "instruction" in columns:
        task = read_task(filled, where)
    else:
        task = parse_row({**row, **{key: filled[key] for key in filled if key in _SWEBENCH}}, where)
        own = {key: value for key, value in filled.items() if key not in _SWEBENCH}
        required = {"id": task.id, "instruction": task.instruction}
        task = dataclasses.replace(task, **read_fields(Task, {**own, **required}, where))
    check_task(task, f"{where} (task {task.id!r})")
    return task


def fill(template: Any, row: Mapping[str, Any], where: str, field: str = "") -> Any:
    """Fill in a template, a text or a list or mapping of such. Raises `TaskError` for a column that is not there.

    Args:
        field: The key that it is for. A template that is one placeholder gives what the column has: for keys of
            lists and objects also what its text spells in JSON or Python.
    """
    if isinstance(template, Mapping):
        return {key: fill(value, row, f"{where}.{key}", str(key)) for key, value in template.items()}
    if isinstance(template, list):
        return [fill(value, row, where) for value in template]
    if not isinstance(template, str):
        return template
    is_one = template[:1] == "{" and template[-1:] == "}"
    if is_one and (template[1:-1] in row or _PLACEHOLDER.fullmatch(template)):  # names of any letters stand alone
        value = _find(template[1:-1], row, where)
        return parse_text(value) if isinstance(value, str) and field in _PARSED else value
    return _PLACEHOLDER.sub(lambda found: _render(_find(found[1], row, where)), template)


def parse_text(text: str) -> Any:
    """Parse a list or an object in JSON or, as SWE-bench Pro has it, in Python; another text stays what it is."""
    if not text.lstrip().startswith(("[", "{")):
        return text
    for parse in (json.loads, ast.literal_eval):
        try:
            return parse(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    return text


def _find(name: str, row: Mapping[str, Any], where: str) -> Any:
    if name in row:
        return row[name]
    first, *rest = name.split(".")
    if name == TEST_FILES and isinstance(row.get("test_patch"), str):
        return shlex.join(dict.fromkeys(list_patched_paths(row["test_patch"])))
    if first not in row:
        raise TaskError(f"{where}: there is no column {first!r}; the columns are {', '.join(map(str, row))}")
    value = row[first]
    for key in rest:
        value = parse_text(value) if isinstance(value, str) else value
        if not isinstance(value, Mapping) or key not in value:
            entries = ", ".join(map(str, value)) if isinstance(value, Mapping) else f"no entries, being {value!r:.100}"
            raise TaskError(f"{where}: {name!r} is not there; {first!r} has {entries}")
        value = value[key]
    return value


def _render(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else json.dumps(value, default=str)
