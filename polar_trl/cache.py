"""Find the cache folder, for what can be made again: models, agents, downloads, images, trees, checks, tasks."""

import os
from pathlib import Path
from typing import Literal

CACHE_VARIABLE = "POLAR_TRL_CACHE"
Part = Literal["models", "agents", "environments", "releases", "suites", "trees", "images", "checks", "sent"]


def find_cache(part: Part) -> Path:
    """Find the folder of one part, in $POLAR_TRL_CACHE or else in the user's cache folder."""
    root = os.environ.get(CACHE_VARIABLE) or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "polar-trl"
    )
    return Path(root) / part
