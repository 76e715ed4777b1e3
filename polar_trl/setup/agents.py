"""Build the agent that a run's settings name, or the several of `agents`.

Settings that nothing would read are refused (`ConfigError`).
"""

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polar_trl.configs import find_packaged
from polar_trl.errors import ConfigError
from polar_trl.harness import AGENTS, build_agent
from polar_trl.harness.base import Harness
from polar_trl.harness.mixed import MixedHarness
from polar_trl.harness.own import load_harness
from polar_trl.harness.shell import ShellHarness
from polar_trl.types import Task
from polar_trl.user_code import is_object_name

if TYPE_CHECKING:
    from polar_trl.setup.run_setup import RunArguments

_OF_AN_AGENT = ("agent", "agent_options", "agent_command", "agent_files", "agent_folders")
"""Settings that an entry of `agents` may have, beside its weight."""


def build_harness(run: "RunArguments") -> Harness:
    """Build the agent of a run, or its `agents`. Raises `ConfigError`."""
    entries = read_agents(run)
    if not entries or run.agent in entries:
        return _build_one(choose_agent(run))
    if run.agent != "shell":
        raise ConfigError(
            f"agent {run.agent!r} is none of agents ({', '.join(entries)}); leave it out for all of them"
        )
    weights = {name: entry["weight"] for name, entry in entries.items() if "weight" in entry}
    built = {name: _build_one(choose_agent(replace(run, agent=name))) for name in entries}
    return MixedHarness(built, weights, within_groups=run.mix_agents_in_groups)


def take_own_tasks(run: "RunArguments", tasks: Sequence[Task]) -> list[Task]:
    """Return the tasks that the one agent of a run may play, without the names of agents in them; all where it has
    several. Raises `ConfigError` where none is left.

    Args:
        run: Not yet as `choose_agent` returns it, which has no names of entries.
    """
    entries = read_agents(run)
    if entries and run.agent not in entries:
        return list(tasks)
    own = [replace(task, agent=None) for task in tasks if task.agent in (None, run.agent)]
    if tasks and not own:
        raise ConfigError(f"all {len(tasks)} tasks name another agent than {run.agent!r}, such as {tasks[0].agent!r}")
    if len(own) < len(tasks):
        print(f"{len(tasks) - len(own)} tasks name another agent and are left out", file=sys.stderr, flush=True)
    return own


def choose_agent(run: "RunArguments") -> "RunArguments":
    """Return the settings of a run with one agent: of several in `agents`, the one that `agent` names.

    Its own settings come before the run's; options of a known agent are those of both. Raises `ConfigError` where
    none is named.
    """
    entries = read_agents(run)
    if not entries:
        if run.mix_agents_in_groups:
            raise ConfigError("mix_agents_in_groups is for several agents: give agents, or leave it out")
        return run
    if run.agent not in entries:
        raise ConfigError(f"this run has several agents: choose one, --agent {' or '.join(entries)}")
    entry = {key: value for key, value in entries[run.agent].items() if key != "weight"}
    # a command's options are others than those of the known agents
    common = run.agent_options if entry["agent"] in AGENTS else None
    options = {**read_agent_options(common), **read_agent_options(entry.get("agent_options"))}
    return replace(run, agents=None, mix_agents_in_groups=False, **(entry | {"agent_options": options or None}))


def read_agents(run: "RunArguments") -> dict[str, dict[str, Any]]:
    """Read the entries of `agents` by name; none where a run has one agent. Raises `ConfigError`."""
    if run.agents is None:
        return {}
    entries = read_mapping("agents", run.agents)
    if not entries:
        raise ConfigError("agents names no agent; leave it out, or give {pi: {}, codex: {weight: 2}}")
    if run.agent_command or run.agent_files or run.agent_folders:
        raise ConfigError("agent_command, agent_files and agent_folders go into the entry of the agent that has them")
    for name, entry in entries.items():
        if not re.fullmatch(r"[A-Za-z0-9][\w-]*", name):
            raise ConfigError(f"agents has the name {name!r}; give one of letters, digits, _ and -")
        if name == "shell":
            raise ConfigError("agents: give the entry 'shell' a name of its own, {mine: {agent: shell, ...}}")
        entry = {} if entry is None else entry
        if not isinstance(entry, dict):
            raise ConfigError(f"agents: {name} must be a mapping, such as {{weight: 2}}, not {entry!r}")
        if unknown := [key for key in entry if key not in (*_OF_AN_AGENT, "weight")]:
            raise ConfigError(f"agents: {name} has {unknown[0]!r}; it may have weight, {', '.join(_OF_AN_AGENT)}")
        entries[name] = {"agent": name} | entry
    return entries


def _build_one(run: "RunArguments") -> Harness:
    options = read_agent_options(run.agent_options)
    if run.agent == "shell":
        if not run.agent_command:
            known = ", ".join(AGENTS)
            raise ConfigError(f"agent_command is needed: the command that runs your agent. Or set agent to {known}")
        if unknown := set(options) - {"auxiliary_without_tools"}:
            names = ", ".join(sorted(map(str, unknown)))
            raise ConfigError(f"agent_options has {names}; those of agent_command are: auxiliary_without_tools")
        return ShellHarness(
            run.agent_command,
            files=find_agent_files(run.agent_files),
            folders=find_agent_folders(run.agent_folders),
            **options,
        )
    if run.agent not in AGENTS and not is_object_name(run.agent):
        raise ConfigError(
            f"agent {run.agent!r} is not known; known are shell, {', '.join(AGENTS)}, and classes of your own as "
            "package.module:Class"
        )
    for name in ("agent_command", "agent_files", "agent_folders"):
        if getattr(run, name):
            raise ConfigError(
                f"{name} is read only with agent: shell, and agent is {run.agent!r}; leave it out of the YAML file"
            )
    return load_harness(run.agent, options) if is_object_name(run.agent) else build_agent(run.agent, options)


def read_agent_options(options: Mapping[str, Any] | str | None) -> dict[str, Any]:
    """Read the options of an agent, from JSON where they are a text."""
    return {} if options is None else read_mapping("agent_options", options)


def read_mapping(name: str, given: Mapping[str, Any] | str) -> dict[str, Any]:
    """Read a setting of names and values, from JSON where it is a text, as a flag has it. Raises `ConfigError`."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{name} is not JSON: {error}") from error
    if not isinstance(given, dict):
        raise ConfigError(f"{name} must be a mapping of names to values")
    return {str(key): value for key, value in given.items()}


def find_agent_files(names: list[str]) -> dict[str, Path]:
    """Find files, by the names that they get in HOME."""
    if isinstance(names, str):
        raise ConfigError(f"agent_files must be a list, such as [{names}]")
    files: dict[str, Path] = {}
    for path in (Path(find_packaged(name)) for name in names):
        if path.name in files:
            raise ConfigError(f"agent_files has two files named {path.name!r}; they would overwrite each other")
        files[path.name] = path
    return files


def find_agent_folders(names: list[str]) -> list[Path]:
    """Find the folders; their absolute paths, as they were named and where a link leads."""
    if isinstance(names, str):
        raise ConfigError(f"agent_folders must be a list, such as [{names}]")
    folders = [Path(os.path.abspath(name)) for name in names]
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"agent_folders: {folder} is no folder")
    # commands name the one, and what was installed there may name the other
    return list(dict.fromkeys(path for folder in folders for path in (folder, folder.resolve())))
