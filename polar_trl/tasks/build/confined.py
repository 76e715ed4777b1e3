"""Confine the code of releases: their setup.py, their build backends and their tests.

Where bubblewrap works, they see this machine's files read-only, their own folders writable, an empty HOME and /tmp, no
process but their own, and no network unless they are being downloaded. Elsewhere they run as they are, with a warning:
a release is held against its recorded hash before any of its code runs.
"""

import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)

_PIP_SETTINGS = ("~/.config/pip", "~/.pip", "~/.netrc", "~/.config/uv")
"""Of the user, which name the package index; nothing else of a HOME is seen."""


def confine(
    command: Sequence[str], *, writable: Sequence[Path], visible: Sequence[Path] = (), network: bool
) -> list[str]:
    """Return the command inside of bubblewrap, or as it is where that does not work.

    Args:
        writable: Folders that it may change.
        visible: Folders below HOME or /tmp that it reads.
    """
    if not _works():
        return list(command)
    hidden = [
        path.resolve() for path in (Path.home(), Path("/tmp"), Path("/var/tmp"), Path("/run")) if path != Path("/")
    ]
    options = ["--die-with-parent", "--unshare-all", *(["--share-net"] if network else []), "--cap-drop", "ALL"]
    options += ["--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"]
    for path in hidden:
        options += ["--tmpfs", str(path)] if path.is_dir() else []
    settings = [Path(os.path.expanduser(name)) for name in _PIP_SETTINGS] if network else []
    seen = [path for path in (*settings, Path("/etc/resolv.conf"), *visible) if path.exists()]
    for how, folders in (("--ro-bind", seen), ("--bind", writable)):
        for real, path in ((folder.resolve(), folder.absolute()) for folder in folders):
            for place in dict.fromkeys((real, path)):
                if any(map(place.is_relative_to, hidden)) or (how == "--bind" and place == real):
                    options += [how, str(real), str(place)]
    return ["bwrap", *options, "--", *command]


def list_python_folders(python: Path) -> list[Path]:
    """List the folders that a virtual environment's Python reads: its own, and those of what it was made from."""
    return [python.parent.parent, python.resolve().parent.parent, Path(sys.prefix), Path(sys.base_prefix)]


@cache
def _works() -> bool:
    try:
        done = subprocess.run(
            ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--", "true"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=30,
        )
        reason = done.stderr.decode(errors="replace").strip() if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    if reason:
        logger.warning("the code of releases runs without a sandbox: bubblewrap does not work here (%s)", reason)
    return not reason
