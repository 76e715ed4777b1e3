"""Run a source tree's tests in an environment of pinned packages.

A run has a deadline, a limit of memory and a process group of its own that is killed at its end, and is confined by
bubblewrap where that works (`confined.py`). Only releases of known packages and single edits of them run here, never
the work of an agent.
"""

import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from polar_trl.cache import Part, find_cache
from polar_trl.errors import ConfigError
from polar_trl.sandbox.inside.run_tests import RUNNER
from polar_trl.tasks.build.confined import confine, list_python_folders

INSTALL_TIMEOUT_S = 900.0
MEMORY_MB = 3072


@dataclass(frozen=True, kw_only=True, slots=True)
class SuiteRun:
    """Outcomes of a run of a tree's tests."""

    outcomes: Mapping[str, str]
    """"passed", "failed", "error", "skipped" or "xfailed" by node id. Empty where the run died or was killed."""
    messages: Mapping[str, str]
    """Beginnings of the messages of failing tests, by node id."""
    timed_out: bool
    cpu_s: float
    said: str
    """The end of its output."""

    def list_passed(self) -> set[str]:
        return {name for name, outcome in self.outcomes.items() if outcome == "passed"}


def find_environment(requirements: Path, part: Part = "environments") -> Path:
    """Return the folder of a requirements file's environment, there or not. Raises `ConfigError`."""
    try:
        text = requirements.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the requirements {requirements}: {error.strerror}") from error
    digest = hashlib.sha256(f"{sys.version}\n{text}".encode()).hexdigest()[:12]
    return find_cache(part) / f"python-{digest}"  # whatever the file is called: task folders have copies of one


def install_environment(requirements: Path, part: Part = "environments") -> Path:
    """Install exactly the file's packages into a virtual environment in the cache, once; return its Python.

    An environment that sandboxes see has no pip: it could reach nothing, and its vendored packages may be newer than a
    task's own. Raises `ConfigError`.
    """
    folder = find_environment(requirements, part)
    python = folder / "bin" / "python"
    mark = folder / ".installed"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / f".{folder.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not mark.exists():
            shutil.rmtree(folder, ignore_errors=True)
            print(f"installing {requirements.name} into {folder} ...", file=sys.stderr, flush=True)
            _install([sys.executable, "-m", "venv", str(folder)])
            pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            _install([*pip, "-r", str(requirements)])
            if part == "environments":  # which sandboxes see
                _install([str(python), "-m", "pip", "uninstall", "--quiet", "--yes", "pip"])
            mark.touch()
    return python


def run_suite(python: Path, tree: Path, spec: Path, *, timeout_s: float, hash_seed: int = 0) -> SuiteRun:
    """Lay a task's hidden tests over `tree`, which is written to, and run them.

    Args:
        spec: tests/spec.json of a task folder.
    """
    with tempfile.TemporaryDirectory(prefix="polar-suite-") as scratch:
        report = Path(scratch) / "report.json"
        command = [str(python), "-B", str(RUNNER), "--root", str(tree), "--spec", str(spec), "--report", str(report)]
        with open(Path(scratch) / "log", "w+b") as log:
            before = os.times()
            confined = confine(
                [*command, f"--memory-mb={MEMORY_MB}"],
                writable=[tree, Path(scratch)],
                visible=[*list_python_folders(python), RUNNER.parent, spec.parent],
                network=False,
            )
            exit_code = run_group(
                confined,
                build_env(python, scratch, hash_seed),
                log.fileno(),
                timeout_s=timeout_s,
            )
            after = os.times()
            log.seek(max(0, log.seek(0, os.SEEK_END) - 2000))
            said = log.read().decode(errors="replace")
        try:
            read = json.loads(report.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            read = {"outcomes": {}, "messages": {}}
    cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
    return SuiteRun(
        outcomes=read["outcomes"],
        messages=read["messages"],
        timed_out=exit_code is None,
        cpu_s=round(cpu_s, 2),
        said=said,
    )


def run_group(command: Sequence[str], env: Mapping[str, str], output: int, *, timeout_s: float) -> int | None:
    """Run a command in a process group, killed at its end; return its exit code, None at the deadline.

    Raises `ConfigError` if it cannot be started.
    """
    try:
        process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        raise ConfigError(f"cannot run {command[0]}: {error.strerror}") from error
    try:
        return process.wait(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def build_env(python: Path, home: str, hash_seed: int) -> dict[str, str]:
    """Build one environment for every run, whatever the user's settings: some tests depend on zone and locale."""
    return {
        "PATH": f"{python.parent}:/usr/local/bin:/usr/bin:/bin",
        "HOME": home,
        "TMPDIR": home,
        "TZ": "UTC",
        "LC_ALL": "C.UTF-8",
        "COLUMNS": "80",
        "PYTHONHASHSEED": str(hash_seed),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


@contextmanager
def copied_tree(tree: Path) -> Iterator[Path]:
    """Yield a copy of the tree, removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="polar-tree-") as scratch:
        copy = Path(scratch) / "tree"
        shutil.copytree(tree, copy, symlinks=True)
        yield copy


def _install(command: list[str]) -> None:
    # a virtual environment that is active here must not be the one that pip installs into
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV")}
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, env=env
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"cannot make the environment for tests: {error}") from error
    if done.returncode != 0:
        raise ConfigError(f"cannot make the environment for tests: {(done.stderr or done.stdout)[-600:].strip()}")
