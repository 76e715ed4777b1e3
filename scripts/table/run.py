"""Run the steps of a table one after the other, and keep what each took in `times.jsonl`.

A step whose folder is there, and whose newest line says that the same command ended well, is not run again. A step
that was stopped or failed is: every command goes on with what its folder has (training from a checkpoint, evaluations
with the sessions that are left), but for SFT, which begins again. Where what it needs was made anew since, it fails:
its folder is of an earlier model.
"""

import ctypes
import json
import os
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from table.steps import Step

from polar_trl.run_folder import append_lines

TIMES_FILE = "times.jsonl"
PR_SET_PDEATHSIG = 1  # prctl(2)
INTERRUPTED = (130, -signal.SIGINT, -signal.SIGTERM)


def run_steps(steps: Sequence[Step], out: Path) -> list[str]:
    """Run what is missing; return the names of the steps that failed. An interrupt ends the running one, and this.

    A step that needs a failed one is left out, and counts as failed.
    """
    failed: list[str] = []
    out.mkdir(parents=True, exist_ok=True)
    for number, step in enumerate(steps, start=1):
        head = f"[{number}/{len(steps)}] {step.name}"
        if lacking := [name for name in step.needs if name in failed]:
            failed.append(step.name)
            say(f"{head}: left out, since {lacking[0]} failed")
            continue
        times, is_there = read_times(out), (out / step.name).exists()
        last, newer = times.get(step.name, [{}])[-1], find_newer(times, step.name, step.needs)
        if is_there and newer and step.goes_on:
            failed.append(step.name)
            say(f"{head}: {out / step.name} is of an earlier {newer[0]}; remove it, or give another --out")
            continue
        if is_there and not newer and last.get("status") == 0 and last.get("command") == list(step.command):
            say(f"{head} is there")
            continue
        say(f"{head}: {shlex.join(step.command)}")
        try:
            status = run_step(step, out)
        except KeyboardInterrupt:
            say(f"stopped in {step.name}; the same command goes on")
            sys.exit(130)
        if status != 0:
            failed.append(step.name)
            say(f"{step.name} failed with exit status {status}; going on with the next")
    return failed


def run_step(step: Step, out: Path) -> int:
    """Run one step; return its exit status. Raises `KeyboardInterrupt`, the step ended, if either is interrupted."""
    libc, interrupts = ctypes.CDLL(None), (signal.SIGINT, signal.SIGTERM)

    def prepare() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # SIGINT may be ignored, by a shell's "&"
        signal.pthread_sigmask(signal.SIG_UNBLOCK, interrupts)

    began, before, status = time.monotonic(), _read_cpu_s(), 130
    signal.pthread_sigmask(signal.SIG_BLOCK, interrupts)  # until there is something to wait for
    process = subprocess.Popen(
        step.command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        start_new_session=True,  # a terminal would interrupt it, too; the second time ends it before it has tidied up
        preexec_fn=prepare,
    )
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, interrupts)
        status = process.wait()
        if status in INTERRUPTED:
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        raise
    finally:
        line = {
            "step": step.name,
            "status": 130 if status in INTERRUPTED else status,
            "seconds": round(time.monotonic() - began, 3),
            "cpu_seconds": round(_read_cpu_s() - before, 3),
            "gpus": count_gpus(),
            "command": step.command,
        }
        append_lines(out / TIMES_FILE, json.dumps(line).encode() + b"\n")
    return status


def read_times(out: Path) -> Mapping[str, list[dict[str, Any]]]:
    """Read what the attempts of each step took, oldest first, and their place among all. A torn line is left out."""
    path = out / TIMES_FILE
    found: dict[str, list[dict[str, Any]]] = {}
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    for place, text in enumerate(lines):
        try:
            line = dict(json.loads(text)) | {"place": place}
            found.setdefault(line["step"], []).append(line)
        except (ValueError, TypeError, KeyError):
            continue
    return found


def find_newer(times: Mapping[str, Sequence[Mapping[str, Any]]], name: str, needs: Sequence[str]) -> list[str]:
    """Find the steps of `needs` that ran after the newest attempt of a step: none where it has no attempt."""
    if name not in times:
        return []
    return [other for other in needs if other in times and times[other][-1]["place"] > times[name][-1]["place"]]


def count_gpus() -> int:
    """Count the GPUs that a command sees."""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def say(line: str) -> None:
    """Print a line of progress."""
    print(line, file=sys.stderr, flush=True)


def _read_cpu_s() -> float:
    """Processor time of all processes that ended under this one and were waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
