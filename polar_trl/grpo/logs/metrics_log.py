"""Write the metrics of each logged step to `log.jsonl`; no tracker is needed.

A step of a run that was killed and resumed may have two lines; the later one counts.
"""

import json
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from polar_trl.run_folder import LOG_FILE, append_lines


class MetricsLog(TrainerCallback):
    """Append the logged metrics, on rank 0: `step`, and the metrics by name.

    Args:
        folder: The run's.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / LOG_FILE

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Write a line."""
        if state.is_world_process_zero and logs:
            self._folder.mkdir(parents=True, exist_ok=True)
            append_lines(self._path, json.dumps({"step": state.global_step, **logs}).encode() + b"\n")
