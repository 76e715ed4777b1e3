"""The `anthropic` client against the proxy, where it is not like the other providers' clients.

The rows that all clients share are in `tests/test_proxy_conformance.py`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import anthropic
import pytest

from polar_trl.engine.base import GenerationParams
from polar_trl.engine.scripted import Reply, ScriptedEngine
from polar_trl.errors import EngineBusyError, EngineError
from polar_trl.proxy import Proxy
from polar_trl.recording.log import SessionLog
from polar_trl.tokens.bytes import ByteRenderer
from polar_trl.types import Message, TokenIds, ToolCall

RENDERER = ByteRenderer()
ASK: dict[str, Any] = {"model": "m", "max_tokens": 90, "messages": [{"role": "user", "content": "hello"}]}
TOOLS: Any = [{"name": "sh", "input_schema": {"type": "object"}}]


def say(text: str, *arguments: str, reasoning: str | None = None) -> TokenIds:
    calls = tuple(ToolCall(id="", name="sh", arguments=written) for written in arguments)
    return RENDERER.spell(Message(role="assistant", text=text, reasoning=reasoning, tool_calls=calls))


@contextmanager
def connect(
    replies: Sequence[Reply], *, max_retries: int = 0, max_model_len: int = 4000, api_key: str | None = None
) -> Iterator[tuple[anthropic.Anthropic, SessionLog]]:
    engine = ScriptedEngine(replies, max_model_len=max_model_len)
    log = SessionLog(session_id="s", task_id="t", group_id="g")
    with Proxy(engine, RENDERER, params=GenerationParams(max_tokens=90)) as proxy:
        endpoint = proxy.open_session(log)
        key = api_key or endpoint.api_key
        yield anthropic.Anthropic(base_url=endpoint.origin, api_key=key, max_retries=max_retries, timeout=600), log


def test_the_stream_helpers_events() -> None:
    reply = say("hi", '{"a": 1}', '{"b": 2}', reasoning="hm")
    with connect([reply]) as (client, _), client.messages.stream(**ASK, tools=TOOLS) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_message()
    assert {"thinking", "signature", "text", "input_json"} <= set(kinds)
    assert kinds.count("content_block_stop") == 4
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert [block.input for block in message.content if block.type == "tool_use"] == [{"a": 1}, {"b": 2}]


@pytest.mark.parametrize("arguments", ["ls -l", "[1]", '{"a": ', "null"])
def test_input_that_is_no_object_does_not_break_the_helper(arguments: str) -> None:
    with connect([say("hi", arguments)]) as (client, _), client.messages.stream(**ASK, tools=TOOLS) as stream:
        message = stream.get_final_message()
    (block,) = [block for block in message.content if block.type == "tool_use"]
    assert block.input == {"unparsed_arguments": arguments}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("error", [EngineBusyError("later", retry_after_s=1.0), EngineError("broken")], ids=type)
def test_an_engine_that_cannot_answer_is_overloaded(error: EngineError, stream: bool) -> None:
    with connect([error]) as (client, _), pytest.raises(anthropic.OverloadedError) as caught:
        client.messages.create(**ASK, stream=stream)
    assert caught.value.status_code == 529


def test_errors_of_the_request() -> None:
    with connect([], api_key="wrong") as (client, _), pytest.raises(anthropic.AuthenticationError):
        client.messages.create(**ASK)
    with connect([]) as (client, _), pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.role"):
        client.messages.create(**ASK | {"messages": [{"role": "robot", "content": ""}]})
    with connect([], max_model_len=20) as (client, _), pytest.raises(anthropic.BadRequestError, match="too long"):
        client.messages.create(**ASK)


def test_a_busy_engine_is_asked_again() -> None:
    with connect([EngineBusyError("later", retry_after_s=0.3), say("hi")], max_retries=1) as (client, log):
        message = client.messages.create(**ASK)
    assert [block.text for block in message.content if block.type == "text"] == ["hi"]
    assert log.counters == {"calls_sent_back": 1}


def test_counting_and_models() -> None:
    with connect([say("hi")]) as (client, log):
        counted = client.messages.count_tokens(model="m", messages=ASK["messages"], system="be brief", tools=TOOLS)
        assert log.calls == ()
        sampled = client.messages.create(**ASK, system="be brief", tools=TOOLS)
        assert counted.input_tokens == sampled.usage.input_tokens == len(log.calls[0].prompt_ids)
        assert [model.id for model in client.models.list()] == ["policy"]
        assert client.models.retrieve("claude-opus").id == "claude-opus"
