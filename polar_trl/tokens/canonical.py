"""Hash conversations so that the changes which agents make when they send one back do not count.

Agents re-serialize tool arguments, invent tool-call ids, drop reasoning and trim replies. Two conversations get one
hash if and only if they differ in nothing else:

- "developer" and "system" are one role;
- reasoning is ignored: what was sampled is what the model saw, whether or not the agent echoes it;
- an assistant's text compares without leading and trailing whitespace, everybody else's exactly;
- tool calls compare by name and by arguments as JSON values (malformed arguments as raw text), results by order;
  call ids are ignored on both.

Sampling settings and tool choice are left out: they change no prompt.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import orjson

from polar_trl.json_text import load_json
from polar_trl.types import Message, Tool

_ROLES = {"system": b"s", "developer": b"s", "user": b"u", "assistant": b"a", "tool": b"t"}


def hash_tools(tools: Sequence[Tool]) -> bytes:
    """Hash a conversation that has no message yet."""
    return _hash(b"", [canonical_tools(tools)])


def extend_hash(before: bytes, message: Message, *, with_arguments: bool = True) -> bytes:
    """Hash a conversation (given by its own hash) and one more message.

    Args:
        before: Of the messages so far, or `hash_tools`.
        message: The next message.
        with_arguments: Whether tool arguments count. Without them, the hash is in no chain; it finds calls whose
            malformed arguments an agent could not repeat.
    """
    is_assistant = message.role == "assistant"
    parts = [
        _ROLES[message.role],
        _encode(message.text.strip() if is_assistant else message.text),
        b"%d" % len(message.images),
        *map(_encode, message.images),
    ]
    for call in message.tool_calls:
        parts += [_encode(call.name), canonical_arguments(call.arguments) if with_arguments else b"*"]
    return _hash(before, parts)


def hash_conversation(messages: Sequence[Message], tools: Sequence[Tool]) -> bytes:
    """Hash a conversation under its tools; a retry of the same request has the same hash."""
    key = hash_tools(tools)
    for message in messages:
        key = extend_hash(key, message)
    return key


def canonical_arguments(arguments: str) -> bytes:
    """Return JSON text with sorted keys and no whitespace; no arguments are `{}`; other text stays as it is."""
    if not arguments.strip():
        return b"{}"
    try:
        return _dump_sorted(_whole_floats_as_ints(_load(arguments)))
    except (ValueError, OverflowError, RecursionError):
        return _encode(arguments)


def canonical_tools(tools: Sequence[Tool]) -> bytes:
    """Return the declared tools, in their order, as JSON text with sorted keys."""
    return _dump_sorted([[tool.name, tool.description, dict(tool.parameters)] for tool in tools])


def _hash(previous: bytes, parts: list[bytes]) -> bytes:
    # lengths first: without them, text could move between neighbouring fields and keep the hash
    hasher = hashlib.blake2b(previous, digest_size=16)
    hasher.update(b",".join([b"%d" % len(part) for part in parts]) + b";")
    for part in parts:
        hasher.update(part)
    return hasher.digest()


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _load(text: str) -> Any:
    try:
        return load_json(text)
    except ValueError:
        return json.loads(text)  # reads what orjson refuses, such as NaN


def _dump_sorted(value: Any) -> bytes:
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError:
        return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _whole_floats_as_ints(value: Any) -> Any:
    """JavaScript agents send 1.0 back as 1, and of longer whole numbers what a float holds of them."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, int) and abs(value) >= 2**53:
        return float(value)
    if isinstance(value, dict):
        return {key: _whole_floats_as_ints(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_whole_floats_as_ints(item) for item in value]
    return value
