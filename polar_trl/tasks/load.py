"""Load tasks from a source of any form: JSON lines, Harbor folders, SWE-bench rows in files or on the hub, Gym rows.

The form is recognized by the source's content, not by an option; `columns` maps rows of any other form. A folder of no
such form raises `TaskError`, a name that nothing has `ConfigError`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polar_trl.configs import find_packaged
from polar_trl.errors import ConfigError, TaskError
from polar_trl.tasks.columns import check_mapping, map_row
from polar_trl.tasks.gym import PARAMS, load_gym
from polar_trl.tasks.harbor import load_harbor
from polar_trl.tasks.jsonl import load_tasks
from polar_trl.tasks.rules import collect_tasks, require_limit
from polar_trl.tasks.swebench import DATASETS, HUB_NAME, load_swebench, read_rows
from polar_trl.types import Task

ROW_FILES = (".parquet", ".json")
"""Files that hold rows of SWE-bench; .jsonl files may hold either kind."""


def load_task_set(
    source: str | Path,
    *,
    columns: Mapping[str, Any] | None = None,
    split: str | None = None,
    limit: int | None = None,
) -> list[Task]:
    """Load the tasks of a source, at most the first `limit`.

    Args:
        source: A JSONL file of tasks, or of rows of NeMo Gym; a folder with a task.toml or with folders that have one;
            a .parquet, .json or .jsonl file of SWE-bench rows or a folder of such files; `polar_trl:PATH`, a file of
            the package; a name of `DATASETS`; "owner/name" or "owner/name:split" on the hub.
        columns: What each task has of its row's columns, see `polar_trl.tasks.columns`: the source then is files of
            rows of any kind, or a data set of the hub.
        split: Of rows in a folder or on the hub.

    Raises `TaskError` with the id and the field of what is wrong, `ConfigError` where there is no such source.
    """
    source = find_packaged(str(source))
    if columns:
        return _load_mapped(source, columns, split, limit)
    path = Path(source)
    if path.is_dir():
        if (path / "task.toml").is_file() or any(path.glob("[!.]*/task.toml")):
            return load_harbor(path, limit=limit)
        if not any(file.suffix in (*ROW_FILES, ".jsonl") for file in path.rglob("*")):
            raise TaskError(f"{path} holds no tasks: neither a task.toml, nor a folder with one, nor files of rows")
        return load_swebench(path, split=split, limit=limit)
    if path.is_file():
        names = _read_names(path)
        if PARAMS in names:
            return load_gym(path, limit=limit)
        # by one of these SWE-bench and SkyRL name a task
        if path.suffix in ROW_FILES or names & {"instance_id", "instance"}:
            return load_swebench(path, split=split, limit=limit)
        return load_tasks(path, limit=limit)
    name = source
    if name.lower() in DATASETS or (HUB_NAME.fullmatch(name) and not path.suffix and name[0] != "."):
        return load_swebench(name, split=split, limit=limit)
    if path.suffix in (*ROW_FILES, ".jsonl"):
        raise TaskError(f"no task file at {path}")
    raise ConfigError(
        f"no tasks at {name!r}: no such file or folder, and no data set of that name; there are "
        f"{', '.join(DATASETS)}, and any 'owner/name' of the hub"
    )


def _load_mapped(source: str, columns: Mapping[str, Any], split: str | None, limit: int | None) -> list[Task]:
    require_limit(limit)
    check_mapping(columns)
    rows = enumerate(read_rows(source, split=split))
    tasks = collect_tasks(((f"row {n}", map_row(columns, row, f"row {n}")) for n, row in rows), limit)
    if not tasks:
        raise TaskError(f"{source} has no rows")
    return tasks


def _read_names(path: Path) -> set[str]:
    """Read the names in the first row; none where there is no such row."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            row: Any = json.loads(next((line for line in file if line.strip()), "null"))
    except (OSError, ValueError):
        return set()  # what is wrong with it, the reader of our own form says
    return set(row) if isinstance(row, dict) else set()
