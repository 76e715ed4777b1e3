"""Build large bodies in the shapes that could make a reader slow, for every dialect. Used by the fuzz tests and by
scripts/bench/bench_parse.py."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from clients import CLIENTS, Client
from conversations import Style

from polar_trl.types import ChatRequest, Message, Tool, ToolCall
from polar_trl.wire.base import Incoming

STYLE = Style(block_lists=False, nulls=False, unknown_fields=False, reserialised=False, with_ids=True)
HELLO = Message(role="user", text="hello")
READ = Tool(name="read", description="Read a file.", parameters={"type": "object"})
_ITEMS = {"openai_chat": "messages", "openai_responses": "input", "anthropic": "messages", "google": "contents"}


def build(dialect_name: str, shape: str, num_bytes: int) -> Incoming:
    """A body of this shape and about this size."""
    return SHAPES[shape](CLIENTS[dialect_name], num_bytes)


def build_follow_up(dialect_name: str, incoming: Incoming) -> Incoming:
    """The same body and one user message more."""
    body = json.loads(incoming.body)
    (item,) = _items(CLIENTS[dialect_name], [Message(role="user", text="go on")])
    items = body[_ITEMS[dialect_name]]
    return replace(incoming, body=json.dumps(body | {_ITEMS[dialect_name]: [*items, item]}).encode())


def _render(client: type[Client], *messages: Message, tools: tuple[Tool, ...] = (), style: Style = STYLE) -> Incoming:
    return client(ChatRequest(messages=messages, tools=tools, model="policy"), style).incoming()


def _with_field(client: type[Client], text: str) -> Incoming:
    """A small request with a field that nobody reads."""
    incoming = _render(client, HELLO)
    return replace(incoming, body=incoming.body[:-1] + b', "x_new": ' + text.encode() + b"}")


def _items(client: type[Client], messages: list[Message], style: Style = STYLE) -> list[dict[str, Any]]:
    body = json.loads(_render(client, HELLO, *messages, style=style).body)
    items: list[dict[str, Any]] = body[_ITEMS[client.dialect_name]]
    return items[1:]


def _turn(number: int, num_calls: int = 1, text: str = "x" * 60) -> list[Message]:
    ids = [f"c{number}_{place}" for place in range(num_calls)]
    calls = tuple(ToolCall(id=id, name="read", arguments='{"path":"a.py"}') for id in ids)
    reply = Message(role="assistant", text="I look.", tool_calls=calls)
    return [reply, *(Message(role="tool", text=text, tool_call_id=id) for id in ids)]


def _repeat(client: type[Client], num_bytes: int, make: Callable[[int], list[Message]]) -> Incoming:
    """As many of these messages as fill the body."""
    few = len(_render(client, HELLO, *(message for number in range(10) for message in make(number))).body)
    none = len(_render(client, HELLO).body)
    count = num_bytes * 10 // (few - none)
    return _render(client, HELLO, *(message for number in range(count) for message in make(number)), tools=(READ,))


def _parallel_calls(client: type[Client], num_bytes: int) -> Incoming:
    one, two = (len(_render(client, HELLO, *_turn(0, count, "ok")).body) for count in (1, 2))
    return _render(client, HELLO, *_turn(0, num_bytes // (two - one), "ok"), tools=(READ,))


def _many_tools(client: type[Client], num_bytes: int) -> Incoming:
    tools = [Tool(name=f"t{number}", parameters={"type": "object"}) for number in range(num_bytes // 20)]
    one, two = (len(_render(client, HELLO, tools=tuple(tools[-count:])).body) for count in (1, 2))
    return _render(client, HELLO, tools=tuple(tools[: num_bytes // (two - one)]))


def _many_blocks(client: type[Client], num_bytes: int) -> Incoming:
    style = replace(STYLE, block_lists=True)
    body = json.loads(_render(client, Message(role="user", text="ab"), style=style).body)
    (item,) = body[_ITEMS[client.dialect_name]]
    key = "parts" if "parts" in item else "content"
    item[key] *= num_bytes // len(json.dumps(item[key]))
    return replace(_render(client, HELLO), body=json.dumps(body).encode())


def _many_numbers(client: type[Client], num_bytes: int) -> Incoming:
    incoming = _render(client, HELLO)
    body = json.loads(incoming.body) | {_ITEMS[client.dialect_name]: [1] * (num_bytes // 3)}
    return replace(incoming, body=json.dumps(body).encode())


def _huge_arguments(client: type[Client], num_bytes: int) -> Incoming:
    arguments = json.dumps({"numbers": [12345] * (num_bytes // 7)})
    call = ToolCall(id="c", name="read", arguments=arguments)
    result = Message(role="tool", text="ok", tool_call_id="c")
    return _render(client, HELLO, Message(role="assistant", tool_calls=(call,)), result, tools=(READ,))


def _one_surrogate(client: type[Client], num_bytes: int) -> Incoming:
    incoming = _repeat(client, num_bytes, _turn)
    return replace(incoming, body=incoming.body[:-1] + b', "x_new": "\\ud83d"}')


def _unknown_fields(client: type[Client], num_bytes: int) -> Incoming:
    fields = ", ".join(f'"{number}": 0' for number in range(num_bytes // 12))
    return _with_field(client, f'0, "y": {{{fields}}}')


def _nested_lists(client: type[Client], num_bytes: int) -> Incoming:
    return _with_field(client, "[" + ("[" * 900 + "]" * 900 + ",") * (num_bytes // 1801) + "0]")


SHAPES: dict[str, Callable[[type[Client], int], Incoming]] = {
    "long history": lambda client, size: _repeat(client, size, _turn),
    "long history, half an emoji": _one_surrogate,
    "short user messages": lambda client, size: _repeat(client, size, lambda _: [Message(role="user", text="a")]),
    "replies in a row": lambda client, size: _repeat(client, size, lambda _: [Message(role="assistant", text="a")]),
    "one text": lambda client, size: _render(client, Message(role="user", text="some words\n" * (size // 12))),
    "one text in blocks": _many_blocks,
    "tools": _many_tools,
    "parallel calls": _parallel_calls,
    "one call's arguments": _huge_arguments,
    "unknown fields": _unknown_fields,
    "an array of numbers": lambda client, size: _with_field(client, "[" + "1234," * (size // 5) + "1]"),
    "numbers as messages": _many_numbers,
    "nested lists": _nested_lists,
    "nested too deeply": lambda client, size: _with_field(client, "[" * size),
}
