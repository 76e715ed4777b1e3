"""What a step logs -> a line of `log.jsonl` in the run's folder, while the run goes on.

Where a run was killed and went on, a step may have two lines; the later one counts. It refuses to need any tracker.
"""

import json
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

LOG_FILE = "log.jsonl"


class MetricsLog(TrainerCallback):
    """Appends what is logged, on rank 0: `step`, and the metrics by name.

    Args:
        folder: The run's.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOG_FILE

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Write a line."""
        if state.is_world_process_zero and logs:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": state.global_step, **logs}) + "\n")


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's log in the order of steps, of each kind (training, evaluation) the latest of a step.

    A line that a kill has torn is left out. Empty where there is no log.
    """
    path = folder / LOG_FILE
    latest: dict[tuple[int, bool], dict[str, Any]] = {}
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        latest[line["step"], "reward" in line] = line
    return [latest[key] for key in sorted(latest)]
