"""Check that the graders of tasks tell a known solution from no work at all.

For each task the solution is laid into fresh sandboxes, and nothing into another one, and the graders of a run say
what that is worth: 1 and 0, or the task teaches nothing. Several runs of the solution show whether its tests are
flaky. Good results are kept in the cache until something changes that they depend on. A task without a known solution
is not proven, whatever else; one that could not be graded is bad, and its `problem` says why.
"""

import fcntl
import hashlib
import json
import os
import re
import sys
import tempfile
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import Any, Literal

from tqdm import tqdm

from polar_trl import grade
from polar_trl.cache import find_cache
from polar_trl.errors import PolarError, SandboxError, TaskError
from polar_trl.grade.base import Grade, describe_tests
from polar_trl.grade.by_task import GraderByTask, find_kind
from polar_trl.sandbox.base import Sandbox, SandboxBackend
from polar_trl.sandbox.inside.run_tests import SCRIPTS
from polar_trl.sandbox.limits import Limits
from polar_trl.tasks.build.folders import apply_patch
from polar_trl.types import Task

GOLD_RUNS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """The graders' verdicts on a task."""

    id: str
    gold: float | None = None
    """Lowest reward of the solution. None: there is none, or it could not be graded."""
    empty: float | None = None
    """Reward of no change. None: it could not be graded."""
    seconds: float = 0.0
    flaky: bool = False
    """Runs of the solution got different rewards."""
    problem: str = ""
    """Why the task cannot be used; "" where nothing speaks against it."""
    verdict: Literal["good", "bad", "not proven"] = "bad"
    """"good": the solution gets 1 and no change 0. "not proven": no change gets 0, and there is no solution to try."""
    missing_tests: tuple[str, ...] = ()
    """Tests that were not found with the solution; without one, with no change."""


def has_tests(task: Task) -> bool:
    """Tell whether more than a command decides, so that an empty change can be told from a solution."""
    return find_kind(task) in ("pytest", "swebench", "harbor")


def has_solution(task: Task) -> bool:
    """Tell whether a solution is known that the graders can be tried on."""
    if not has_tests(task):
        return False
    return any(found is not None for found in (_find_patch(task), task.start_patch, _find_script(task)))


class TaskChecker:
    """Checks tasks, any number at a time.

    Args:
        backend: Makes the sandboxes, the graders' own included.
        kind, image, limits: Of the backend; results depend on them.
        gold_runs: How often the solution is graded.
        fresh: Take no result from the cache.
    """

    def __init__(
        self,
        backend: SandboxBackend,
        *,
        kind: str,
        image: str | None = None,
        limits: Limits = Limits(),
        gold_runs: int = GOLD_RUNS,
        fresh: bool = False,
    ) -> None:
        self._backend = _StoppableBackend(backend)
        self._grader = GraderByTask(self._backend)
        self._kind = kind
        self._image = image
        self._limits = limits
        self._gold_runs = gold_runs
        self._fresh = fresh
        self._image_ids: dict[str, str] = {}

    def check_all(self, tasks: Sequence[Task], *, jobs: int = 1, show_progress: bool = True) -> list[Checked]:
        """Check tasks, `jobs` at a time, with a progress bar on standard error; results in the tasks' order.

        Raises `KeyboardInterrupt` after every sandbox was removed.
        """
        executor = ThreadPoolExecutor(max_workers=jobs, thread_name_prefix="polar-check")
        futures: list[Future[Checked]] = [executor.submit(self.check, task) for task in tasks]
        waiting = set(futures)
        try:
            with tqdm(
                total=len(tasks), desc="checking", unit="task", leave=False, disable=None if show_progress else True
            ) as bar:
                while waiting:
                    done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                    for checked in (future.result() for future in done):
                        if checked.problem and show_progress:
                            bar.write(f"{checked.id}: {checked.problem}", file=sys.stderr)
                    bar.update(len(done))
            return [future.result() for future in futures]
        finally:
            executor.shutdown(wait=False, cancel_futures=True)
            # Only an exception leaves checks running here. Killed until they end: a command may be about to start.
            while wait([future for future in futures if not future.cancelled()], timeout=0).not_done:
                self._backend.stop()
                wait(futures, timeout=0.2)

    def check(self, task: Task) -> Checked:
        """Check one task, or take its result from the cache."""
        try:
            self._backend.prepare([task])
            with self._kept(task) as path:
                kept = None if self._fresh else _recall(path, task, self._gold_runs)
                if kept is not None:
                    return kept
                checked = self._grade_all(task)
                if not checked.problem:
                    _keep(path, checked, self._gold_runs)
                return checked
        except (PolarError, OSError) as error:
            # beside its id the task need not be named again
            named = re.match(rf"task '?{re.escape(task.id)}'?:? ", text := str(error))
            return Checked(id=task.id, problem=text[named.end() :] if named else text)

    def _grade_all(self, task: Task) -> Checked:
        started = monotonic()
        runs = self._gold_runs if has_solution(task) else 0
        solved = [self._grade(task, is_solved=True) for _ in range(runs)]
        golds = [graded.reward for graded in solved]
        untouched = self._grade(task, is_solved=False)
        empty = untouched.reward
        problem = ""
        if any(reward != 1.0 for reward in golds):
            counts = sum((Counter(graded.counters) for graded in solved), Counter[str]())
            said = ", ".join(f"{name}: {count}" for name, count in counts.items())
            problem = f"the solution gets {', '.join(f'{reward:g}' for reward in golds)}" + (said and f" ({said})")
            report = min(solved, key=lambda graded: graded.reward).report
            if why := describe_tests(report) or report.output_tail[-300:].strip():
                problem += f"; {why}"
        if empty != 0.0:
            problem = f"no change at all gets {empty:g}"
        return Checked(
            id=task.id,
            gold=min(golds, default=None),
            empty=empty,
            seconds=round(monotonic() - started, 1),
            flaky=len(set(golds)) > 1,
            problem=problem,
            verdict="bad" if problem else "good" if golds else "not proven",
            missing_tests=(solved or [untouched])[0].report.missing_tests,
        )

    def _grade(self, task: Task, *, is_solved: bool) -> Grade:
        """Grade the solution, or no change."""
        sandbox = self._backend.create(task, f"check-{task.id}")
        try:
            if is_solved:
                solve(task, sandbox)
            return self._grader.grade(task, sandbox, timeout_s=task.grade_timeout_s)
        finally:
            sandbox.destroy()
            self._backend.refuse_if_stopped()

    @contextmanager
    def _kept(self, task: Task) -> Iterator[Path]:
        """Lock the file of the task's result, so that other ranks of a run do not check the same meanwhile."""
        digest = build_digest(task, f"{self._kind} {self._limits} {self._find_image(task)}")
        folder = find_cache("checks")
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / f".{digest}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield folder / f"{digest}.json"

    def _find_image(self, task: Task) -> str:
        """Identify the task's image as it is now: a name alone may come to mean another one."""
        name = task.image or self._image
        if self._kind == "local" or name is None:
            return ""
        if name not in self._image_ids:
            self._image_ids[name] = f"{name} {_find_image_id(name, self._kind)}"
        return self._image_ids[name]


def solve(task: Task, sandbox: Sandbox) -> None:
    """Lay the task's solution into a sandbox in which nothing runs. Raises `TaskError`, `SandboxError`."""
    patch, script = _find_patch(task), _find_script(task)
    options: list[str] = []
    if patch is None and task.start_patch is not None:  # what takes a bug back solves its task
        patch, options = f"{task.start_patch}\n".encode("utf-8", "surrogateescape"), ["--reverse"]
    if patch is not None:
        with tempfile.TemporaryDirectory(prefix="polar-gold-") as scratch:
            file = Path(scratch) / "gold.patch"
            file.write_bytes(patch)
            apply_patch(sandbox.host_workdir, file, *options)
    elif script is not None:
        sandbox.upload(script.parent, "/solution")
        result = sandbox.run("bash /solution/solve.sh", env=task.env, timeout_s=task.agent_timeout_s)
        if result.exit_code != 0:
            end = "did not end in time" if result.timed_out else f"ended with exit code {result.exit_code}"
            raise TaskError(f"solve.sh of task {task.id} {end}: {(result.stderr or result.stdout)[-300:]!r}")


def build_digest(task: Task, place: str) -> str:
    """Hash everything that a result depends on: the task, its files by their content, the graders' code, the place."""
    digest = hashlib.sha256()
    fields = asdict(task)
    for name in ("instruction", "agent", "cut_sessions"):
        fields.pop(name)
    for name in ("workspace", "build_context"):
        _add(digest, fields.pop(name))
    for name in ("folder", "gold_patch", "requirements"):
        _add(digest, (fields["tests"] or {}).pop(name, None))
    harbor = fields["metadata"].get("harbor", {})
    if task.tests is None and "folder" in harbor:
        for name in ("tests", "solution"):
            _add(digest, f"{harbor['folder']}/{name}")
    fields["metadata"] = {**fields["metadata"], "harbor": {**harbor, "folder": ""}}
    digest.update(json.dumps([place, fields], sort_keys=True, default=str).encode())
    for file in (*sorted(Path(grade.__file__).parent.glob("*.py")), *SCRIPTS):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:32]


def _add(digest: Any, path: str | None) -> None:
    """Add a file's content, or the paths, modes and contents of a folder."""
    digest.update(b"\0" if path else b"\1")
    if not path:
        return
    root = Path(path)
    for file in [root] if root.is_file() else sorted(root.rglob("*")):
        state = os.lstat(file)
        digest.update(f"{file.relative_to(root)}\0{state.st_mode}\n".encode("utf-8", "surrogateescape"))
        if file.is_symlink():
            digest.update(os.fsencode(os.readlink(file)))
        elif file.is_file():
            digest.update(hashlib.sha256(file.read_bytes()).digest())


def _find_patch(task: Task) -> bytes | None:
    if task.tests is not None and task.tests.gold_patch is not None:
        return Path(task.tests.gold_patch).read_bytes()
    row = task.metadata.get("swebench")
    return str(row["patch"]).encode() if isinstance(row, Mapping) else None


def _find_script(task: Task) -> Path | None:
    harbor = task.metadata.get("harbor")
    script = Path(harbor["folder"]) / "solution" / "solve.sh" if isinstance(harbor, Mapping) else None
    return script if script is not None and script.is_file() else None


def _find_image_id(name: str, kind: str) -> str:
    if kind == "bwrap":
        from polar_trl.sandbox.bwrap.images import find_image, read_image

        return read_image(find_image(name)).id
    import docker
    from docker.errors import DockerException

    try:
        client = docker.from_env()
        try:
            return str(client.images.get(name).id)
        finally:
            client.close()
    except DockerException:
        return ""  # the backend has its own way to the engine; the name has to do


def _recall(path: Path, task: Task, gold_runs: int) -> Checked | None:
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
        kept = Checked(**read["checked"] | {"missing_tests": tuple(read["checked"]["missing_tests"])})
    except (OSError, ValueError, KeyError, TypeError):
        return None  # not there, or of another version of this package
    return kept if kept.id == task.id and read["gold_runs"] >= gold_runs else None


def _keep(path: Path, checked: Checked, gold_runs: int) -> None:
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps({"gold_runs": gold_runs, "checked": asdict(checked)}) + "\n", encoding="utf-8")
    os.replace(part, path)


class _StoppableBackend(SandboxBackend):
    """A backend whose sandboxes can all be killed at once, those that a grader made for itself included."""

    def __init__(self, backend: SandboxBackend) -> None:
        self.capabilities = backend.capabilities
        self._backend = backend
        self._lock = threading.Lock()
        self._sandboxes: weakref.WeakSet[Sandbox] = weakref.WeakSet()
        self._is_stopped = False

    def prepare(self, tasks: Sequence[Task]) -> None:
        self.refuse_if_stopped()
        self._backend.prepare(tasks)

    def create(self, task: Task, session_id: str) -> Sandbox:
        self.refuse_if_stopped()
        sandbox = self._backend.create(task, session_id)
        with self._lock:
            self._sandboxes.add(sandbox)
        return sandbox

    def close(self) -> None:
        self._backend.close()

    def refuse_if_stopped(self) -> None:
        if self._is_stopped:
            raise SandboxError("the check was stopped")

    def stop(self) -> None:
        """Kill what runs, and make no more."""
        with self._lock:
            self._is_stopped = True
            sandboxes = list(self._sandboxes)
        for sandbox in sandboxes:
            sandbox.kill()
