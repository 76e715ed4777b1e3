"""The Python of this machine, as sandboxes see it: its standard library, and none of the packages installed in it.

Packages are what tasks are made of: the release that has the fix may well be installed here.
"""

import sys
from pathlib import Path

PACKAGES = ("lib/python3*/site-packages", "lib/python3*/dist-packages", "lib64/python3*/site-packages")


def find_python() -> list[Path]:
    """Where the Python that runs this lies; empty where it is the system's, which an image has its own of."""
    return [path for path in (Path(sys.base_prefix),) if not path.is_relative_to("/usr")]


def list_package_folders() -> list[Path]:
    """Where packages are installed for it and for the system's: outside of every virtual environment."""
    roots = dict.fromkeys((Path(sys.base_prefix), Path("/usr"), Path("/usr/local")))
    return [
        folder for root in roots for pattern in PACKAGES for folder in sorted(root.glob(pattern)) if folder.is_dir()
    ]
