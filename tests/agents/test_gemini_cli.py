"""Gemini CLI as npm ships it: what it does with answers that are late, empty, cut, wrong, refused or too long."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from test_three_turns import GRADER, build_replies, count_drifted

from polar_trl.doctor import RENDERER, answer_by_turn, run_scripted_session
from polar_trl.engine.base import GenerationParams
from polar_trl.engine.scripted import ScriptedEngine
from polar_trl.errors import EngineBusyError
from polar_trl.harness.gemini_cli import GeminiCLIHarness
from polar_trl.proxy import Proxy
from polar_trl.rollout import Finished, Job, RolloutConfig, RolloutRunner
from polar_trl.sandbox.local import LocalSandboxBackend
from polar_trl.types import Completion, Endpoint, Message, Rollout, Task, TokenIds, ToolCall

TASK = Task(id="t", instruction="Write three files: one.txt, two.txt, three.txt.")
HARNESS = GeminiCLIHarness()
WRITE = HARNESS.build_shell_call("printf one > one.txt")


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    HARNESS.install()


def say(text: str, *tool_calls: ToolCall) -> Message:
    return Message(role="assistant", text=text, tool_calls=tool_calls)


def call_tool(name: str, arguments: str) -> ToolCall:
    return ToolCall(id="", name=name, arguments=arguments)


def results(rollout: Rollout) -> list[str]:
    """The texts that tools gave, as the last call saw them."""
    return [message.text for message in rollout.calls[-1].request.messages if message.role == "tool"]


def session(replies: Sequence[Message], **options: object) -> Finished:
    return run_scripted_session(HARNESS, replies, TASK, **options)  # type: ignore[arg-type]


class LateEngine(ScriptedEngine):
    """Busy when it is asked for the second time, after a while."""

    def __init__(self, replies: Sequence[Message], busy_after_s: float) -> None:
        super().__init__(answer_by_turn(replies), max_model_len=1 << 20)
        self.busy_after_s = busy_after_s
        self.num_asked = 0

    async def generate(self, prompt_ids: TokenIds, params: GenerationParams) -> Completion:
        self.num_asked += 1
        if self.num_asked == 2:
            await asyncio.sleep(self.busy_after_s)
            raise EngineBusyError("weights are being updated", retry_after_s=1.0)
        return await super().generate(prompt_ids, params)


def test_pings_while_it_waits_leave_no_trace() -> None:
    task = replace(TASK, grader=GRADER)
    finished = run_scripted_session(HARNESS, build_replies(HARNESS), task, delay_s=0.6, ping_interval_s=0.05)
    rollout = finished.rollout
    assert (rollout.reward, rollout.stop_reason, rollout.counters) == (1.0, "completed", {})
    assert [len(call.request.messages) for call in rollout.calls] == [2, 4, 7]
    assert count_drifted(rollout) == 0
    replies = [(m.text, len(m.tool_calls)) for m in rollout.calls[-1].request.messages if m.role == "assistant"]
    assert replies == [("The first one.", 1), ("", 2)]


def test_the_short_prompt_is_a_quarter_as_long() -> None:
    short = GeminiCLIHarness(short_prompt=True)
    replies = build_replies(HARNESS)
    finished = run_scripted_session(short, replies, replace(TASK, grader=GRADER))
    assert (finished.rollout.reward, finished.rollout.stop_reason) == (1.0, "completed")
    assert len(finished.reconstruction.trajectories) == 1
    first = finished.rollout.calls[0]
    assert len(first.prompt_ids) < 15_000  # of bytes; the agent's own has 49 kB and 15 tools
    assert {tool.name for tool in first.request.tools} == {
        "run_shell_command", "read_file", "write_file", "replace", "list_directory", "glob", "grep_search",
    }  # fmt: skip


def test_wrong_tool_calls_are_answered_and_the_session_goes_on() -> None:
    wrong = [
        call_tool("run_shell_command", '{"command": "pri'),
        call_tool("no_such_tool", '{"a": 1}'),
        call_tool("run_shell_command", '{"command": 3}'),
    ]
    finished = session([*(say("", tool_call) for tool_call in wrong), say("I give up.")])
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
    rollout = session([say("", call_tool("google_web_search", '{"query": "weather"}')), say("Sunny.")]).rollout
    assert [call.purpose for call in rollout.calls] == ["policy", "auxiliary", "policy"]
    assert rollout.calls[1].request.unread == ("tools[0].googleSearch",)
    assert rollout.stop_reason == "completed"


def test_a_sub_agents_calls_are_the_policys_own() -> None:
    delegate = call_tool("invoke_agent", '{"agent_name": "generalist", "prompt": "look around"}')
    finished = session(
        [say("", delegate), say("", call_tool("complete_task", '{"result": {"response": "seen"}}')), say("x")]
    )
    assert {call.purpose for call in finished.rollout.calls} == {"policy"}
    assert len(finished.reconstruction.trajectories) == 2
    assert "Subagent 'generalist' finished" in results(finished.rollout)[0]


@pytest.mark.parametrize("busy_after_s", [0.0, 0.5])
def test_a_busy_engine_is_asked_again(busy_after_s: float) -> None:
    engine = LateEngine([say("one", WRITE), say("two", WRITE), say("end")], busy_after_s)
    with Proxy(engine, RENDERER, params=GenerationParams(max_tokens=4096), ping_interval_s=0.1) as proxy:
        runner = RolloutRunner(
            proxy=proxy, backend=LocalSandboxBackend(), harness=HARNESS, grader=None, config=RolloutConfig()
        )
        finished = runner.run([Job(rollout_id="r", group_id="g", task=TASK)])[0]
    assert (finished.rollout.stop_reason, finished.rollout.counters) == ("completed", {"calls_sent_back": 1})
    assert len(finished.rollout.calls) == 3
    assert len(finished.reconstruction.trajectories) == 1


def test_an_empty_first_answer_is_asked_for_once_more() -> None:
    finished = session([say("")])
    first, second = finished.rollout.calls
    assert second.request.messages[-1].text.startswith(first.request.messages[-1].text)
    assert second.request.messages[-1].text != first.request.messages[-1].text
    assert finished.rollout.stop_reason == "agent_failed"


def test_an_empty_answer_after_a_result_ends_the_session() -> None:
    rollout = session([say("", WRITE), say("")]).rollout
    assert (len(rollout.calls), rollout.stop_reason) == (2, "agent_failed")


def test_a_cut_answer_ends_the_session() -> None:
    words = " ".join(f"word{number * number}" for number in range(1000))
    rollout = session([say("", WRITE), say(words)]).rollout
    assert [call.completion.finish_reason for call in rollout.calls] == ["stop", "length"]
    assert rollout.stop_reason == "agent_failed"


def test_a_conversation_that_outgrows_the_window_ends_the_session_and_is_graded() -> None:
    # the first prompt has 49 kB, and the second the command's output
    write = HARNESS.build_shell_call("printf one > one.txt; seq 1 3000")
    finished = run_scripted_session(
        HARNESS, [say("", write), say("x")], replace(TASK, grader="test -f one.txt"), max_model_len=56_000
    )
    rollout = finished.rollout
    assert (rollout.stop_reason, rollout.reward, len(rollout.calls)) == ("agent_failed", 1.0, 1)
    assert rollout.counters == {"context_overflows": 1}
    assert sum(finished.reconstruction.trajectories[0].trainable) == len(rollout.calls[0].completion.token_ids)


def test_the_settings_name_the_policy_and_nothing_else() -> None:
    endpoint = Endpoint(origin="http://127.0.0.1:9", api_key="k y", model="it's")
    launch = HARNESS.build_launch(replace(TASK, instruction='say "$HOME" \''), endpoint)
    assert launch.env["GOOGLE_GEMINI_BASE_URL"] == "http://127.0.0.1:9"
    assert launch.env["GEMINI_API_KEY"] == "k y"
    assert launch.files[".polar/instruction.txt"] == 'say "$HOME" \''
    assert """-m 'it'"'"'s'""" in launch.command
