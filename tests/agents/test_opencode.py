"""OpenCode as npm ships it: through each of its four APIs, and with answers that are wrong, cut, empty, late or too
long."""

import json
from dataclasses import replace

import pytest
from sessions import (
    BusyEngine,
    answer_in_order,
    call_tool,
    overhear,
    purposes,
    results,
    run_session,
    say,
)
from three_turns import GRADER, build_replies, count_drifted

from polar_trl.engine.scripted import ScriptedEngine
from polar_trl.errors import ConfigError
from polar_trl.harness.base import Launch
from polar_trl.harness.opencode import OpenCodeHarness
from polar_trl.sandbox.local import LocalSandboxBackend
from polar_trl.tools.doctor import run_scripted_session
from polar_trl.types import Endpoint, Task

HARNESS = OpenCodeHarness()
OPTIONS = {"system_prompt": "You have a shell.", "tools": ["bash", "read", "edit", "write", "glob", "grep"]}
SHORT = OpenCodeHarness(**OPTIONS)  # type: ignore[arg-type]
APIS = ("openai", "openai-responses", "anthropic", "google")
WRITE = HARNESS.build_shell_call("printf one > one.txt")
# a byte is a token here: this prompt has 13 kB, each of these turns adds 12 kB
PRINT = [HARNESS.build_shell_call(f"head -c 12000 /dev/zero | tr '\\0' {letter}") for letter in "abc"]
LONG_WORK = [*(say("More.", tool_call) for tool_call in PRINT), say("All is done.")]
# it takes a lock before it asks the npm registry
NOTHING_WAS_INSTALLED = "test -d ~/.local/state/opencode && test ! -e ~/.local/state/opencode/locks"


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    HARNESS.install()


@pytest.mark.parametrize("api", APIS)
def test_three_turns_through_each_api(api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = OpenCodeHarness(api=api)  # type: ignore[arg-type]
    heard = overhear(monkeypatch)
    grader = f"{GRADER} && {NOTHING_WAS_INSTALLED}"
    finished = run_session(harness, build_replies(harness), grader=grader, ping_interval_s=0.01)
    rollout = finished.rollout
    assert (rollout.error, rollout.reward, rollout.stop_reason) == (None, 1.0, "completed")
    assert (len(rollout.calls), count_drifted(rollout), len(finished.reconstruction.trajectories)) == (3, 0, 1)
    echoed = [message for message in heard[-1].messages if message.role == "assistant"]
    assert [message.reasoning for message in echoed] == ["Three files.", "Now the others."]


@pytest.mark.parametrize("api", ["openai", "anthropic"])
def test_a_call_that_cannot_be_run_comes_back_as_another(api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = OpenCodeHarness(api=api, **OPTIONS)  # type: ignore[arg-type]
    wrong = [
        call_tool("bash", '{"command": "pri'),
        call_tool("no_such_tool", '{"a": 1}'),
        call_tool("bash", '{"x": 1}'),
    ]
    heard = overhear(monkeypatch)
    finished = run_session(harness, [*(say("", tool_call) for tool_call in wrong), say("Good.", WRITE), say("Done.")])
    rollout = finished.rollout
    assert (rollout.stop_reason, len(rollout.calls)) == ("completed", 5)
    sent_back = [call.name for message in heard[-1].messages for call in message.tool_calls]
    indices = [trajectory.call_indices for trajectory in finished.reconstruction.trajectories]
    if api == "openai":
        assert sent_back == ["invalid", "invalid", "bash", "bash"]
        assert indices == [(0,), (1,), (2, 3, 4)]
    else:
        # arguments are objects there: what is no object travels inside one, and only the tool finds it wrong
        assert sent_back == ["bash", "invalid", "bash", "bash"]
        assert indices == [(0, 1), (2, 3, 4)]
    malformed, unknown, mistyped, _ = results(rollout)
    assert "invalid" in malformed
    assert "unavailable tool 'no_such_tool'" in unknown
    assert "Missing key" in mistyped


def test_a_prompt_with_six_tools_is_half_as_long() -> None:
    finished = run_session(SHORT, build_replies(SHORT), grader=GRADER)
    assert (finished.rollout.reward, finished.rollout.stop_reason) == (1.0, "completed")
    assert len(finished.reconstruction.trajectories) == 1
    first = finished.rollout.calls[0]
    assert len(first.prompt_ids) < 15_000  # of bytes; the agent's own has 30 kB and 10 tools
    assert {tool.name for tool in first.request.tools} == {"bash", "edit", "glob", "grep", "read", "write"}


def test_an_overflow_is_compacted_and_the_session_goes_on() -> None:
    # it counts on room for 4096 tokens of an answer: the third request is too long before it has counted
    engine = ScriptedEngine(answer_in_order(LONG_WORK), max_model_len=36_000)
    finished = run_session(SHORT, engine)
    rollout = finished.rollout
    assert (rollout.stop_reason, rollout.counters) == ("completed", {"context_overflows": 1})
    assert purposes(rollout) == "ppapp"
    assert [trajectory.call_indices for trajectory in finished.reconstruction.trajectories] == [(0, 1), (3, 4)]
    assert rollout.calls[2].request.tools == ()


def test_it_compacts_by_its_own_count_before_the_window_ends() -> None:
    engine = ScriptedEngine(answer_in_order(LONG_WORK), max_model_len=40_000)
    finished = run_session(SHORT, engine)
    rollout = finished.rollout
    assert (rollout.stop_reason, rollout.counters) == ("completed", {})
    assert "a" in purposes(rollout)


def test_a_sub_agents_calls_are_the_policys_own() -> None:
    delegate = call_tool(
        "task", json.dumps({"description": "look", "prompt": "look around", "subagent_type": "general"})
    )
    replies = [say("", delegate), say("", WRITE), say("seen"), say("Done.")]
    engine = ScriptedEngine(answer_in_order(replies), max_model_len=1 << 20)
    finished = run_session(HARNESS, engine)
    assert purposes(finished.rollout) == "pppp"
    assert [trajectory.call_indices for trajectory in finished.reconstruction.trajectories] == [(0, 3), (1, 2)]
    assert "seen" in results(finished.rollout)[0]


def test_a_busy_engine_is_asked_again() -> None:
    finished = run_session(SHORT, BusyEngine([say("one", WRITE), say("two", WRITE), say("end")]))
    assert (finished.rollout.stop_reason, finished.rollout.counters) == ("completed", {"calls_sent_back": 1})
    assert (len(finished.rollout.calls), len(finished.reconstruction.trajectories)) == (3, 1)


@pytest.mark.parametrize("text", ["", " ".join(f"word{number * number}" for number in range(1000))])
def test_an_empty_or_cut_answer_ends_the_session(text: str) -> None:
    rollout = run_session(SHORT, [say("", WRITE), say(text)]).rollout
    assert (len(rollout.calls), rollout.stop_reason) == (2, "agent_failed")


def test_a_session_that_was_closed_lets_it_end() -> None:
    def forget_the_key(launch: Launch) -> Launch:
        name = "OPENCODE_CONFIG_CONTENT"
        config = json.loads(launch.env[name])
        config["provider"]["polar"]["options"]["apiKey"] = "none"
        return replace(launch, env={**launch.env, name: json.dumps(config)})

    rollout = run_session(SHORT, [say("x")], change=forget_the_key).rollout
    assert (rollout.stop_reason, rollout.calls) == ("no_calls", ())
    assert rollout.error is not None and "exit code 1" in rollout.error


def test_the_instruction_arrives_as_it_is_and_the_work_folder_chooses_no_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard = overhear(monkeypatch)
    instruction = "Say \"$HOME\" and '`id`'.\n\n{env:HOME} – 😀\n"
    config = {"model": "elsewhere/other", "provider": {"elsewhere": {"models": {"other": {}}}}}
    files = {"opencode.json": json.dumps(config), "AGENTS.md": "Be quick."}
    task = Task(id="t", instruction=instruction, files=files, env={"XDG_CONFIG_HOME": "/nowhere"})
    finished = run_scripted_session(HARNESS, [say("Done.")], task, backend=LocalSandboxBackend())
    assert finished.rollout.stop_reason == "completed"
    assert heard[0].messages[-1].text.strip() == instruction.strip()
    assert "Be quick." in heard[0].messages[0].text


def test_an_api_that_it_does_not_speak_is_refused() -> None:
    with pytest.raises(ConfigError, match="opencode: api must be one of openai, openai-responses, anthropic, google"):
        OpenCodeHarness(api="cohere")  # type: ignore[arg-type]


def test_a_small_window_leaves_room_for_a_prompt() -> None:
    endpoint = Endpoint(origin="http://127.0.0.1:9", api_key="k", model="org/m", max_model_len=8000, max_tokens=8000)
    launch = HARNESS.build_launch(Task(id="t", instruction="x"), endpoint)
    config = json.loads(launch.env["OPENCODE_CONFIG_CONTENT"])
    assert config["model"] == config["small_model"] == "polar/org/m"
    assert config["provider"]["polar"]["models"]["org/m"]["limit"] == {"context": 8000, "output": 4000}
