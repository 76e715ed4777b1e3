"""Load an own agent's class by its name, `package.module:Class`."""

import difflib
import importlib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from polar_trl.errors import ConfigError
from polar_trl.harness.base import Harness

_ADVICE = "derive the class from polar_trl.Harness, and define name and build_launch"


def is_class_name(agent: str) -> bool:
    """Return whether a setting names a class, and no agent that is known or a command."""
    module, colon, name = agent.partition(":")
    return bool(colon) and all(part.isidentifier() for part in (*module.split("."), name))


def load_harness(agent: str, options: Mapping[str, Any] | None = None) -> Harness:
    """Import `package.module:Class` and build it; `options` are its arguments. Raises `ConfigError`."""
    module_name, _, name = agent.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"agent {agent!r}: there is no module {error.name!r}; put its folder on PYTHONPATH"
            ) from error
        raise ConfigError(f"agent {agent!r} cannot be imported: {error}") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"agent {agent!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not hasattr(module, name):
        near = difflib.get_close_matches(name, dir(module), n=1)
        raise ConfigError(
            f"agent {agent!r}: {module_name} has no {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")
        )
    kind: Any = getattr(module, name)
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
