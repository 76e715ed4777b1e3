"""Requests come back as the normal form they were made from, and replies sent back as history match their calls.

The agents are those of `clients`; what a format cannot say is stated in each client's `carry`.
"""

import json
from dataclasses import replace
from typing import Any

import pytest
from client_base import read_events
from clients import CLIENTS, Client, Seen
from conversations import Style, build_reply, others, replies, requests, styles, tool_results
from hypothesis import given, settings
from hypothesis import strategies as st

from polar_trl.json_text import load_json
from polar_trl.tokens.bytes import ByteRenderer
from polar_trl.tokens.canonical import canonical_arguments, hash_conversation
from polar_trl.tokens.continuation import Continuations, Prompt
from polar_trl.types import Call, ChatRequest, Completion, Message, Tool, ToolCall
from polar_trl.wire import DIALECTS
from polar_trl.wire.base import Dialect, ItemMemo, ReplyHead, Told

RENDERER = ByteRenderer()
every_dialect = pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)


def test_every_dialect_has_a_client() -> None:
    assert {dialect.name for dialect in DIALECTS} <= CLIENTS.keys()


@every_dialect
@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_request_comes_back_as_it_was(dialect: Dialect, data: st.DataObject) -> None:
    client_class = CLIENTS[dialect.name]
    request = data.draw(requests(client_class.kinds))
    client = client_class(request, data.draw(styles))
    parsed = dialect.parse(client.incoming(), ItemMemo())
    assert parsed.purpose == "policy"
    wanted = client_class.carry(request)
    if not client.says_ids:
        wanted = _without_ids(wanted)
        parsed = replace(parsed, request=_without_ids(parsed.request))
    assert _comparable(parsed.request, client_class) == _comparable(wanted, client_class)
    assert bool(parsed.request.unread) >= client.style.unknown_fields


@every_dialect
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_reply_sent_back_matches_its_call(dialect: Dialect, data: st.DataObject) -> None:
    client_class = CLIENTS[dialect.name]
    client = client_class(data.draw(requests(client_class.kinds)), data.draw(styles))
    memo = ItemMemo()
    request = dialect.parse(client.incoming(), memo).request
    message = _with_ids(data.draw(replies(request.tools)), 0)
    call = build_reply(message, request, index=0)
    seen = client.read(render(dialect, call, streamed=request.stream), streamed=request.stream)
    check_seen(seen, message, request, client_class)
    client.add(data.draw(tool_results([seen_call.id for seen_call in seen.calls], with_images=True)))
    client.add(data.draw(others(with_images=True, min_size=1)))
    later = dialect.parse(client.incoming(), memo).request
    num_known = len(request.messages) + 1
    assert hash_conversation(later.messages[:num_known], later.tools) == hash_conversation(
        (*request.messages, message), request.tools
    )
    assert later == dialect.parse(client.incoming(), ItemMemo()).request


@every_dialect
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("depth", [200, *range(240, 260), 900, 1100])
def test_arguments_of_any_depth_are_sent_back(dialect: Dialect, depth: int, streamed: bool) -> None:
    style = Style(block_lists=False, nulls=False, unknown_fields=False, reserialised=False, with_ids=True)
    tool = Tool(name="sh", parameters={"type": "object"})
    client = CLIENTS[dialect.name](ChatRequest(messages=(Message(role="user", text="hello"),), tools=(tool,)), style)
    request = dialect.parse(client.incoming(), ItemMemo()).request
    arguments = '{"a":' * depth + "1" + "}" * depth
    status = "ok" if depth < 1024 else "malformed"  # more is no JSON to our parser
    message = Message(
        role="assistant", tool_calls=(ToolCall(id="c", name="sh", arguments=arguments, parse_status=status),)
    )
    client.read(render(dialect, build_reply(message, request, index=0), streamed=streamed), streamed=streamed)
    later = dialect.parse(client.incoming(), ItemMemo()).request
    assert hash_conversation(later.messages, later.tools) == hash_conversation(
        (*request.messages, message), request.tools
    )


def _read_plain(dialect: Dialect, data: st.DataObject) -> tuple[Any, Any, Call, Any]:
    """Return two clients with one request, of which the first has read the reply whole, the reply, and what it saw."""
    client_class = CLIENTS[dialect.name]
    request, style = data.draw(requests(client_class.kinds)), data.draw(styles)
    plain, streamed = client_class(request, style), client_class(request, style)
    parsed = dialect.parse(plain.incoming(), ItemMemo()).request
    call = build_reply(_with_ids(data.draw(replies(parsed.tools)), 0), parsed, index=0)
    seen = plain.read(render(dialect, call, streamed=False), streamed=False)
    return plain, streamed, call, seen


@every_dialect
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_plain_and_streamed_replies_are_read_alike(dialect: Dialect, data: st.DataObject) -> None:
    plain, streamed, call, seen = _read_plain(dialect, data)
    assert streamed.read(render(dialect, call, streamed=True), streamed=True) == seen
    assert dialect.parse(streamed.incoming(), ItemMemo()) == dialect.parse(plain.incoming(), ItemMemo())


@every_dialect
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_reply_that_is_told_in_parts_is_read_as_one(dialect: Dialect, data: st.DataObject) -> None:
    plain, streamed, call, seen = _read_plain(dialect, data)
    assert streamed.read(render_parts(dialect, call, data), streamed=True) == seen
    first, second = (dialect.parse(one.incoming(), ItemMemo()).request for one in (plain, streamed))
    # ids that a client does not send are made of the places of parts
    assert hash_conversation(first.messages, first.tools) == hash_conversation(second.messages, second.tools)


def render_parts(dialect: Dialect, call: Call, data: st.DataObject) -> bytes:
    """A stream that tells reasoning and text in parts, while they are sampled."""
    head = ReplyHead(id=f"s-{call.index}", model="policy", created_s=0.0, num_prompt_tokens=len(call.prompt_ids))
    reasoning, text = call.message.reasoning or "", call.message.text
    ends = sorted(data.draw(st.lists(st.integers(0, len(reasoning) + len(text)), max_size=5)))
    told, stream = Told(), dialect.stream_start(head)
    for end in ends:
        now = Told(reasoning=reasoning[:end], text=text[: max(0, end - len(reasoning))])
        parts = list(dialect.stream_part(head, told, now))
        stream += b"".join(parts) + dialect.ping()
        told = replace(now, num_events=told.num_events + len(parts)) if parts else told
    assert told.begins(call.message)
    stream += b"".join(dialect.stream(head, call, told))
    numbers = [
        json.loads(data)["sequence_number"] for name, data in read_events(stream) if name.startswith("response.")
    ]
    assert numbers == list(range(len(numbers)))
    return stream


@every_dialect
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_every_later_prompt_begins_with_the_sampled_tokens(dialect: Dialect, data: st.DataObject) -> None:
    client_class = CLIENTS[dialect.name]
    client = client_class(data.draw(requests(client_class.kinds, with_images=False)), data.draw(styles))
    memo, continuations = ItemMemo(), Continuations(RENDERER)
    known: tuple[int, ...] = ()
    for index in range(3):
        request = dialect.parse(client.incoming(), memo).request
        prompt = continuations.build_prompt(request)
        assert (prompt.parent, prompt.forked) == (index - 1 if index else None, False)
        assert prompt.ids[: len(known)] == known
        call = sample(prompt, data.draw(replies(request.tools)), index)
        continuations.add(call)
        known = call.prompt_ids + call.completion.token_ids
        seen = client.read(render(dialect, call, streamed=request.stream), streamed=request.stream)
        client.add(data.draw(tool_results([seen_call.id for seen_call in seen.calls], with_images=False)))
        client.add(data.draw(others(with_images=False, min_size=1)))


def sample(prompt: Prompt, reply: Message, index: int) -> Call:
    """The call that a policy makes of a prompt when it says `reply`."""
    completion_ids = RENDERER.spell(reply)
    message = RENDERER.parse(prompt.ids, completion_ids, prompt.request.tools)
    call = build_reply(_with_ids(message, index), prompt.request, index=index)
    completion = Completion(token_ids=completion_ids, logprobs=(-0.5,) * len(completion_ids), finish_reason="stop")
    return replace(call, prompt_ids=prompt.ids, completion=completion, parent=prompt.parent)


def render(dialect: Dialect, call: Call, *, streamed: bool) -> bytes:
    head = ReplyHead(
        id=f"s-{call.index}", model="policy", created_s=1700000000.5, num_prompt_tokens=len(call.prompt_ids)
    )
    if not streamed:
        return dialect.render(head, call)
    return dialect.stream_start(head) + dialect.ping() + b"".join(dialect.stream(head, call))


def check_seen(seen: Seen, message: Message, request: ChatRequest, client_class: type[Client]) -> None:
    """The client read what the policy said."""
    assert (seen.text, seen.reasoning) == (message.text, message.reasoning or "")
    assert [call.name for call in seen.calls] == [call.name for call in message.tool_calls]
    freeform = {tool.name for tool in request.tools if tool.kind == "freeform"}
    for read, said in zip(seen.calls, message.tool_calls, strict=True):
        if said.name in freeform and read.id != said.id:  # not {"input": text}, so the text is all of it
            assert json.loads(read.arguments) == {"input": said.arguments}
        elif client_class.raw_arguments:
            assert canonical_arguments(read.arguments) == canonical_arguments(said.arguments)
        elif said.parse_status == "ok":
            assert json.loads(read.arguments) == load_json(said.arguments)


def _with_ids(message: Message, index: int) -> Message:
    calls = [replace(call, id=f"call_{index}_{place}") for place, call in enumerate(message.tool_calls)]
    return replace(message, tool_calls=tuple(calls))


def _without_ids(request: ChatRequest) -> ChatRequest:
    messages = [
        replace(
            message,
            tool_calls=tuple(replace(call, id="") for call in message.tool_calls),
            tool_call_id=None,
        )
        for message in request.messages
    ]
    return replace(request, messages=tuple(messages))


def _comparable(request: ChatRequest, client_class: type[Client]) -> ChatRequest:
    """Without what is compared elsewhere: how a tool that is no function is shown to the model, unread fields, and
    the spelling of arguments that a format carries as objects."""
    others = {tool.name for tool in request.tools if tool.kind != "function"}
    tools = [Tool(name=tool.name, kind=tool.kind) if tool.name in others else tool for tool in request.tools]
    messages = [
        replace(
            message,
            tool_calls=tuple(
                call if client_class.raw_arguments and call.name not in others else _respelled(call)
                for call in message.tool_calls
            ),
        )
        for message in request.messages
    ]
    return replace(request, messages=tuple(messages), tools=tuple(tools), unread=())


def _respelled(call: ToolCall) -> ToolCall:
    return replace(
        call, arguments=canonical_arguments(call.arguments).decode(errors="surrogatepass"), parse_status="ok"
    )
