"""A task of any form -> nothing, or the sentence that says which of its fields cannot be as it is.

Whatever a run would stumble over later is looked at when the task is loaded: paths, names of variables, files of this
machine, the columns that graders read. It refuses paths that lead out of the work folder: a task file is somebody
else's, and what is laid or removed there for grading is laid and removed by this process.
"""

import datetime
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from polar_trl.errors import ConfigError, TaskError
from polar_trl.sandbox.base import Capabilities
from polar_trl.sandbox.limits import Limits
from polar_trl.sandbox.workdir import find_workdir_fault
from polar_trl.types import Task, TestSpec

RUNNERS = ("pytest", "swebench")
COLUMNS = ("instance_id", "repo", "base_commit", "problem_statement", "patch", "test_patch")
"""Of a row of SWE-bench: texts that it must have."""
READ_COLUMNS = ("version", "eval_script", "log_parser")
"""Texts that graders read where a row has them."""
FACTS = ("package", "fixed_version")
"""What a rebuilt task says of the package that it is about."""
WISHES = {"memory_mb": "memory_mb", "cpus": "cpus", "storage_mb": "disk_mb"}
"""What Harbor's tasks ask for -> the name of that limit."""


def check_task(task: Task, where: str) -> None:
    """Raises `TaskError`, which begins with `where` and names the field."""
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


def check_paths(name: str, paths: Sequence[str] | Mapping[str, str], where: str, *, is_folder: bool = False) -> None:
    """Each must lead to something in the work folder; with `is_folder` it may be the work folder itself."""
    for path in paths:
        pure = PurePosixPath(path)
        if pure.is_absolute() or ".." in pure.parts or "\0" in path or not (pure.parts or (is_folder and path)):
            raise TaskError(f"{where}: '{name}': {path!r} must be a path in the work folder, relative to it")


def check_variables(name: str, variables: Mapping[str, str], where: str) -> None:
    """Each must be one that a process can be given."""
    for variable, value in variables.items():
        if not variable or "=" in variable or "\0" in variable + value:
            raise TaskError(f"{where}: '{name}': no process can be given the variable {variable!r}: {value!r:.100}")


def check_columns(row: Any, where: str) -> None:
    """What graders read of a row of SWE-bench."""
    if not isinstance(row, Mapping):
        raise TaskError(f"{where}: a row must be an object, not {row!r:.100}")
    for name in COLUMNS:
        if not isinstance(row.get(name), str) or not row[name].strip():
            raise TaskError(f"{where}: {name!r} must be text, not {row.get(name)!r:.100}")
    for name in READ_COLUMNS:
        if not isinstance(row.get(name, ""), str | None):
            raise TaskError(f"{where}: {name!r} must be text, not {row[name]!r:.100}")


def check_limits(tasks: Sequence[Task], limits: Limits, capabilities: Capabilities) -> None:
    """Raises `ConfigError` where a task asks for more than its sandbox would have, naming the setting to raise."""
    enforced = {
        "memory_mb": capabilities.limits_memory,
        "cpus": capabilities.limits_memory,  # the same control groups
        "storage_mb": capabilities.limits_disk,
    }
    for wish, name in WISHES.items():
        wishes = {task.id: task.metadata.get("harbor", {}).get(wish) or 0 for task in tasks}
        greedy = [task_id for task_id, wanted in wishes.items() if wanted > getattr(limits, name)]
        if greedy and enforced[wish]:
            raise ConfigError(
                f"task {greedy[0]!r} asks for {wish} {wishes[greedy[0]]:g}, and a sandbox has "
                f"{getattr(limits, name):g}: set sandbox_{name} to {max(wishes.values()):g}, the most that any of "
                f"{len(tasks)} tasks asks for, or take the {len(greedy)} that ask for so much out"
            )


def collect_tasks(rows: Iterable[tuple[str, Task]], limit: int | None) -> list[Task]:
    """The first `limit` tasks, or all. Raises `TaskError` where an id comes twice.

    Args:
        rows: Where each task stands, as an error says it, and the task.
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
    """Of how many tasks are wanted. Raises `ConfigError`."""
    if limit is not None and limit < 1:
        raise ConfigError(f"limit is {limit}; it must be at least 1")


def render_json(value: Any) -> Any:
    """TOML and Parquet have dates and times, JSON has not."""
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
    if not isinstance(variables, Mapping) or not all(isinstance(value, str) for value in variables.values()):
        raise TaskError(f"{where}: 'verifier_env' must be an object of texts, not {variables!r:.100}")
    check_variables("verifier_env", variables, where)
    if not isinstance(facts, Mapping):
        raise TaskError(f"{where}: 'metadata' must be an object, not {facts!r:.100}")
    for name in FACTS:
        if not isinstance(facts.get(name, ""), str):
            raise TaskError(f"{where}: 'metadata.{name}' must be text, not {facts[name]!r:.100}")
    for name in WISHES:
        if not isinstance(harbor.get(name) or 0, int | float):
            raise TaskError(f"{where}: {name!r} must be a number, not {harbor[name]!r:.100}")


def _check_host_path(name: str, path: str | None, where: str, *, is_folder: bool) -> None:
    if path is None:
        return
    kind = "folder" if is_folder else "file"
    if not path or "\0" in path or not (Path(path).is_dir() if is_folder else Path(path).is_file()):
        raise TaskError(f"{where}: '{name}': there is no {kind} {path!r} on this machine")
