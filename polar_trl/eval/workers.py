"""Run one evaluation on several engines: a process each, with a GPU of its own, that write into one folder.

Each process takes its share of the samples and knows of no other. They end with the process that started them, however
that ends.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tqdm import tqdm

from polar_trl.errors import ConfigError, PolarError
from polar_trl.eval.sample_tasks import RESULTS_FILE

if TYPE_CHECKING:
    from polar_trl.eval.setup import EvalSetup

LOG_FILE = "engine-{}.log"
POLL_INTERVAL_S = 1.0
STOP_TIMEOUT_S = 120.0
"""How long a process may take to remove its sandboxes before it is killed."""


def run_workers(setup: "EvalSetup", num_samples: int, *, show_progress: bool) -> None:
    """Start the processes and wait for all of them.

    Raises `PolarError` with the last words of those that failed, once the others have ended.
    """
    number = setup.evaluation.num_engines
    devices = [None] * number if setup.on_cpu else find_devices(number)
    command = [sys.executable, "-m", "polar_trl", "eval", *setup.command]
    results = setup.folder / RESULTS_FILE
    workers: list[subprocess.Popen[bytes]] = []
    with ExitStack() as stack:
        stack.callback(_stop, workers)
        for index, device in enumerate(devices):
            log = stack.enter_context((setup.folder / LOG_FILE.format(index)).open("wb"))
            workers.append(
                subprocess.Popen(
                    [*command, "--worker", str(index)],
                    env=os.environ if device is None else {**os.environ, "CUDA_VISIBLE_DEVICES": device},
                    # it ends when this pipe does; what the terminal sends to a group it hears from us
                    stdin=subprocess.PIPE,
                    start_new_session=True,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
        _watch(workers, results, num_samples, show_progress)
    failed = [index for index, worker in enumerate(workers) if worker.returncode != 0]
    if failed:
        logs = [setup.folder / LOG_FILE.format(index) for index in failed]
        said = "; ".join(f"{path.name}: {_read_last_line(path)}" for path in logs)
        raise PolarError(f"{len(failed)} of {number} engines stopped early ({said}). The same command goes on")


def find_devices(number: int) -> list[str]:
    """List so many of this process's GPUs, as `CUDA_VISIBLE_DEVICES` names them. Raises `ConfigError` for too few."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = [str(i) for i in range(torch.cuda.device_count())] if named is None else named.split(",")
    if number > len(devices):
        raise ConfigError(f"num_engines is {number}, and there are {len(devices)} GPUs")
    return devices[:number]


def end_with_parent() -> None:
    """Interrupt this worker when the process that started it closes its pipe, or dies."""

    def wait() -> None:
        while os.read(0, 1):  # not sys.stdin, whose lock this thread would hold while the interpreter ends
            pass
        os.kill(os.getpid(), signal.SIGTERM)  # SIGINT may be ignored, by a shell that started all of this with "&"

    threading.Thread(target=wait, name="polar-parent", daemon=True).start()


def _watch(workers: Sequence["subprocess.Popen[bytes]"], results: Path, num_samples: int, show: bool) -> None:
    before = _count_lines(results)
    with tqdm(total=num_samples, desc="sessions", unit="session", disable=None if show else True) as bar:
        for worker in workers:
            while True:
                bar.update(_count_lines(results) - before - bar.n)
                try:
                    worker.wait(timeout=POLL_INTERVAL_S)
                    break
                except subprocess.TimeoutExpired:
                    continue
        bar.update(_count_lines(results) - before - bar.n)


def _stop(workers: Sequence["subprocess.Popen[bytes]"]) -> None:
    for worker in workers:
        if worker.stdin is not None:
            worker.stdin.close()
    for worker in workers:
        try:
            worker.wait(timeout=STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()


def _count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _read_last_line(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"
