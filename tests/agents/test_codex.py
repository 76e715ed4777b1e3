"""Codex as npm ships it: sub-agents, compaction, wrong calls, shorter prompts, and a key that is not known."""

import json
import re
import tomllib
from dataclasses import replace
from typing import Any

import pytest
from sessions import (
    SUMMARY,
    BusyEngine,
    Change,
    answer_in_order,
    call_tool,
    change_env,
    purposes,
    results,
    run_session,
    say,
)
from three_turns import GRADER, build_replies, count_drifted

from polar_trl.engine.scripted import ScriptedEngine
from polar_trl.harness.base import Launch
from polar_trl.harness.codex import CodexHarness
from polar_trl.tools.doctor import MAX_MODEL_LEN, answer_by_turn
from polar_trl.types import TokenIds
from polar_trl.wire.openai_responses_request import COMPACTION_PROMPT, SUMMARY_LEAD

HARNESS = CodexHarness()
SHORT = CodexHarness(system_prompt="You have a shell.")
WRITE = HARNESS.build_shell_call("printf one > one.txt")
PRINT = [HARNESS.build_shell_call(f"head -c 9000 /dev/zero | tr '\\0' {letter}") for letter in "abcdefghi"]
LONG_WORK = [*(say("More.", tool_call) for tool_call in PRINT), say("All is done.")]


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    HARNESS.install()


@pytest.mark.parametrize(
    ("options", "tools"),
    [
        ({"tools": ["exec_command"]}, set()),
        ({"tools": ["exec_command", "view_image", "goals"]}, {"view_image", "get_goal", "create_goal", "update_goal"}),
        (
            {"system_prompt": "You have a shell.", "tools": ["exec_command", "apply_patch", "request_user_input"]},
            {"apply_patch", "request_user_input"},
        ),
    ],
)
def test_three_turns_with_some_of_its_tools(options: dict[str, Any], tools: set[str]) -> None:
    harness = CodexHarness(**options)
    finished = run_session(harness, build_replies(harness), grader=GRADER)
    rollout = finished.rollout
    assert (rollout.error, rollout.reward, rollout.stop_reason) == (None, 1.0, "completed")
    assert (count_drifted(rollout), len(finished.reconstruction.trajectories)) == (0, 1)
    assert {tool.name for tool in rollout.calls[0].request.tools} == {"exec_command", "write_stdin"} | tools


def test_a_freeform_patch_is_applied() -> None:
    patch = "*** Begin Patch\n*** Add File: new.txt\n+hello\n*** End Patch"
    replies = [say("", call_tool("apply_patch", json.dumps({"input": patch}))), say("The file is there.")]
    finished = run_session(SHORT, replies, grader='test "$(cat new.txt)" = hello')
    rollout = finished.rollout
    assert [tool.kind for tool in rollout.calls[0].request.tools if tool.name == "apply_patch"] == ["freeform"]
    assert (rollout.reward, count_drifted(rollout), len(finished.reconstruction.trajectories)) == (1.0, 0, 1)


def test_wrong_tool_calls_are_answered_and_the_session_goes_on() -> None:
    wrong = [
        call_tool("exec_command", '{"cmd": "pri'),
        call_tool("no_such_tool", '{"a": 1}'),
        call_tool("exec_command", '{"command": "ls"}'),
    ]
    finished = run_session(HARNESS, [*(say("", tool_call) for tool_call in wrong), say("I give up.")])
    rollout = finished.rollout
    assert (rollout.stop_reason, len(rollout.calls), count_drifted(rollout)) == ("completed", 4, 0)
    assert len(finished.reconstruction.trajectories) == 1
    assert len(results(rollout)) == 3


def test_patches_that_are_no_input_are_answered_and_come_back_as_they_were() -> None:
    wrong = ['{"patch": "x"}', "*** Begin Patch", '{"input": 3}', ""]
    replies = [say("", call_tool("apply_patch", arguments)) for arguments in wrong]
    finished = run_session(SHORT, [*replies, say("I give up.")])
    rollout = finished.rollout
    assert (rollout.stop_reason, len(rollout.calls), count_drifted(rollout)) == ("completed", 5, 0)
    assert len(finished.reconstruction.trajectories) == 1
    assert all("invalid patch" in result for result in results(rollout))


def test_a_text_model_is_shown_no_image() -> None:
    look = [
        say("", HARNESS.build_shell_call("printf x > a.png")),
        say("", call_tool("view_image", '{"path": "a.png"}')),
    ]
    rollout = run_session(SHORT, [*look, say("I see nothing.")]).rollout
    assert (rollout.stop_reason, count_drifted(rollout)) == ("completed", 0)
    assert "do not support image inputs" in results(rollout)[-1]


def test_a_sub_agents_calls_are_the_policys_own() -> None:
    finished = run_session(
        HARNESS, ScriptedEngine(_delegate, max_model_len=MAX_MODEL_LEN), grader='test "$(cat sub.txt)" = sub'
    )
    rollout = finished.rollout
    assert (rollout.stop_reason, rollout.reward, purposes(rollout)) == ("completed", 1.0, "ppppp")
    assert sorted(len(trajectory.call_indices) for trajectory in finished.reconstruction.trajectories) == [2, 3]
    assert "multi_agent_v1__spawn_agent" in [call.name for call in rollout.calls[0].message.tool_calls]


def _delegate(prompt_ids: TokenIds) -> TokenIds:
    """Script a model that has a sub-agent write sub.txt, and that sub-agent."""
    text = bytes(token_id for token_id in prompt_ids if token_id < 256).decode()
    work = [say("", HARNESS.build_shell_call("printf sub > sub.txt")), say("It is written.")]
    spawned = re.findall(r'"agent_id":"([^"]+)"', text)
    lead = [
        say("", call_tool("multi_agent_v1__spawn_agent", '{"message": "SUBTASK: write sub.txt"}')),
        say("", call_tool("multi_agent_v1__wait_agent", json.dumps({"targets": spawned}))),
        say("All is done."),
    ]
    # the instruction of the session comes first, that of the sub-agent only where it is one
    return answer_by_turn(lead if "Do the work." in text else work)(prompt_ids)


def test_it_compacts_before_the_window_is_full() -> None:
    engine = ScriptedEngine(answer_in_order(LONG_WORK), max_model_len=80_000)
    finished = run_session(HARNESS, engine, max_tokens=2000)
    rollout = finished.rollout
    assert (rollout.stop_reason, rollout.counters) == ("completed", {})
    assert purposes(rollout).count("a") >= 1
    assert len(finished.reconstruction.trajectories) == 1 + purposes(rollout).count("a")
    after = rollout.calls[purposes(rollout).index("a") + 1].request
    assert after.messages[-1].role == "user" and SUMMARY in after.messages[-1].text


def test_a_compaction_of_openais_own_kind() -> None:
    engine = ScriptedEngine(answer_in_order(LONG_WORK), max_model_len=80_000)
    rollout = run_session(HARNESS, engine, max_tokens=2000, change=_pose_as_openai).rollout
    assert (rollout.stop_reason, rollout.counters) == ("completed", {})
    place = purposes(rollout).index("a")
    assert rollout.calls[place].request.messages[-1].text == COMPACTION_PROMPT
    assert SUMMARY_LEAD + SUMMARY in [message.text for message in rollout.calls[place + 1].request.messages]


def _pose_as_openai(launch: Launch) -> Launch:
    """Configure Codex as for OpenAI at another address: it tries a WebSocket first."""
    path = ".codex/config.toml"
    config = tomllib.loads(launch.files[path])
    address = config["model_providers"]["polar"]["base_url"]
    text = launch.files[path].replace('model_provider = "polar"', f'openai_base_url = "{address}"')
    key = launch.env["POLAR_API_KEY"]
    return replace(launch, files={**launch.files, path: text}, env={**launch.env, "CODEX_API_KEY": key})


def test_an_overflow_ends_the_session_at_once() -> None:
    engine = ScriptedEngine(answer_by_turn([say("", WRITE), say("end")]), max_model_len=20_000)
    rollout = run_session(HARNESS, engine).rollout
    assert (rollout.counters, rollout.stop_reason, rollout.calls) == ({"context_overflows": 1}, "no_calls", ())


def test_a_ping_restarts_its_timer_for_silent_streams() -> None:
    engine = ScriptedEngine(answer_by_turn([say("", WRITE), say("end")]), delay_s=2.5, max_model_len=MAX_MODEL_LEN)
    finished = run_session(HARNESS, engine, ping_interval_s=0.2, change=_set_idle_timeout(1000))
    assert (finished.rollout.stop_reason, finished.rollout.counters, engine.num_aborted) == ("completed", {}, 0)


def test_without_pings_a_late_answer_is_given_up() -> None:
    engine = ScriptedEngine(answer_by_turn([say("end")]), delay_s=2.5, max_model_len=MAX_MODEL_LEN)
    rollout = run_session(HARNESS, engine, ping_interval_s=60.0, change=_set_idle_timeout(1000)).rollout
    assert (rollout.stop_reason, rollout.calls) == ("no_calls", ())


def _set_idle_timeout(milliseconds: int) -> Change:
    def change(launch: Launch) -> Launch:
        path = ".codex/config.toml"
        text = re.sub(r"(?<=stream_idle_timeout_ms = )\d+", str(milliseconds), launch.files[path])
        assert text != launch.files[path]
        return replace(launch, files={**launch.files, path: text})

    return change


@pytest.mark.parametrize("busy_after_s", [0.0, 0.3])
def test_a_busy_engine_is_asked_again(busy_after_s: float) -> None:
    engine = BusyEngine([say("", WRITE), say("end")], busy_after_s)
    finished = run_session(HARNESS, engine)
    assert (finished.rollout.stop_reason, finished.rollout.counters) == ("completed", {"calls_sent_back": 1})
    assert engine.num_asked == 3
    assert len(finished.reconstruction.trajectories) == 1


def test_a_key_that_is_not_known_ends_it() -> None:
    rollout = run_session(HARNESS, [say("end")], change=change_env(POLAR_API_KEY="sk-closed")).rollout
    assert (rollout.calls, rollout.stop_reason) == ((), "no_calls")
