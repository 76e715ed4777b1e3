"""Find this machine's Python for sandboxes, which see its standard library and none of its installed packages.

Tasks are made of packages: the release that has the fix may well be installed here.
"""

import sys
from pathlib import Path

PACKAGES = ("lib/python3*/site-packages", "lib/python3*/dist-packages", "lib64/python3*/site-packages")


def find_python() -> list[Path]:
    """Return the folder of the Python that runs this; empty where it is the system's (images have their own)."""
    return [path for path in (Path(sys.base_prefix),) if not path.is_relative_to("/usr")]


def list_package_folders() -> list[Path]:
    """List the package folders of this Python and the system's, outside of every virtual environment."""
    roots = dict.fromkeys((Path(sys.base_prefix), Path("/usr"), Path("/usr/local")))
    return [
        folder for root in roots for pattern in PACKAGES for folder in sorted(root.glob(pattern)) if folder.is_dir()
    ]
