"""Sessions through the stages, with the real proxy, sandbox and shell harness, and a scripted engine."""

import json
import math
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from records import read_session
from short_sessions import CALL, RENDERER, REPLY, jobs, runner

from polar_trl.cli import main
from polar_trl.errors import EngineError, LawError, SandboxError
from polar_trl.grade.base import Grade, Grader
from polar_trl.grade.function import FunctionGrader
from polar_trl.harness.shell import ShellHarness
from polar_trl.proxy import Proxy
from polar_trl.sandbox.base import Sandbox
from polar_trl.types import ChatRequest, Completion, Message, Purpose, Task, ToolCall


def test_results_come_in_order_and_are_on_record(tmp_path: Path) -> None:
    with runner(tmp_path) as rollouts:
        finished = rollouts.run(jobs(tmp_path, 3))
    assert [f.rollout.id for f in finished] == ["r0", "r1", "r2"]
    for number, result in enumerate(finished):
        assert result.rollout.reward == 1.0
        assert len(result.reconstruction.trajectories) == 1
        assert read_session(tmp_path / f"r{number}.jsonl") == result.rollout


def test_looking_for_the_fix_finds_nothing_and_is_counted(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "m.py").write_text("def f(): return 1\n")
    look = ToolCall(id="1", name="bash", arguments=json.dumps({"command": "git log --all --oneline"}))
    reply = RENDERER.spell(Message(role="assistant", tool_calls=(look,)))

    def grade(task: Task, box: Sandbox) -> float:
        found = box.run("git log --all --format=%s", env={}, timeout_s=20).stdout
        return float(found != "start\n")

    with runner(tmp_path, grade, reply=lambda prompt: reply) as rollouts:
        (finished,) = rollouts.run(jobs(tmp_path, 1, workspace=str(tree)))
    assert finished.rollout.reward == 0.0
    assert finished.rollout.counters["peeks"] == finished.rollout.counters["rollouts_that_peeked"] == 1


class AsideHarness(ShellHarness):
    """Takes all of its agent's calls for side business."""

    def classify(self, request: ChatRequest) -> Purpose:
        return "auxiliary"


@pytest.mark.parametrize(("train_auxiliary", "num_trained"), [(False, 0), (True, len(REPLY))])
def test_auxiliary_calls_are_trained_only_where_the_run_says_so(
    tmp_path: Path, train_auxiliary: bool, num_trained: int
) -> None:
    with runner(tmp_path, harness=AsideHarness(CALL), train_auxiliary=train_auxiliary) as rollouts:
        (result,) = rollouts.run(jobs(tmp_path, 1))
    assert [call.purpose for call in result.rollout.calls] == ["auxiliary"]
    assert sum(sum(row.trainable) for row in result.reconstruction.trajectories) == num_trained
    assert result.reconstruction.dropped.get("auxiliary", 0) == len(REPLY) - num_trained
    assert read_session(tmp_path / "r0.jsonl") == result.rollout
    assert main(["replay", str(tmp_path / "r0.jsonl")]) == 0


def test_a_slow_grader_holds_no_agents_place(tmp_path: Path) -> None:
    second_agent_called = threading.Event()
    seen: list[int] = []

    def reply(prompt: tuple[int, ...]) -> tuple[int, ...]:
        seen.append(1)
        if len(seen) == 2:
            second_agent_called.set()
        return REPLY

    def grade(task: Task, box: Any) -> float:
        # with one place for agents, this returns only if grading has let go of it
        return 1.0 if second_agent_called.wait(timeout=30) else 0.0

    with runner(tmp_path, grade, reply=reply, max_agents=1, max_grading=2) as rollouts:
        finished = rollouts.run(jobs(tmp_path, 2))
    assert [f.rollout.reward for f in finished] == [1.0, 1.0]


def test_a_fault_of_the_engine_is_no_zero(tmp_path: Path) -> None:
    def reply(prompt: tuple[int, ...]) -> tuple[int, ...]:
        raise EngineError("it broke")

    with runner(tmp_path, reply=reply) as rollouts:
        (result,) = rollouts.run(jobs(tmp_path, 1))
    assert result.rollout.reward is None
    assert "failed on our side (1, the last by EngineError: it broke)" in result.rollout.error
    assert result.rollout.error_kind == "model_calls_failed"
    assert read_session(tmp_path / "r0.jsonl") == result.rollout


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (math.nan, "the grading function returned nan"),
        (math.inf, "the grading function returned inf"),
        (Grade(reward=-math.inf), "the grader gave -inf"),
        (Grade(reward=1e39), "the grader gave 1e"),
    ],
)
def test_a_reward_that_is_no_number_is_none(tmp_path: Path, given: Any, reason: str) -> None:
    class Direct(Grader):
        """A grader of a user's own, which nothing has looked at yet."""

        def grade(self, task: Task, sandbox: Any, *, timeout_s: float) -> Grade:
            return given

    grader = Direct() if isinstance(given, Grade) else FunctionGrader(lambda task, box: given)
    with runner(tmp_path) as rollouts:
        rollouts._context = replace(rollouts._context, grader=grader)
        (result,) = rollouts.run(jobs(tmp_path, 1))
    assert result.rollout.reward is None and reason in str(result.rollout.error)
    assert (result.rollout.counters["rewards_not_finite"], result.rollout.error_kind) == (1, "grader_failed")


@pytest.mark.parametrize("logprob", [math.nan, math.inf, -math.inf, 0.25])
def test_an_engines_log_probability_that_is_none_is_its_failure(tmp_path: Path, logprob: float) -> None:
    bad = Completion(token_ids=REPLY, logprobs=(-0.5,) * (len(REPLY) - 1) + (logprob,), finish_reason="stop")
    with runner(tmp_path, reply=lambda prompt: bad) as rollouts:
        (result,) = rollouts.run(jobs(tmp_path, 1))
    assert result.rollout.reward is None and result.rollout.calls == ()
    assert f"log-probability {logprob} for sampled token {len(REPLY) - 1}" in str(result.rollout.error)
    assert result.rollout.counters["engine_errors"] == 1


def test_an_agent_that_does_not_exist(tmp_path: Path) -> None:
    with runner(tmp_path, harness=ShellHarness("no-such-agent {instruction}")) as rollouts:
        (result,) = rollouts.run(jobs(tmp_path, 1))
    assert (result.rollout.stop_reason, result.rollout.error_kind) == ("no_calls", "no_calls")
    assert result.rollout.reward is None
    assert result.rollout.error.startswith("the agent ended with exit code 127 before its first call: ")
    assert result.rollout.error.endswith("not found")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("exit 3; : {instruction}", "the agent ended with exit code 3 before its first call, and printed nothing"),
        ("true {instruction}", "the agent got no answer from the model (exit code 0; it printed nothing)"),
        (
            'curl -s -d "{" -H "Authorization: Bearer $OPENAI_API_KEY" $OPENAI_BASE_URL/chat/completions; exit 3; '
            ": {instruction}",
            "a request of the agent was refused",
        ),
    ],
)
def test_an_agent_without_an_answer_is_not_always_one_that_failed_by_itself(
    tmp_path: Path, command: str, words: str
) -> None:
    with runner(tmp_path, harness=ShellHarness(command)) as rollouts:
        (result,) = rollouts.run(jobs(tmp_path, 1))
    assert words in result.rollout.error


def test_a_sandbox_that_cannot_be_made(tmp_path: Path) -> None:
    with runner(tmp_path) as rollouts:
        (result,) = rollouts.run(jobs(tmp_path, 1, image="python:3.12"))
    assert (result.rollout.stop_reason, result.rollout.error_kind) == ("prepare_failed", "prepare_failed")
    assert "no images" in result.rollout.error


def test_a_timeout_keeps_what_was_captured(tmp_path: Path) -> None:
    with runner(tmp_path, harness=ShellHarness(f"{CALL}; sleep 60")) as rollouts:
        (result,) = rollouts.run(jobs(tmp_path, 1, agent_timeout_s=4.0))
    assert result.rollout.stop_reason == "agent_timeout"
    assert result.rollout.reward == 1.0
    assert sum(result.reconstruction.trajectories[0].trainable) == len(REPLY)


def test_a_broken_law_stops_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from polar_trl.rollout import session_run

    def broken(*_: Any) -> None:
        raise LawError("r0: broken for this test")

    monkeypatch.setattr(session_run, "check_laws", broken)
    batch = jobs(tmp_path, 1, env={"NAP_S": "0"}) + jobs(tmp_path, 4, env={"NAP_S": "600"})[1:]
    with (
        runner(tmp_path, harness=ShellHarness(f"{CALL}; sleep $NAP_S")) as rollouts,
        pytest.raises(LawError, match="broken for"),
    ):
        # returns long before the other agents would have ended by themselves
        rollouts.run(batch)
    assert "the run was stopped" not in caplog.text  # of each session that was cancelled


def test_a_law_that_the_proxy_found_broken_stops_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    close = Proxy.close_session

    def close_and_raise(proxy: Proxy, api_key: str) -> None:
        close(proxy, api_key)
        raise LawError("r0: broken in the proxy")

    with runner(tmp_path) as rollouts, pytest.raises(LawError, match="broken in the proxy"):
        monkeypatch.setattr(Proxy, "close_session", close_and_raise)
        rollouts.run(jobs(tmp_path, 2))
    monkeypatch.undo()


def test_a_sandbox_that_cannot_be_removed_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from polar_trl.sandbox.local import LocalSandbox

    destroy = LocalSandbox.destroy

    def destroy_and_complain(sandbox: LocalSandbox) -> None:
        destroy(sandbox)
        raise SandboxError("cannot remove it")

    monkeypatch.setattr(LocalSandbox, "destroy", destroy_and_complain)
    with runner(tmp_path) as rollouts:
        (result,) = rollouts.run(jobs(tmp_path, 1))
    assert result.rollout.reward == 1.0
    assert result.rollout.counters["sandboxes_left_behind"] == 1
