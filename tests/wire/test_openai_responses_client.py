"""The official client reads replies beyond the conformance table: custom tools, summaries, raw events."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest

from polar_trl.engine.base import GenerationParams
from polar_trl.engine.scripted import ScriptedEngine
from polar_trl.errors import EngineBusyError
from polar_trl.proxy import Proxy
from polar_trl.recording.log import SessionLog
from polar_trl.tokens.bytes import ByteRenderer
from polar_trl.types import Completion, Message, TokenIds, ToolCall

RENDERER = ByteRenderer()
PATCH: Any = {
    "type": "custom",
    "name": "patch",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
HELLO: Any = {"role": "user", "content": "hello"}


def say(text: str = "", *tool_calls: tuple[str, str]) -> TokenIds:
    calls = tuple(ToolCall(id="", name=name, arguments=arguments) for name, arguments in tool_calls)
    return RENDERER.spell(Message(role="assistant", text=text, tool_calls=calls))


@contextmanager
def serve(engine: ScriptedEngine) -> Iterator[tuple[openai.OpenAI, SessionLog]]:
    """The client of a session, and the session's record."""
    log = SessionLog(session_id="s", task_id="t", group_id="g")
    with Proxy(engine, RENDERER, params=GenerationParams(max_tokens=1000), ping_interval_s=0.05) as proxy:
        endpoint = proxy.open_session(log)
        with openai.OpenAI(base_url=f"{endpoint.origin}/v1", api_key=endpoint.api_key, max_retries=0) as client:
            yield client, log


@pytest.mark.parametrize("stream", [False, True])
def test_custom_tool_calls_and_their_results(stream: bool) -> None:
    replies = [say("", ("patch", '{"input": "*** é"}'), ("patch", "no json")), say("done")]
    with serve(ScriptedEngine(replies)) as (client, log):
        if stream:
            with client.responses.stream(model="m", input=[HELLO], tools=[PATCH]) as events:
                response: Any = events.get_final_response()
        else:
            response = client.responses.create(model="m", input=[HELLO], tools=[PATCH])
        assert [(item.type, item.input) for item in response.output] == [
            ("custom_tool_call", "*** é"),
            ("custom_tool_call", "no json"),
        ]
        results: list[Any] = [
            {"type": "custom_tool_call_output", "call_id": item.call_id, "output": "ok"} for item in response.output
        ]
        history = [HELLO, *(item.model_dump(exclude_none=True) for item in response.output), *results]
        assert client.responses.create(model="m", input=history, tools=[PATCH]).output_text == "done"
    first, second = log.calls
    assert second.parent == 0
    assert second.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids
    assert [message.tool_call_id for message in second.request.messages[-2:]] == ["call_0_0", "call_0_1"]


def test_a_compacted_conversation_goes_on() -> None:
    with serve(ScriptedEngine([say("The file is half written."), say("whole now")])) as (client, log):
        compacted = client.responses.compact(model="gpt-5.5", input=[HELLO])
        assert (compacted.object, [item.type for item in compacted.output]) == ("response.compaction", ["compaction"])
        assert compacted.usage.total_tokens == len(log.calls[0].prompt_ids) + len(log.calls[0].completion.token_ids)
        items: Any = [*(item.model_dump(exclude_none=True) for item in compacted.output), HELLO]
        assert client.responses.create(model="m", input=items).output_text == "whole now"
    assert [call.purpose for call in log.calls] == ["auxiliary", "policy"]
    assert log.calls[1].request.messages[0].text.endswith("The file is half written.")


def test_counting_says_what_the_prompt_has_and_records_nothing() -> None:
    with serve(ScriptedEngine([say("hi")])) as (client, log):
        count = client.responses.input_tokens.count(model="m", input=[HELLO], tools=[PATCH], instructions="be brief")
        assert log.calls == ()
        client.responses.create(model="m", input=[HELLO], tools=[PATCH], instructions="be brief")
        assert count.input_tokens == len(log.calls[0].prompt_ids)
        assert count.object == "response.input_tokens"


def test_every_event_is_one_that_the_client_knows() -> None:
    reply = Message(
        role="assistant",
        reasoning="hm",
        text="so",
        tool_calls=(
            ToolCall(id="", name="patch", arguments='{"input": "x"}'),
            ToolCall(id="", name="f", arguments="{}"),
        ),
    )
    with (
        serve(ScriptedEngine([RENDERER.spell(reply)], delay_s=0.3)) as (client, _),
        client.responses.create(model="m", input="hello", tools=[PATCH], stream=True) as events,
    ):
        seen = list(events)
    kinds = [event.type for event in seen]
    assert "keepalive" in kinds
    known = [event for event in seen if event.type != "keepalive"]
    for event in known:
        # made anew with its own checks, which the client leaves out
        type(event).model_validate(event.model_dump())
        assert type(event).model_fields["type"].annotation.__args__ == (event.type,)  # type: ignore[union-attr]
    assert [event.sequence_number for event in known] == list(range(len(known)))
    assert kinds[-1] == "response.completed"


class LateBusyEngine(ScriptedEngine):
    """Busy once a stream has begun."""

    async def generate(self, prompt_ids: TokenIds, params: GenerationParams) -> Completion:
        await super().generate(prompt_ids, params)
        raise EngineBusyError("weights are being updated", retry_after_s=1.5)


def test_a_stream_that_fails_raises() -> None:
    with (
        serve(LateBusyEngine([say("x")], delay_s=0.2)) as (client, _),
        pytest.raises(openai.APIError, match=r"weights are being updated\. Please try again in 1\.500s") as caught,
        client.responses.stream(model="m", input="hello") as events,
    ):
        events.get_final_response()
    assert caught.value.code == "rate_limit_exceeded"
