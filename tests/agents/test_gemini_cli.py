"""Gemini CLI as npm ships it, with answers that are late, empty, cut, wrong, refused or too long."""

import pytest
from sessions import BusyEngine, call_tool, results, run_session, say
from three_turns import GRADER, build_replies, count_drifted

from polar_trl.engine.scripted import ScriptedEngine
from polar_trl.harness.gemini_cli import GeminiCLIHarness
from polar_trl.tools.doctor import MAX_MODEL_LEN, answer_by_turn
from polar_trl.types import Endpoint, Task

HARNESS = GeminiCLIHarness()
WRITE = HARNESS.build_shell_call("printf one > one.txt")


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    HARNESS.install()


def test_pings_while_it_waits_leave_no_trace() -> None:
    engine = ScriptedEngine(answer_by_turn(build_replies(HARNESS)), delay_s=0.6, max_model_len=MAX_MODEL_LEN)
    finished = run_session(HARNESS, engine, grader=GRADER, ping_interval_s=0.05)
    rollout = finished.rollout
    assert (rollout.reward, rollout.stop_reason, rollout.counters) == (1.0, "completed", {})
    assert [len(call.request.messages) for call in rollout.calls] == [2, 4, 7]
    assert count_drifted(rollout) == 0
    replies = [(m.text, len(m.tool_calls)) for m in rollout.calls[-1].request.messages if m.role == "assistant"]
    assert replies == [("The first one.", 1), ("", 2)]


def test_a_prompt_with_four_tools_is_a_quarter_as_long() -> None:
    tools = ["run_shell_command", "read_file", "replace", "glob"]
    short = GeminiCLIHarness(system_prompt="You have a shell.", tools=tools)
    finished = run_session(short, build_replies(short), grader=GRADER)
    assert (finished.rollout.reward, finished.rollout.stop_reason) == (1.0, "completed")
    assert len(finished.reconstruction.trajectories) == 1
    first = finished.rollout.calls[0]
    assert len(first.prompt_ids) < 12_000  # of bytes; the agent's own has 49 kB and 15 tools
    assert {tool.name for tool in first.request.tools} == set(tools)


def test_wrong_tool_calls_are_answered_and_the_session_goes_on() -> None:
    wrong = [
        call_tool("run_shell_command", '{"command": "pri'),
        call_tool("no_such_tool", '{"a": 1}'),
        call_tool("run_shell_command", '{"command": 3}'),
    ]
    finished = run_session(HARNESS, [*(say("", tool_call) for tool_call in wrong), say("I give up.")])
    rollout = finished.rollout
    assert (rollout.stop_reason, len(rollout.calls), count_drifted(rollout)) == ("completed", 4, 0)
    assert len(finished.reconstruction.trajectories) == 1
    malformed, unknown, mistyped = results(rollout)
    assert "must have required property 'command'" in malformed
    assert '"no_such_tool" not found' in unknown
    assert "must be string" in mistyped
    # the policy's own words are on record, not what was made of them for the wire
    assert rollout.calls[-1].request.messages[2].tool_calls[0].arguments == '{"command": "pri'


def test_a_search_is_a_side_request() -> None:
    search = call_tool("google_web_search", {"query": "weather"})
    rollout = run_session(HARNESS, [say("", search), say("Sunny.")]).rollout
    assert [call.purpose for call in rollout.calls] == ["policy", "auxiliary", "policy"]
    assert rollout.calls[1].request.unread == ("tools[0].googleSearch",)
    assert rollout.stop_reason == "completed"


def test_a_sub_agents_calls_are_the_policys_own() -> None:
    delegate = call_tool("invoke_agent", '{"agent_name": "generalist", "prompt": "look around"}')
    finished = run_session(
        HARNESS, [say("", delegate), say("", call_tool("complete_task", '{"result": {"response": "seen"}}')), say("x")]
    )
    assert {call.purpose for call in finished.rollout.calls} == {"policy"}
    assert len(finished.reconstruction.trajectories) == 2
    assert "Subagent 'generalist' finished" in results(finished.rollout)[0]


@pytest.mark.parametrize("busy_after_s", [0.0, 0.5])
def test_a_busy_engine_is_asked_again(busy_after_s: float) -> None:
    engine = BusyEngine([say("one", WRITE), say("two", WRITE), say("end")], busy_after_s)
    finished = run_session(HARNESS, engine, ping_interval_s=0.1)
    assert (finished.rollout.stop_reason, finished.rollout.counters) == ("completed", {"calls_sent_back": 1})
    assert len(finished.rollout.calls) == 3
    assert len(finished.reconstruction.trajectories) == 1


def test_an_empty_first_answer_is_asked_for_once_more() -> None:
    finished = run_session(HARNESS, [say("")])
    first, second = finished.rollout.calls
    assert second.request.messages[-1].text.startswith(first.request.messages[-1].text)
    assert second.request.messages[-1].text != first.request.messages[-1].text
    assert finished.rollout.stop_reason == "agent_failed"


def test_an_empty_answer_after_a_result_ends_the_session() -> None:
    rollout = run_session(HARNESS, [say("", WRITE), say("")]).rollout
    assert (len(rollout.calls), rollout.stop_reason) == (2, "agent_failed")


def test_a_cut_answer_ends_the_session() -> None:
    words = " ".join(f"word{number * number}" for number in range(1000))
    rollout = run_session(HARNESS, [say("", WRITE), say(words)]).rollout
    assert [call.completion.finish_reason for call in rollout.calls] == ["stop", "length"]
    assert rollout.stop_reason == "agent_failed"


def test_a_conversation_that_outgrows_the_window_ends_the_session_and_is_graded() -> None:
    # the first prompt has 49 kB, and the second the command's output
    write = HARNESS.build_shell_call("printf one > one.txt; seq 1 3000")
    engine = ScriptedEngine(answer_by_turn([say("", write), say("x")]), max_model_len=56_000)
    finished = run_session(HARNESS, engine, grader="test -f one.txt")
    rollout = finished.rollout
    assert (rollout.stop_reason, rollout.reward, len(rollout.calls)) == ("agent_failed", 1.0, 1)
    assert rollout.counters == {"context_overflows": 1}
    assert sum(finished.reconstruction.trajectories[0].trainable) == len(rollout.calls[0].completion.token_ids)


def test_the_settings_name_the_policy_and_nothing_else() -> None:
    endpoint = Endpoint(origin="http://127.0.0.1:9", api_key="k y", model="it's")
    launch = HARNESS.build_launch(Task(id="t", instruction='say "$HOME" \''), endpoint)
    assert launch.env["GOOGLE_GEMINI_BASE_URL"] == "http://127.0.0.1:9"
    assert launch.env["GEMINI_API_KEY"] == "k y"
    assert launch.files[".polar/instruction.txt"] == 'say "$HOME" \''
    assert """-m 'it'"'"'s'""" in launch.command
