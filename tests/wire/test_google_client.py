"""Google's own Python client against the proxy: its requests are read, and it gets the recorded replies."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from google import genai
from google.genai import errors as genai_errors
from google.genai import types as genai_types

from polar_trl.engine.base import GenerationParams
from polar_trl.engine.scripted import ScriptedEngine
from polar_trl.errors import EngineBusyError
from polar_trl.proxy import Proxy
from polar_trl.recording.log import SessionLog
from polar_trl.tokens.bytes import ByteRenderer
from polar_trl.types import Completion, Message, RequestedSampling, TokenIds, ToolCall

RENDERER = ByteRenderer()


class BusyEngine(ScriptedEngine):
    """Works for a while, then takes no more requests."""

    async def generate(self, prompt_ids: TokenIds, params: GenerationParams) -> Completion:
        await asyncio.sleep(self.delay_s)
        raise EngineBusyError("weights are being updated", retry_after_s=2.0)


@dataclass(frozen=True, kw_only=True)
class Served:
    """A session behind a real socket, Google's client for it, and one with a wrong key."""

    log: SessionLog
    client: genai.Client
    stranger: genai.Client


Serve = Callable[[ScriptedEngine], Served]


@pytest.fixture
def serve() -> Iterator[Serve]:
    proxies: list[Proxy] = []

    def start(engine: ScriptedEngine) -> Served:
        proxy = Proxy(engine, RENDERER, params=GenerationParams(max_tokens=100), ping_interval_s=0.02)
        proxy.start()
        proxies.append(proxy)
        log = SessionLog(session_id="s", task_id="t", group_id="g")
        endpoint = proxy.open_session(log)
        options = genai_types.HttpOptions(base_url=endpoint.origin)
        clients = [genai.Client(api_key=key, http_options=options) for key in (endpoint.api_key, "wrong")]
        return Served(log=log, client=clients[0], stranger=clients[1])

    yield start
    for proxy in proxies:
        proxy.stop()


def spell(*replies: Message) -> list[TokenIds]:
    return [RENDERER.spell(reply) for reply in replies]


def declare(name: str) -> genai_types.Tool:
    parameters = genai_types.Schema(
        type=genai_types.Type.OBJECT, properties={"cmd": genai_types.Schema(type=genai_types.Type.STRING)}
    )
    return genai_types.Tool(function_declarations=[genai_types.FunctionDeclaration(name=name, parameters=parameters)])


TWO_CALLS = Message(
    role="assistant",
    reasoning="Both.",
    text="I run two.",
    tool_calls=(
        ToolCall(id="", name="sh", arguments='{"cmd": "ls"}'),
        ToolCall(id="", name="sh", arguments='{"cmd": "pwd"}'),
    ),
)


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("keep_ids", [True, False])
def test_googles_client_holds_a_conversation_with_tools(serve: Serve, streamed: bool, keep_ids: bool) -> None:
    served = serve(ScriptedEngine(spell(TWO_CALLS, Message(role="assistant", text="done")), delay_s=0.1))
    config = genai_types.GenerateContentConfig(
        system_instruction="be brief",
        tools=[declare("sh")],
        max_output_tokens=60,
        stop_sequences=["END"],
        top_k=40,
        automatic_function_calling=genai_types.AutomaticFunctionCallingConfig(disable=True),
    )
    contents = [genai_types.Content(role="user", parts=[genai_types.Part(text="go")])]

    def ask() -> list[genai_types.Part]:
        if not streamed:
            reply = served.client.models.generate_content(model="policy", contents=contents, config=config)
            assert reply.usage_metadata.candidates_token_count > 0
            return reply.candidates[0].content.parts
        chunks = list(served.client.models.generate_content_stream(model="policy", contents=contents, config=config))
        assert chunks[0].candidates[0].content.parts == []  # a ping
        assert chunks[-1].candidates[0].finish_reason == genai_types.FinishReason.STOP
        assert chunks[-1].usage_metadata.prompt_token_count == len(served.log.calls[-1].prompt_ids)
        return [part for chunk in chunks for part in chunk.candidates[0].content.parts]

    thought, text, *calls = ask()
    assert (thought.text, thought.thought, text.text) == ("Both.", True, "I run two.")
    assert [(part.function_call.name, part.function_call.args) for part in calls] == [
        ("sh", {"cmd": "ls"}),
        ("sh", {"cmd": "pwd"}),
    ]
    ids = [part.function_call.id if keep_ids else None for part in calls]
    for part, call_id in zip(calls, ids, strict=True):
        part.function_call.id = call_id
    contents.append(genai_types.Content(role="model", parts=[thought, text, *calls]))
    results = [
        genai_types.Part(
            function_response=genai_types.FunctionResponse(id=call_id, name="sh", response={"output": output})
        )
        for call_id, output in zip(ids, ("a.txt", "/work"), strict=True)
    ]
    contents.append(genai_types.Content(role="user", parts=results))
    (final,) = ask()
    assert final.text == "done"

    first, second = served.log.calls
    assert second.prompt_ids[: len(first.prompt_ids) + len(first.completion.token_ids)] == (
        first.prompt_ids + first.completion.token_ids
    )
    assert [(m.text, m.tool_call_id) for m in second.request.messages[-2:]] == [
        ("a.txt", first.message.tool_calls[0].id),
        ("/work", first.message.tool_calls[1].id),
    ]
    assert first.request.sampling == RequestedSampling(max_tokens=60, top_k=40, stop=("END",))


def test_googles_client_counts_and_lists(serve: Serve) -> None:
    served = serve(ScriptedEngine(spell(Message(role="assistant", text="hi"))))
    counted = served.client.models.count_tokens(model="policy", contents="hello").total_tokens
    reply = served.client.models.generate_content(model="policy", contents="hello")
    assert counted == reply.usage_metadata.prompt_token_count == len(served.log.calls[0].prompt_ids)
    assert reply.text == "hi"
    assert [entry.name for entry in served.client.models.list()] == ["models/policy"]
    assert served.client.models.get(model="org/x").name == "models/org/x"
    assert len(served.log.calls) == 1


def test_googles_client_sees_a_cut_reply(serve: Serve) -> None:
    served = serve(ScriptedEngine(spell(Message(role="assistant", text="abcdef"))))
    config = genai_types.GenerateContentConfig(max_output_tokens=3)
    reply = served.client.models.generate_content(model="policy", contents="hello", config=config)
    assert (reply.text, reply.candidates[0].finish_reason) == ("abc", genai_types.FinishReason.MAX_TOKENS)


def test_googles_client_reads_errors(serve: Serve) -> None:
    served = serve(ScriptedEngine([], max_model_len=10))
    with pytest.raises(genai_errors.ClientError) as caught:
        served.client.models.generate_content(model="policy", contents="hello, long")
    assert (caught.value.code, caught.value.status) == (400, "INVALID_ARGUMENT")
    assert "exceeds the maximum number of tokens allowed (9)" in str(caught.value)
    with pytest.raises(genai_errors.ClientError) as caught:
        served.stranger.models.generate_content(model="policy", contents="hello")
    assert (caught.value.code, caught.value.status) == (401, "UNAUTHENTICATED")


@pytest.mark.parametrize("delay_s", [0.0, 0.1])
def test_googles_client_hears_of_an_error_inside_a_stream(serve: Serve, delay_s: float) -> None:
    served = serve(BusyEngine([], delay_s=delay_s))
    with pytest.raises(genai_errors.ClientError) as caught:
        list(served.client.models.generate_content_stream(model="policy", contents="hello"))
    assert (caught.value.code, caught.value.status) == (429, "RESOURCE_EXHAUSTED")
