"""Load tasks from a source of any form: JSON lines, Harbor folders, SWE-bench rows in files or on the hub.

The form is recognized by the source's content, not by an option. A folder of no such form raises `TaskError`, a name
that nothing has `ConfigError`.
"""

import json
import re
from pathlib import Path
from typing import Any

from polar_trl.configs import find_packaged
from polar_trl.errors import ConfigError, TaskError
from polar_trl.tasks.harbor import load_harbor
from polar_trl.tasks.jsonl import load_tasks
from polar_trl.tasks.swebench import DATASETS, load_swebench
from polar_trl.types import Task

ROW_FILES = (".parquet", ".json")
"""Files that hold rows of SWE-bench; .jsonl files may hold either kind."""
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def load_task_set(source: str | Path, *, split: str | None = None, limit: int | None = None) -> list[Task]:
    """Load the tasks of a source, at most the first `limit`.

    Args:
        source: A JSONL file of tasks; a folder with a task.toml or with folders that have one; a .parquet, .json or
            .jsonl file of SWE-bench rows or a folder of such files; `polar_trl:PATH`, a file of the package; a name of
            `DATASETS`; "owner/name" on the hub.
        split: Of SWE-bench rows in a folder or on the hub.

    Raises `TaskError` with the id and the field of what is wrong, `ConfigError` where there is no such source.
    """
    source = find_packaged(str(source))
    path = Path(source)
    if path.is_dir():
        if (path / "task.toml").is_file() or any(path.glob("[!.]*/task.toml")):
            return load_harbor(path, limit=limit)
        if not any(file.suffix in (*ROW_FILES, ".jsonl") for file in path.rglob("*")):
            raise TaskError(f"{path} holds no tasks: neither a task.toml, nor a folder with one, nor files of rows")
        return load_swebench(path, split=split, limit=limit)
    if path.is_file():
        if path.suffix in ROW_FILES or _holds_swebench_rows(path):
            return load_swebench(path, split=split, limit=limit)
        return load_tasks(path, limit=limit)
    name = source
    if name.lower() in DATASETS or (_HUB_NAME.fullmatch(name) and not path.suffix and name[0] != "."):
        return load_swebench(name, split=split, limit=limit)
    if path.suffix in (*ROW_FILES, ".jsonl"):
        raise TaskError(f"no task file at {path}")
    raise ConfigError(
        f"no tasks at {name!r}: no such file or folder, and no data set of that name; there are "
        f"{', '.join(DATASETS)}, and any 'owner/name' of the hub"
    )


def _holds_swebench_rows(path: Path) -> bool:
    """Return whether the first row has the columns by which SWE-bench and SkyRL name a task."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            row: Any = json.loads(next((line for line in file if line.strip()), "null"))
    except (OSError, ValueError):
        return False  # what is wrong with it, the reader of our own form says
    return isinstance(row, dict) and ("instance_id" in row or "instance" in row)
