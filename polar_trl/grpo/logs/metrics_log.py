"""Write a run's settings to `settings.json` and the metrics of each logged step to `log.jsonl`; no tracker is needed.

A step of a run that was killed and resumed may have two lines; the later one counts.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from polar_trl.run_folder import LOG_FILE, SETTINGS_FILE, append_lines, write_whole


class MetricsLog(TrainerCallback):
    """Append the logged metrics, on rank 0: `step`, and the metrics by name.

    Args:
        folder: The run's.
        settings: Of the run, as JSON values; `max_steps` is added.
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
            write_whole(self._folder / SETTINGS_FILE, (json.dumps(settings, indent=2) + "\n").encode())

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Write a line."""
        if state.is_world_process_zero and logs:
            self._folder.mkdir(parents=True, exist_ok=True)
            append_lines(self._path, json.dumps({"step": state.global_step, **logs}).encode() + b"\n")
