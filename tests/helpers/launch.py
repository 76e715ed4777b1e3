"""Start the worker scripts of tests/grpo/workers, as one process or as several ranks."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKERS = ROOT / "tests" / "grpo" / "workers"
ACCELERATE = ROOT / "polar_trl" / "configs" / "accelerate"


def build_launcher(processes: int) -> list[str]:
    """Build what starts a script: Python, or `accelerate launch` where it is several processes."""
    if processes == 1:
        return [sys.executable]
    return [
        # accelerate starts one process on a CPU, whatever --num_processes says, unless it is given --multi_gpu
        *(sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", str(processes)),
        *("--main_process_port", "0"),  # one that is free: other launches may be under way
        *("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"),
    ]


def run_worker(script: str, *arguments: str, processes: int = 1) -> None:
    """Run a worker to its end; its output is shown if it fails."""
    done = subprocess.run(
        [*build_launcher(processes), str(WORKERS / script), *arguments],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"


def launch_ranks(name: str, out: Path, *arguments: str, precision: str = "no") -> list[dict[str, Any]]:
    """Run `accelerate_worker.py` as two ranks; return what each wrote."""
    out.mkdir(parents=True, exist_ok=True)
    settings = yaml.safe_load((ACCELERATE / f"{name}.yaml").read_text())
    settings |= {"num_processes": 2, "mixed_precision": precision}
    settings.pop("gpu_ids", None)
    file = out / "accelerate.yaml"
    file.write_text(yaml.safe_dump(settings))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file)),
            *("--main_process_port", str(port), str(WORKERS / "accelerate_worker.py"), str(out), *arguments),
        ],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return [torch.load(out / f"rank{rank}.pt") for rank in (0, 1)]
