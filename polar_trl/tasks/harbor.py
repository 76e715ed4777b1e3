"""Load Harbor task folders (task.toml, instruction.md, environment/, tests/, solution/).

The format is Harbor's of schema 1.4 and before (package `harbor` 0.25). Keys of task.toml that nothing here reads are
tolerated and listed in `metadata["harbor"]["unread"]`. Refuses tasks that need an unsupported part (`TaskError`):
several steps or containers, Windows, accelerators, MCP servers, a verifier in a container or network of its own.

A folder that scripts/build_pypi_tasks.py wrote also has environment/workspace, which becomes the work folder,
environment/requirements.txt, and tests/spec.json with the ids of the tests that decide. A task that says nothing of
the network has the public one in Harbor, in which an agent can look its answer up: it has to say which it wants.
"""

import json
import math
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from polar_trl.errors import TaskError
from polar_trl.tasks.jsonl import read_test_spec
from polar_trl.tasks.rules import check_task, render_json, require_limit
from polar_trl.types import Task, TestSpec

NETWORK_MODES = ("no-network", "public")
READ = {
    *("schema_version", "version", "source", "task.name", "steps", "metadata"),
    *("agent.timeout_sec", "agent.network_mode", "agent.allowed_hosts", "verifier.timeout_sec", "verifier.env"),
    *("verifier.network_mode", "verifier.allowed_hosts", "verifier.environment", "verifier.environment_mode"),
    *("environment.build_timeout_sec", "environment.docker_image", "environment.os"),
    *("environment.cpus", "environment.memory_mb", "environment.storage_mb", "environment.memory"),
    *("environment.storage", "environment.gpus", "environment.tpu", "environment.env", "environment.workdir"),
    *("environment.network_mode", "environment.allowed_hosts", "environment.allow_internet"),
    "environment.mcp_servers",
}
"""Keys of task.toml that are read here."""
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMG])")


def load_harbor(path: Path, *, limit: int | None = None) -> list[Task]:
    """Load the task in a folder, or the first `limit` tasks in its folders, by name. Raises `TaskError`."""
    require_limit(limit)
    if (path / "task.toml").is_file():
        return [parse_folder(path)]
    folders = sorted(file.parent for file in path.glob("[!.]*/task.toml"))
    if not folders:
        raise TaskError(f"no task.toml in {path} or in a folder of it")
    return [parse_folder(folder) for folder in folders[:limit]]


def parse_folder(folder: Path) -> Task:
    """Parse one task, named for its folder. Raises `TaskError` with its id and the file or key."""
    folder = folder.resolve()
    where = f"task {folder.name!r}"
    table, instruction = _read_files(folder, where)
    config = _Config(table, where)
    config.refuse_unsupported()
    image = config.text("environment.docker_image")
    context = folder / "environment"
    if (context / "docker-compose.yaml").exists():
        raise TaskError(f"{where}: environment/docker-compose.yaml: tasks of several containers are not supported")
    workspace = context / "workspace"
    has_dockerfile = (context / "Dockerfile").is_file()
    if image is None and not has_dockerfile and not workspace.is_dir():
        raise TaskError(f"{where}: environment: there is no docker_image, no Dockerfile and no workspace")
    tests = _parse_tests(folder, where)
    if tests is None and not (folder / "tests" / "test.sh").is_file():
        raise TaskError(f"{where}: tests/test.sh is missing")
    task = Task(
        id=folder.name,
        instruction=instruction,
        image=image,
        build_context=str(context) if has_dockerfile else None,
        workspace=str(workspace) if workspace.is_dir() else None,
        workdir=config.text("environment.workdir"),
        # the format's own verifier writes to /logs and reads /tests
        writable_root=tests is None,
        env=config.environment("environment.env"),
        prepare_timeout_s=config.seconds("environment.build_timeout_sec", 600.0),
        agent_timeout_s=config.seconds("agent.timeout_sec", 600.0),
        grade_timeout_s=config.seconds("verifier.timeout_sec", 600.0),
        tests=tests,
        metadata={
            "harbor": {
                "folder": str(folder),
                "name": config.text("task.name") or folder.name,
                "cpus": config.number("environment.cpus"),
                "memory_mb": config.megabytes("memory"),
                "storage_mb": config.megabytes("storage"),
                "verifier_env": config.environment("verifier.env"),
                "metadata": render_json(table.get("metadata", {})),
                "unread": sorted(config.list_unread()),
            }
        },
    )
    check_task(task, where)
    return replace(task, network=config.network())


def _read_files(folder: Path, where: str) -> tuple[dict[str, Any], str]:
    """Read task.toml and the instruction."""
    try:
        table = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
        instruction = (folder / "instruction.md").read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise TaskError(f"{where}: {Path(error.filename).name} is missing") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise TaskError(f"{where}: task.toml or instruction.md cannot be read: {error}") from error
    if not instruction.strip():
        raise TaskError(f"{where}: instruction.md is empty")
    return table, instruction


def _parse_tests(folder: Path, where: str) -> TestSpec | None:
    path = folder / "tests" / "spec.json"
    if not path.is_file():
        return None
    try:
        spec = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TaskError(f"{where}: tests/spec.json cannot be read: {error}") from error
    if not isinstance(spec, dict) or "fail_to_pass" not in spec:
        return None  # another task's own file of that name
    hidden, gold = folder / "tests" / "hidden", folder / "solution" / "gold.patch"
    requirements = folder / "environment" / "requirements.txt"
    spec |= {"folder": str(hidden) if spec.get("files") else "", "python": "python"}
    spec["gold_patch"] = str(gold) if gold.is_file() else None
    spec["requirements"] = str(requirements) if requirements.is_file() else None
    return read_test_spec(spec, where)


class _Config:
    """A parsed task.toml; keys are dotted."""

    def __init__(self, table: Mapping[str, Any], where: str) -> None:
        self._table = table
        self._where = where

    def get(self, key: str) -> Any:
        value: Any = self._table
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def error(self, key: str, complaint: str) -> TaskError:
        return TaskError(f"{self._where}: {key}: {complaint}")

    def refuse_unsupported(self) -> None:
        for key in ("task", "metadata", "agent", "verifier", "environment"):
            if not isinstance(self._table.get(key, {}), Mapping):
                raise self.error(key, f"must be a table, not {self._table[key]!r}")
        if self.get("steps"):
            raise self.error("steps", "tasks of several steps are not supported")
        if (self.text("environment.os") or "linux").lower() != "linux":
            raise self.error("environment.os", f"{self.get('environment.os')!r} is not supported, only 'linux'")
        for key, what in (("gpus", "GPUs"), ("tpu", "TPUs"), ("mcp_servers", "MCP servers")):
            if self.get(f"environment.{key}"):
                raise self.error(f"environment.{key}", f"{what} for the agent are not supported")
        if self.get("verifier.environment_mode") not in (None, "shared") or self.get("verifier.environment"):
            raise self.error("verifier.environment", "a verifier in a container of its own is not supported")

    def text(self, key: str) -> str | None:
        value = self.get(key)
        if value is not None and not (isinstance(value, str) and value):
            raise self.error(key, f"must be text, not {value!r}")
        return value

    def number(self, key: str) -> int | float | None:
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
            raise self.error(key, f"must be a number above 0, not {value!r}")
        return value

    def seconds(self, key: str, default: float) -> float:
        value = self.number(key)
        return default if value is None else float(value)

    def megabytes(self, name: str) -> int | float | None:
        """Read the key `name`_mb, or the older form, such as "2G"."""
        key = f"environment.{name}"
        old = self.get(key)
        if old is None:
            return self.number(f"{key}_mb")
        match = _SIZE.fullmatch(old.strip().upper()) if isinstance(old, str) else None
        if match is None:
            raise self.error(key, f"must be a size such as '512M' or '2G', not {old!r}")
        size = int(float(match[1]) * {"K": 1 / 1024, "M": 1, "G": 1024}[match[2]])
        if self.number(f"{key}_mb") not in (None, size):
            raise self.error(key, f"{old!r} is not what {name}_mb says, {self.get(f'{key}_mb')!r}")
        return size

    def network(self) -> Literal["none", "public"]:
        """Return the network of the agent and of the verifier, which share a container."""
        base = self._network_mode("environment")
        if base is None and (allowed := self.get("environment.allow_internet")) is not None:
            if not isinstance(allowed, bool):
                raise self.error("environment.allow_internet", f"must be true or false, not {allowed!r}")
            base = "public" if allowed else "no-network"
        agent, verifier = (self._network_mode(phase) or base for phase in ("agent", "verifier"))
        if agent is None or verifier is None:
            raise self.error(
                "environment.network_mode",
                "is missing, and Harbor's default is the public network, in which an agent can look answers up; write "
                'network_mode = "no-network" or network_mode = "public" under [environment] in task.toml',
            )
        if agent != verifier:
            raise self.error("verifier.network_mode", f"must be the agent's, {agent!r}: they share a container")
        return "public" if agent == "public" else "none"

    def _network_mode(self, table: str) -> str | None:
        key = f"{table}.network_mode"
        mode = self.text(key)
        if mode == "allowlist" or self.get(f"{table}.allowed_hosts"):
            raise self.error(key, "a network of some hosts only cannot be had; there are no-network and public")
        if mode not in (None, *NETWORK_MODES):
            raise self.error(key, f"must be one of {', '.join(NETWORK_MODES)}, not {mode!r}")
        return mode

    def environment(self, key: str) -> dict[str, str]:
        """Read variables; "${NAME}" and "${NAME:-default}" in them stand for variables of this process."""
        value = self.get(key) or {}
        if not isinstance(value, Mapping) or not all(isinstance(item, str) for item in value.values()):
            raise self.error(key, f"must be a table of texts, not {value!r}")

        def substitute(match: re.Match[str]) -> str:
            found = os.environ.get(match[1], match[2])
            if found is None:
                raise self.error(key, f"the variable {match[1]} is not set")
            return found

        return {name: _VARIABLE.sub(substitute, text) for name, text in value.items()}

    def list_unread(self) -> Iterator[str]:
        """Yield the keys that nothing here reads."""
        for name, value in self._table.items():
            if name in READ:
                continue
            if name in ("task", "agent", "verifier", "environment"):
                yield from (f"{name}.{key}" for key in value if f"{name}.{key}" not in READ)
            elif value not in ({}, []):
                yield name
