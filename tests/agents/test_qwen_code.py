"""Qwen Code as npm ships it: a shorter prompt, its side requests, and wrong, cut, late or too long answers."""

import json

import pytest
from sessions import (
    LOOKED_NOTHING_UP,
    BusyEngine,
    answer_in_order,
    call_tool,
    change_env,
    change_settings,
    note_lookups,
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
from polar_trl.harness.qwen_code import QwenCodeHarness
from polar_trl.sandbox.local import LocalSandboxBackend
from polar_trl.tools.doctor import MAX_MODEL_LEN, answer_by_turn, run_scripted_session
from polar_trl.types import Endpoint, Task

HARNESS = QwenCodeHarness()
SHORT = QwenCodeHarness(system_prompt="You have a shell.", tools=["run_shell_command", "read_file", "edit"])
SETTINGS = ".qwen/settings.json"
WRITE = HARNESS.build_shell_call("printf one > one.txt")
ECHOES = [say("", *(HARNESS.build_shell_call(f"echo {turn}{word}") for word in "abc")) for turn in range(6)]
# a byte is a token here: each turn adds 9 kB to a first prompt of 9 kB (SHORT) or 70 kB
PRINT = [HARNESS.build_shell_call(f"head -c 9000 /dev/zero | tr '\\0' {letter}") for letter in "abcdef"]
LONG_WORK = [*(say("More.", tool_call) for tool_call in PRINT), say("All is done.")]


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    HARNESS.install()


def test_a_prompt_with_three_tools_is_a_quarter_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = overhear(monkeypatch)
    finished = run_session(SHORT, build_replies(SHORT), change=note_lookups, grader=f"{GRADER} && {LOOKED_NOTHING_UP}")
    rollout = finished.rollout
    assert (rollout.error, rollout.reward, rollout.stop_reason) == (None, 1.0, "completed")
    assert (len(finished.reconstruction.trajectories), count_drifted(rollout)) == (1, 0)
    assert len(rollout.calls[0].prompt_ids) < 18_000  # of bytes
    assert {tool.name for tool in rollout.calls[0].request.tools} == {"edit", "read_file", "run_shell_command"}
    echoed = [message for message in heard[-1].messages if message.role == "assistant"]
    assert [message.reasoning for message in echoed] == ["Three files.", "Now the others."]


def test_no_command_loses_its_output() -> None:
    rollout = run_session(HARNESS, [*ECHOES, say("end")], change=note_lookups, grader=LOOKED_NOTHING_UP).rollout
    printed = [text.partition("Output: ")[2].partition("\n")[0] for text in results(rollout)]
    assert printed == [f"{turn}{word}" for turn in range(6) for word in "abc"]
    assert rollout.reward == 1.0


def test_wrong_tool_calls_are_answered_and_pings_keep_late_answers_alive() -> None:
    wrong = [
        call_tool("run_shell_command", '{"command": "pri'),
        call_tool("no_such_tool", '{"a": 1}'),
        call_tool("run_shell_command", '{"cmd": "ls"}'),
    ]
    replies = [*(say("", tool_call) for tool_call in wrong), say("I give up.")]
    engine = ScriptedEngine(answer_by_turn(replies), delay_s=1.5, max_model_len=MAX_MODEL_LEN)
    finished = run_session(HARNESS, engine, change=set_request_timeout, ping_interval_s=0.2)
    rollout = finished.rollout
    assert (rollout.stop_reason, len(rollout.calls), rollout.counters) == ("completed", 4, {"tool_calls_malformed": 1})
    assert (count_drifted(rollout), len(finished.reconstruction.trajectories)) == (0, 1)
    malformed, unknown, mistyped = results(rollout)
    assert malformed.startswith("Command: pri\n")  # it mends JSON that stops too early
    assert '"no_such_tool" not found' in unknown
    assert "must have required property 'command'" in mistyped
    # the policy's own words are on record, not the mended ones
    assert rollout.calls[-1].request.messages[2].tool_calls[0].arguments == '{"command": "pri'


def test_an_overflow_is_compacted_and_the_session_goes_on() -> None:
    engine = ScriptedEngine(answer_in_order(LONG_WORK), max_model_len=56_000)
    # told of a larger window than there is, it learns of the end from the error alone
    finished = run_session(SHORT, engine, change=tell_of_a_large_window)
    rollout = finished.rollout
    # the summary's request overflows too; it is made anew without tools
    assert (rollout.stop_reason, rollout.counters) == ("completed", {"context_overflows": 2})
    assert purposes(rollout) == "pppppapp"
    assert rollout.calls[5].request.tools == ()
    # after it the next answer is merged into an acknowledgement of its own: one more trajectory
    assert len(finished.reconstruction.trajectories) == 3


def test_a_summary_that_declares_tools_is_a_side_request() -> None:
    engine = ScriptedEngine(answer_in_order(LONG_WORK), max_model_len=150_000)
    finished = run_session(HARNESS, engine)
    rollout = finished.rollout
    assert (rollout.stop_reason, rollout.counters) == ("completed", {})
    assert purposes(rollout) == "ppppppap"
    assert rollout.calls[6].request.tools == rollout.calls[0].request.tools
    assert len(finished.reconstruction.trajectories) == 2


def test_its_memory_agent_is_a_side_request() -> None:
    rollout = run_session(HARNESS, [say("Nothing to do.")], change=change_settings(SETTINGS, memory={})).rollout
    assert purposes(rollout) == "pa"
    assert len(rollout.calls[1].request.tools) == 6
    # and with the settings it is not there
    assert purposes(run_session(HARNESS, [say("Nothing to do.")]).rollout) == "p"


def test_a_cut_answer_is_not_asked_for_again() -> None:
    rollout = run_session(HARNESS, [say("", WRITE), say("word " * 1000)]).rollout
    assert [call.completion.finish_reason for call in rollout.calls] == ["stop", "length"]
    assert rollout.stop_reason == "agent_failed"


def test_an_answer_that_is_asked_for_again_is_superseded() -> None:
    engine = ScriptedEngine(
        answer_in_order([say("", WRITE), say("word " * 1000), say("end")]), max_model_len=MAX_MODEL_LEN
    )
    finished = run_session(HARNESS, engine, change=change_env(QWEN_CODE_MAX_OUTPUT_TOKENS=None))
    rollout = finished.rollout
    assert [call.request.sampling.max_tokens for call in rollout.calls] == [32000, 32000, 64000]
    assert rollout.stop_reason == "completed"
    assert finished.reconstruction.counters["superseded_calls"] == 1
    assert [row.call_indices for row in finished.reconstruction.trajectories] == [(0, 2)]


def test_a_busy_engine_is_asked_again() -> None:
    engine = BusyEngine([say("", WRITE), say("end")])
    finished = run_session(HARNESS, engine)
    assert (finished.rollout.stop_reason, finished.rollout.counters) == ("completed", {"calls_sent_back": 1})
    assert engine.num_asked == 3
    assert len(finished.reconstruction.trajectories) == 1


def test_a_key_that_is_not_known_ends_it_at_once() -> None:
    rollout = run_session(HARNESS, [say("end")], change=change_env(OPENAI_API_KEY="sk-closed")).rollout
    assert rollout.stop_reason == "no_calls"
    assert rollout.error is not None and "exit code 1 before its first call: " in rollout.error
    assert "[API Error: 401" in rollout.error  # after what it may say of its own grep


def test_the_settings_name_the_policy_and_nothing_else() -> None:
    endpoint = Endpoint(origin="http://127.0.0.1:9", api_key="k y", model="it's", max_model_len=32768, max_tokens=2048)
    launch = QwenCodeHarness(api="google").build_launch(Task(id="t", instruction='-x "$HOME" \''), endpoint)
    assert launch.env["GOOGLE_GEMINI_BASE_URL"] == "http://127.0.0.1:9"
    assert launch.env["GEMINI_API_KEY"] == "k y"
    assert launch.env["QWEN_CODE_MAX_OUTPUT_TOKENS"] == "2048"
    assert "--auth-type=gemini '--model=it'\"'\"'s' --yolo '--prompt=-x \"$HOME\" '\"'\"''" in launch.command
    generation = json.loads(launch.files[SETTINGS])["model"]["generationConfig"]
    assert generation["contextWindowSize"] == 32768


@pytest.mark.parametrize("instruction", ["it's a é 👩‍👧 log\n" * 5000, "'" * 30_000], ids=["long", "long when quoted"])
def test_an_instruction_that_no_argument_can_carry_comes_by_stdin(instruction: str) -> None:
    task = Task(id="t", instruction=f"Read this. {instruction} The end.", agent_timeout_s=120.0)
    rollout = run_scripted_session(HARNESS, [say("Read.")], task, backend=LocalSandboxBackend()).rollout
    assert rollout.stop_reason == "completed", rollout.error
    assert any(task.instruction in message.text for message in rollout.calls[0].request.messages)


def test_an_instruction_that_no_process_can_be_given_is_refused() -> None:
    with pytest.raises(ConfigError, match="holds a NUL byte"):
        HARNESS.build_launch(Task(id="t", instruction="a\0b"), Endpoint(origin="http://x", api_key="k", model="m"))


def test_an_api_that_it_does_not_speak_is_refused() -> None:
    with pytest.raises(ConfigError, match="api must be one of openai, openai-responses, anthropic, google"):
        QwenCodeHarness(api="cohere")  # type: ignore[arg-type]


def tell_of_a_large_window(launch: Launch) -> Launch:
    model = json.loads(launch.files[SETTINGS])["model"]
    model["generationConfig"]["contextWindowSize"] = 1_000_000
    return change_settings(SETTINGS, model=model)(launch)


def set_request_timeout(launch: Launch) -> Launch:
    """Limit requests to one second; there is no limit by default."""
    model = json.loads(launch.files[SETTINGS])["model"]
    model["generationConfig"]["timeout"] = 1000
    return change_env(QWEN_CODE_API_TIMEOUT_MS="1000")(change_settings(SETTINGS, model=model)(launch))
