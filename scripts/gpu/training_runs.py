"""Start ranks of a trainer, and render the gap of a step, for the experiments that run the whole trainer."""

import sys
from collections.abc import Mapping
from typing import Any

GAP = "sampling/sampling_logp_difference"
"""Of a step's metrics: |trainer - engine| of the log-probability of a trained token (nats), mean, p99 and max."""


def build_launch(processes: int) -> list[str]:
    """Build the command in front of a script and its flags, for one process or for so many ranks."""
    if processes == 1:
        return [sys.executable]
    return [
        *(sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines", "1"),
        *("--num_processes", str(processes), "--main_process_port", "0"),
        *("--mixed_precision", "no", "--dynamo_backend", "no"),
    ]


def render_gap(line: Mapping[str, Any]) -> str:
    """Render the gap of one step as "mean / p99 / max"."""
    return " / ".join(f"{line[f'{GAP}/{name}']:.2g}" for name in ("mean", "p99", "max"))
