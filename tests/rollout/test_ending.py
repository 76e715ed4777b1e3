"""Sessions say how they ended: the agent's exit and output, the grader's report, and the change that was made."""

from pathlib import Path

import pytest
from records import read_session
from short_sessions import CALL, jobs, runner

from polar_trl.grade.command import CommandGrader
from polar_trl.harness.shell import ShellHarness
from polar_trl.rollout.ending import Redaction, find_signal
from polar_trl.sandbox.base import ExecResult
from polar_trl.sandbox.local import LocalSandboxBackend
from polar_trl.types import AgentExit, Rollout, Task


def run_one(tmp_path: Path, command: str, grade: object = lambda task, box: 1.0, **task: object) -> Rollout:
    with runner(tmp_path, grade, harness=ShellHarness(command)) as rollouts:  # type: ignore[arg-type]
        [result] = rollouts.run(jobs(tmp_path, 1, **task))
    assert read_session(tmp_path / "r0.jsonl") == result.rollout
    return result.rollout


def test_an_agent_that_fails_after_a_call_says_how(tmp_path: Path) -> None:
    rollout = run_one(tmp_path, f"{CALL}; echo partly; my-agent --run")
    assert rollout.stop_reason == "agent_failed" and rollout.error is None
    ended = rollout.agent_exit
    assert ended is not None and ended.exit_code == 127 and ended.signal is None
    assert ended.output_tail.startswith("200\npartly\n") and "my-agent: command not found" in ended.output_tail


def test_an_agent_that_dies_names_the_signal(tmp_path: Path) -> None:
    ended = run_one(tmp_path, f"{CALL}; kill -SEGV $$").agent_exit
    assert ended is not None and (ended.exit_code, ended.signal) == (139, "SIGSEGV")


def test_an_agent_out_of_time_was_killed_and_its_output_is_kept(tmp_path: Path) -> None:
    rollout = run_one(tmp_path, f"{CALL}; echo waiting; sleep 60", agent_timeout_s=3.0)
    assert rollout.stop_reason == "agent_timeout"
    assert rollout.agent_exit == AgentExit(exit_code=None, signal="SIGKILL", output_tail="200\nwaiting")


def test_keys_are_not_on_record(tmp_path: Path) -> None:
    command = f'{CALL}; echo "key $OPENAI_API_KEY and $MY_TOKEN"; echo "$OPENAI_API_KEY" > notes; exit 3'
    rollout = run_one(tmp_path, command, env={"MY_TOKEN": "tok-123456789"})
    assert rollout.agent_exit is not None
    assert rollout.agent_exit.output_tail == "200\nkey [redacted] and [redacted]"
    assert rollout.changes == "--- /dev/null\n+++ b/notes\n@@ -0,0 +1,1 @@\n+[redacted]\n"
    assert "tok-123456789" not in (tmp_path / "r0.jsonl").read_text()


def test_the_change_is_the_agents_and_not_the_graders(tmp_path: Path) -> None:
    def grade(task: object, sandbox: object) -> float:
        sandbox.put("graded", b"x")  # type: ignore[attr-defined]
        return 0.5

    rollout = run_one(tmp_path, f"{CALL}; echo 2 > f", grade, files={"f": "1\n", "same": "s"})
    assert rollout.changes == "--- a/f\n+++ b/f\n@@ -1,1 +1,1 @@\n-1\n+2\n"


def test_an_agent_without_a_call_names_its_exit_beside_the_counts(tmp_path: Path) -> None:
    rollout = run_one(tmp_path, "echo lost; exit 4")
    assert rollout.error == "the agent ended with exit code 4 before its first call: lost"
    assert rollout.agent_exit == AgentExit(exit_code=4, output_tail="lost") and rollout.changes == ""
    assert rollout.grading is None


def test_what_a_command_that_grades_printed_is_kept(tmp_path: Path) -> None:
    report = CommandGrader("echo 'FAILED test_a.py::test_b - assert 1 == 2'; echo 1 failed >&2; exit 1")
    sandbox = LocalSandboxBackend(tmp_path / "boxes").create(Task(id="t", instruction="x"), "s")
    grade = report.grade(Task(id="t", instruction="x"), sandbox, timeout_s=20)
    sandbox.destroy()
    assert grade.reward == 0.0
    assert grade.report.output_tail == "FAILED test_a.py::test_b - assert 1 == 2\n1 failed"
    assert grade.report.failed_tests == ("test_a.py::test_b",) and grade.report.num_failed == 1


def broken_grade(task: object, sandbox: object) -> float:
    values: dict[str, float] = {}
    return values["score"]


def test_a_graders_exception_names_the_line_of_the_user(tmp_path: Path) -> None:
    rollout = run_one(tmp_path, CALL, broken_grade)
    assert rollout.error is not None and rollout.error.startswith("the grader failed: KeyError: 'score' (")
    assert 'in broken_grade, `return values["score"]`)' in rollout.error
    line = broken_grade.__code__.co_firstlineno + 2
    assert f"test_ending.py:{line} in" in rollout.error
    assert rollout.grading is not None and "KeyError: 'score'" in rollout.grading.output_tail
    assert f"line {line}, in broken_grade" in rollout.grading.output_tail
    assert "polar_trl/grade" not in rollout.grading.output_tail


@pytest.mark.parametrize(("code", "name"), [(0, None), (127, None), (139, "SIGSEGV"), (255, None), (None, "SIGKILL")])
def test_signals_by_exit_code(code: int | None, name: str | None) -> None:
    assert find_signal(code) == name


@pytest.mark.parametrize(
    ("stdout", "stderr", "tail"),
    [
        ("", "", ""),
        ("out\n", "", "out"),
        ("", "error", "error"),
        ("out", "error", "out\nerror"),
        ("o" * 50, "e" * 50, "o" * 5 + "\n" + "e" * 4),
        ("o", "e" * 50, "o\n" + "e" * 8),
        ("o" * 50, "e", "o" * 8 + "\ne"),
    ],
)
def test_the_end_of_both_streams_is_kept(stdout: str, stderr: str, tail: str) -> None:
    result = ExecResult(exit_code=0, stdout=stdout, stderr=stderr, timed_out=False, seconds=0.0)
    assert result.tail(10) == tail


def test_short_values_are_no_secrets() -> None:
    assert Redaction({"API_KEY": "none", "OTHER": "long enough"}).clean("none, long enough") == "none, long enough"
