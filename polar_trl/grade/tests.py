"""The agent's changes, laid over a fresh tree in a fresh sandbox, and the task's hidden tests: all pass is reward 1.

What the agent ran in is never graded: only files come over, and none at paths that decide how tests run. Hidden tests
are laid last. Two tests with names that nobody can guess ride along, one that must fail and one that must pass: where
they do not, the tested code has tampered with its judge, and the reward is 0.

It refuses to take a sandbox's failure for the agent's: a fresh sandbox that cannot be made has decided nothing.
"""

import json
import secrets
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

from polar_trl.errors import FileTooLargeError, GradeError
from polar_trl.grade.base import Grade
from polar_trl.grade.changes import Change, apply_changes, find_changes
from polar_trl.sandbox.base import Sandbox, SandboxBackend
from polar_trl.sandbox.run_tests import RUNNER
from polar_trl.types import Task, TestSpec

MAX_REPORT_BYTES = 64 << 20
# names that pytest or Python load unasked, wherever they lie
ALWAYS_PROTECTED = (
    *("conftest.py", "pytest.ini", ".pytest.ini", "tox.ini", "sitecustomize.py", "usercustomize.py", "*.pth"),
    *("pytest.py", "_pytest", "pluggy", "pytest"),
)


class TestsGrader:
    """Grades tasks that have `tests`.

    Args:
        backend: Makes the fresh sandboxes.
        python: Runs pytest in them; has what the tests need.
        partial: Reward the share of the failing tests that pass, as long as none of the others broke.
    """

    __test__ = False  # its name makes pytest look for tests in it

    def __init__(self, backend: SandboxBackend, *, python: str = "python3", partial: bool = False) -> None:
        self._backend = backend
        self._python = python
        self._partial = partial

    def grade(self, task: Task, sandbox: Sandbox, *, timeout_s: float) -> Grade:
        """The reward, and under which names the agent's attempts on its judge are counted. Raises `GradeError`."""
        if task.tests is None or sandbox.base_tree is None:
            raise GradeError(f"task {task.id} has no tests, or no work tree that they belong to")
        changes = find_changes(sandbox.base_tree, sandbox.host_workdir)
        return self.grade_changes(task, task.tests, changes, timeout_s=timeout_s)

    def grade_changes(self, task: Task, spec: TestSpec, changes: dict[str, Change], *, timeout_s: float) -> Grade:
        """The same for changes that are known."""
        kept = {path: change for path, change in changes.items() if not is_protected(path, spec)}
        counters = {"protected_changes_dropped": len(changes) - len(kept)}
        fresh = self._backend.create(replace(task, files={}), f"{task.id}-grade")
        try:
            apply_changes(kept, fresh.host_workdir)
            lay_hidden_tests(spec, fresh)
            canary = Canary()
            fresh.put(canary.path, canary.text.encode())
            outcomes = self._run(spec, fresh, canary, timeout_s)
        finally:
            fresh.destroy()
        if outcomes is None:
            return Grade(reward=0.0, counters=counters | {"test_runs_died": 1})
        if not canary.is_intact(outcomes):
            return Grade(reward=0.0, counters=counters | {"canaries_broken": 1})
        return Grade(reward=self._score(spec, outcomes), counters=counters)

    def _run(self, spec: TestSpec, fresh: Sandbox, canary: "Canary", timeout_s: float) -> dict[str, str] | None:
        """Node id -> outcome; None where the run left no report."""
        runner, report = f"run_{secrets.token_hex(8)}.py", f"report_{secrets.token_hex(8)}.json"
        fresh.put(f"~/{runner}", RUNNER.read_bytes())
        words = [self._python, "-B", f'"$HOME/{runner}"', "--root", ".", "--report", f'"$HOME/{report}"']
        words += [f"--import-root={root}" for root in spec.import_roots]
        words += ["--", *(_quote(path) for path in spec.paths), canary.path]
        fresh.run(" ".join(words), env={"PYTHONHASHSEED": "0"}, timeout_s=timeout_s)
        try:
            text = fresh.get(f"~/{report}", max_bytes=MAX_REPORT_BYTES)
            outcomes: Any = json.loads(text or b"")["outcomes"]
        except (ValueError, KeyError, TypeError, FileTooLargeError):
            return None
        return outcomes if isinstance(outcomes, dict) else None

    def _score(self, spec: TestSpec, outcomes: dict[str, str]) -> float:
        if any(outcomes.get(name) != "passed" for name in spec.pass_to_pass):
            return 0.0
        share = sum(outcomes.get(name) == "passed" for name in spec.fail_to_pass) / len(spec.fail_to_pass)
        return share if self._partial or share == 1.0 else 0.0


class Canary:
    """Two tests with random names."""

    def __init__(self) -> None:
        folder, module, self._passing, self._failing = (secrets.token_hex(8) for _ in range(4))
        # a folder of its own: pytest 9 drops a file that lies inside of a folder it was given as well
        self.path = f"c{folder}/test_{module}.py"
        self.text = f"def test_{self._passing}():\n    pass\n\n\ndef test_{self._failing}():\n    assert False\n"

    def is_intact(self, outcomes: dict[str, str]) -> bool:
        """Whether the one passed and the other failed."""
        passing, failing = f"{self.path}::test_{self._passing}", f"{self.path}::test_{self._failing}"
        return outcomes.get(passing) == "passed" and outcomes.get(failing) == "failed"


def is_protected(path: str, spec: TestSpec) -> bool:
    """Whether a change at this path is dropped: it decides how tests run, or is a test itself."""
    if path in spec.files or path in spec.removed or any(fnmatch(path, pattern) for pattern in spec.protected):
        return True
    return any(fnmatch(part, pattern) for part in PurePosixPath(path).parts for pattern in ALWAYS_PROTECTED)


def lay_hidden_tests(spec: TestSpec, fresh: Sandbox) -> None:
    """Take away the tests that the agent saw, and lay the hidden ones."""
    for path in spec.removed:
        (fresh.host_workdir / path).unlink(missing_ok=True)
    for path in spec.files:
        fresh.put(path, (Path(spec.folder) / path).read_bytes())


def _quote(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
