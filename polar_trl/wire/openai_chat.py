"""Parse `/v1/chat/completions` bodies (OpenAI Chat Completions) and render calls as completions or chunks.

Refuses more than one choice per request (`WireError`): a session is one line of conversation per call.
Format: the OpenAI API reference, "Chat" and "Streaming"; `reasoning_content` as DeepSeek and vLLM write it.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any, get_args

import orjson

from polar_trl.errors import ContextOverflowError, WireError
from polar_trl.json_text import is_json_object
from polar_trl.types import Call, ChatRequest, Message, RequestedSampling, Role, Tool, ToolCall
from polar_trl.wire.base import (
    NOTHING_TOLD,
    Incoming,
    ItemMemo,
    ParsedRequest,
    ReplyHead,
    Route,
    Told,
    find_tool,
    json_type,
    list_unread,
    parse_object,
    read_call_arguments,
    read_field,
    read_reasoning,
    read_text,
    read_texts,
    require_string,
)
from polar_trl.wire.freeform import FREEFORM_PARAMETERS, describe_grammar, parse_input, render_input
from polar_trl.wire.openai_parts import parse_content
from polar_trl.wire.sse import render_comment, render_event

_ROLES: tuple[Role, ...] = get_args(Role)
_SAMPLING_FIELDS = {"max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "stop"}
_BODY_FIELDS = _SAMPLING_FIELDS | {"model", "messages", "tools", "tool_choice", "stream", "stream_options", "n"}
_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
_MESSAGE_FIELDS = {"role", "content", "tool_calls", "tool_call_id", *_REASONING_FIELDS}
_TOOL_TYPES = ("function", "custom")
# kind of a WireError -> OpenAI's type and code
_ERROR_NAMES: dict[str, tuple[str, str | None]] = {
    "invalid_request": ("invalid_request_error", None),
    "authentication": ("invalid_request_error", "invalid_api_key"),
    "not_found": ("invalid_request_error", "not_found"),
    "context_overflow": ("invalid_request_error", "context_length_exceeded"),
    "overloaded": ("server_error", "overloaded"),
    "internal": ("server_error", "internal_error"),
}
_FIELD_PATH = re.compile(r"([A-Za-z_][\w.\[\]]*): ")


class OpenAIChat:
    """The Chat Completions dialect."""

    name: str = "openai_chat"
    open_calls_error: str = (
        "An assistant message with 'tool_calls' must be followed by tool messages responding to each 'tool_call_id'. "
        "The following tool_call_ids did not have response messages: {ids}"
    )
    routes: tuple[Route, ...] = (
        Route(method="POST", path="/v1/chat/completions", kind="chat"),
        Route(method="GET", path="/v1/models", kind="models"),
        Route(method="GET", path="/v1/models/{model:path}", kind="models"),
    )

    def parse(self, incoming: Incoming, memo: ItemMemo) -> ParsedRequest:
        body = parse_object(incoming.body)
        if read_field(body, "n", int, "") not in (None, 1):
            raise WireError("n: only one choice per request is supported; send n=1 or leave it out")
        unread = list(list_unread(body, _BODY_FIELDS, ""))
        messages = _parse_messages(body, unread, memo)
        tools = _parse_tools(body, unread)
        stream_options = read_field(body, "stream_options", dict, "") or {}
        usage_wanted = read_field(stream_options, "include_usage", bool, "stream_options")
        request = ChatRequest(
            messages=messages,
            tools=tools,
            tool_choice=_parse_tool_choice(body.get("tool_choice"), tools, unread),
            sampling=_parse_sampling(body),
            stream=bool(read_field(body, "stream", bool, "")),
            model=read_field(body, "model", str, "") or "",
            unread=tuple(unread),
        )
        return ParsedRequest(request=request, reply_options=("include_usage",) if usage_wanted else ())

    def render(self, head: ReplyHead, call: Call) -> bytes:
        message = call.message
        body: dict[str, Any] = {"role": "assistant", "content": message.text}
        if message.reasoning:
            body["reasoning_content"] = message.reasoning
        if message.tool_calls:
            body["content"] = message.text or None
            body["tool_calls"] = [_render_tool_call(tool_call, call) for tool_call in message.tool_calls]
        choice = {"index": 0, "message": body, "logprobs": None, "finish_reason": _finish_reason(call)}
        return orjson.dumps(_envelope(head, "chat.completion", [choice]) | {"usage": _usage(head, call)})

    def stream_start(self, head: ReplyHead) -> bytes:
        return _render_chunk(head, {"role": "assistant", "content": ""})

    def ping(self) -> bytes:
        return render_comment("ping")

    def stream_part(self, head: ReplyHead, told: Told, now: Told) -> Iterator[bytes]:
        if reasoning := now.reasoning[len(told.reasoning) :]:
            yield _render_chunk(head, {"reasoning_content": reasoning})
        if text := now.text[len(told.text) :]:
            yield _render_chunk(head, {"content": text})

    def stream(self, head: ReplyHead, call: Call, told: Told = NOTHING_TOLD) -> Iterator[bytes]:
        message = call.message
        yield from self.stream_part(head, told, Told(reasoning=message.reasoning or "", text=message.text))
        for index, tool_call in enumerate(message.tool_calls):
            yield _render_chunk(head, {"tool_calls": [{"index": index} | _render_tool_call(tool_call, call)]})
        yield _render_chunk(head, {}, finish_reason=_finish_reason(call))
        if "include_usage" in head.options:
            chunk = _envelope(head, "chat.completion.chunk", []) | {"usage": _usage(head, call)}
            yield render_event(orjson.dumps(chunk))
        yield render_event(b"[DONE]")

    def stream_error(self, error: WireError) -> bytes:
        return render_event(self.render_error(error))

    def render_error(self, error: WireError) -> bytes:
        kind, code = _ERROR_NAMES[error.kind]
        text = str(error)
        if isinstance(error, ContextOverflowError):
            # agents that do not read `code` look for these words before they compact
            text = (
                f"This model's maximum context length is {error.max_tokens} tokens. "
                f"However, your messages resulted in {error.num_tokens} tokens. {error.advice}"
            )
        path = _FIELD_PATH.match(text)
        return orjson.dumps({"error": {"message": text, "type": kind, "param": path and path[1], "code": code}})

    def error_status(self, error: WireError) -> int:
        return error.status

    def render_count(self, num_prompt_tokens: int) -> bytes:
        raise NotImplementedError("Chat Completions has no route that counts tokens")

    def render_models(self, incoming: Incoming, model: str) -> bytes:
        # any label is served by the one policy, so any id that is asked for exists
        asked = incoming.path_params.get("model")
        entry = {"id": asked or model, "object": "model", "created": 0, "owned_by": "polar-trl"}
        return orjson.dumps(entry if asked else {"object": "list", "data": [entry]})


def _parse_messages(body: dict[str, Any], unread: list[str], memo: ItemMemo) -> tuple[Message, ...]:
    raw = read_field(body, "messages", list, "")
    if not raw:
        raise WireError("messages: must hold at least one message")
    messages = memo.parse_items(raw, _parse_message)
    seen = set(_MESSAGE_FIELDS)
    for index, item in enumerate(raw):
        # histories repeat the same unknown field on every message; its first place is enough
        if not item.keys() <= seen:
            unread += list_unread(item, seen, f"messages[{index}]")
            seen |= item.keys()
    return tuple(messages)


def _parse_message(item: Any, index: int) -> Message:
    path = f"messages[{index}]"
    if not isinstance(item, dict):
        raise WireError(f"{path}: must be an object, not {json_type(item)}")
    role = item.get("role")
    if role not in _ROLES:
        raise WireError(f"{path}.role: must be one of {', '.join(_ROLES)}")
    content = parse_content(item, "content", path, is_reply=role == "assistant")
    text, images = content.text, tuple(content.images)
    if role == "assistant":
        told = (read_reasoning(item.get(key)) for key in _REASONING_FIELDS)
        tool_calls = _parse_tool_calls(read_field(item, "tool_calls", list, path) or [], f"{path}.tool_calls")
        reasoning = next(filter(None, told), content.reasoning)
        return Message(role="assistant", text=text, reasoning=reasoning, tool_calls=tool_calls, images=images)
    if role == "tool":
        return Message(role="tool", text=text, tool_call_id=read_field(item, "tool_call_id", str, path), images=images)
    return Message(role=role, text=text, images=images)


def _parse_tool_calls(items: list[Any], path: str) -> tuple[ToolCall, ...]:
    tool_calls = []
    for index, item in enumerate(items):
        here = f"{path}[{index}]"
        if not isinstance(item, dict):
            raise WireError(f"{here}: must be an object, not {json_type(item)}")
        call_id = read_field(item, "id", str, here) or ""
        kind = "custom" if item.get("type") == "custom" else "function"
        called = item.get(kind)
        if not isinstance(called, dict):
            raise WireError(f"{here}.{kind}: must be an object with a name")
        if kind == "custom":
            arguments = parse_input(call_id, read_text(called, "input", f"{here}.custom"))
        else:
            arguments = read_call_arguments(called, "arguments", f"{here}.function")
        tool_call = ToolCall(
            id=call_id,
            name=require_string(called, "name", f"{here}.{kind}"),
            arguments=arguments,
            parse_status="ok" if is_json_object(arguments) else "malformed",
        )
        tool_calls.append(tool_call)
    return tuple(tool_calls)


def _parse_tools(body: dict[str, Any], unread: list[str]) -> tuple[Tool, ...]:
    tools = []
    for index, item in enumerate(read_field(body, "tools", list, "") or []):
        path = f"tools[{index}]"
        if not isinstance(item, dict):
            raise WireError(f"{path}: must be an object, not {json_type(item)}")
        kind = item.get("type") or ("function" if "function" in item else None)
        if kind not in _TOOL_TYPES:
            unread.append(path)
            continue
        declared = read_field(item, kind, dict, path)
        if declared is None:
            raise WireError(f"{path}.{kind}: must be an object with a name")
        read = _parse_custom_tool if kind == "custom" else _parse_function
        tools.append(read(declared, f"{path}.{kind}", unread))
    return tuple(tools)


def _parse_function(function: dict[str, Any], path: str, unread: list[str]) -> Tool:
    return Tool(
        name=require_string(function, "name", path),
        description=read_field(function, "description", str, path) or "",
        parameters=read_field(function, "parameters", dict, path) or {},
    )


def _parse_custom_tool(custom: dict[str, Any], path: str, unread: list[str]) -> Tool:
    description = read_field(custom, "description", str, path) or ""
    form = read_field(custom, "format", dict, path) or {}
    if form.get("type") == "grammar":
        # the API nests it; in the Responses API, and in what some clients send here, it is flat
        grammar = read_field(form, "grammar", dict, f"{path}.format") or form
        texts = [require_string(grammar, key, f"{path}.format.grammar") for key in ("syntax", "definition")]
        description = describe_grammar(description, *texts)
    elif form.get("type") not in (None, "text"):
        unread.append(f"{path}.format")
    name = require_string(custom, "name", path)
    return Tool(name=name, description=description, parameters=FREEFORM_PARAMETERS, kind="freeform")


def _parse_tool_choice(value: object, tools: Sequence[Tool], unread: list[str]) -> str:
    if not value:
        return "auto"
    if isinstance(value, str):
        if value not in ("auto", "none", "required"):
            raise WireError("tool_choice: must be auto, none, required or an object that names a function")
        return value
    if isinstance(value, dict):
        kind = value.get("type")
        if kind in _TOOL_TYPES:
            chosen = read_field(value, kind, dict, "tool_choice") or {}
            name = require_string(chosen, "name", f"tool_choice.{kind}")
            if any(tool.name == name for tool in tools):
                return name
        unread.append("tool_choice")
        return "auto"
    raise WireError(f"tool_choice: must be a string or an object, not {json_type(value)}")


def _parse_sampling(body: dict[str, Any]) -> RequestedSampling:
    limits = [(key, read_field(body, key, int, "")) for key in ("max_completion_tokens", "max_tokens")]
    for key, limit in limits:
        if limit is not None and limit < 1:
            raise WireError(f"{key}: must be at least 1")
    return RequestedSampling(
        max_tokens=min((limit for _, limit in limits if limit is not None), default=None),
        temperature=read_field(body, "temperature", (int, float), ""),
        top_p=read_field(body, "top_p", (int, float), ""),
        top_k=read_field(body, "top_k", int, ""),
        stop=read_texts(body, "stop", ""),
    )


def _finish_reason(call: Call) -> str:
    if call.message.tool_calls and call.completion.finish_reason != "length":
        return "tool_calls"
    return call.completion.finish_reason


def _render_tool_call(tool_call: ToolCall, call: Call) -> dict[str, Any]:
    tool = find_tool(call.request, tool_call.name)
    if tool is not None and tool.kind == "freeform":
        call_id, text = render_input(tool_call)
        return {"id": call_id, "type": "custom", "custom": {"name": tool_call.name, "input": text}}
    function = {"name": tool_call.name, "arguments": tool_call.arguments}
    return {"id": tool_call.id, "type": "function", "function": function}


def _usage(head: ReplyHead, call: Call) -> dict[str, int]:
    sampled = len(call.completion.token_ids)
    return {
        "prompt_tokens": head.num_prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": head.num_prompt_tokens + sampled,
    }


def _envelope(head: ReplyHead, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{head.id}",
        "object": kind,
        "created": int(head.created_s),
        "model": head.model,
        "choices": choices,
    }


def _render_chunk(head: ReplyHead, delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    return render_event(orjson.dumps(_envelope(head, "chat.completion.chunk", [choice])))
