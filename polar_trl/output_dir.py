"""The folder of a run, an evaluation or a collection, made before anything is begun.

It refuses, in one sentence, what is no folder and what nothing can be written into.
"""

import tempfile
from pathlib import Path

from polar_trl.errors import ConfigError


def make_output_dir(folder: Path) -> None:
    """Make the folder unless it is there. Raises `ConfigError`."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"output_dir {folder} is a file; name another output_dir")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(
            f"output_dir {folder} cannot be written ({error.strerror}); name another output_dir"
        ) from error
