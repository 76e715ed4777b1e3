"""Graders: a reward, or an error that says why there is none. Never a zero that nobody decided."""

import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import kill_when_up

from polar_trl.errors import GradeError
from polar_trl.grade.command import CommandGrader
from polar_trl.grade.function import FunctionGrader
from polar_trl.sandbox.base import Sandbox
from polar_trl.sandbox.local import LocalSandboxBackend
from polar_trl.types import Task

TASK = Task(id="t1", instruction="x", files={"f": "1"}, env={"WANT": "1"})


@pytest.fixture()
def sandbox(tmp_path: Path) -> Iterator[Sandbox]:
    sandbox = LocalSandboxBackend(tmp_path).create(TASK, "s")
    yield sandbox
    sandbox.destroy()


@pytest.mark.parametrize(
    ("grader", "reward"),
    [
        (CommandGrader('test "$(cat f)" = "$WANT"'), 1.0),
        (CommandGrader("grep -q 2 f"), 0.0),
        (CommandGrader("echo noise; echo 0.25; echo", reward="stdout"), 0.25),
        (FunctionGrader(lambda task, box: box.get("f") == b"1"), 1.0),
        (FunctionGrader(lambda task, box: 0.5), 0.5),
    ],
)
def test_rewards(sandbox: Sandbox, grader: Any, reward: float) -> None:
    assert grader.grade(TASK, sandbox, timeout_s=20).reward == reward


@pytest.mark.parametrize(
    ("grader", "message"),
    [
        (CommandGrader("no-such-command"), "exit code 127"),
        (CommandGrader("exit 2"), "exit code 2, neither 0 nor 1"),
        (CommandGrader("kill -9 $$"), "neither 0 nor 1"),
        (CommandGrader(), "task t1 names no grader"),
        (CommandGrader(" \n"), "task t1 names no grader"),
        (CommandGrader("echo 1; exit 1", reward="stdout"), "exit code 1"),
        (CommandGrader("echo ok", reward="stdout"), "is no number"),
        (CommandGrader("true", reward="stdout"), "is no number"),
        (CommandGrader("echo nan", reward="stdout"), "no reward"),
        (FunctionGrader(lambda task, box: None), "returned None"),
        (FunctionGrader(lambda task, box: math.nan), "returned nan"),
        (FunctionGrader(lambda task, box: -math.inf), "returned -inf"),
        (FunctionGrader(lambda task, box: 1e39), "returned 1e"),  # training would make it infinite
        (FunctionGrader(lambda task, box: 10**400), "returned 1000"),
        (CommandGrader("echo 1e400", reward="stdout"), "printed inf"),
        (FunctionGrader(lambda task, box: "1"), "returned '1'"),
        (FunctionGrader(lambda task, box: 1 / 0), "ZeroDivisionError"),
    ],
)
def test_no_reward(sandbox: Sandbox, grader: Any, message: str) -> None:
    with pytest.raises(GradeError, match=message):
        grader.grade(TASK, sandbox, timeout_s=20)


def test_a_slow_command_is_no_reward(sandbox: Sandbox) -> None:
    with pytest.raises(GradeError, match=r"longer than 0\.3 s"):
        CommandGrader("sleep 30").grade(TASK, sandbox, timeout_s=0.3)


def test_a_killed_command_is_no_reward(sandbox: Sandbox) -> None:
    kill_when_up(sandbox)
    with pytest.raises(GradeError, match="was killed"):
        CommandGrader("touch up; sleep 600").grade(TASK, sandbox, timeout_s=300)


def test_a_tasks_own_command_comes_first(sandbox: Sandbox) -> None:
    task = Task(id="t2", instruction="x", grader="exit 1")
    assert CommandGrader("exit 0").grade(task, sandbox, timeout_s=20).reward == 0.0


def test_a_slow_function_is_no_reward(sandbox: Sandbox) -> None:
    release = threading.Event()
    grader = FunctionGrader(lambda task, box: release.wait(60))
    with pytest.raises(GradeError, match=r"longer than 0\.3 s"):
        grader.grade(TASK, sandbox, timeout_s=0.3)
    release.set()
