"""Make the folder of a run, name its files, and read its log.

Standard library only: pages and scripts read it.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from polar_trl.errors import ConfigError

LOG_FILE = "log.jsonl"
SETTINGS_FILE = "settings.json"
TRAINED_FILE = "trained.jsonl"
ROWS_FOLDER = "rows"


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Read a run's log: the last line per (step, kind), in the order of steps. Empty where there is no log.

    The kinds are lines of training, of evaluation, and of the run's end.
    """
    path = folder / LOG_FILE
    latest: dict[tuple[int, bool, bool], dict[str, Any]] = {}
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        try:
            line = json.loads(text)
            step = int(line["step"])
            is_evaluation = any(name.startswith("eval_") for name in line)  # else the line of the end would replace it
            latest[step, "reward" in line, is_evaluation] = line | {"step": step}
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):  # {"step": Infinity} overflows
            continue
    return [latest[key] for key in sorted(latest)]


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
