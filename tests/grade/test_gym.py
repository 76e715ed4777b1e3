"""The grader that asks a resources server: what it sends, which server it asks, and what has no reward."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from openai_servers import ASKED, serve_app
from serving import PARAMS, RENDERER, say
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from polar_trl.engine.scripted import ScriptedEngine
from polar_trl.errors import ConfigError
from polar_trl.grade.gym import GymGrader, build_response
from polar_trl.harness.shell import ShellHarness
from polar_trl.proxy import Proxy
from polar_trl.rollout.reasons import find_reason
from polar_trl.rollout.runner import Job, RolloutConfig, RolloutRunner
from polar_trl.sandbox.local import LocalSandboxBackend
from polar_trl.types import Call, ChatRequest, Completion, Message, Rollout, Task, ToolCall

ROW = {"responses_create_params": {"input": "Which one?"}, "expected_answer": "B"}
TASK = Task(id="example-1", instruction="Which one?", metadata={"gym": ROW})
ASK = (
    'curl -s "$OPENAI_BASE_URL/chat/completions" -H "authorization: Bearer $OPENAI_API_KEY" '
    """-d '{"messages": [{"role": "user", "content": "Which one?"}]}'"""
)


@contextmanager
def serve_gym(verify: Any, **more: Any) -> Iterator[str]:
    """Serve a head server and the resources server "mcqa" at one address."""

    async def head(request: Request) -> Response:
        place = {"host": request.url.hostname, "port": request.url.port}
        servers: dict[str, Any] = {"mcqa": {"resources_servers": {"mcqa": {"entrypoint": "app.py", **place}}}}
        return JSONResponse(yaml.safe_dump(servers | more))

    async def seed(request: Request) -> Response:
        answer = JSONResponse({})
        answer.set_cookie("session", "7")
        return answer

    async def check(request: Request) -> Response:
        assert request.cookies == {"session": "7"}
        ASKED.append(await request.json())
        return verify if isinstance(verify, Response) else JSONResponse({**ASKED[-1], **verify})

    ASKED.clear()
    with serve_app({"/global_config_dict_yaml": head, "/seed_session": seed, "/verify": check}) as url:
        yield url


def play(grader: GymGrader, tmp_path: Path) -> Rollout:
    with Proxy(ScriptedEngine([say("It is B.")]), RENDERER, params=PARAMS) as proxy:
        backend = LocalSandboxBackend()
        runner = RolloutRunner(
            proxy=proxy, backend=backend, harness=ShellHarness(ASK), grader=grader, config=RolloutConfig()
        )
        rollout = runner.run_one(
            Job(rollout_id="r", group_id="r", task=TASK, record_path=tmp_path / "r.jsonl")
        ).rollout
        runner.close()
        backend.close()
    return rollout


def test_the_reward_is_what_verify_returns(tmp_path: Path) -> None:
    with serve_gym({"reward": 0.25, "extracted_answer": "B"}) as url:
        rollout = play(GymGrader(url), tmp_path)
    assert rollout.reward == 0.25
    assert rollout.grading is not None and rollout.grading.output_tail == '{"extracted_answer": "B"}'
    (asked,) = ASKED
    assert asked["expected_answer"] == "B"
    (item,) = asked["response"]["output"]
    assert item["content"][0]["text"] == "It is B."
    assert tuple(item["generation_token_ids"]) == rollout.calls[0].completion.token_ids


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (Response("it broke", status_code=500), "the resources server mcqa at .* does not answer: .*500"),
        (Response("no JSON"), "the resources server mcqa at .* does not answer"),
        ({"reward": None}, "the resources server mcqa gave the reward None"),
    ],
)
def test_without_an_answer_there_is_no_reward_and_a_reason(answer: Any, message: str, tmp_path: Path) -> None:
    with serve_gym(answer) as url:
        rollout = play(GymGrader(url), tmp_path)
    assert rollout.reward is None
    assert rollout.error_kind == "grader_failed"
    reason = find_reason(rollout)
    assert reason is not None and reason.name == "the grader failed"
    assert re.search(message, rollout.error or "")


def test_a_server_that_is_gone_gives_no_reward(tmp_path: Path) -> None:
    with serve_gym({"reward": 1.0}) as url:
        grader = GymGrader(url)
    assert play(grader, tmp_path).error_kind == "grader_failed"


def test_an_agent_ref_names_the_server(tmp_path: Path) -> None:
    other = {"resources_servers": {"math": {"host": "127.0.0.1", "port": 9}}}
    agent = {"responses_api_agents": {"simple_agent": {"resources_server": {"name": "mcqa"}}}}
    named = Task(id="b", instruction="x", metadata={"gym": ROW | {"agent_ref": {"name": "mine"}}})
    with serve_gym({"reward": 1.0}, math=other, mine=agent) as url:
        grader = GymGrader(url)
        grader.check([named])
        with pytest.raises(ConfigError, match=r"'example-1': its agent_ref \(None\) .* has 2 of them \(math, mcqa\)"):
            grader.check([TASK])


def test_the_response_has_what_tools_gave_and_no_side_requests() -> None:
    ask = Message(role="user", text="List the files.")
    called = Message(role="assistant", reasoning="I look.", tool_calls=(ToolCall(id="c", name="sh", arguments="{}"),))
    result = Message(role="tool", text="a.txt", tool_call_id="c")
    say_it = Message(role="assistant", text="One.")
    asked = [((ask,), called, "policy"), ((ask,), say_it, "auxiliary"), ((ask, called, result), say_it, "policy")]
    calls = [
        Call(
            session_id="s",
            index=index,
            dialect="openai_chat",
            request=ChatRequest(messages=messages),
            prompt_ids=(1, 2),
            completion=Completion(token_ids=(3,), logprobs=(-1.0,), finish_reason="stop"),
            message=message,
            purpose=purpose,  # type: ignore[arg-type]
        )
        for index, (messages, message, purpose) in enumerate(asked)
    ]
    response = build_response(ROW, calls)
    kinds = [item["type"] for item in response["output"]]
    assert kinds == ["reasoning", "function_call", "function_call_output", "message"]
    assert ["prompt_token_ids" in item for item in response["output"]] == [False, True, False, True]
    assert response["usage"]["total_tokens"] == 6
