"""Load an own agent's class by its name, `package.module:Class`."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from polar_trl.errors import ConfigError
from polar_trl.harness.base import Harness
from polar_trl.user_code import load_object

_ADVICE = "derive the class from polar_trl.Harness, and define name and build_launch"


def load_harness(agent: str, options: Mapping[str, Any] | None = None) -> Harness:
    """Import `package.module:Class` and build it; `options` are its arguments. Raises `ConfigError`."""
    name = agent.rpartition(":")[2]
    kind = load_object("agent", agent)
    if not inspect.isclass(kind):
        raise ConfigError(f"agent {agent!r}: {name} is a {type(kind).__name__}, and must be a class")
    _check_methods(agent, kind)
    try:
        inspect.signature(kind).bind(**(options or {}))
    except TypeError as error:
        raise ConfigError(f"agent {agent!r}: agent_options do not fit its arguments: {error}") from error
    try:
        harness: Harness = cast(Any, kind)(**(options or {}))
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"agent {agent!r} cannot be built: {type(error).__name__}: {error}") from error
    if not isinstance(getattr(harness, "name", None), str) or not harness.name:
        raise ConfigError(f"agent {agent!r}: its name must be a text that is not empty")
    if not hasattr(harness, "folders"):
        raise ConfigError(f"agent {agent!r} is no harness: it lacks folders; {_ADVICE}")
    folders: object = harness.folders
    if not isinstance(folders, (list, tuple)) or not all(isinstance(folder, Path) for folder in folders):
        raise ConfigError(f"agent {agent!r}: its folders must be a list of pathlib.Path, not {folders!r}")
    return harness


def _check_methods(agent: str, kind: Any) -> None:
    names = ("install", "build_launch", "judge_exit", "classify")
    if missing := [name for name in names if not callable(getattr(kind, name, None))]:
        raise ConfigError(f"agent {agent!r} is no harness: it lacks {', '.join(missing)}; {_ADVICE}")
    if kind.build_launch is Harness.build_launch:
        raise ConfigError(f"agent {agent!r} is no harness: it lacks build_launch, which says how the agent is started")
