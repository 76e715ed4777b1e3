"""The grader of each task, and tasks that are refused before a run starts."""

from pathlib import Path

import pytest

from polar_trl.errors import ConfigError, GradeError, TaskError
from polar_trl.grade.by_task import GraderByTask, check_gradable, find_kind
from polar_trl.sandbox.local import LocalSandboxBackend
from polar_trl.setup.run_setup import RunArguments, build_grader
from polar_trl.types import Task, TestSpec

SPEC = TestSpec(fail_to_pass=("t::a",))
PLAIN = Task(id="t", instruction="x")
HARBOR = Task(id="h", instruction="x", metadata={"harbor": {"folder": "/nowhere"}}, writable_root=True)


def test_who_grades() -> None:
    assert find_kind(Task(id="t", instruction="x", grader="true", tests=SPEC)) == "command"
    assert find_kind(Task(id="t", instruction="x", tests=SPEC, metadata=HARBOR.metadata)) == "pytest"
    spec = TestSpec(fail_to_pass=("t::a",), runner="swebench")
    assert find_kind(Task(id="t", instruction="x", tests=spec)) == "swebench"
    assert find_kind(HARBOR, has_command=True) == "harbor"
    assert (find_kind(PLAIN), find_kind(PLAIN, has_command=True)) == (None, "command")


def test_a_task_that_nobody_can_grade_is_named(tmp_path: Path) -> None:
    backend = LocalSandboxBackend(tmp_path)
    check_gradable([PLAIN], backend, has_command=True)
    for task, message in (
        (PLAIN, "task 't' cannot be graded: it has no `grader` command"),
        (HARBOR, "task 'h' cannot be graded here.*docker"),
        (Task(id="u", instruction="x", tests=TestSpec(fail_to_pass=("a",), runner="go")), "task 'u'.*not 'go'"),
        (Task(id="s", instruction="x", tests=TestSpec(fail_to_pass=("a",), runner="swebench")), "'s'.*swebench"),
    ):
        good = Task(id="good", instruction="x", grader="true")
        with pytest.raises(TaskError, match=message):
            check_gradable([good, task], backend)


def test_commands_are_run_in_the_agents_sandbox(tmp_path: Path) -> None:
    backend = LocalSandboxBackend(tmp_path)
    grader = GraderByTask(backend, command="echo 0.5", command_reward="stdout")
    sandbox = backend.create(PLAIN, "s")
    try:
        assert grader.grade(PLAIN, sandbox, timeout_s=20).reward == 0.5
        with pytest.raises(GradeError, match="task t: it has no"):
            GraderByTask(backend).grade(PLAIN, sandbox, timeout_s=20)
    finally:
        sandbox.destroy()


def test_settings_of_tests_without_tests_are_refused(tmp_path: Path) -> None:
    backend = LocalSandboxBackend(tmp_path)
    for name in ("partial_credit", "zero_suspected_cheats"):
        with pytest.raises(ConfigError, match=f"{name} is for tasks with tests"):
            build_grader(RunArguments(tasks="x", **{name: True}), [PLAIN], backend)
    assert build_grader(RunArguments(tasks="x"), [PLAIN], backend) is None
