"""mini-swe-agent as PyPI ships it, with replies without a usable call, and refused, late or too long ones."""

from dataclasses import replace

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from sessions import BusyEngine, answer_in_order, call_tool, change_env, overhear, results, run_session, say
from three_turns import GRADER, build_replies, count_drifted

from polar_trl.engine.scripted import ScriptedEngine
from polar_trl.harness.mini_swe_agent import MiniSWEAgentHarness
from polar_trl.sandbox.local import LocalSandboxBackend
from polar_trl.tools.doctor import run_scripted_session
from polar_trl.types import Endpoint, Message, Task

HARNESS = MiniSWEAgentHarness()
ENDPOINT = Endpoint(origin="http://127.0.0.1:9", api_key="k y", model='it\'s "m"')
WRITE = [HARNESS.build_shell_call(f"printf {word} > {word}.txt") for word in ("one", "two", "three")]
LAST_TEXT, LAST_CALLS = HARNESS.build_last_message("All done.")
END = say(LAST_TEXT, *LAST_CALLS)


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    HARNESS.install()


def in_order(*replies: Message, max_model_len: int = 1 << 20) -> ScriptedEngine:
    """Script replies in order, for sessions whose history loses some."""
    return ScriptedEngine(answer_in_order(replies), max_model_len=max_model_len)


def test_a_reply_without_a_usable_call_is_taken_out_of_the_history(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = overhear(monkeypatch)
    engine = in_order(
        say("I think first."),
        say("", WRITE[0]),
        say("", call_tool("bash", '{"command": "pri')),
        say("", call_tool("no_such_tool", '{"a": 1}')),
        say("", *WRITE[1:]),
        END,
    )
    finished = run_session(HARNESS, engine, grader=GRADER)
    rollout = finished.rollout
    assert (rollout.reward, rollout.stop_reason, rollout.counters) == (1.0, "completed", {"tool_calls_malformed": 1})
    # none of the three is a copy that was superseded: each is a trajectory's last reply, and the next prompt goes on
    # from the call before it
    assert [call.parent for call in rollout.calls] == [None, None, 1, 1, 1, 4]
    indices = [trajectory.call_indices for trajectory in finished.reconstruction.trajectories]
    assert indices == [(0,), (1, 2), (3,), (4, 5)]
    assert finished.reconstruction.dropped == {}
    assert [message.role[0] for message in heard[-1].messages] == [*"suuatuuatt"]


def test_repeated_replies_without_a_call_end_the_session() -> None:
    finished = run_session(HARNESS, [say("I think.")])
    assert (len(finished.rollout.calls), finished.rollout.stop_reason) == (3, "agent_failed")
    assert len(finished.reconstruction.trajectories) == 3


def test_a_conversation_that_outgrows_the_window_ends_the_session_and_is_graded() -> None:
    write = HARNESS.build_shell_call("printf one > one.txt; seq 1 2000")
    finished = run_session(
        HARNESS, in_order(say("", write), END, max_model_len=9000), grader='test "$(cat one.txt)" = one'
    )
    rollout = finished.rollout
    assert (rollout.stop_reason, rollout.reward, len(rollout.calls)) == ("agent_failed", 1.0, 1)
    assert rollout.counters == {"context_overflows": 1}


def test_a_busy_engine_is_asked_again() -> None:
    finished = run_session(HARNESS, BusyEngine([say("one", WRITE[0]), say("two", WRITE[1]), END]))
    assert (finished.rollout.stop_reason, finished.rollout.counters) == ("completed", {"calls_sent_back": 1})
    assert (len(finished.rollout.calls), len(finished.reconstruction.trajectories)) == (3, 1)


def test_a_session_that_was_closed_lets_it_end() -> None:
    rollout = run_session(HARNESS, [END], change=change_env(OPENAI_API_KEY="none")).rollout
    assert (rollout.stop_reason, rollout.calls) == ("no_calls", ())
    assert rollout.error is not None and "exit code 1" in rollout.error


def test_a_work_folder_changes_nothing_of_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = overhear(monkeypatch)
    # longer than an argument or a variable of the environment may be
    instruction = "Say \"$HOME\", '`id`' and {{ task }}.\n\n\t\\U0001f600 😀 \x85\n" + "x" * 300_000
    files = {
        "mini.yaml": "agent: 1",
        "litellm.py": "raise SystemExit(9)",
        ".env": "OPENAI_API_BASE=http://127.0.0.1:1\nMSWEA_COST_TRACKING=default",
    }
    task = Task(id="t", instruction=instruction, files=files, env={"PYTHONPATH": ".", "PYTHONHOME": "/nowhere"})
    finished = run_scripted_session(
        HARNESS, build_replies(HARNESS), replace(task, grader=GRADER), backend=LocalSandboxBackend()
    )
    assert (finished.rollout.reward, finished.rollout.stop_reason) == (1.0, "completed")
    assert (count_drifted(finished.rollout), len(finished.reconstruction.trajectories)) == (0, 1)
    assert instruction in heard[0].messages[1].text
    echoed = [message for message in heard[-1].messages if message.role == "assistant"]
    assert [message.reasoning for message in echoed] == ["Three files.", "Now the others."]
    assert [len(message.tool_calls) for message in echoed] == [1, 2]


def test_limits_of_steps_and_of_commands() -> None:
    harness = MiniSWEAgentHarness(step_limit=1, command_timeout_s=1)
    finished = run_session(harness, [say("", HARNESS.build_shell_call("sleep 30")), END])
    assert (len(finished.rollout.calls), finished.rollout.stop_reason) == (1, "agent_failed")
    harness = MiniSWEAgentHarness(step_limit=2, command_timeout_s=1)
    rollout = run_session(harness, [say("", HARNESS.build_shell_call("sleep 30")), END]).rollout
    assert rollout.stop_reason == "completed"
    assert "timed out after 1 seconds" in results(rollout)[0]


@given(st.text())
def test_any_instruction_is_one_line_of_its_settings(instruction: str) -> None:
    launch = HARNESS.build_launch(Task(id="t", instruction=instruction), ENDPOINT)
    text = launch.files[".polar/mini.yaml"]
    assert yaml.safe_load(text)["run"]["task"] == instruction
    assert text.count("\n") == 1


def test_the_settings_name_the_policy() -> None:
    launch = HARNESS.build_launch(Task(id="t", instruction="x"), ENDPOINT)
    assert (launch.env["OPENAI_API_BASE"], launch.env["OPENAI_API_KEY"]) == ("http://127.0.0.1:9/v1", "k y")
    model = yaml.safe_load(launch.files[".polar/mini.yaml"])["model"]
    assert model["model_name"] == 'openai/it\'s "m"'
    assert model["model_kwargs"]["timeout"] > 3600
