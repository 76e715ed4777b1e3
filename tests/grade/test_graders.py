"""Graders: a reward, or an error that says why there is none. Never a zero that nobody decided."""

import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import kill_when_up

from polar_trl.errors import GradeError
from polar_trl.grade.base import Grade, read_call_rewards
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


def test_a_function_that_wants_the_calls_gets_them(sandbox: Sandbox) -> None:
    def grade_calls(function: Callable[..., Any]) -> Grade:
        calls: Any = ("first", "second")
        return FunctionGrader(function).grade_session(TASK, sandbox, calls, timeout_s=10)

    assert grade_calls(lambda task, box, calls: float(len(calls))).reward == 2
    assert grade_calls(lambda task, box, calls=(): float(len(calls))).reward == 2
    assert grade_calls(lambda task, box, strict=True: float(strict)).reward == 1
    assert grade_calls(lambda task, box, *rest, **more: float(len(rest))).reward == 0
    given = Grade(reward=0.5, call_rewards={1: -1.0})
    assert grade_calls(lambda task, box, calls: given) == given
    assert FunctionGrader(lambda task, box, calls: 1.0).takes_calls and not CommandGrader("true").takes_calls


def test_rewards_of_calls_are_numbers_of_calls() -> None:
    assert read_call_rewards({np.int64(1): np.float32(0.5), 0: True}, 2) == {1: 0.5, 0: 1.0}
    for rewards, message in (
        ({2: 1.0}, "the grader gave a reward to call 2 of a session with 2 calls"),
        ({-1: 1.0}, "to call -1"),
        ({"0": 1.0}, "to call '0'"),
        ({0: math.nan}, "the grader gave call 0 the reward nan, which is no finite number"),
        ({0: "1"}, "the reward '1'"),
        ({0: None}, "the reward None"),
    ):
        with pytest.raises(GradeError, match=message):
            read_call_rewards(rewards, 2)
