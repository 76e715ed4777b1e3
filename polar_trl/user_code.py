"""Import the user's own code by name, and find where it is: a function's line, or that of an exception of it."""

import difflib
import functools
import importlib
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polar_trl.errors import ConfigError

MAX_TRACE = 4000
"""Characters of a traceback that is kept."""
_OWN = Path(__file__).parent
_LIBRARIES = tuple({Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")})


def is_object_name(text: str) -> bool:
    """Return whether a setting has the form `package.module:name`."""
    module, colon, name = text.partition(":")
    return bool(colon) and all(part.isidentifier() for part in (*module.split("."), name))


def load_object(setting: str, text: str) -> Any:
    """Import what `package.module:name` names, from the current folder or the installed packages.

    Args:
        setting: That the text is of, for the error.

    Raises `ConfigError`: no such module or name, or an error in the module, with its line.
    """
    module_name, _, name = text.partition(":")
    try:
        module = _import_here(module_name)
    except ModuleNotFoundError as error:
        if error.name and f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"{setting} {text!r}: there is no module {error.name!r}, neither in the current folder "
                f"({os.getcwd()}) nor on PYTHONPATH"
            ) from error
        raise ConfigError(f"{setting} {text!r} cannot be imported: {describe_error(error)}") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{setting} {text!r} cannot be imported: {describe_error(error)}") from error
    if not hasattr(module, name):
        near = difflib.get_close_matches(name, dir(module), n=1)
        where = f"{module_name} ({module.__file__})" if getattr(module, "__file__", None) else module_name
        raise ConfigError(
            f"{setting} {text!r}: {where} has no {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")
        )
    return getattr(module, name)


def _import_here(module_name: str) -> Any:
    """Import with the current folder first, as `python -m` has it; later imports look there last.

    So a file of the user's never takes the place of a module that a library imports in mid-run.
    """
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        return importlib.import_module(module_name)
    finally:
        sys.path.remove(here)
        if here not in sys.path:
            sys.path.append(here)


def locate_error(error: BaseException) -> str:
    """Say where the user's own code raised, as "my_mod.py:12 in score, `return 1 / 0`"; "" where none of it ran."""
    frames = _list_own_frames(error)
    if not frames:
        return ""
    last = frames[-1]
    line = f", `{last.line.strip()[:200]}`" if last.line else ""
    return f"{_shorten(last.filename)}:{last.lineno} in {last.name}{line}"


def locate_function(function: Any) -> str:
    """Say where a function (or the `__call__` of an object) begins, as "my_mod.py:12"; "" where it is not Python's."""
    inner = inspect.unwrap(function.func if isinstance(function, functools.partial) else function)
    code = getattr(inner, "__code__", None) or getattr(vars(type(inner)).get("__call__"), "__code__", None)
    return f"{_shorten(code.co_filename)}:{code.co_firstlineno}" if code else ""


def describe_error(error: BaseException) -> str:
    """Describe an exception in one line: its type, what it says, and where the user's own code raised it."""
    said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    place = locate_error(error)
    return f"{said} ({place})" if place else said


def format_trace(error: BaseException) -> str:
    """Format the end of a traceback of the user's own frames and what they called, at most 4,000 characters."""
    frames = traceback.extract_tb(error.__traceback__)
    first = next((index for index, frame in enumerate(frames) if _is_own(frame.filename)), 0)
    lines = [*traceback.format_list(frames[first:]), *traceback.format_exception_only(error)]
    return "".join(lines)[-MAX_TRACE:]


def _list_own_frames(error: BaseException) -> Sequence[traceback.FrameSummary]:
    return [frame for frame in traceback.extract_tb(error.__traceback__) if _is_own(frame.filename)]


def _is_own(filename: str) -> bool:
    """Return whether a frame is neither of this package nor of a library."""
    path = Path(filename)
    if filename.startswith("<") or path.is_relative_to(_OWN):
        return False
    return not any(path.is_relative_to(folder) for folder in _LIBRARIES)


def _shorten(filename: str) -> str:
    """Return a path as seen from the current folder, where it is below that."""
    path = Path(filename)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else filename
