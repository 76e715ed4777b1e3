"""Validate tasks of any form when they are loaded: paths, variables, host files, the columns that graders read.

Refuses paths that lead out of the work folder (`TaskError`): a task file is somebody else's, and this process itself
lays and removes the files that it names.
"""

import datetime
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from polar_trl.errors import ConfigError, TaskError
from polar_trl.sandbox.base import Capabilities
from polar_trl.sandbox.limits import Limits
from polar_trl.sandbox.workdir import find_workdir_fault
from polar_trl.tasks.fields import require_type
from polar_trl.types import Task, TestSpec

RUNNERS = ("pytest", "swebench")
COLUMNS = ("instance_id", "repo", "base_commit", "problem_statement", "patch", "test_patch")
"""Columns that a row of SWE-bench must have, with text in them."""
READ_COLUMNS = ("version", "eval_script", "log_parser")
"""Columns of text that graders read where a row has them."""
FACTS = ("package", "fixed_version")
"""Metadata of a rebuilt task about its package."""
RESOURCES = {"memory_mb": "memory_mb", "cpus": "cpus", "storage_mb": "disk_mb"}
"""Names of resources that Harbor's tasks ask for, and of the limit of each."""


def check_task(task: Task, where: str) -> None:
    """Validate a task. Raises `TaskError`, which begins with `where` and names the field."""
    check_paths("files", task.files, where)
    check_variables("env", task.env, where)
    if task.workdir is not None and (fault := find_workdir_fault(task.workdir)):
        raise TaskError(f"{where}: 'workdir': {fault}")
    for name in ("workspace", "build_context"):
        _check_host_path(name, getattr(task, name), where, is_folder=True)
    if task.tests is not None:
        _check_tests(task, task.tests, where)
    if "harbor" in task.metadata:
        _check_harbor(task, task.metadata["harbor"], where)
    if "swebench" in task.metadata:
        check_columns(task.metadata["swebench"], f"{where}: metadata.swebench")


def check_spec(spec: TestSpec, where: str) -> None:
    """Validate a spec apart from its task. Raises `TaskError`, which begins with `where` and names the field."""
    if not spec.fail_to_pass:
        raise TaskError(f"{where}: 'tests.fail_to_pass' is missing or empty")
    if spec.runner not in RUNNERS:
        raise TaskError(f"{where}: 'tests.runner' must be one of {', '.join(RUNNERS)}, not {spec.runner!r}")
    for name in ("files", "removed"):
        check_paths(f"tests.{name}", getattr(spec, name), where)
    for name in ("paths", "import_roots"):
        check_paths(f"tests.{name}", getattr(spec, name), where, is_folder=True)


def check_paths(name: str, paths: Sequence[str] | Mapping[str, str], where: str, *, is_folder: bool = False) -> None:
    """Raise `TaskError` for a path that is not below the work folder; with `is_folder` it may be that folder."""
    for path in paths:
        pure = PurePosixPath(path)
        if pure.is_absolute() or ".." in pure.parts or "\0" in path or not (pure.parts or (is_folder and path)):
            raise TaskError(f"{where}: '{name}': {path!r} must be a path in the work folder, relative to it")


def check_variables(name: str, variables: Mapping[str, str], where: str) -> None:
    """Raise `TaskError` for an environment variable that no process can be given."""
    for variable, value in variables.items():
        if not variable or "=" in variable or "\0" in variable + value:
            raise TaskError(f"{where}: '{name}': no process can be given the variable {variable!r}: {value!r:.100}")


def check_columns(row: Any, where: str) -> None:
    """Raise `TaskError` for a row of SWE-bench whose columns graders cannot read."""
    if not isinstance(row, Mapping):
        raise TaskError(f"{where}: a row must be an object, not {row!r:.100}")
    for name in COLUMNS:
        if not isinstance(row.get(name), str) or not row[name].strip():
            raise TaskError(f"{where}: {name!r} must be text, not {row.get(name)!r:.100}")
    for name in READ_COLUMNS:
        require_type(name, row.get(name), str | None, where)


def check_limits(tasks: Sequence[Task], limits: Limits, capabilities: Capabilities) -> None:
    """Raise `ConfigError` where a task asks for more than its sandbox would have, naming the setting to raise."""
    enforced = {
        "memory_mb": capabilities.limits_memory,
        "cpus": capabilities.limits_memory,  # the same control groups
        "storage_mb": capabilities.limits_disk,
    }
    for resource, name in RESOURCES.items():
        asked = {task.id: task.metadata.get("harbor", {}).get(resource) or 0 for task in tasks}
        over = [task_id for task_id, amount in asked.items() if amount > getattr(limits, name)]
        if over and enforced[resource]:
            raise ConfigError(
                f"task {over[0]!r} asks for {resource} {asked[over[0]]:g}, and a sandbox has "
                f"{getattr(limits, name):g}: set sandbox_{name} to {max(asked.values()):g}, the most that any of "
                f"{len(tasks)} tasks asks for, or take the {len(over)} that ask for so much out"
            )


def collect_tasks(rows: Iterable[tuple[str, Task]], limit: int | None) -> list[Task]:
    """Collect the first `limit` tasks, or all. Raises `TaskError` where an id comes twice.

    Args:
        rows: The place of each task, as an error names it, and the task.
    """
    tasks: dict[str, Task] = {}
    for where, task in rows:
        if task.id in tasks:
            raise TaskError(f"{where}: the id {task.id!r} is there twice; ids must be unique")
        tasks[task.id] = task
        if len(tasks) == limit:
            break
    return list(tasks.values())


def require_limit(limit: int | None) -> None:
    """Raise `ConfigError` for a number of tasks below 1."""
    if limit is not None and limit < 1:
        raise ConfigError(f"limit is {limit}; it must be at least 1")


def render_json(value: Any) -> Any:
    """Render dates and times, which TOML and Parquet have and JSON has not, as ISO texts."""
    if isinstance(value, Mapping):
        return {key: render_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [render_json(item) for item in value]
    return value.isoformat() if isinstance(value, (datetime.date, datetime.time)) else value


def _check_tests(task: Task, spec: TestSpec, where: str) -> None:
    for name in ("requirements", "gold_patch"):
        _check_host_path(f"tests.{name}", getattr(spec, name), where, is_folder=False)
    if spec.runner == "swebench":
        if "swebench" not in task.metadata:
            raise TaskError(f"{where}: metadata.swebench, the columns of its row, is missing")
        if task.workdir is None:
            raise TaskError(f"{where}: 'workdir' is missing: where the image has the repository")
        return
    if not spec.paths:
        raise TaskError(f"{where}: 'tests.paths', what the runner is given, is missing or empty")
    if bool(spec.folder) != bool(spec.files):
        given, missing = ("folder", "files") if spec.folder else ("files", "folder")
        raise TaskError(f"{where}: 'tests.{missing}' is missing or empty; it goes with 'tests.{given}'")
    if spec.folder:
        _check_host_path("tests.folder", spec.folder, where, is_folder=True)
        for file in spec.files:
            if not (Path(spec.folder) / file).is_file():
                raise TaskError(f"{where}: 'tests.files': {file!r} is not in {spec.folder}")


def _check_harbor(task: Task, harbor: Any, where: str) -> None:
    where = f"{where}: metadata.harbor"
    if not isinstance(harbor, Mapping):
        raise TaskError(f"{where}: must be an object as Harbor's task folders give it, not {harbor!r:.100}")
    if not isinstance(harbor.get("folder"), str):
        raise TaskError(f"{where}: 'folder' must be the task's folder, not {harbor.get('folder')!r:.100}")
    _check_host_path("folder", harbor["folder"], where, is_folder=True)
    if task.tests is None and task.grader is None and not Path(harbor["folder"], "tests", "test.sh").is_file():
        raise TaskError(f"{where}: 'folder': tests/test.sh is missing")
    variables, facts = harbor.get("verifier_env", {}), harbor.get("metadata", {})
    require_type("verifier_env", variables, Mapping[str, str], where)
    check_variables("verifier_env", variables, where)
    require_type("metadata", facts, Mapping[str, Any], where)
    for name in FACTS:
        require_type(f"metadata.{name}", facts.get(name, ""), str, where)
    for name in RESOURCES:
        require_type(name, harbor.get(name) or 0, int | float, where)


def _check_host_path(name: str, path: str | None, where: str, *, is_folder: bool) -> None:
    if path is None:
        return
    kind = "folder" if is_folder else "file"
    if not path or "\0" in path or not (Path(path).is_dir() if is_folder else Path(path).is_file()):
        raise TaskError(f"{where}: '{name}': there is no {kind} {path!r} on this machine")
