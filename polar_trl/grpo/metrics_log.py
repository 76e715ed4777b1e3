"""A run's settings -> `settings.json` in its folder; what a step logs -> a line of `log.jsonl`, while the run goes on.

Where a run was killed and went on, a step may have two lines; the later one counts. It refuses to need any tracker.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

LOG_FILE = "log.jsonl"
SETTINGS_FILE = "settings.json"


class MetricsLog(TrainerCallback):
    """Appends what is logged, on rank 0: `step`, and the metrics by name.

    Args:
        folder: The run's.
        settings: What whoever looks at the run wants to know of it, as JSON values; `max_steps` is added.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self._folder = folder
        self._path = folder / LOG_FILE
        self._settings = settings

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the settings."""
        if state.is_world_process_zero:
            self._folder.mkdir(parents=True, exist_ok=True)
            settings = {**self._settings, "max_steps": state.max_steps}
            (self._folder / SETTINGS_FILE).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Write a line."""
        if state.is_world_process_zero and logs:
            self._folder.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": state.global_step, **logs}) + "\n")


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's log in the order of steps, of each kind (training, evaluation) the latest of a step.

    A line that a kill has torn is left out. Empty where there is no log.
    """
    path = folder / LOG_FILE
    latest: dict[tuple[int, bool, bool], dict[str, Any]] = {}
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        is_evaluation = any(name.startswith("eval_") for name in line)  # else the summary of the end would replace it
        latest[line["step"], "reward" in line, is_evaluation] = line
    return [latest[key] for key in sorted(latest)]
