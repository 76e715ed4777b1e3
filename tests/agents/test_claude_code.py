"""Claude Code as npm ships it, with answers that are late, empty, cut, wrong, refused or too long."""

import asyncio
import re
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
from sessions import INSTRUCTION, BusyEngine, call_tool, change_env, purposes, results, run_session, say
from three_turns import GRADER, build_replies, count_drifted

from polar_trl.engine.base import GenerationParams
from polar_trl.engine.scripted import ScriptedEngine
from polar_trl.harness.base import Launch
from polar_trl.harness.claude_code import ClaudeCodeHarness
from polar_trl.proxy import Proxy
from polar_trl.rollout.runner import Job, RolloutConfig, RolloutResult, RolloutRunner
from polar_trl.sandbox.local import LocalSandboxBackend
from polar_trl.tools.doctor import MAX_MODEL_LEN, RENDERER, answer_by_turn, run_scripted_session
from polar_trl.types import Completion, Endpoint, Rollout, Task, TokenIds

TASK = Task(id="t", instruction="Write three files: one.txt, two.txt, three.txt.")
HARNESS = ClaudeCodeHarness()
WRITE = HARNESS.build_shell_call("printf one > one.txt")
SUMMARY = "<analysis>a</analysis>\n<summary>All that was done.</summary>"
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    HARNESS.install()


def read_text(prompt_ids: TokenIds) -> str:
    return bytes(token_id for token_id in prompt_ids if token_id < 256).decode()


def chains(finished: RolloutResult) -> list[tuple[int, ...]]:
    return [trajectory.call_indices for trajectory in finished.reconstruction.trajectories]


# Tools


def test_wrong_tool_calls_are_answered_and_the_session_goes_on() -> None:
    wrong = [
        [call_tool("Bash", '{"command": "pri'), call_tool("Bash", {"command": "echo beside"})],
        [call_tool("Bash", "[1]")],
        [call_tool("NoSuchTool", {"a": 1})],
        [call_tool("Bash", {"command": 3})],
    ]
    finished = run_session(HARNESS, [*(say("", *tool_calls) for tool_calls in wrong), say("I give up.")])
    rollout = finished.rollout
    assert (rollout.stop_reason, purposes(rollout), count_drifted(rollout)) == ("completed", "ppppp", 0)
    assert len(finished.reconstruction.trajectories) == 1
    malformed, beside, no_object, unknown, mistyped = results(rollout)
    assert "could not be parsed as JSON" in malformed and '{"command": "pri' in malformed
    assert beside == "beside"
    assert "`command` is missing" in no_object
    assert "No such tool available: NoSuchTool" in unknown
    assert "provided as `number`" in mistyped
    # the policy's own words are on record, not what was made of them for the wire
    said = [call.arguments for m in rollout.calls[-1].request.messages for call in m.tool_calls]
    assert said == [tool_call.arguments for tool_calls in wrong for tool_call in tool_calls]


def test_a_tool_that_is_looked_up_forks_and_a_search_is_a_side_request() -> None:
    look_up = call_tool("ToolSearch", {"query": "select:WebSearch"})
    search = call_tool("WebSearch", {"query": "weather"})
    finished = run_session(HARNESS, [say("", look_up), say("", search), say("Sunny.")])
    rollout = finished.rollout
    assert (rollout.stop_reason, purposes(rollout)) == ("completed", "ppap")
    # the prompt begins with the tools, of which there is now one more
    new = {tool.name for tool in rollout.calls[1].request.tools} - {
        tool.name for tool in rollout.calls[0].request.tools
    }
    assert new == {"WebSearch"}
    assert chains(finished) == [(0,), (1, 3)]
    assert "hello" in results(rollout)[-1]  # what the policy answers without tools


def test_sub_agents_are_the_policys_own_and_have_trajectories_of_their_own() -> None:
    tasks = ["count the files", "read the files"]
    delegate = [
        call_tool("Agent", {"description": task, "prompt": f"SUBTASK {task}", "subagent_type": "general-purpose"})
        for task in tasks
    ]

    def answer(prompt_ids: TokenIds) -> TokenIds:
        text = read_text(prompt_ids)
        if INSTRUCTION not in text:
            seen = "tool\nlooked" in text
            return RENDERER.spell(say("seen") if seen else say("", HARNESS.build_shell_call("echo looked")))
        step = text.count("STEP")
        return RENDERER.spell([say("STEP 1", *delegate), say("STEP 2", WRITE), say("STEP 3")][min(step, 2)])

    engine = ScriptedEngine(answer, delay_s=0.3, max_model_len=MAX_MODEL_LEN)
    finished = run_session(HARNESS, engine, ping_interval_s=0.1)
    rollout = finished.rollout
    assert rollout.stop_reason == "completed"
    assert set(purposes(rollout)) == {"p"}
    main, *others = sorted(chains(finished), key=len, reverse=True)
    assert [len(chain) for chain in others] == [2, 2]
    assert sorted(task for chain in others for task in tasks if task in last_words(rollout, chain[0])) == sorted(tasks)
    assert sorted(index for chain in (main, *others) for index in chain) == list(range(len(rollout.calls)))
    assert "task-notification" in last_words(rollout, main[-1])


def last_words(rollout: Rollout, index: int) -> str:
    """Return the last user message in that call's request."""
    return [message.text for message in rollout.calls[index].request.messages if message.role == "user"][-1]


def test_images_and_documents_are_left_out_for_a_model_that_reads_text() -> None:
    make = HARNESS.build_shell_call(
        f"echo {PNG} | base64 -d > a.png; printf '%%PDF-1.4\\n%%%%EOF\\n' > a.pdf; echo $PWD is here"
    )

    def answer(prompt_ids: TokenIds) -> TokenIds:
        text = read_text(prompt_ids)
        folder = re.search(r"tool\n(/\S+) is here", text)
        if folder is None:
            return RENDERER.spell(say("STEP", make))
        reads = [call_tool("Read", {"file_path": f"{folder[1]}/{name}"}) for name in ("a.png", "a.pdf")]
        return RENDERER.spell(
            [say("STEP", reads[0]), say("STEP", reads[1]), say("Nothing to see.")][text.count("STEP") - 1]
        )

    finished = run_session(HARNESS, ScriptedEngine(answer, max_model_len=MAX_MODEL_LEN))
    rollout = finished.rollout
    refused = {"refused_template": 1, "refused_messages": 1}  # the image, then the document: it goes on without them
    assert (rollout.stop_reason, rollout.counters) == ("completed", {"prompts_forked": 1, **refused})
    removals = [rollout.calls[index].request.messages[-1].text for index in (2, 3)]
    assert "Image removed" in removals[0] and "Document removed" in removals[1]
    # the request after next has another text in its place
    assert chains(finished) == [(0, 1, 2), (3,)]


# Windows


def answer_until(last_step: int, num_lines: Callable[[int], int]) -> Callable[[TokenIds], TokenIds]:
    """Answer with commands that print so many lines, step by step, and with a summary when it is asked for."""

    def answer(prompt_ids: TokenIds) -> TokenIds:
        text = read_text(prompt_ids)
        if "CRITICAL: Respond with TEXT ONLY" in text:
            return RENDERER.spell(say(SUMMARY))
        step = last_step if "All that was done." in text else text.count("STEP")
        if step >= last_step:
            return RENDERER.spell(say("The end."))
        return RENDERER.spell(say("STEP", HARNESS.build_shell_call(f"seq 1 {num_lines(step)}")))

    return answer


def test_a_small_window_leaves_room_to_work() -> None:
    # the first prompt has 48 kB; the agent's own margin, made for large windows, would have it compact from here on
    engine = ScriptedEngine(answer_until(3, lambda step: 100), max_model_len=60_000)
    finished = run_session(HARNESS, engine, max_tokens=2000)
    assert (finished.rollout.stop_reason, chains(finished)) == ("completed", [(0, 1, 2, 3)])
    assert finished.rollout.counters == {}


@pytest.mark.parametrize(
    ("max_model_len", "num_lines", "counters"),
    # about 14 kB a step; then 11 kB and, at once, more than is left
    [(84_000, (3000, 3000, 3000), {}), (84_000, (2500, 6000, 0), {"context_overflows": 1})],
    ids=["by usage", "by an overflow"],
)
def test_it_compacts(max_model_len: int, num_lines: tuple[int, ...], counters: dict[str, int]) -> None:
    engine = ScriptedEngine(answer_until(3, lambda step: num_lines[step]), max_model_len=max_model_len)
    finished = run_session(HARNESS, engine, max_tokens=2000)
    rollout = finished.rollout
    assert (rollout.stop_reason, rollout.counters) == ("completed", counters)
    assert purposes(rollout).endswith("pap") and purposes(rollout).count("a") == 1
    assert chains(finished) == [tuple(range(len(rollout.calls) - 2)), (len(rollout.calls) - 1,)]
    assert "All that was done." in rollout.calls[-1].request.messages[1].text
    assert rollout.calls[-2].request.tools == rollout.calls[0].request.tools


# Answers


def test_an_empty_answer_is_asked_for_once_more() -> None:
    finished = run_session(HARNESS, [say("", WRITE), say(""), say("never asked")])
    rollout = finished.rollout
    assert (rollout.stop_reason, chains(finished)) == ("agent_failed", [(0, 1), (2,)])
    assert "no visible output" in last_words(rollout, 2)
    assert "assistant" not in [message.role for message in rollout.calls[2].request.messages[-2:]]


def test_a_cut_answer_is_asked_to_go_on_three_times() -> None:
    words = " ".join(f"word{number * number}" for number in range(1000))
    finished = run_session(HARNESS, [say("", WRITE), say(words)])
    rollout = finished.rollout
    assert [call.completion.finish_reason for call in rollout.calls] == ["stop", *["length"] * 4]
    assert (rollout.stop_reason, chains(finished)) == ("agent_failed", [(0, 1, 2, 3, 4)])


def test_a_cut_tool_call_is_not_run_and_the_one_before_it_is() -> None:
    cut = HARNESS.build_shell_call("touch cut.txt; echo " + "x" * 6000)
    grader = "test -f one.txt && test ! -e cut.txt"
    finished = run_session(HARNESS, [say("", WRITE, cut), say("The end.")], grader=grader)
    rollout = finished.rollout
    assert (rollout.stop_reason, rollout.reward, chains(finished)) == ("completed", 1.0, [(0, 1)])
    assert rollout.calls[0].completion.finish_reason == "length"
    assert "truncated output" in results(rollout)[1]


# Errors and waiting


@pytest.mark.parametrize("busy_after_s", [0.0, 0.5])
def test_a_busy_engine_is_asked_again(busy_after_s: float) -> None:
    engine = BusyEngine([say("one", WRITE), say("end")], busy_after_s)
    finished = run_session(HARNESS, engine, ping_interval_s=0.1)
    assert (finished.rollout.stop_reason, finished.rollout.counters) == ("completed", {"calls_sent_back": 1})
    assert chains(finished) == [(0, 1)]


def test_pings_keep_a_stream_alive_longer_than_the_agent_waits() -> None:
    class SlowEngine(ScriptedEngine):
        async def generate(self, prompt_ids: TokenIds, params: GenerationParams) -> Completion:
            await asyncio.sleep(0.0 if self.params else 12.0)
            return await super().generate(prompt_ids, params)

    engine = SlowEngine(answer_by_turn([say("one", WRITE), say("end")]), max_model_len=MAX_MODEL_LEN)
    # ten seconds of silence are the least that it can be told to give up after
    change = change_env(CLAUDE_BYTE_STREAM_IDLE_TIMEOUT_MS="10000")
    finished = run_session(HARNESS, engine, change=change, ping_interval_s=1.0)
    assert (finished.rollout.stop_reason, finished.rollout.counters) == ("completed", {})
    assert chains(finished) == [(0, 1)]


def test_a_closed_session_ends_the_agent() -> None:
    class Spy(ClaudeCodeHarness):
        api_key = ""

        def build_launch(self, task: Task, endpoint: Endpoint) -> Launch:
            self.api_key = endpoint.api_key
            return super().build_launch(task, endpoint)

    class ClosingEngine(ScriptedEngine):
        async def generate(self, prompt_ids: TokenIds, params: GenerationParams) -> Completion:
            if self.params:
                threading.Thread(target=proxy.close_session, args=(spy.api_key,)).start()
                await asyncio.sleep(60)
            return await super().generate(prompt_ids, params)

    spy = Spy()
    engine = ClosingEngine(answer_by_turn([say("one", WRITE)]), max_model_len=MAX_MODEL_LEN)
    with Proxy(engine, RENDERER, params=GenerationParams(max_tokens=4096)) as proxy:
        runner = RolloutRunner(
            proxy=proxy, backend=LocalSandboxBackend(), harness=spy, grader=None, config=RolloutConfig()
        )
        rollout = runner.run([Job(rollout_id="r", group_id="g", task=TASK)])[0].rollout
    # it would ask eleven times, for three minutes, if it were let
    assert rollout.stop_reason == "agent_failed"
    assert len(rollout.calls) == 1


# Options


def test_a_system_prompt_alone_leaves_the_three_tools_of_its_bare_mode() -> None:
    short = ClaudeCodeHarness(system_prompt="You have a shell.")
    finished = run_session(short, build_replies(short), grader=GRADER)
    assert (finished.rollout.reward, finished.rollout.stop_reason) == (1.0, "completed")
    assert len(finished.reconstruction.trajectories) == 1
    first = finished.rollout.calls[0]
    assert len(first.prompt_ids) < 5000  # of bytes; the agent's own has 48 kB and 11 tools
    assert {tool.name for tool in first.request.tools} == {"Bash", "Edit", "Read"}


def test_it_stops_after_max_turns() -> None:
    finished = run_session(ClaudeCodeHarness(max_turns=2), [say("", WRITE)])
    assert (len(finished.rollout.calls), finished.rollout.stop_reason) == (2, "agent_failed")


def test_a_long_instruction_arrives_whole() -> None:
    text = 'say "$HOME" \' `id` \\ é👩‍👧\n' * 6000
    rollout = run_scripted_session(
        HARNESS, [say("Said.")], replace(TASK, instruction=text), backend=LocalSandboxBackend()
    ).rollout
    assert rollout.stop_reason == "completed"
    assert text.strip() in last_words(rollout, 0)


def test_the_settings_name_the_policy_and_nothing_else() -> None:
    endpoint = Endpoint(origin="http://127.0.0.1:9", api_key="k y", model="it's", max_model_len=40_000, max_tokens=99)
    launch = HARNESS.build_launch(TASK, endpoint)
    assert launch.env["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:9"
    assert (launch.env["ANTHROPIC_AUTH_TOKEN"], "ANTHROPIC_API_KEY" in launch.env) == ("k y", False)
    assert {value for name, value in launch.env.items() if name.endswith("MODEL")} == {"it's"}
    assert """'--model=it'"'"'s'""" in launch.command
    # it leaves 13,000 tokens free, which of so few is brought down to a tenth
    assert launch.env["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "49000"
    assert launch.env["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "99"
    large = HARNESS.build_launch(TASK, replace(endpoint, max_model_len=200_000))
    assert large.env["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "200000"
