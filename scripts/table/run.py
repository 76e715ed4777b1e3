"""Run the steps of a table, some at a time, and keep what each took in `times.jsonl`.

A step whose folder is there, and whose newest line says that the same command ended well, is not run again. A step
that was stopped or failed is: every command goes on with what its folder has (training from a checkpoint, evaluations
with the sessions that are left), but for SFT, which begins again. Where what it needs was made anew since, it fails:
its folder is of an earlier model.
"""

import ctypes
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from table.steps import Step

from polar_trl.run_folder import append_lines

TIMES_FILE = "times.jsonl"
PR_SET_PDEATHSIG = 1  # prctl(2)
POLL_INTERVAL_S = 0.1
DEVICES = Path("/dev")
SIGNALS = (signal.SIGINT, signal.SIGTERM)
INTERRUPTED = (130, -signal.SIGINT, -signal.SIGTERM)


@dataclass(eq=False)
class Running:
    """The process of a step.

    Args:
        gpus: Those that it sees, as CUDA_VISIBLE_DEVICES names them.
    """

    step: Step
    process: "subprocess.Popen[bytes]"
    gpus: Sequence[str]
    began: float = field(default_factory=time.monotonic)
    gpu_seconds: float = 0.0
    """A GPU's time is shared evenly among the steps on it."""

    def terminate(self) -> None:
        """Ask it to end. `Popen.terminate` would take its exit status, and with it what it used."""
        os.kill(self.process.pid, signal.SIGTERM)

    def wait(self, out: Path, *, is_blocking: bool = True) -> int | None:
        """Return its exit status, and write its line; None if it goes on and the call does not block."""
        pid, wait_status, used = os.wait4(self.process.pid, 0 if is_blocking else os.WNOHANG)
        if pid == 0:
            return None
        self.process.returncode = status = os.waitstatus_to_exitcode(wait_status)
        line = {
            "step": self.step.name,
            "status": 130 if status in INTERRUPTED else status,
            "seconds": round(time.monotonic() - self.began, 3),
            "cpu_seconds": round(used.ru_utime + used.ru_stime, 3),
            "gpu_seconds": round(self.gpu_seconds, 3),
            "command": self.step.command,
        }
        append_lines(out / TIMES_FILE, json.dumps(line).encode() + b"\n")
        return status


def run_steps(steps: Sequence[Step], out: Path, jobs: int = 1) -> list[str]:
    """Run what is missing; return the names of the steps that failed. An interrupt ends those that run, and this.

    A step that needs a failed one is left out, and counts as failed.

    Args:
        jobs: How many at a time. If above 1, each sees one GPU, in turns, and what it prints goes to OUT/NAME.txt.
    """
    out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    waiting, running, failed = list(steps), list[Running](), list[str]()
    try:
        while waiting or running:
            unfinished = {step.name for step in (*waiting, *(task.step for task in running))}
            ready = next((step for step in waiting if not unfinished.intersection(step.needs)), None)
            if ready is not None and len(running) < jobs:
                waiting.remove(ready)
                head = f"[{len(steps) - len(waiting)}/{len(steps)}] {ready.name}"
                if problem := find_problem(ready, out, failed):
                    failed.append(ready.name)
                    say(f"{head}: {problem}")
                elif is_done(ready, out):
                    say(f"{head} is there")
                else:
                    say(f"{head}: {shlex.join(ready.command)}")
                    start_step(ready, out, running, is_alone=jobs == 1)
                continue
            began = time.monotonic()
            time.sleep(POLL_INTERVAL_S)
            share_gpus(running, time.monotonic() - began)
            for task in list(running):
                with uninterrupted():  # an exit status is told once
                    if (status := task.wait(out, is_blocking=False)) is None:
                        continue
                    running.remove(task)
                if status != 0:
                    failed.append(task.step.name)
                    say(f"{task.step.name} failed with exit status {status}; going on with the next")
                elif jobs > 1:
                    say(f"{task.step.name} is done")
    except KeyboardInterrupt:
        for task in running:
            task.terminate()  # all at once
        for task in running:
            task.wait(out)
        names = ", ".join(task.step.name for task in running)
        say(f"stopped{' in ' if names else ''}{names}; the same command goes on")
        sys.exit(130)
    say(f"ended after {(time.monotonic() - started) / 60:.1f} minutes")
    return failed


def find_problem(step: Step, out: Path, failed: Sequence[str]) -> str | None:
    """Tell why a step cannot run; None if it can."""
    if lacking := [name for name in step.needs if name in failed]:
        return f"left out, since {lacking[0]} failed"
    newer = find_newer(read_times(out), step.name, step.needs)
    if (out / step.name).exists() and newer and step.goes_on:
        return f"{out / step.name} is of an earlier {newer[0]}; remove it, or give another --out"
    return None


def is_done(step: Step, out: Path) -> bool:
    """Tell whether a step ended well, with the same command and after what it needs."""
    times = read_times(out)
    last = times.get(step.name, [{}])[-1]
    is_same = last.get("status") == 0 and last.get("command") == list(step.command)
    return is_same and (out / step.name).exists() and not find_newer(times, step.name, step.needs)


def start_step(step: Step, out: Path, running: list[Running], *, is_alone: bool) -> None:
    """Start a step, and add it to those that run."""
    libc = ctypes.CDLL(None)

    def prepare() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # SIGINT may be ignored, by a shell's "&"
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    gpus, env, output = find_gpus(), dict(os.environ), None
    if not is_alone:
        gpus = sorted(gpus, key=lambda gpu: sum(gpu in task.gpus for task in running))[:1]
        output = (out / f"{step.name}.txt").open("ab")
        if gpus:
            env["CUDA_VISIBLE_DEVICES"] = gpus[0]
    with uninterrupted():  # until it is among those that an interrupt ends
        process = subprocess.Popen(
            step.command,
            stdin=subprocess.DEVNULL,
            stdout=output or sys.stderr,
            stderr=output,
            env=env,
            start_new_session=True,  # a terminal would interrupt it, too, and a second time before it has tidied up
            preexec_fn=prepare,
        )
        running.append(Running(step, process, gpus))
    if output is not None:
        output.close()


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Keep signals that interrupt waiting until the end of the block."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def share_gpus(running: Sequence[Running], seconds: float) -> None:
    """Add to each step its share of the GPUs that it was on for so long."""
    for task in running:
        task.gpu_seconds += sum(seconds / sum(gpu in other.gpus for other in running) for gpu in task.gpus)


def find_gpus() -> list[str]:
    """Name the GPUs that a command sees as CUDA_VISIBLE_DEVICES does: by CUDA's numbers, not the devices'."""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in map(str.strip, visible.split(",")) if name not in ("", "-1")]
    return [str(number) for number, _ in enumerate(DEVICES.glob("nvidia[0-9]*"))]


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


def say(line: str) -> None:
    """Print a line of progress."""
    print(line, file=sys.stderr, flush=True)
