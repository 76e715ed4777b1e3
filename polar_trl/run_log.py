"""Names in a run's folder; `log.jsonl` there -> its lines, one per step and kind. Standard library only: pages and
scripts read it.

It refuses nothing that a kill or an odd metric has left there: what is no line of a step is left out.
"""

import json
from pathlib import Path
from typing import Any

LOG_FILE = "log.jsonl"
SETTINGS_FILE = "settings.json"
TRAINED_FILE = "trained.jsonl"
ROWS_FOLDER = "rows"


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's log in the order of steps, of each kind (training, evaluation, the end's) a step's latest.

    Empty where there is no log.
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
