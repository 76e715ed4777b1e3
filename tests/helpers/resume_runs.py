"""Start the runs of resume_worker.py, kill them at a moment, and let them finish."""

import json
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch import WORKERS, build_launcher

from polar_trl.grpo.resume.checkpoint import find_problem, list_checkpoints

ENVIRONMENT = dict(os.environ)


@dataclass
class Start:
    """One process of a run that was killed: what was there then."""

    agents_alive: int
    sandboxes: int
    trained_steps: tuple[int, ...]
    partial: tuple[str, ...]


def start_worker(
    model: Path, out: Path, moment: str, step: int, settings: dict[str, Any], processes: int
) -> subprocess.Popen[bytes]:
    (out / "tmp").mkdir(parents=True, exist_ok=True)
    script = [str(WORKERS / "resume_worker.py"), str(model), str(out), moment, str(step), json.dumps(settings)]
    with (out / f"log-{moment}").open("wb") as log:
        return subprocess.Popen(
            [*build_launcher(processes), *script],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**ENVIRONMENT, "TMPDIR": str(out / "tmp")},
            start_new_session=True,  # so that a test can press Ctrl-C for all of a run's processes
        )


def kill_workers(out: Path, rank: int | None = None) -> None:
    """The trainers and what launched them, or one of several; none of the agents."""
    workers = [pid for pid in find_processes(out) if b"resume_worker.py" in read_command(pid)]
    for pid in workers:
        if rank is None or f"\0RANK={rank}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes():
            os.kill(pid, signal.SIGKILL)


def read_command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def wait_for(worker: subprocess.Popen[bytes], out: Path, pattern: str, count: int) -> None:
    for _ in range(2000):
        if len(list(out.glob(pattern))) >= count:
            return
        assert worker.poll() is None, read_logs(out)
        time.sleep(0.1)
    raise AssertionError(f"no {pattern}\n{read_logs(out)}")


def read_logs(out: Path) -> str:
    return "\n".join(path.read_text(errors="replace")[-4000:] for path in out.glob("log-*"))


def find_processes(out: Path) -> list[int]:
    """Those that work in or for a run's folder."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            text = (folder / "environ").read_bytes() + (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if os.fsencode(out) in text:
            found.append(int(folder.name))
    return found


def list_sandboxes(out: Path) -> list[Path]:
    return list(out.glob("tmp/polar-trl-*/*/owner"))


def kill_at(
    model: Path, out: Path, moment: str, step: int, processes: int = 1, only_rank: int | None = None, **settings: Any
) -> Start:
    """Start a run and kill it at a moment: all of its processes, or one, and the others end by themselves."""
    worker = start_worker(model, out, moment, step, settings, processes)
    try:
        # agents that wait in mid-session, all four; else the worker itself stands still
        wait_for(worker, out, *(("tmp/polar-trl-*/*/disk/work/waiting", 4) if moment == "rollout" else ("now", 1)))
        agents_alive, sandboxes = len(find_processes(out)) - processes, len(list_sandboxes(out))
        if only_rank is not None:
            kill_workers(out, only_rank)
            worker.wait(timeout=120)
    finally:
        kill_workers(out)
        worker.wait()
    for path in [*out.glob("seen-by-agents/hold"), *out.glob("now")]:
        path.unlink()
    return Start(
        agents_alive=agents_alive,
        sandboxes=sandboxes,
        trained_steps=tuple(line["step"] for line in read_lines(out / "trained.jsonl")),
        partial=tuple(folder.name for _, folder in list_checkpoints(out) if find_problem(folder)),
    )


def finish(model: Path, out: Path, processes: int = 1, **settings: Any) -> dict[str, Any]:
    worker = start_worker(model, out, "never", 0, settings, processes)
    try:
        assert worker.wait(timeout=250) == 0, read_logs(out)
    finally:
        kill_workers(out)
        worker.wait()
    (result,) = out.glob("result-*.json")
    return json.loads(result.read_text())


def finish_with_error(model: Path, out: Path, **settings: Any) -> str:
    """What a run says that cannot go on."""
    worker = start_worker(model, out, "never", 0, settings, 1)
    try:
        assert worker.wait(timeout=250) != 0
    finally:
        kill_workers(out)
        worker.wait()
    return read_logs(out)


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
