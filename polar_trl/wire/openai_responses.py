"""Parse `/v1/responses` bodies (OpenAI Responses) and render calls as responses or events.

Stateless: a request holds the whole conversation, and no earlier response can be fetched again.
Format: the OpenAI API reference, "Responses" and its streaming events; what Codex 0.171.0 needs beyond it.
"""

from collections.abc import Iterator
from typing import Any

import orjson

from polar_trl.errors import WireError
from polar_trl.types import Call
from polar_trl.wire.base import (
    NOTHING_TOLD,
    Incoming,
    ItemMemo,
    ParsedRequest,
    ReplyHead,
    Route,
    Told,
    parse_object,
)
from polar_trl.wire.openai_chat import OpenAIChat
from polar_trl.wire.openai_responses_reply import (
    COMPACTION,
    Events,
    build_compacted_response,
    build_finished_response,
    build_message,
    build_reasoning,
    build_response,
)
from polar_trl.wire.openai_responses_request import parse_body
from polar_trl.wire.sse import render_event

_COMPACT_ENDPOINT = "compact_endpoint"
# the events of `stream_start`
_NUM_FIRST_EVENTS = 2
# OpenAI's two APIs have one error body
_CHAT = OpenAIChat()


class OpenAIResponses:
    """The Responses dialect. Models are listed by the Chat Completions dialect, whose path and shape are the same."""

    name: str = "openai_responses"
    open_calls_error: str = "No tool output found for function call {ids}."
    routes: tuple[Route, ...] = (
        Route(method="POST", path="/v1/responses", kind="chat"),
        Route(method="POST", path="/v1/responses/compact", kind="chat"),
        Route(method="POST", path="/v1/responses/input_tokens", kind="count"),
        # Codex 0.171.0 tries a WebSocket first where it believes that this is OpenAI's own server
        Route(method="GET", path="/v1/responses", kind="no_upgrade"),
    )

    def parse(self, incoming: Incoming, memo: ItemMemo) -> ParsedRequest:
        at_endpoint = incoming.path.endswith("/compact")
        request, compact = parse_body(parse_object(incoming.body), memo, compact=at_endpoint)
        if not compact:
            return ParsedRequest(request=request)
        options = (COMPACTION, _COMPACT_ENDPOINT) if at_endpoint else (COMPACTION,)
        return ParsedRequest(request=request, reply_options=options, purpose="auxiliary")

    def render(self, head: ReplyHead, call: Call) -> bytes:
        if _COMPACT_ENDPOINT in head.options:
            return orjson.dumps(build_compacted_response(head, call))
        return orjson.dumps(build_finished_response(head, call))

    def stream_start(self, head: ReplyHead) -> bytes:
        events = Events(0)
        response = build_response(head, "in_progress", [])
        return events.render("response.created", response=response) + events.render(
            "response.in_progress", response=response
        )

    def ping(self) -> bytes:
        # OpenAI's own, undocumented. No comment: Codex's idle timer does not see those. No repeated in_progress
        # event either: it would have to name the response, and openai-python 3.57 refuses another id than the first.
        return render_event(b'{"type":"keepalive","sequence_number":1}', event="keepalive")

    def stream_part(self, head: ReplyHead, told: Told, now: Told) -> Iterator[bytes]:
        if COMPACTION in head.options:  # its one item is opaque
            return
        events = Events(_NUM_FIRST_EVENTS + told.num_events)
        index = 0
        if now.reasoning:
            if not told.text:
                reasoning = build_reasoning(head, now.reasoning)
                yield from events.render_item(reasoning, 0, told.reasoning, is_whole=bool(now.text))
            index = 1
        if now.text:
            yield from events.render_item(build_message(head, now.text), index, told.text, is_whole=False)

    def stream(self, head: ReplyHead, call: Call, told: Told = NOTHING_TOLD) -> Iterator[bytes]:
        events = Events(_NUM_FIRST_EVENTS + told.num_events)
        response = build_finished_response(head, call)
        for index, item in enumerate(response["output"]):
            if item["type"] == "reasoning" and told.text:
                continue
            known = {"reasoning": told.reasoning, "message": told.text}.get(item["type"], "")
            yield from events.render_item(item, index, known)
        yield events.render(f"response.{response['status']}", response=response)

    def stream_error(self, error: WireError) -> bytes:
        """Render the error twice: openai-python and most agents read "error", Codex 0.171.0 only "response.failed"."""
        events = Events(_NUM_FIRST_EVENTS)
        details: dict[str, Any] = orjson.loads(self.render_error(error))["error"]
        if error.kind == "overloaded" and error.retry_after_s is not None:
            # Codex waits as long as these words say
            details["code"] = "rate_limit_exceeded"
            details["message"] = f"{details['message'].rstrip('.')}. Please try again in {error.retry_after_s:.3f}s."
        flat = {key: details[key] for key in ("code", "message", "param")}
        head = ReplyHead(id="failed", model="", created_s=0, num_prompt_tokens=0)
        failed = build_response(head, "failed", [], error={"code": details["code"], "message": details["message"]})
        return events.render("error", **flat, error=details) + events.render("response.failed", response=failed)

    def render_error(self, error: WireError) -> bytes:
        return _CHAT.render_error(error)

    def error_status(self, error: WireError) -> int:
        return error.status

    def render_count(self, num_prompt_tokens: int) -> bytes:
        return orjson.dumps({"object": "response.input_tokens", "input_tokens": num_prompt_tokens})

    def render_models(self, incoming: Incoming, model: str) -> bytes:
        return _CHAT.render_models(incoming, model)
