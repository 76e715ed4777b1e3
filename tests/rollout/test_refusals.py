"""A session that ends on a refusal of ours has no reward and says why; one that goes on, or overflows, is graded."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from records import read_session

from polar_trl.engine.base import GenerationParams
from polar_trl.engine.scripted import ScriptedEngine
from polar_trl.grade.function import FunctionGrader
from polar_trl.grpo.logs.metrics import build_rollout_metrics, count_rollout
from polar_trl.harness.shell import ShellHarness
from polar_trl.proxy import Proxy
from polar_trl.recording.session import SessionLimits
from polar_trl.rollout.runner import Job, RolloutConfig, RolloutResult, RolloutRunner
from polar_trl.sandbox.local import LocalSandboxBackend
from polar_trl.tokens.bytes import ByteRenderer
from polar_trl.types import Message, Task

RENDERER = ByteRenderer()
REPLY = RENDERER.spell(Message(role="assistant", text="done"))
AGENT = """
import json, os, sys, urllib.error, urllib.request
origin, key = os.environ["ANTHROPIC_BASE_URL"], os.environ["OPENAI_API_KEY"]
for path, body in json.load(open("asks.json")):
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    request = urllib.request.Request(origin + path, json.dumps(body).encode(), headers)
    try:
        urllib.request.urlopen(request).read()
    except urllib.error.HTTPError as error:
        print(error.code)
"""
CHAT, GOOGLE = "/v1/chat/completions", "/v1beta/models/policy:generateContent"
HELLO = {"role": "user", "content": "hello"}
GOOD = (CHAT, {"messages": [HELLO]})
NEXT = (CHAT, {"messages": [HELLO, {"role": "assistant", "content": "done"}, {"role": "user", "content": "more"}]})
LONG = (CHAT, {"messages": [{"role": "user", "content": "x" * 5000}]})
BAD: dict[str, tuple[str, Any]] = {
    "chat": (CHAT, {"messages": [HELLO, {"role": "tool", "content": {"stdout": "x"}}]}),
    "responses": ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_file"}]}]}),
    "messages": ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "video"}]}]}),
    "google": (GOOGLE, {"contents": [{"role": "robot", "parts": []}]}),
    "template": (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "u"}]}]}),
    "no json": (CHAT, "hello"),
}
Ask = tuple[str, Any]


def run(folder: Path, *asks: Ask, agent: str = AGENT, timeout_s: float = 60.0, **limits: Any) -> RolloutResult:
    """An agent that asks so and ends with exit code 0."""
    with Proxy(
        ScriptedEngine(lambda _: REPLY, max_model_len=4096), RENDERER, params=GenerationParams(max_tokens=50)
    ) as proxy:
        runner = RolloutRunner(
            proxy=proxy,
            backend=LocalSandboxBackend(folder / "boxes"),
            harness=ShellHarness("python3 agent.py"),
            grader=FunctionGrader(lambda task, box: 1.0),
            config=RolloutConfig(limits=SessionLimits(**limits)),
        )
        files = {"agent.py": agent, "asks.json": json.dumps(asks)}
        task = Task(id="t", instruction="x", files=files, agent_timeout_s=timeout_s)
        (result,) = runner.run([Job(rollout_id="r", group_id="g", task=task, record_path=folder / "r.jsonl")])
    return result


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("before", [(), (GOOD,), (GOOD, LONG)], ids=["at once", "later", "after an overflow"])
def test_a_session_that_ends_on_a_refusal_has_no_reward(tmp_path: Path, before: tuple[Ask, ...], name: str) -> None:
    result = run(tmp_path, *before, BAD[name])
    rollout = result.rollout
    assert (rollout.reward, rollout.error_kind) == (None, "request_refused")
    assert rollout.stop_reason == ("agent_failed" if before else "no_calls")
    assert rollout.error is not None and rollout.error.startswith("a request of the agent was refused, and it asked")
    assert sum(count for counter, count in rollout.counters.items() if counter.startswith("refused_")) == 1
    (counter,) = (counter for counter in rollout.counters if counter.startswith("refused_"))
    assert build_rollout_metrics([count_rollout(result)])[f"polar/counters/{counter}"] == 1
    assert read_session(tmp_path / "r.jsonl") == rollout


@pytest.mark.parametrize("name", BAD)
def test_a_session_that_goes_on_after_a_refusal_is_graded(tmp_path: Path, name: str) -> None:
    rollout = run(tmp_path, GOOD, BAD[name], NEXT).rollout
    assert (rollout.reward, rollout.error, rollout.stop_reason) == (1.0, None, "completed")
    assert any(counter.startswith("refused_") for counter in rollout.counters)


def test_an_overflow_at_the_end_of_a_session_is_graded(tmp_path: Path) -> None:
    rollout = run(tmp_path, GOOD, LONG).rollout
    assert (rollout.reward, rollout.error, dict(rollout.counters)) == (1.0, None, {"context_overflows": 1})


def test_what_is_too_large_for_anybody_is_graded(tmp_path: Path) -> None:
    rollout = run(tmp_path, GOOD, (CHAT, {"messages": [{"role": "user", "content": "x" * (16 << 20)}]})).rollout
    assert (rollout.reward, rollout.error, dict(rollout.counters)) == (1.0, None, {"refused_body": 1})


def test_the_end_of_the_budget_is_graded(tmp_path: Path) -> None:
    asks = [(CHAT, {"messages": [{"role": "user", "content": f"{number}"}]}) for number in range(30)]
    rollout = run(tmp_path, *asks, max_calls=2).rollout
    assert (rollout.reward, rollout.error, dict(rollout.counters)) == (1.0, None, {"budget_messages": 28})


def test_another_path_that_is_not_served_ends_nothing(tmp_path: Path) -> None:
    rollout = run(tmp_path, GOOD, ("/api/event_logging/batch", {})).rollout
    assert (rollout.reward, rollout.error, dict(rollout.counters)) == (1.0, None, {"refused_path": 1})


def test_an_agent_that_waits_for_ever_after_a_refusal_has_no_reward(tmp_path: Path) -> None:
    rollout = run(tmp_path, GOOD, BAD["chat"], agent=AGENT + "import time; time.sleep(100)", timeout_s=2.0).rollout
    assert (rollout.reward, rollout.error_kind, rollout.stop_reason) == (None, "request_refused", "agent_timeout")


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (LONG, r"5\d\d\d tokens > 4095 maximum. vllm_max_model_length sets the context length of 4096 tokens"),
        (("/v1/completions", {"prompt": "x"}), "POST /v1/completions is not served here"),
    ],
)
def test_an_agent_without_an_answer_says_the_last_refusal(tmp_path: Path, ask: Ask, words: str) -> None:
    """A prompt that does not fit among them: both numbers and the key that sets the window."""
    rollout = run(tmp_path, ask).rollout
    assert (rollout.reward, rollout.error_kind, rollout.stop_reason) == (None, "no_calls", "no_calls")
    assert rollout.error is not None
    assert re.search(words, rollout.error)


def test_a_tool_that_prints_nothing_is_no_refusal(tmp_path: Path) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "sh", "arguments": {"cmd": "true"}}}
    history = [HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]
    asks = (CHAT, {"messages": [*history, {"role": "tool", "tool_call_id": "c1", "content": None}]})
    rollout = run(tmp_path, GOOD, asks).rollout
    assert (rollout.reward, dict(rollout.counters), len(rollout.calls)) == (1.0, {}, 2)
