"""Test which calls of a session are trained, and what becomes of sessions that a limit ended."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from reconstruct_sessions import build_rollout

from polar_trl.errors import ConfigError
from polar_trl.grpo.turns import find_cut_rule, load_turn_choice
from polar_trl.reconstruct import build_prefix_merged
from polar_trl.rollout.session_run import RolloutResult
from polar_trl.types import Rollout, Task

ROLLOUT = build_rollout(([0], [100, 200]), ([0, 100, 200, 0], [101, 201]), ([9], [102]))
MODULE = """
def even(rollout):
    return [call.index for call in rollout.calls if call.index % 2 == 0]

def far(rollout):
    return [7]

def named(rollout):
    return ["first"]

def nothing(rollout):
    return None

def broken(rollout):
    raise KeyError("x")

number = 3
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_turns.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)


def result_of(rollout: Rollout) -> RolloutResult:
    return RolloutResult(rollout=rollout, reconstruction=build_prefix_merged(rollout))


def test_all_the_last_or_a_functions_choice() -> None:
    assert load_turn_choice("all") is None
    last, even = load_turn_choice("last"), load_turn_choice("own_turns:even")
    assert last is not None and even is not None
    assert (set(last(result_of(ROLLOUT))), set(even(result_of(ROLLOUT)))) == ({2}, {0, 2})
    asked_beside = replace(ROLLOUT, calls=(*ROLLOUT.calls[:2], replace(ROLLOUT.calls[2], purpose="auxiliary")))
    assert set(last(result_of(asked_beside))) == {1}
    assert set(last(result_of(replace(ROLLOUT, calls=())))) == set()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("own_turns:far", "train_turns: own_turns:far chose 7 of a session with 3 calls; it must return indices"),
        ("own_turns:named", "own_turns:named chose 'first' of a session with 3 calls"),
        ("own_turns:nothing", "train_turns: own_turns:nothing raised TypeError"),
        ("own_turns:broken", "train_turns: own_turns:broken raised KeyError"),
        ("own_turns:number", "train_turns: own_turns:number is a int, and must be a function of a rollout"),
        ("own_turns:absent", "has no 'absent'"),
    ],
)
def test_a_function_that_cannot_be_used(setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose = load_turn_choice(setting)
        assert choose is not None
        choose(result_of(ROLLOUT))


def cut(**fields: Any) -> Rollout:
    return replace(ROLLOUT, **fields)


@pytest.mark.parametrize(
    ("rollout", "is_cut"),
    [
        (ROLLOUT, False),
        (cut(stop_reason="agent_failed"), False),
        (cut(stop_reason="agent_timeout"), True),
        (cut(stop_reason="straggler", reward=1.0), True),
        (cut(stop_reason="limit_exceeded"), True),
        (cut(counters={"budget_messages": 1}), True),
    ],
)
def test_what_counts_as_cut(rollout: Rollout, is_cut: bool) -> None:
    plain = {rollout.task_id: Task(id=rollout.task_id, instruction="x")}
    own = {rollout.task_id: Task(id=rollout.task_id, instruction="x", cut_sessions="leave_out")}
    assert find_cut_rule(rollout, plain, "mask") == ("mask" if is_cut else "train")
    assert find_cut_rule(rollout, own, "mask") == ("leave_out" if is_cut else "train")


def test_an_answer_that_is_cut_ends_a_session_as_well() -> None:
    call = ROLLOUT.calls[-1]
    ended = replace(call, completion=replace(call.completion, finish_reason="length"))
    rollout = cut(calls=(*ROLLOUT.calls[:-1], ended))
    tasks = {rollout.task_id: Task(id=rollout.task_id, instruction="x")}
    assert find_cut_rule(rollout, tasks, "mask") == "mask"
