"""Find what the package ships for runs: run files and accelerate files by name, and the files that they name.

A run file is the path of a file, or else the name of one of this folder (`quickstart`). What a run file of this folder
names besides is written `polar_trl:PATH`, so that a copy of it works in any folder.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

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
    """Find a run file or an accelerate file by its path or its name. Raises `ConfigError` that lists the names."""
    path, known = Path(name), list_configs(kind)
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
