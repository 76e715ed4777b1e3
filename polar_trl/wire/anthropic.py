"""Parse `/v1/messages` bodies (Anthropic Messages) and render calls as messages or events.

Unknown beta headers and fields are let through: a 400 makes Claude Code ask again six times, each time with another
prompt. Format: the Claude API reference, "Messages", "Streaming" and "Errors".
"""

import json
from collections.abc import Iterator
from typing import Any

import orjson

from polar_trl.errors import WireError
from polar_trl.json_text import UNPARSED_ARGUMENTS, mend_json
from polar_trl.types import Call, Message
from polar_trl.wire.anthropic_request import parse_request
from polar_trl.wire.anthropic_tools import has_only_server_tools
from polar_trl.wire.base import (
    NOTHING_TOLD,
    Incoming,
    ItemMemo,
    ParsedRequest,
    ReplyHead,
    Route,
    Told,
    parse_object,
    read_arguments,
)
from polar_trl.wire.sse import render_event

# Clients keep a thought only with a signature; Pi 1.6.0 sends an unsigned one back as plain text.
SIGNATURE = "cG9sYXItdHJs"
# kind of a WireError -> Anthropic's type
_ERROR_NAMES = {
    "invalid_request": "invalid_request_error",
    "authentication": "authentication_error",
    "not_found": "not_found_error",
    "context_overflow": "invalid_request_error",
    "overloaded": "overloaded_error",
    "internal": "api_error",
}
_VERSION_HEADER = "anthropic-version"
_RAW_INPUT = "raw_input"
# Claude Code 2.1.332 tells the model what it wrote where tool input is no JSON; other clients' libraries raise on it.
_READS_RAW_INPUT = "claude-cli/"


class Anthropic:
    """The Messages dialect."""

    name: str = "anthropic"
    open_calls_error: str = (
        "messages: `tool_use` ids were found without `tool_result` blocks immediately after: {ids}. Each `tool_use` "
        "block must have a corresponding `tool_result` block in the next message."
    )
    routes: tuple[Route, ...] = (
        Route(method="POST", path="/v1/messages", kind="chat"),
        Route(method="POST", path="/v1/messages/count_tokens", kind="count"),
        Route(method="GET", path="/v1/models", kind="models", header=_VERSION_HEADER),
        Route(method="GET", path="/v1/models/{model:path}", kind="models", header=_VERSION_HEADER),
        Route(method="HEAD", path="/api/hello", kind="alive"),
        Route(method="GET", path="/api/hello", kind="alive"),
    )

    def parse(self, incoming: Incoming, memo: ItemMemo) -> ParsedRequest:
        body = parse_object(incoming.body)
        request = parse_request(body, memo)
        is_aside = has_only_server_tools(body)
        takes_raw_input = incoming.headers.get("user-agent", "").startswith(_READS_RAW_INPUT)
        return ParsedRequest(
            request=request,
            reply_options=(_RAW_INPUT,) if takes_raw_input else (),
            purpose="auxiliary" if is_aside else "policy",
        )

    def render(self, head: ReplyHead, call: Call) -> bytes:
        body = _envelope(head)
        body["content"] = [_block(part) for part in _render_blocks(call.message, raw_input=False)]
        return orjson.dumps(body | _stop(call) | {"usage": _usage(head, len(call.completion.token_ids))})

    def stream_start(self, head: ReplyHead) -> bytes:
        return _render(
            "message_start",
            {"message": _envelope(head) | {"stop_reason": None, "stop_sequence": None, "usage": _usage(head, 1)}},
        )

    def ping(self) -> bytes:
        return _render("ping", {})

    def stream_part(self, head: ReplyHead, told: Told, now: Told) -> Iterator[bytes]:
        if now.reasoning and not told.text:
            if not told.reasoning:
                yield _render("content_block_start", {"index": 0, "content_block": dict(_THINKING)})
            if thinking := now.reasoning[len(told.reasoning) :]:
                yield _render_delta(0, {"type": "thinking_delta", "thinking": thinking})
            if now.text:
                yield _render_delta(0, {"type": "signature_delta", "signature": SIGNATURE})
                yield _render("content_block_stop", {"index": 0})
        if text := now.text[len(told.text) :]:
            index = int(bool(now.reasoning))
            if not told.text:
                yield _render("content_block_start", {"index": index, "content_block": {"type": "text", "text": ""}})
            yield _render_delta(index, {"type": "text_delta", "text": text})

    def stream(self, head: ReplyHead, call: Call, told: Told = NOTHING_TOLD) -> Iterator[bytes]:
        whole = Told(reasoning=call.message.reasoning or "", text=call.message.text)
        yield from self.stream_part(head, told, whole)
        if whole.reasoning and not whole.text:
            yield _render_delta(0, {"type": "signature_delta", "signature": SIGNATURE})
        if whole.reasoning or whole.text:
            yield _render("content_block_stop", {"index": int(bool(whole.reasoning and whole.text))})
        for index, (block, deltas) in enumerate(_render_blocks(call.message, raw_input=_RAW_INPUT in head.options)):
            if block["type"] != "tool_use":
                continue
            yield _render("content_block_start", {"index": index, "content_block": block})
            for delta in deltas:
                yield _render_delta(index, delta)
            yield _render("content_block_stop", {"index": index})
        usage = {"output_tokens": len(call.completion.token_ids)}
        yield _render("message_delta", {"delta": _stop(call), "usage": usage})
        yield _render("message_stop", {})

    def stream_error(self, error: WireError) -> bytes:
        return render_event(self.render_error(error), event="error")

    def render_error(self, error: WireError) -> bytes:
        kind = "request_too_large" if error.status == 413 else _ERROR_NAMES[error.kind]
        return orjson.dumps({"type": "error", "error": {"type": kind, "message": str(error)}, "request_id": None})

    def error_status(self, error: WireError) -> int:
        return 529 if error.kind == "overloaded" else error.status

    def render_count(self, num_prompt_tokens: int) -> bytes:
        return orjson.dumps({"input_tokens": num_prompt_tokens})

    def render_models(self, incoming: Incoming, model: str) -> bytes:
        # any label is served by the one policy, so any id that is asked for exists
        asked = incoming.path_params.get("model")
        name = asked or model
        entry = {"type": "model", "id": name, "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
        if asked:
            return orjson.dumps(entry)
        return orjson.dumps({"data": [entry], "has_more": False, "first_id": name, "last_id": name})


_THINKING = {"type": "thinking", "thinking": "", "signature": ""}
_Part = tuple[dict[str, Any], list[dict[str, Any]]]
"""A content block as a stream opens it, empty, and the deltas that fill it."""


def _render_blocks(message: Message, *, raw_input: bool) -> Iterator[_Part]:
    if message.reasoning:
        yield (
            dict(_THINKING),
            [
                {"type": "thinking_delta", "thinking": message.reasoning},
                {"type": "signature_delta", "signature": SIGNATURE},
            ],
        )
    if message.text:
        yield {"type": "text", "text": ""}, [{"type": "text_delta", "text": message.text}]
    for call in message.tool_calls:
        text = call.arguments if raw_input and _is_no_json(call.arguments) else _spell_input(call.arguments)
        yield (
            {"type": "tool_use", "id": call.id, "name": call.name, "input": {}},
            [{"type": "input_json_delta", "partial_json": text}],
        )


def _spell_input(arguments: str) -> str:
    """Spell tool input as a JSON object, in the model's own spelling where that can be read again."""
    # objects that are nested too deeply to be read again are wrapped as well
    value = read_arguments(arguments)
    is_as_written = arguments.strip() and UNPARSED_ARGUMENTS not in value
    return mend_json(arguments) if is_as_written else orjson.dumps(value).decode()


def _is_no_json(arguments: str) -> bool:
    """Return whether no parser reads the text. (NaN, half an emoji and the like are read by some.)"""
    try:
        json.loads(arguments)
    except RecursionError:
        return False
    except ValueError:
        return bool(arguments.strip())
    return False


def _block(part: _Part) -> dict[str, Any]:
    """Build the whole block of a plain reply."""
    block, deltas = part
    for delta in deltas:
        if delta["type"] == "input_json_delta":
            block["input"] = read_arguments(delta["partial_json"])
        else:
            block |= {key: value for key, value in delta.items() if key != "type"}
    return block


def _stop(call: Call) -> dict[str, Any]:
    if call.completion.finish_reason == "length":
        reason = "max_tokens"
    elif call.message.tool_calls:
        reason = "tool_use"
    else:
        reason = "end_turn" if call.stop_text is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": call.stop_text if reason == "stop_sequence" else None}


def _usage(head: ReplyHead, num_sampled: int) -> dict[str, int]:
    return {
        "input_tokens": head.num_prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": num_sampled,
    }


def _envelope(head: ReplyHead) -> dict[str, Any]:
    return {"id": f"msg_{head.id}", "type": "message", "role": "assistant", "model": head.model, "content": []}


def _render_delta(index: int, delta: dict[str, Any]) -> bytes:
    return _render("content_block_delta", {"index": index, "delta": delta})


def _render(kind: str, fields: dict[str, Any]) -> bytes:
    # clients pick the event by its name; Claude Code takes a stream without names for a broken one
    return render_event(orjson.dumps({"type": kind} | fields), event=kind)
