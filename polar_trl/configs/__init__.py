"""Find what the package ships for runs: run files and accelerate files by name, and the files that they name.

A run file is the path of a file, or else the name of one of this folder (`quickstart`). What a run file of this folder
names besides is written `polar_trl:PATH`, so that a copy of it works in any folder.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml  # type: ignore[import-untyped]

from polar_trl.configs.small_model import MODEL_NAME, make_small_model
from polar_trl.errors import ConfigError

Kind = Literal["run", "accelerate"]
FOLDER = Path(__file__).parent
PREFIX = "polar_trl:"
_MODEL = f"models/{MODEL_NAME}"


def list_configs(kind: Kind) -> Mapping[str, Path]:
    """List the run files or the accelerate files of the package by their names."""
    if kind == "accelerate":
        return {path.stem: path for path in sorted((FOLDER / kind).glob("*.yaml"))}
    small = sorted(path for path in (FOLDER / "small").glob("*.yaml") if path.name != "base.yaml")
    return {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))} | {f"small/{path.stem}": path for path in small}


def find_config(name: str, kind: Kind = "run") -> Path:
    """Find a run file or an accelerate file by its path or its name, or as `polar_trl:PATH`.

    Raises `ConfigError` that lists the names.
    """
    path, known = Path(find_packaged(name)), list_configs(kind)
    if path.exists() and not path.is_dir():
        return path
    if name in known:
        return known[name]
    raise ConfigError(f"no file at {name!r}, and no {kind} file of that name; there are {', '.join(known)}")


def find_packaged(name: str) -> str:
    """Return the path of what `polar_trl:PATH` names; any other name as it is.

    The small model is made when it is first asked for. Raises `ConfigError` for what the package does not have.
    """
    if not name.startswith(PREFIX):
        return name
    wanted = name.removeprefix(PREFIX)
    if wanted == _MODEL:
        return str(make_small_model())
    found = [
        path for name in ("tasks", "agents", "small") for path in sorted((FOLDER / name).glob("*")) if path.is_file()
    ]
    files = {path.relative_to(FOLDER).as_posix(): path for path in found}
    if wanted not in files:
        raise ConfigError(f"{name}: the package has no such file; it has {', '.join([*files, _MODEL])}")
    return str(files[wanted])


def read_run_file(name: str, *, is_base: bool = False) -> tuple[dict[str, Any], str]:
    """Read a run file (path or name) over its `base`: another one, by a path relative to it or a name.

    Its own keys win, and within mappings (`agent_options`, `env`) the keys there. Returns the keys, and the text of a
    file that holds them all. Raises `ConfigError`.
    """
    try:
        path = find_config(name)
        text = path.read_text(encoding="utf-8")
        content = yaml.safe_load(text)
    except ConfigError as error:
        raise ConfigError(f"--config: {error}") from error
    except OSError as error:
        raise ConfigError(f"--config {name} cannot be read ({error.strerror}); give a run file") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {name} is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict) or not isinstance(content.get("env", {}), dict):
        raise ConfigError(f"--config {name} must be a mapping, lines of `key: value`, and so must its env")
    if (base := content.pop("base", None)) is None:
        return content, text
    if is_base:
        raise ConfigError(f"--config: {name} is the base of another run file, and cannot have a base itself")
    if "agents" in content:  # several in the place of the one that the base names
        content = {"agent": "shell"} | content
    beside = path.parent / find_packaged(str(base))
    found = beside if beside.exists() else list_configs("run").get(str(base), beside)
    below, _ = read_run_file(str(found), is_base=True)
    for key, value in content.items():
        both = isinstance(value, dict) and isinstance(below.get(key), dict)
        below[key] = below[key] | value if both else value
    return below, yaml.safe_dump(below, sort_keys=False, allow_unicode=True)
