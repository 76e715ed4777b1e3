"""Pi as npm ships it: through each of its four APIs, and with answers that are wrong, cut, empty, late or too long."""

import json
from pathlib import Path

import pytest
import yaml
from sessions import (
    LOOKED_NOTHING_UP,
    BusyEngine,
    Change,
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
from polar_trl.harness import build_agent
from polar_trl.harness.base import Launch
from polar_trl.harness.pi import PiHarness
from polar_trl.tasks.load import load_task_set
from polar_trl.tools.doctor import MAX_MODEL_LEN, answer_by_turn
from polar_trl.types import Endpoint, Task

ROOT = Path(__file__).parents[2]

HARNESS = PiHarness()
APIS = ("openai", "openai-responses", "anthropic", "google")
SETTINGS = ".pi/agent/settings.json"
WRITE = HARNESS.build_shell_call("printf one > one.txt")
# a byte is a token here: the first prompt has 5 kB, each turn adds 3 kB
PRINT = [HARNESS.build_shell_call(f"head -c 3000 /dev/zero | tr '\\0' {letter}") for letter in "abcdefghi"]
LONG_WORK = [*(say("More.", tool_call) for tool_call in PRINT), say("All is done.")]


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    HARNESS.install()


@pytest.mark.parametrize("api", APIS)
def test_three_turns_through_each_api(api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = PiHarness(api=api)  # type: ignore[arg-type]
    heard = overhear(monkeypatch)
    finished = run_session(harness, build_replies(harness), grader=GRADER)
    rollout = finished.rollout
    assert (rollout.error, rollout.reward, rollout.stop_reason) == (None, 1.0, "completed")
    assert (len(rollout.calls), count_drifted(rollout), len(finished.reconstruction.trajectories)) == (3, 0, 1)
    echoed = [message for message in heard[-1].messages if message.role == "assistant"]
    assert [message.reasoning for message in echoed] == ["Three files.", "Now the others."]


@pytest.mark.parametrize("api", APIS)
def test_an_overflow_is_compacted_and_the_session_goes_on(api: str) -> None:
    engine = ScriptedEngine(answer_in_order(LONG_WORK), max_model_len=24_000)
    # told of a larger window than there is, it learns of the end from the error alone
    finished = run_session(
        PiHarness(api=api),  # type: ignore[arg-type]
        engine,
        change=change_window(1_000_000),
        max_tokens=2000,
    )
    rollout, counters = finished.rollout, finished.reconstruction.counters
    assert (rollout.stop_reason, rollout.counters) == ("completed", {"context_overflows": 1})
    assert purposes(rollout) == "pppppppappp"
    assert (counters["auxiliary_calls"], counters["forks"]) == (1, 1)
    assert len(finished.reconstruction.trajectories) == 2


def test_it_compacts_before_the_window_is_full() -> None:
    engine = ScriptedEngine(answer_in_order(LONG_WORK), max_model_len=24_000)
    rollout = run_session(HARNESS, engine, max_tokens=2000).rollout
    assert (rollout.stop_reason, rollout.counters) == ("completed", {})
    assert purposes(rollout).startswith("pppppap")
    # an answer has all its room
    assert {params.max_tokens for params in engine.params} == {2000}


def test_a_single_token_near_the_window_does_not_end_the_session() -> None:
    engine = ScriptedEngine(answer_in_order(LONG_WORK), max_model_len=24_000)
    small_reserve = change_settings(SETTINGS, compaction={"reserveTokens": 100, "keepRecentTokens": 3750})
    rollout = run_session(HARNESS, engine, change=small_reserve, max_tokens=2000).rollout
    single = [call for call in rollout.calls if call.request.sampling.max_tokens == 1]
    assert single and {call.completion.finish_reason for call in single} == {"length"}
    assert rollout.stop_reason == "completed"


def test_wrong_tool_calls_are_answered_and_the_session_goes_on() -> None:
    wrong = [
        call_tool("bash", '{"command": "pri'),
        call_tool("no_such_tool", '{"a": 1}'),
        call_tool("bash", '{"cmd": "ls"}'),
    ]
    finished = run_session(HARNESS, [*(say("", tool_call) for tool_call in wrong), say("I give up.")])
    rollout = finished.rollout
    assert (rollout.stop_reason, len(rollout.calls), count_drifted(rollout)) == ("completed", 4, 0)
    assert len(finished.reconstruction.trajectories) == 1
    malformed, unknown, mistyped = results(rollout)
    assert malformed.startswith('Invalid arguments for tool "bash"')
    assert "no_such_tool not found" in unknown
    assert "command: missing" in mistyped
    # the policy's own words are on record; Pi sends "{}"
    assert rollout.calls[-1].request.messages[2].tool_calls[0].arguments == '{"command": "pri'


def test_a_cut_tool_call_is_not_run() -> None:
    rollout = run_session(HARNESS, [say("", HARNESS.build_shell_call("true " * 1000)), say("end")]).rollout
    assert [call.completion.finish_reason for call in rollout.calls] == ["length", "stop"]
    assert "was not executed" in results(rollout)[0]
    assert (rollout.stop_reason, count_drifted(rollout)) == ("completed", 0)


@pytest.mark.parametrize("last", [say("word " * 1000), say("")])
def test_a_cut_or_an_empty_answer_ends_the_session(last: object) -> None:
    rollout = run_session(HARNESS, [say("", WRITE), last], grader="test -f one.txt").rollout  # type: ignore[list-item]
    assert (len(rollout.calls), rollout.stop_reason, rollout.reward) == (2, "agent_failed", 1.0)


def test_pings_keep_a_late_answer_alive() -> None:
    engine = ScriptedEngine(answer_by_turn([say("", WRITE), say("end")]), delay_s=2.5, max_model_len=MAX_MODEL_LEN)
    # by default there is no limit at all
    impatient = change_settings(SETTINGS, httpIdleTimeoutMs=1000)
    rollout = run_session(HARNESS, engine, change=impatient, ping_interval_s=0.2).rollout
    assert (rollout.stop_reason, rollout.counters, engine.num_aborted) == ("completed", {}, 0)


@pytest.mark.parametrize("api", APIS)
def test_a_busy_engine_is_asked_again(api: str) -> None:
    engine = BusyEngine([say("", WRITE), say("end")])
    finished = run_session(PiHarness(api=api), engine)  # type: ignore[arg-type]
    assert (finished.rollout.stop_reason, finished.rollout.counters) == ("completed", {"calls_sent_back": 1})
    assert engine.num_asked == 3
    assert len(finished.reconstruction.trajectories) == 1


def test_a_key_that_is_not_known_ends_it_at_once() -> None:
    rollout = run_session(HARNESS, [say("end")], change=change_env(POLAR_API_KEY="sk-closed")).rollout
    assert rollout.stop_reason == "no_calls"
    assert rollout.error is not None and "exit code 1 before its first call: 401" in rollout.error


def test_it_looks_no_name_up() -> None:
    finished = run_session(HARNESS, [say("", WRITE), say("end")], change=note_lookups, grader=LOOKED_NOTHING_UP)
    assert (finished.rollout.stop_reason, finished.rollout.reward) == ("completed", 1.0)


def test_the_settings_name_the_policy_and_nothing_else() -> None:
    endpoint = Endpoint(origin="http://127.0.0.1:9", api_key="k y", model="it's", max_model_len=32768, max_tokens=2048)
    launch = PiHarness(api="google").build_launch(Task(id="t", instruction='say "$HOME" \''), endpoint)
    assert launch.files[".polar/instruction.txt"] == 'say "$HOME" \''
    assert """--model 'it'"'"'s'""" in launch.command
    assert launch.env["POLAR_API_KEY"] == "k y"
    (provider,) = json.loads(launch.files[".pi/agent/models.json"])["providers"].values()
    assert provider["baseUrl"] == "http://127.0.0.1:9/v1beta"
    assert [(model["contextWindow"], model["maxTokens"]) for model in provider["models"]] == [(32768, 2048)]
    compaction = json.loads(launch.files[SETTINGS])["compaction"]
    assert compaction == {"reserveTokens": 6144, "keepRecentTokens": 5120}


def test_a_large_window_keeps_the_agents_own_figures() -> None:
    endpoint = Endpoint(origin="http://x", api_key="k", model="m", max_model_len=131072, max_tokens=16384)
    settings = json.loads(HARNESS.build_launch(Task(id="t", instruction="x"), endpoint).files[SETTINGS])
    assert settings["compaction"] == {"reserveTokens": 16384, "keepRecentTokens": 20000}


DEMONSTRATIONS = [["Copy a.txt to b.txt", "cp a.txt b.txt"], ['Say "it\'s"', 'echo "it\'s"']]


@pytest.mark.parametrize("api", APIS)
def test_demonstrations_are_earlier_turns_with_a_prompt_and_tools_of_the_runs_own(api: str) -> None:
    harness = PiHarness(api=api, system_prompt="You have a shell.", tools=["bash"], demonstrations=DEMONSTRATIONS)  # type: ignore[arg-type]
    finished = run_session(
        harness,
        ScriptedEngine(answer_in_order([say("", WRITE), say("end")]), max_model_len=MAX_MODEL_LEN),
        grader="test -f one.txt",
    )
    rollout = finished.rollout
    assert (rollout.error, rollout.reward, rollout.stop_reason, len(rollout.calls)) == (None, 1.0, "completed", 2)
    assert (count_drifted(rollout), len(finished.reconstruction.trajectories)) == (0, 1)
    request = rollout.calls[0].request
    assert [tool.name for tool in request.tools] == ["bash"]
    system, *turns = request.messages
    assert system.text.startswith("You have a shell.\n") and "coding" not in system.text
    assert [turn.role for turn in turns] == [*("user", "assistant", "tool", "assistant") * 2, "user"]
    assert [turn.text for turn in turns if turn.role == "user"] == [
        DEMONSTRATIONS[0][0],
        DEMONSTRATIONS[1][0],
        "Do the work.",
    ]
    shown = [json.loads(call.arguments) for turn in turns for call in turn.tool_calls]
    assert shown == [{"command": command} for _, command in DEMONSTRATIONS]
    assert [turn.text for turn in turns if turn.role == "tool"] == ["(no output)"] * 2


def test_a_window_in_which_it_would_ask_for_one_token_is_refused() -> None:
    def launch(max_model_len: int) -> Launch:
        endpoint = Endpoint(origin="http://x", api_key="k", model="m", max_model_len=max_model_len, max_tokens=64)
        return HARNESS.build_launch(Task(id="t", instruction="x"), endpoint)

    with pytest.raises(ConfigError, match=r"window of 8191 .* prompt of about 1200,.*_max_model_length to 8192"):
        launch(8191)
    assert '"contextWindow": 8192' in launch(8192).files[".pi/agent/models.json"]


def test_the_ladders_run_file_shows_each_kind_of_task_and_no_task_itself() -> None:
    run = yaml.safe_load((ROOT / "polar_trl" / "configs" / "ladder_pi.yaml").read_text(encoding="utf-8"))
    endpoint = Endpoint(
        origin="http://x", api_key="k", model="m", max_model_len=run["vllm_max_model_length"], max_tokens=64
    )
    launch = build_agent(run["agent"], run["agent_options"]).build_launch(Task(id="t", instruction="x"), endpoint)
    assert "--tools bash" in launch.command and len(launch.files[".polar/earlier.jsonl"].splitlines()) == 1 + 6 * 4
    tasks = load_task_set(run["tasks"])
    shown = dict(run["agent_options"]["demonstrations"])
    assert {task.metadata["kind"] for task in tasks} == {"write_word", "copy_file", "count_lines"}
    assert {text.split()[0] for text in shown} == {task.instruction.split()[0] for task in tasks}
    assert not {task.metadata["gold"] for task in tasks} & set(shown.values())


def test_an_api_that_it_does_not_speak_is_refused() -> None:
    with pytest.raises(ConfigError, match="api must be one of openai, openai-responses, anthropic, google"):
        PiHarness(api="cohere")  # type: ignore[arg-type]


def change_window(num_tokens: int) -> Change:
    """Tell the agent of another context window."""
    path = ".pi/agent/models.json"

    def change(launch: Launch) -> Launch:
        providers = json.loads(launch.files[path])["providers"]
        providers["polar"]["models"][0]["contextWindow"] = num_tokens
        return change_settings(path, providers=providers)(launch)

    return change
