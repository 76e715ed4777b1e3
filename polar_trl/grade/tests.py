"""The agent's changes, laid over a fresh tree in a fresh sandbox, and the task's hidden tests: all pass is reward 1.

What the agent ran in is never graded: only files come over, and none at paths that decide how tests run. Hidden tests
are laid last. Two more tests ride along, one that must fail and one that must pass: where they do not, the tested code
has tampered with its judge, and the reward is 0.

What is left to a determined cheat is what runs inside of the tested process: code that finds the collected tests there
and sends a report of its own, with the right answer for the two as well. It refuses to take a sandbox's failure for
the agent's: a fresh sandbox that cannot be made has decided nothing.
"""

import hmac
import json
import secrets
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polar_trl.errors import FileTooLargeError, GradeError
from polar_trl.grade.attempts import Protection, add_total, count_planted, read_fix
from polar_trl.grade.base import Grade
from polar_trl.grade.canary import Canary
from polar_trl.grade.changes import Change, apply_changes, find_changes
from polar_trl.grade.fresh import FreshSandboxes
from polar_trl.sandbox.base import Sandbox, SandboxBackend
from polar_trl.sandbox.run_tests import NO_PYTEST, RUNNER, sign
from polar_trl.types import Task, TestSpec

MAX_REPORT_BYTES = 64 << 20
NOT_STARTED = (126, 127)
"""Exit codes of a shell that cannot start the program it was told to."""
# the same as where tasks are built: some tests depend on zone, locale and width
ENV = {"PYTHONHASHSEED": "0", "TZ": "UTC", "LC_ALL": "C.UTF-8", "COLUMNS": "80"}


class TestsGrader:
    """Grades tasks that have `tests` with the runner "pytest".

    Args:
        backend: Makes the fresh sandboxes.
        partial: Reward the share of the failing tests that pass, as long as none of the others broke.
    """

    __test__ = False  # its name makes pytest look for tests in it

    def __init__(self, backend: SandboxBackend, *, partial: bool = False) -> None:
        self._fresh = FreshSandboxes(backend)
        self._partial = partial

    def order(self, task: Task) -> None:
        """See `FreshSandboxGrader`."""
        self._fresh.order(task)

    def withdraw(self, task: Task) -> None:
        """See `FreshSandboxGrader`."""
        self._fresh.withdraw(task)

    def grade(self, task: Task, sandbox: Sandbox, *, timeout_s: float) -> Grade:
        """The reward, and under which names the agent's attempts on its judge are counted. Raises `GradeError`."""
        if task.tests is None:
            raise GradeError(f"task {task.id} has no tests")
        try:
            changes = find_changes(sandbox.base_tree, sandbox.host_workdir)
        except FileTooLargeError:
            self._fresh.withdraw(task)
            return Grade(reward=0.0, counters={"changes_too_large": 1})
        planted = count_planted(changes, sandbox.host_home)
        return self.grade_changes(task, task.tests, changes, planted=planted, timeout_s=timeout_s)

    def grade_changes(
        self,
        task: Task,
        spec: TestSpec,
        changes: Mapping[str, Change],
        *,
        planted: Mapping[str, int] | None = None,
        timeout_s: float,
    ) -> Grade:
        """The same for changes that are known."""
        kept, counts = Protection(spec, read_fix(task)).sort(drop_given(task, changes))
        counts.update(planted or {})
        canary = Canary((*spec.fail_to_pass, *spec.pass_to_pass))
        with self._fresh.open(task) as fresh:
            apply_changes(kept, fresh.host_workdir)
            for path, text in task.files.items():
                if path not in changes or path not in kept:
                    fresh.put(path, text.encode())
            lay_hidden_tests(spec, fresh)
            fresh.put(canary.path, canary.text.encode())
            outcomes, why = self._run(task, spec, fresh, canary, timeout_s)
        counts[why or canary.find_fault(outcomes, passed="passed", failed="failed") or ""] += 1
        del counts[""]
        reward = 0.0
        if not {"test_runs_died", "test_runs_timed_out", "canaries_broken"} & counts.keys():
            reward = score(spec, {name for name, outcome in outcomes.items() if outcome == "passed"}, self._partial)
        return Grade(reward=reward, counters=add_total(counts))
