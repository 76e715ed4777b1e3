"""Find the user's own line in an exception that passed through their code."""

import sys
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path

MAX_TRACE = 4000
"""Characters of a traceback that is kept."""
_OWN = Path(__file__).parent
_LIBRARIES = tuple({Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")})


def locate_error(error: BaseException) -> str:
    """Say where the user's own code raised, as "my_mod:12 in score, `return 1 / 0`"; "" where none of it ran."""
    frames = _list_own_frames(error)
    if not frames:
        return ""
    last = frames[-1]
    line = f", `{last.line.strip()[:200]}`" if last.line else ""
    return f"{_name_module(last.filename)}:{last.lineno} in {last.name}{line}"


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


def _name_module(filename: str) -> str:
    """Return the name under which the file was imported; the file's own name where that is not known."""
    for name, module in list(sys.modules.items()):
        if getattr(module, "__dict__", {}).get("__file__") == filename and name != "__main__":
            return name
    return Path(filename).name
