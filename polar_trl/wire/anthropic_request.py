"""Parse bodies of Anthropic Messages into normal form.

Blocks that carry no text of the conversation (redacted thinking, results of server tools) are left out and named in
`unread`, as are tools that Anthropic's own servers run. An unknown role or block raises `WireError`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from polar_trl.errors import WireError
from polar_trl.json_text import is_json_object
from polar_trl.types import ChatRequest, Message, RequestedSampling, Role, ToolCall
from polar_trl.wire.anthropic_tools import parse_tool_choice, parse_tools
from polar_trl.wire.base import (
    ItemMemo,
    json_type,
    list_parts,
    list_unread,
    read_call_arguments,
    read_field,
    read_reasoning,
    read_text,
    read_texts,
    require_string,
)

UNPARSED_INPUT = "__unparsedToolInput"
"""Under this key Claude Code 2.1.332 sends back tool input that was no JSON: {"raw": text, "len": length}."""
_BODY_FIELDS = {
    "model", "messages", "system", "tools", "tool_choice", "stream",
    "max_tokens", "temperature", "top_p", "top_k", "stop_sequences",
}  # fmt: skip
_ROLES: dict[str, Role] = {"user": "user", "assistant": "assistant", "system": "system", "developer": "developer"}
# Claude Code counts its requests in the first block of its system prompt; no model should see that
_BILLING_PREFIX = "x-anthropic-billing-header:"
_UNREAD_BLOCKS = {
    "redacted_thinking", "server_tool_use", "web_search_tool_result", "web_fetch_tool_result",
    "code_execution_tool_result", "bash_code_execution_tool_result", "text_editor_code_execution_tool_result",
    "tool_search_tool_result", "mcp_tool_use", "mcp_tool_result", "container_upload", "compaction",
}  # fmt: skip


def parse_request(body: Mapping[str, Any], memo: ItemMemo) -> ChatRequest:
    """Parse the request into normal form. Raises `WireError` naming the field that is wrong."""
    unread = list(list_unread(body, _BODY_FIELDS, ""))
    system = _parse_system(body, unread)
    items = _parse_messages(body, unread, memo)
    named = frozenset(name for item in items for name in item.tool_references)
    tools = parse_tools(body, unread, named)
    return ChatRequest(
        messages=(*system, *_join_assistants(message for item in items for message in item.messages)),
        tools=tools,
        tool_choice=parse_tool_choice(body, unread),
        sampling=_parse_sampling(body),
        stream=bool(read_field(body, "stream", bool, "")),
        model=read_field(body, "model", str, "") or "",
        unread=tuple(unread),
    )


@dataclass(frozen=True, slots=True)
class _Item:
    """One entry of `messages`, read."""

    messages: tuple[Message, ...]
    unread: tuple[str, ...]
    tool_references: tuple[str, ...]


@dataclass(slots=True)
class _Blocks:
    """The blocks of one content, by kind and in order."""

    texts: list[str] = field(default_factory=list)
    thinking: list[str] = field(default_factory=list)
    images: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    results: list[Message] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    tool_references: list[str] = field(default_factory=list)


def _parse_system(body: Mapping[str, Any], unread: list[str]) -> list[Message]:
    raw = body.get("system")
    if raw is None:
        return []
    if isinstance(raw, str):
        return [Message(role="system", text=raw)] if raw else []
    if not isinstance(raw, list):
        raise WireError(f"system: must be a string or an array of text blocks, not {json_type(raw)}")
    blocks = _Blocks()
    for index, block in enumerate(raw):
        path = f"system[{index}]"
        text = block.get("text") if isinstance(block, dict) else None
        if isinstance(text, str) and text.startswith(_BILLING_PREFIX):
            blocks.unread.append(path)
        else:
            _parse_block(block, path, blocks)
    unread += blocks.unread
    # blocks are paragraphs here, not pieces of one text as in messages
    return (
        [Message(role="system", text="\n\n".join(blocks.texts), images=tuple(blocks.images))] if blocks.texts else []
    )


def _parse_messages(body: Mapping[str, Any], unread: list[str], memo: ItemMemo) -> list[_Item]:
    raw = read_field(body, "messages", list, "")
    if not raw:
        raise WireError("messages: must hold at least one message")
    items = memo.parse_items(raw, _parse_item)
    seen: set[str] = set()
    for item in items:
        for path in item.unread:
            # histories repeat the same unknown field in every message; its first place is enough
            name = path.rpartition(".")[2]
            if name not in seen:
                unread.append(path)
                seen.add(name)
    return items


def _join_assistants(messages: Iterable[Message]) -> list[Message]:
    """Join the messages of an assistant turn into one: in this format, neighbours of one role are one turn."""
    joined: list[Message] = []
    for message in messages:
        if joined and message.role == joined[-1].role == "assistant":
            first = joined.pop()
            message = replace(
                first,
                text=first.text + message.text,
                reasoning=(first.reasoning or "") + (message.reasoning or "") or None,
                tool_calls=first.tool_calls + message.tool_calls,
                images=first.images + message.images,
            )
        joined.append(message)
    return joined


def _parse_item(item: Any, index: int) -> _Item:
    path = f"messages[{index}]"
    if not isinstance(item, dict):
        raise WireError(f"{path}: must be an object, not {json_type(item)}")
    role = _ROLES.get(item["role"]) if isinstance(item.get("role"), str) else None
    if role is None:
        raise WireError(f"{path}.role: must be user, assistant or system")
    blocks = _Blocks(unread=list(list_unread(item, {"role", "content"}, path)))
    _parse_content(item.get("content"), f"{path}.content", blocks)
    return _Item(
        messages=tuple(_build_messages(role, blocks)),
        unread=tuple(blocks.unread),
        tool_references=tuple(blocks.tool_references),
    )


def _build_messages(role: Role, blocks: _Blocks) -> list[Message]:
    text, images = "".join(blocks.texts), tuple(blocks.images)
    if role == "assistant":
        return [
            Message(
                role="assistant",
                text=text,
                reasoning="".join(blocks.thinking) or None,
                tool_calls=tuple(blocks.calls),
                images=images,
            )
        ]
    # results first: no chat template knows a user's words between a call and its result
    own = [Message(role=role, text=text, images=images)] if blocks.texts or images or not blocks.results else []
    return [*blocks.results, *own]


def _parse_content(raw: Any, path: str, blocks: _Blocks) -> None:
    for index, block in enumerate(list_parts(raw, path)):
        _parse_block(block, f"{path}[{index}]", blocks)


def _parse_block(block: Any, path: str, blocks: _Blocks) -> None:
    if isinstance(block, str):  # some clients write a text block as its text
        blocks.texts.append(block)
        return
    if not block and block in (None, {}):
        return
    if not isinstance(block, dict):
        raise WireError(f"{path}: must be an object, not {json_type(block)}")
    kind = block.get("type")
    if kind == "text":
        blocks.texts.append(read_text(block, "text", path))
    elif kind == "thinking":
        blocks.thinking.append(read_reasoning(block))
    elif kind == "image":
        blocks.images.append(_parse_image(block, path))
    elif kind == "tool_use":
        blocks.calls.append(_parse_tool_use(block, path))
    elif kind == "tool_result":
        blocks.results.append(_parse_tool_result(block, path, blocks))
    elif kind == "document":
        _parse_document(block, path, blocks)
    elif kind == "search_result":
        _parse_content(block.get("content"), f"{path}.content", blocks)
    elif kind == "tool_reference":
        blocks.tool_references.append(require_string(block, "tool_name", path))
    elif isinstance(kind, str) and kind in _UNREAD_BLOCKS:
        blocks.unread.append(f"{path}.{kind}")
    elif block.get("text") is not None:
        blocks.texts.append(read_text(block, "text", path))
    else:
        shown = repr(kind[:40]) if isinstance(kind, str) else json_type(kind)
        raise WireError(f"{path}.type: {shown} is no block that can be read here")


def _parse_image(block: Mapping[str, Any], path: str) -> str:
    source = read_field(block, "source", dict, path) or {}
    kind = source.get("type")
    if kind == "base64":
        media_type = require_string(source, "media_type", f"{path}.source")
        return f"data:{media_type};base64,{require_string(source, 'data', f'{path}.source')}"
    if kind == "url":
        return require_string(source, "url", f"{path}.source")
    raise WireError(f"{path}.source.type: only base64 and url images can be read")


def _parse_document(block: Mapping[str, Any], path: str, blocks: _Blocks) -> None:
    source = read_field(block, "source", dict, path) or {}
    kind = source.get("type")
    if kind == "text":
        blocks.texts.append(require_string(source, "data", f"{path}.source"))
    elif kind == "content":
        _parse_content(source.get("content"), f"{path}.source.content", blocks)
    else:
        # these words make Claude Code 2.1.332 leave the document out and go on
        raise WireError(f"{path}.source: this model does not support PDF input, only documents of type text")


def _parse_tool_use(block: Mapping[str, Any], path: str) -> ToolCall:
    value = block.get("input")
    unparsed = value.get(UNPARSED_INPUT) if isinstance(value, dict) and len(value) == 1 else None
    if isinstance(unparsed, dict) and isinstance(unparsed.get("raw"), str):
        arguments = unparsed["raw"]
    else:
        arguments = read_call_arguments(block, "input", path) if value not in (None, []) else "{}"
    return ToolCall(
        id=require_string(block, "id", path),
        name=require_string(block, "name", path),
        arguments=arguments,
        parse_status="ok" if is_json_object(arguments) else "malformed",
    )


def _parse_tool_result(block: Mapping[str, Any], path: str, outer: _Blocks) -> Message:
    inner = _Blocks()
    _parse_content(block.get("content"), f"{path}.content", inner)
    outer.unread += inner.unread
    outer.tool_references += inner.tool_references
    # with references alone, the tools themselves are what the model gets; say which
    text = "".join(inner.texts) or "\n".join(inner.tool_references)
    return Message(
        role="tool", text=text, tool_call_id=require_string(block, "tool_use_id", path), images=tuple(inner.images)
    )


def _parse_sampling(body: Mapping[str, Any]) -> RequestedSampling:
    max_tokens = read_field(body, "max_tokens", int, "")
    if max_tokens is not None and max_tokens < 1:
        raise WireError("max_tokens: must be at least 1")
    return RequestedSampling(
        max_tokens=max_tokens,
        temperature=read_field(body, "temperature", (int, float), ""),
        top_p=read_field(body, "top_p", (int, float), ""),
        top_k=read_field(body, "top_k", int, ""),
        stop=read_texts(body, "stop_sequences", ""),
    )
