#!/usr/bin/env python3
"""Time a sandbox from being asked for until a command has run in it: made then ("cold"), or before ("warm").

Each repetition measures both sides, in turns: one sandbox at a time, then some at once, with an empty work folder and
with a work tree of 2000 files (50 MB). Warm ones come out of a pool as deep as what is asked for at once, filled
before the clock starts. A command that fails ends the measurement.
"""

import argparse
import json
import math
import os
import platform
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from polar_trl.cache import CACHE_VARIABLE
from polar_trl.sandbox import build_backend
from polar_trl.sandbox.base import Sandbox, SandboxBackend
from polar_trl.sandbox.pool import WarmPool
from polar_trl.types import Task

EXAMPLES = """examples:
  python scripts/bench/bench_sandbox.py --sandbox bwrap
  python scripts/bench/bench_sandbox.py --image polar-trl-test:latest --repeat 40 --json sandbox.json
"""
NUM_FILES, FILE_BYTES = 2000, 25_000


class AnnouncingBackend(SandboxBackend):
    """Passes everything on, and tells when a sandbox has been made."""

    def __init__(self, backend: SandboxBackend) -> None:
        self.capabilities = backend.capabilities
        self.made = threading.Semaphore(0)
        self._backend = backend

    def prepare(self, tasks: Sequence[Task]) -> None:
        self._backend.prepare(tasks)

    def create(self, task: Task, session_id: str) -> Sandbox:
        sandbox = self._backend.create(task, session_id)
        self.made.release()
        return sandbox

    def close(self) -> None:
        """Nothing: the backend is used again."""


def make_tree(folder: Path) -> Path:
    """2000 files of text in 40 folders, 50 MB together."""
    for number in range(NUM_FILES):
        path = folder / f"package_{number % 40}" / f"module_{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        line = f"value_{number} = compute({number})\n"
        path.write_text(line * (FILE_BYTES // len(line)))
    return folder


def time_starts(create: Callable[[Task, str], Sandbox], task: Task, at_once: int) -> list[float]:
    """Seconds of each of the sandboxes that are asked for at the same moment. They are removed afterwards."""
    ready = threading.Barrier(at_once)

    def start(number: int) -> tuple[Sandbox, float]:
        ready.wait()
        started = time.perf_counter()
        sandbox = create(task, f"bench-{number}")
        result = sandbox.run("true", env={}, timeout_s=120)
        seconds = time.perf_counter() - started
        if result.exit_code != 0:
            raise SystemExit(f"`true` failed in the sandbox: {result}")
        return sandbox, seconds

    with ThreadPoolExecutor(at_once) as threads:
        started = list(threads.map(start, range(at_once)))
        list(threads.map(lambda pair: pair[0].destroy(), started))
    return [seconds for _, seconds in started]


def time_warm(backend: SandboxBackend, task: Task, at_once: int) -> list[float]:
    """The same out of a full pool."""
    announcing = AnnouncingBackend(backend)
    pool = WarmPool(announcing, depth=at_once)
    for _ in range(at_once):
        pool.order(task)
    for _ in range(at_once):
        if not announcing.made.acquire(timeout=300):
            raise SystemExit("the pool did not fill within 300 s")
    try:
        return time_starts(pool.create, task, at_once)
    finally:
        pool.close()


def measure(backend: SandboxBackend, task: Task, at_once: int, rounds: int) -> dict[str, Any]:
    """One row: cold and warm in turns."""
    seconds: dict[str, list[float]] = {"cold": [], "warm": []}
    for _ in range(rounds):
        seconds["cold"] += time_starts(backend.create, task, at_once)
        seconds["warm"] += time_warm(backend, task, at_once)
    row: dict[str, Any] = {
        "tree": "none" if task.workspace is None else "2000 files",
        "at_once": at_once,
        "n": at_once * rounds,
    }
    for side, values in seconds.items():
        row[f"{side}_p50_ms"] = round(1000 * statistics.median(values))
        row[f"{side}_p95_ms"] = round(1000 * sorted(values)[math.ceil(0.95 * len(values)) - 1])
    return row


def print_row(row: dict[str, Any]) -> None:
    cold, warm = (f"{row[f'{side}_p50_ms']} / {row[f'{side}_p95_ms']} ms" for side in ("cold", "warm"))
    print(f"{row['tree']:>10} {row['at_once']:>8} {row['n']:>5} {cold:>18} {warm:>18}", flush=True)


def describe_machine(kind: str) -> dict[str, Any]:
    facts = {
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load before": os.getloadavg()[0],
    }
    if kind == "docker":
        import docker

        info = docker.from_env().info()
        names = ("ServerVersion", "Driver", "CgroupVersion", "DefaultRuntime")
        facts["engine"] = " ".join(f"{name} {info.get(name)}" for name in names)
    return facts


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sandbox", choices=("docker", "bwrap"), default="docker", help="default: docker")
    parser.add_argument("--image", default="polar-trl-test:latest", help="docker only; default: %(default)s")
    parser.add_argument("--repeat", type=int, default=20, metavar="N", help="single starts per row (default 20)")
    parser.add_argument("--at-once", type=int, default=16, metavar="N", help="of the other rows (default 16)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    options = parser.parse_args()
    if min(options.repeat, options.at_once) < 1:
        parser.error("--repeat and --at-once must be at least 1")
    return options


def main() -> None:
    options = read_options()
    machine = describe_machine(options.sandbox)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        # the prepared copy of the tree is of no use to anybody else
        os.environ[CACHE_VARIABLE] = str(Path(folder) / "cache")
        image = options.image if options.sandbox == "docker" else None
        backend = build_backend(options.sandbox, image=image, run_id="bench")
        tree = make_tree(Path(folder) / "tree")
        print(f"{'work tree':>10} {'at once':>8} {'n':>5} {'cold p50 / p95':>18} {'warm p50 / p95':>18}")
        for workspace in (None, str(tree)):
            task = Task(id="bench", instruction="none", workspace=workspace)
            backend.prepare([task])
            for at_once, rounds in ((1, options.repeat), (options.at_once, math.ceil(options.repeat / 5))):
                rows.append(measure(backend, task, at_once, rounds))
                print_row(rows[-1])
        backend.close()
    result = {"sandbox": options.sandbox, "machine": machine, "rows": rows}
    print(f"sandbox: {options.sandbox}\nmachine: {machine}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
