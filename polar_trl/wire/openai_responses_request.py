"""Parse Responses bodies: `input` items become messages of the normal form.

Refuses requests that only a server with a memory could answer (`previous_response_id`, `conversation`,
`item_reference`) with a `WireError`.
Format: the OpenAI API reference, "Responses"; Codex 0.171.0 for items that it does not list.
"""

import base64
import binascii
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from polar_trl.errors import WireError
from polar_trl.json_text import is_json_object
from polar_trl.types import ChatRequest, Message, RequestedSampling, Role, Tool, ToolCall
from polar_trl.wire.base import (
    ItemMemo,
    json_type,
    list_unread,
    read_call_arguments,
    read_field,
    read_reasoning,
    read_text,
    require_string,
)
from polar_trl.wire.freeform import parse_input
from polar_trl.wire.openai_parts import parse_content
from polar_trl.wire.openai_responses_tools import (
    LOCAL_SHELL,
    parse_tool_choice,
    parse_tools,
    qualify_name,
    read_local_shell_action,
)

COMPACTION_PROMPT = (
    "The conversation is about to be replaced by a summary, which you write now. Write it for whoever goes on with "
    "the work and knows nothing else of it. State the task in the user's own terms, with every condition that was "
    "named. Then state what was done and found, with the paths, commands and results that still matter, what was "
    "decided and why, what is left to do, and the next step. Answer with the summary alone and call no tool."
)
SUMMARY_LEAD = "The conversation so far was replaced by this summary of it:\n\n"

_MESSAGE_ROLES: dict[str, Role] = {
    "user": "user",
    "system": "system",
    "developer": "developer",
    "assistant": "assistant",
}
_CALL_TYPES = {"function_call", "custom_tool_call", "local_shell_call"}
_RESULT_TYPES = {"function_call_output", "custom_tool_call_output", "local_shell_call_output"}
_SUMMARY_TYPES = {"compaction", "compaction_summary"}
# what is read, and what changes no answer; the rest is named as unread
_BODY_FIELDS = {
    "model", "input", "instructions", "tools", "tool_choice", "stream", "max_output_tokens", "temperature", "top_p",
    "previous_response_id", "conversation", "background", "prompt", "text",
    "store", "include", "stream_options", "prompt_cache_key", "prompt_cache_retention", "client_metadata", "metadata",
    "user", "safety_identifier", "parallel_tool_calls",
}  # fmt: skip
_ITEM_FIELDS = {
    "type", "id", "status", "role", "content", "phase", "summary", "encrypted_content", "call_id", "name", "namespace",
    "arguments", "input", "action", "output",
    # Codex 0.171.0 to a server that it takes for OpenAI's own
    "internal_chat_message_metadata_passthrough",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class _Turn:
    """The messages that one or more items of `input` stand for."""

    message: Message | None = None
    tools: tuple[Tool, ...] = ()
    unread: tuple[tuple[str, str], ...] = ()
    """(what, path): a history repeats the same thing in many items, of which the first is named."""


def parse_body(body: dict[str, Any], memo: ItemMemo, *, compact: bool) -> tuple[ChatRequest, bool]:
    """Parse the request; return it, and whether it asks for a summary of the conversation.

    Args:
        body: The JSON object.
        memo: The session's.
        compact: It came to the endpoint that makes summaries.
    """
    _refuse_memory(body)
    unread = [path for path in list_unread(body, _BODY_FIELDS, "") if body[path] is not None]
    unread += _list_text_options(body)
    if read_field(body, "parallel_tool_calls", bool, "") is False:
        unread.append("parallel_tool_calls")  # a model that calls several tools is not kept from it
    tools = list(parse_tools(read_field(body, "tools", list, "") or [], "tools", unread))
    turns, triggered = _parse_input(body, memo)
    compact = compact or triggered
    named: dict[str, str] = {}
    for turn in turns:
        tools += turn.tools
        for what, path in turn.unread:
            named.setdefault(what, path)
    messages = [turn.message for turn in turns if turn.message is not None]
    instructions = read_field(body, "instructions", str, "")
    if instructions:
        messages.insert(0, Message(role="system", text=instructions))
    if not messages:
        raise WireError("input: must hold at least one message")
    if compact:
        messages.append(Message(role="user", text=COMPACTION_PROMPT))
    tool_choice = parse_tool_choice(body.get("tool_choice"), unread)
    request = ChatRequest(
        messages=tuple(messages),
        tools=tuple(tools),
        tool_choice="none" if compact else tool_choice,
        sampling=_parse_sampling(body),
        stream=bool(read_field(body, "stream", bool, "")),
        model=read_field(body, "model", str, "") or "",
        unread=(*unread, *named.values()),
    )
    return request, compact


def _refuse_memory(body: Mapping[str, Any]) -> None:
    for key in ("previous_response_id", "conversation", "prompt"):
        if body.get(key):
            raise WireError(f"{key}: nothing is stored here; send the whole conversation in input")
    if read_field(body, "background", bool, ""):
        raise WireError("background: must be false; nothing is stored here, so send the whole conversation and wait")


def _list_text_options(body: Mapping[str, Any]) -> list[str]:
    text = read_field(body, "text", dict, "") or {}
    unread = [path for path in list_unread(text, {"format"}, "text") if text[path.removeprefix("text.")] is not None]
    form = read_field(text, "format", dict, "text") or {}
    return unread if form.get("type", "text") == "text" else [*unread, "text.format"]


def _parse_sampling(body: Mapping[str, Any]) -> RequestedSampling:
    max_tokens = read_field(body, "max_output_tokens", int, "")
    if max_tokens is not None and max_tokens < 1:
        raise WireError("max_output_tokens: must be at least 1")
    return RequestedSampling(
        max_tokens=max_tokens,
        temperature=read_field(body, "temperature", (int, float), ""),
        top_p=read_field(body, "top_p", (int, float), ""),
    )


def _parse_input(body: Mapping[str, Any], memo: ItemMemo) -> tuple[list[_Turn], bool]:
    """Parse the turns of `input`; return them, and whether it ends in a compaction trigger."""
    raw = body.get("input")
    if isinstance(raw, str):
        raw = [{"role": "user", "content": raw}]
    if raw is None:
        raw = []
    if not isinstance(raw, list):
        raise WireError(f"input: must be a string or an array of items, not {json_type(raw)}")
    triggered = bool(raw) and isinstance(raw[-1], dict) and raw[-1].get("type") == "compaction_trigger"
    if triggered:
        raw = raw[:-1]
    return memo.parse_items(list(_split_turns(raw)), lambda turn, _: _parse_turn(*turn)), triggered


def _split_turns(raw: list[Any]) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Items that together are one assistant message, and each other item alone; with the index of the first.

    Before the items are read, so that a history that was read before gives the very same messages.
    """
    start, turn = 0, list[dict[str, Any]]()
    for index, item in enumerate(raw):
        if not isinstance(item, dict):
            raise WireError(f"input[{index}]: must be an object, not {json_type(item)}")
        if _is_assistants(item):
            start = start if turn else index
            turn.append(item)
            continue
        if turn:
            yield start, turn
            turn = []
        yield index, [item]
    if turn:
        yield start, turn


def _is_assistants(item: Mapping[str, Any]) -> bool:
    kind = item.get("type")
    if kind is None or kind == "message":
        return bool(item.get("role") == "assistant")
    # calls of servers' own tools among them, which are left out but end no turn
    return kind == "reasoning" or (isinstance(kind, str) and kind.endswith("_call"))


def _parse_turn(start: int, items: list[dict[str, Any]]) -> _Turn:
    item, path = items[0], f"input[{start}]"
    if _is_assistants(item):
        return _parse_assistant(start, items)
    kind = read_field(item, "type", str, path) or "message"
    unread = _list_unread(item, kind, path)
    if kind == "message":
        role = item.get("role")
        if not isinstance(role, str) or role not in _MESSAGE_ROLES:
            raise WireError(f"{path}.role: must be one of {', '.join(_MESSAGE_ROLES)}")
        content = parse_content(item, "content", path)
        message = Message(role=_MESSAGE_ROLES[role], text=content.text, images=tuple(content.images))
        return _Turn(message=message, unread=unread)
    if kind in _RESULT_TYPES:
        content = parse_content(item, "output", path)
        call_id = read_field(item, "call_id", str, path) or read_field(item, "id", str, path)
        message = Message(role="tool", text=content.text, tool_call_id=call_id, images=tuple(content.images))
        return _Turn(message=message, unread=unread)
    if kind in _SUMMARY_TYPES:
        summary = decode_summary(require_string(item, "encrypted_content", path), f"{path}.encrypted_content")
        return _Turn(message=Message(role="user", text=SUMMARY_LEAD + summary), unread=unread)
    if kind == "additional_tools":
        left_out: list[str] = []
        tools = parse_tools(read_field(item, "tools", list, path) or [], f"{path}.tools", left_out)
        return _Turn(tools=tools, unread=tuple((there, there) for there in left_out))
    if kind == "item_reference":
        raise WireError(f"{path}: nothing is stored here that could be referred to; send the whole item")
    return _Turn(unread=((kind, path),))


def _parse_assistant(start: int, items: list[dict[str, Any]]) -> _Turn:
    texts, reasonings, images = list[str](), list[str](), list[str]()
    tool_calls, unread = list[ToolCall](), list[tuple[str, str]]()
    for index, item in enumerate(items, start):
        path = f"input[{index}]"
        kind = item.get("type") or "message"
        if kind == "message":
            content = parse_content(item, "content", path, is_reply=True)
            texts.append(content.text)
            reasonings += content.reasonings
            images += content.images
        elif kind == "reasoning":
            # the reasoning itself if it was sent, else its summary; what is encrypted is not ours to read
            reasonings.append(read_reasoning(item.get("content")) or read_reasoning(item.get("summary")))
        elif kind in _CALL_TYPES:
            tool_calls.append(_parse_call(item, kind, path))
        else:
            unread.append((kind, path))
            continue
        unread += _list_unread(item, kind, path)
    if not (texts or reasonings or tool_calls):
        return _Turn(unread=tuple(unread))
    message = Message(
        role="assistant",
        text="\n\n".join(text for text in texts if text),
        reasoning="\n\n".join(text for text in reasonings if text) or None,
        tool_calls=tuple(tool_calls),
        images=tuple(images),
    )
    return _Turn(message=message, unread=tuple(unread))


def _list_unread(item: dict[str, Any], kind: str, path: str) -> tuple[tuple[str, str], ...]:
    if item.keys() <= _ITEM_FIELDS:
        return ()
    return tuple((f"{kind}.{key}", f"{path}.{key}") for key in item if key not in _ITEM_FIELDS)


def _parse_call(item: Mapping[str, Any], kind: str, path: str) -> ToolCall:
    call_id = read_field(item, "call_id", str, path) or read_field(item, "id", str, path) or ""
    if kind == "local_shell_call":
        action = read_local_shell_action(read_field(item, "action", dict, path) or {})
        if action is None:
            raise WireError(f"{path}.action: must be an object with a command, which is an array of strings")
        return ToolCall(id=call_id, name=LOCAL_SHELL, arguments=orjson.dumps(action).decode())
    if kind == "custom_tool_call":
        arguments = parse_input(call_id, read_text(item, "input", path))
    else:
        arguments = read_call_arguments(item, "arguments", path)
    return ToolCall(
        id=call_id,
        name=qualify_name(item, path),
        arguments=arguments,
        parse_status="ok" if is_json_object(arguments) else "malformed",
    )


def encode_summary(summary: str) -> str:
    """Encode a summary as the opaque content of a compaction item."""
    return base64.b64encode(summary.encode()).decode()


def decode_summary(content: str, path: str) -> str:
    """Invert `encode_summary`; `path` is the content's own."""
    try:
        return base64.b64decode(content, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError, ValueError) as error:
        raise WireError(f"{path}: was not made here, so the summary in it cannot be read") from error
