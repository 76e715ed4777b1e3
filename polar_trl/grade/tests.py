"""Grade by hidden tests: the agent's changes laid over a fresh tree in a fresh sandbox; all pass is reward 1.

The agent's own sandbox is never graded: only files come over, and none at paths that decide how tests run. Hidden
tests are laid last. Two canary tests ride along, one that must fail and one that must pass: where they do not, the
tested code has tampered with its grader, and the reward is 0. So it is where what the agent left cannot be copied:
because it is too much, for that or for the fresh sandbox's disk, or cannot be read.

The tested code runs in the process that judges it, so this is no proof. What sandbox/inside/guard.py notices is worth
0; signs in the code of the change (`SUSPICIONS`) are counted. docs/tasks.md says what is neither. A fresh sandbox that
cannot be made raises `SandboxError`, and is no failure of the agent.
"""

import hmac
import json
import secrets
import shlex
import time
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from polar_trl.errors import FileTooLargeError, GradeError, SandboxError
from polar_trl.grade.added_code import count_seen, count_signs, is_test_file
from polar_trl.grade.base import MAX_OUTPUT, Grade, Grader, report_tests
from polar_trl.grade.canary import Canary
from polar_trl.grade.changes import UNUSABLE, Change, apply_changes, find_changes
from polar_trl.grade.fresh import FreshSandboxes
from polar_trl.grade.reward_hacking import Protection, add_total, count_planted, read_fix
from polar_trl.names import list_patched_paths
from polar_trl.sandbox.base import Sandbox, SandboxBackend
from polar_trl.sandbox.inside.guard import sign
from polar_trl.sandbox.inside.run_tests import NO_PYTEST, RUNNER, SCRIPTS, list_own
from polar_trl.types import GradeReport, Task, TestSpec

MAX_REPORT_BYTES = 64 << 20
NOT_STARTED = (126, 127)
"""Exit codes of a shell that cannot start a program."""
_INSTALL = (
    "install pytest in the task's image (its Dockerfile), or, in bwrap and local sandboxes, name a requirements file "
    "(tests.requirements)"
)
_DIED = {"test_runs_timed_out": "the tests ran out of time", "test_runs_died": "the tests ended without a report"}
# the same as where tasks are built: some tests depend on zone, locale and width
ENV = {"PYTHONHASHSEED": "0", "TZ": "UTC", "LC_ALL": "C.UTF-8", "COLUMNS": "80"}


class HiddenTestsGrader(Grader):
    """Base of the graders that run a task's hidden tests in a fresh sandbox.

    Args:
        backend: Makes the fresh sandboxes.
        partial: Reward the share of the failing tests that pass, as long as none of the others broke.
        zero_suspected: Give 0 to changes whose code has a sign of `SUSPICIONS`; else those are only counted.
    """

    writable_root = False
    """Whether the fresh sandboxes have a writable root, whatever the task says."""

    def __init__(self, backend: SandboxBackend, *, partial: bool = False, zero_suspected: bool = False) -> None:
        self._fresh = FreshSandboxes(backend, writable_root=self.writable_root)
        self._partial = partial
        self._zero_suspected = zero_suspected

    def grade(self, task: Task, sandbox: Sandbox, *, timeout_s: float) -> Grade:
        """Return the reward, and counts of tampering with the grader. Raises `GradeError` and `SandboxError`."""
        if task.tests is None:
            raise GradeError(f"task {task.id} has no tests")
        with self._fresh.open(task) as fresh:
            deadline = time.monotonic() + timeout_s  # only now: the agent is not to blame for how long making it took
            try:
                return self._judge(task, task.tests, sandbox, fresh, deadline)
            except tuple(UNUSABLE) as loss:
                report = GradeReport(output_tail=str(loss))
                return Grade(reward=0.0, counters={UNUSABLE[type(loss)]: 1}, report=report)
            except (SandboxError, OSError):
                if not self._fresh.is_filled(fresh):
                    raise
                report = GradeReport(output_tail="what the agent left filled the disk of the sandbox that grades it")
                return Grade(reward=0.0, counters={UNUSABLE[FileTooLargeError]: 1}, report=report)

    def _judge(self, task: Task, spec: TestSpec, sandbox: Sandbox, fresh: Sandbox, deadline: float) -> Grade:
        """Grade in the fresh sandbox until the deadline (of `time.monotonic`)."""
        raise NotImplementedError

    def order(self, task: Task) -> None:
        """See `Grader`."""
        self._fresh.order(task)

    def withdraw(self, task: Task) -> None:
        """See `Grader`."""
        self._fresh.withdraw(task)

    def _close(self, spec: TestSpec, passed: Set[str] | None, counts: Counter[str], report: GradeReport) -> Grade:
        """Return the grade of a run; `passed` is None where it was tampered with or left no outcomes."""
        counters = add_total(counts)
        if passed is None or (self._zero_suspected and "cheats_suspected" in counters):
            return Grade(reward=0.0, counters=counters, report=report)
        return Grade(reward=score(spec, passed, partial=self._partial), counters=counters, report=report)


class TestsGrader(HiddenTestsGrader):
    """Grades tasks that have `tests` with the runner "pytest"."""

    __test__ = False  # its name makes pytest look for tests in it

    def _judge(self, task: Task, spec: TestSpec, sandbox: Sandbox, fresh: Sandbox, deadline: float) -> Grade:
        changes = find_changes(sandbox.base_tree, sandbox.host_workdir, deadline=deadline)
        fix = read_fix(task)
        protection = Protection(spec, fix)
        given = {path: Change(kind="file", content=text.encode()) for path, text in task.files.items()}
        # files that the task itself laid, and that are as they were, are nobody's change
        done = {
            p: c for p, c in changes.items() if c.kind != "file" or p not in given or given[p].content != c.content
        }
        kept, counts = protection.sort(done)
        counts.update(count_planted(changes, sandbox.host_home))
        counts.update(count_signs(kept, sandbox.base_tree, fix))
        canary = Canary((*spec.fail_to_pass, *spec.pass_to_pass), paths=spec.paths)
        own = list_tested(task, spec, fresh, spec.import_roots)
        candidates = list_new_modules(kept, task, spec, fresh, (*spec.paths, *spec.files))
        apply_changes(kept, fresh.host_workdir, deadline=deadline)
        lost = {p: c for p, c in given.items() if p not in kept and (p in changes or protection.covers(p))}
        apply_changes(lost, fresh.host_workdir)
        lay_hidden_tests(spec, fresh)
        canary.lay(fresh)
        left_s = max(deadline - time.monotonic(), 0.0)
        found, fault, output = run_hidden_tests(task, spec, fresh, canary, own, candidates, timeout_s=left_s)
        deciding = (*spec.fail_to_pass, *spec.pass_to_pass)
        if found is None:
            return self._close(spec, None, counts + Counter([fault]), report_died(fault, len(deciding), output))
        outcomes: dict[str, str] = found["outcomes"]
        faults = find_faults(found, counts, kept, sandbox.base_tree)
        faults += filter(None, [canary.find_fault(outcomes, passed="passed", failed="failed")])
        counts.update(faults)
        passed = {name for name, outcome in outcomes.items() if outcome == "passed"}
        report = report_tests(deciding, passed, outcomes, found["messages"])
        return self._close(spec, None if faults else passed, counts, report)


def report_died(fault: str, num_tests: int, output: str) -> GradeReport:
    """Report a run of which no outcome counts; `fault` is its counter."""
    return GradeReport(output_tail=f"{_DIED[fault]}\n{output}".strip()[-MAX_OUTPUT:], num_tests=num_tests)


def find_faults(
    found: Mapping[str, Any], counts: Counter[str], kept: Mapping[str, Change], tree: Path | None
) -> list[str]:
    """Return the counters of faults that the process of the tests reports; add what decides nothing to `counts`.

    Args:
        found: The report, as sandbox/inside/guard.py has it.
        kept: The changes that were graded.
        tree: The work tree before them.
    """
    # "test" is one of the standard library's too, and of many a note that honest agents leave
    counts["modules_shadowed"] += sum(not is_test_file(path) for path in found["shadows"])
    seen = count_seen(found["seen"], kept, tree)
    is_opened = seen.pop("tests_read", 0)
    counts.update(seen)
    return ["judges_patched"] * bool(found["patched"]) + ["hidden_tests_opened"] * bool(is_opened)


def run_hidden_tests(
    task: Task,
    spec: TestSpec,
    fresh: Sandbox,
    canary: Canary,
    own: list[str],
    candidates: list[str],
    *,
    timeout_s: float,
) -> tuple[dict[str, Any] | None, str, str]:
    """Return the run's report, or None, the counter of the reason and the end of the output. Raises `GradeError`."""
    folder, key = f"~/run_{secrets.token_hex(8)}", secrets.token_hex(32)
    runner, request, report = (f"{folder}/{name}" for name in (RUNNER.name, "request.json", "report.json"))
    asked = {
        "paths": [*spec.paths, *canary.arguments],
        "import_roots": list(spec.import_roots),
        "own": own,
        "candidates": candidates,
        "report": "report.json",
        "key": key,
    }
    for file in SCRIPTS:
        fresh.put(f"{folder}/{file.name}", file.read_bytes())
    fresh.put(request, json.dumps(asked).encode())
    command = f"{shlex.quote(spec.python)} -I -B {runner} --request {request}"
    result = fresh.run(command, env={**task.env, **ENV}, timeout_s=timeout_s)
    if (found := read_report(fresh, report, key, max_bytes=MAX_REPORT_BYTES)) is not None:
        return found, "", ""
    if result.timed_out:
        return None, "test_runs_timed_out", result.tail()
    if result.exit_code in (*NOT_STARTED, NO_PYTEST):
        why = f"task {task.id}: {spec.python!r} cannot run pytest there: {result.stderr.strip()[-300:]}"
        raise GradeError(f"{why}; {_INSTALL}", output=result.tail())
    return None, "test_runs_died", result.tail()


def read_report(fresh: Sandbox, path: str, key: str, *, max_bytes: int) -> dict[str, Any] | None:
    """Read a report that was signed by the key (sandbox/inside/guard.py), None where there is none."""
    with suppress(ValueError, TypeError, FileTooLargeError):
        proof, _, text = (fresh.get(path, max_bytes=max_bytes) or b"").decode().partition("\n")
        if hmac.compare_digest(proof, sign(key, text)):
            found: dict[str, Any] = json.loads(text)
            return found
    return None


def list_tested(task: Task, spec: TestSpec, fresh: Sandbox, folders: Sequence[str]) -> list[str]:
    """List names in folders that are the task's own, whoever else has them, before the agent's changes are laid."""
    placed = [PurePosixPath(path) for path in (*task.files, *spec.files, *list_patched_paths(read_fix(task)))]
    names = {part.partition(".")[0] for path in placed for part in path.parts}
    return sorted(names.union(list_own(fresh.host_workdir, folders)))


def list_new_modules(
    kept: Mapping[str, Change], task: Task, spec: TestSpec, fresh: Sandbox, tests: Sequence[str]
) -> list[str]:
    """List what a change adds where modules are imported from: import roots, folders of tests and those above them.

    Not in packages, whose modules hide no others.

    Args:
        fresh: Without the change.
        tests: Files and folders of tests.
    """

    def is_package(folder: PurePosixPath) -> bool:
        path = folder / "__init__.py"
        change = kept.get(str(path))
        return path.as_posix() in spec.files or (
            (fresh.host_workdir / path).is_file() if change is None else change.kind == "file"
        )

    above = {folder for path in tests for folder in (PurePosixPath(path), *PurePosixPath(path).parents)}
    folders = {PurePosixPath(folder) for folder in (*spec.import_roots, "src", "lib", ".")}
    folders |= {folder for folder in above if not is_package(folder)}
    own = set(list_tested(task, spec, fresh, [str(folder) for folder in folders]))
    found = {
        folder / path.relative_to(folder).parts[0]
        for path in map(PurePosixPath, kept)
        for folder in folders
        if folder in path.parents
    }
    return sorted(str(path) for path in found if path.name.partition(".")[0] not in own)


def lay_hidden_tests(spec: TestSpec, fresh: Sandbox) -> None:
    """Remove the tests that the agent saw, and lay the hidden ones. Raises `GradeError` for a path outside."""
    laid = {path: Change(kind="gone") for path in spec.removed}
    laid |= {path: Change(kind="file", content=(Path(spec.folder) / path).read_bytes()) for path in spec.files}
    # as an agent's changes are, and with the same care: its links may be in the way
    apply_changes(laid, fresh.host_workdir)


def score(spec: TestSpec, passed: Set[str], *, partial: bool) -> float:
    """Return 1 where all required tests passed; with `partial`, the share of `fail_to_pass` if nothing else broke."""
    if not set(spec.pass_to_pass) <= passed:
        return 0.0
    share = sum(name in passed for name in spec.fail_to_pass) / len(spec.fail_to_pass)
    return share if partial or share == 1.0 else 0.0
