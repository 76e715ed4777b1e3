"""Start the worker scripts of tests/grpo/workers, as one process or as several ranks."""

import atexit
import functools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import yaml

HELPERS = Path(__file__).resolve().parent
ROOT = HELPERS.parents[1]
WORKERS = ROOT / "tests" / "grpo" / "workers"
ACCELERATE = ROOT / "polar_trl" / "configs" / "accelerate"
LAUNCH = (
    # accelerate starts one process on a CPU, whatever --num_processes says, unless it is given --multi_gpu
    *("-m", "accelerate.commands.launch", "--multi_gpu"),
    *("--main_process_port", "0"),  # one that is free: other launches may be under way
    *("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"),
)


@functools.cache
def find_warm_python() -> str:
    """Find the program of `warm_python.py`, whose server is started once for each process of pytest.

    Beside it, `polar-trl` is the command in such a Python.
    """
    folder = Path(tempfile.mkdtemp(prefix="warm-python-"))
    atexit.register(shutil.rmtree, folder)
    source, address, program = HELPERS / "warm_python.py", folder / "socket", folder / "python"
    with (folder / "log").open("wb") as log:
        command = [sys.executable, str(source), "--serve", str(address)]
        # it ends with its standard input, which is this process's
        server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)
    real = f'exec "{sys.executable}"'
    warm = f'{real} -I -S "{source}" "{address}" "$@"'
    # with options of the interpreter, it is the interpreter
    program.write_text(f'#!/bin/sh\ncase $1 in -[mcu] | [!-]*) {warm} ;; esac\n{real} "$@"\n')
    (folder / "polar-trl").write_text(f'#!/bin/sh\nexec "{program}" -m polar_trl "$@"\n')
    for path in (program, folder / "polar-trl"):
        path.chmod(0o755)
    while not address.exists():
        assert server.poll() is None, (folder / "log").read_text()
        time.sleep(0.05)
    return str(program)


def list_warm_programs() -> str:
    """List where commands are found, for PATH: warm ones first, then those of this environment."""
    return os.pathsep.join([str(Path(find_warm_python()).parent), f"{sys.prefix}/bin", os.environ["PATH"]])


def build_launcher(processes: int, *, warm: bool = False) -> list[str]:
    """Build what starts a script: Python, or `accelerate launch` where it is several processes."""
    python = find_warm_python() if warm else sys.executable
    if processes == 1:
        return [python]
    return [python, *LAUNCH, "--num_processes", str(processes), *(("--no_python", python) if warm else ())]


def run_worker(script: str, *arguments: str, processes: int = 1, warm: bool = True) -> None:
    """Run a worker to its end; its output is shown if it fails.

    Args:
        warm: In a warm Python. Not for one that sets what libraries read of the environment at import.
    """
    done = subprocess.run(
        [*build_launcher(processes, warm=warm), str(WORKERS / script), *arguments],
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
    python = find_warm_python()
    done = subprocess.run(
        [
            *(python, "-m", "accelerate.commands.launch", "--config_file", str(file), "--no_python"),
            *("--main_process_port", str(port), python, str(WORKERS / "accelerate_worker.py"), str(out), *arguments),
        ],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return [torch.load(out / f"rank{rank}.pt") for rank in (0, 1)]
