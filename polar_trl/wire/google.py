"""Parse bodies of Google's generateContent, streamGenerateContent and countTokens, and render calls as replies.

Refuses streams other than server-sent events (`WireError` without `alt=sse`): Google's are then one JSON array, which
pings cannot keep open.
"""

from collections.abc import Iterator
from typing import Any

import orjson

from polar_trl.errors import ContextOverflowError, WireError
from polar_trl.types import Call, ChatRequest, Message
from polar_trl.wire.base import (
    NOTHING_TOLD,
    Incoming,
    ItemMemo,
    ParsedRequest,
    ReplyHead,
    Route,
    RouteKind,
    Told,
    parse_object,
    read_arguments,
    read_field,
)
from polar_trl.wire.google_request import parse_request
from polar_trl.wire.sse import render_event

# Clients keep a thought only with a signature, and some (Pi 1.6.0) only one that is valid base64.
THOUGHT_SIGNATURE = "cG9sYXItdHJs"
_METHODS = ("generateContent", "streamGenerateContent", "countTokens")
# kind of a WireError -> google.rpc.Code
_STATUS_NAMES = {
    "invalid_request": "INVALID_ARGUMENT",
    "authentication": "UNAUTHENTICATED",
    "not_found": "NOT_FOUND",
    "context_overflow": "INVALID_ARGUMENT",
    "overloaded": "UNAVAILABLE",
    "internal": "INTERNAL",
}


def _build_routes() -> Iterator[Route]:
    for version in ("v1beta", "v1alpha", "v1"):
        for method in _METHODS:
            kind: RouteKind = "count" if method == "countTokens" else "chat"
            yield Route(method="POST", path=f"/{version}/models/{{model:path}}:{method}", kind=kind)
        if version != "v1":  # there, GET /v1/models is OpenAI's
            yield Route(method="GET", path=f"/{version}/models", kind="models")
            yield Route(method="GET", path=f"/{version}/models/{{model:path}}", kind="models")


class Google:
    """The generateContent dialect."""

    name: str = "google"
    open_calls_error: str = (
        "Please ensure that the number of function response parts is equal to the number of function call parts of "
        "the function call turn."
    )
    routes: tuple[Route, ...] = tuple(_build_routes())

    def parse(self, incoming: Incoming, memo: ItemMemo) -> ParsedRequest:
        body = parse_object(incoming.body)
        model = incoming.path_params.get("model", "")
        if incoming.path.endswith(":countTokens"):
            return ParsedRequest(request=_parse_counted(body, memo, model))
        stream = incoming.path.endswith(":streamGenerateContent")
        if stream and incoming.query.get("alt") != "sse":
            raise WireError("alt: streams are sent as server-sent events only; add ?alt=sse to the URL")
        return ParsedRequest(request=parse_request(body, memo, model=model, stream=stream))

    def render(self, head: ReplyHead, call: Call) -> bytes:
        message = call.message
        parts = [*_render_texts(message.reasoning or "", message.text), *_render_calls(message)]
        return orjson.dumps(_build_reply(head, parts, call))

    def stream_start(self, head: ReplyHead) -> bytes:
        # Nothing: an error that follows at once must not share a read with an event, see `stream_error`.
        return b""

    def ping(self) -> bytes:
        # A candidate that adds no part. Comments are no way: to Gemini CLI 0.61.0 they make the stream an empty one.
        return render_event(orjson.dumps({"candidates": [_build_candidate([])]}))

    def stream_part(self, head: ReplyHead, told: Told, now: Told) -> Iterator[bytes]:
        for part in _render_texts(now.reasoning[len(told.reasoning) :], now.text[len(told.text) :]):
            yield render_event(orjson.dumps(_build_reply(head, [part])))

    def stream(self, head: ReplyHead, call: Call, told: Told = NOTHING_TOLD) -> Iterator[bytes]:
        message = call.message
        rest = (message.reasoning or "")[len(told.reasoning) :], message.text[len(told.text) :]
        parts = [*_render_texts(*rest), *_render_calls(message)]
        for part in parts[:-1]:
            yield render_event(orjson.dumps(_build_reply(head, [part])))
        # with the last part: the chats of Google's Python client forget a turn that has a content without any
        yield render_event(orjson.dumps(_build_reply(head, parts[-1:], call)))

    def stream_error(self, error: WireError) -> bytes:
        # As Google sends it, bare and not as an event: its JavaScript client finds an error only in a read that is
        # JSON as a whole, and takes an event without candidates for an empty answer.
        return self.render_error(error) + b"\n\n"

    def render_error(self, error: WireError) -> bytes:
        text = str(error)
        if isinstance(error, ContextOverflowError):
            text = (
                f"The input token count ({error.num_tokens}) exceeds the maximum number of tokens allowed "
                f"({error.max_tokens - 1}). {error.advice}"
            )
        status = "RESOURCE_EXHAUSTED" if error.status == 429 else _STATUS_NAMES[error.kind]
        body: dict[str, Any] = {"code": error.status, "message": text, "status": status}
        if error.retry_after_s is not None:
            # in this message, since the clients read no header
            delay = f"{error.retry_after_s:.3f}s"
            body["details"] = [{"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": delay}]
        return orjson.dumps({"error": body})

    def error_status(self, error: WireError) -> int:
        return error.status

    def render_count(self, num_prompt_tokens: int) -> bytes:
        return orjson.dumps({"totalTokens": num_prompt_tokens})

    def render_models(self, incoming: Incoming, model: str) -> bytes:
        # any label is served by the one policy, so any id that is asked for exists
        asked = incoming.path_params.get("model")
        entry = {
            "name": f"models/{asked or model}",
            "version": "1",
            "displayName": asked or model,
            "supportedGenerationMethods": list(_METHODS),
        }
        return orjson.dumps(entry if asked else {"models": [entry]})


def _parse_counted(body: dict[str, Any], memo: ItemMemo, model: str) -> ChatRequest:
    """The request whose tokens are to be counted: the body itself, or wrapped in `generateContentRequest`."""
    wrapper = next((key for key in ("generateContentRequest", "generate_content_request") if key in body), None)
    if wrapper is None:
        return parse_request(body, memo, model=model, stream=False)
    wrapped = read_field(body, wrapper, dict, "") or {}
    try:
        return parse_request(wrapped, memo, model=model, stream=False)
    except WireError as error:
        raise WireError(f"{wrapper}.{error}") from error


def _render_texts(reasoning: str, text: str) -> Iterator[dict[str, Any]]:
    if reasoning:
        yield {"text": reasoning, "thought": True, "thoughtSignature": THOUGHT_SIGNATURE}
    if text:
        yield {"text": text}


def _render_calls(message: Message) -> Iterator[dict[str, Any]]:
    for call in message.tool_calls:
        yield {"functionCall": {"id": call.id, "name": call.name, "args": read_arguments(call.arguments)}}


def _build_candidate(parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {"content": {"role": "model", "parts": parts}, "index": 0}


def _build_reply(head: ReplyHead, parts: list[dict[str, Any]], call: Call | None = None) -> dict[str, Any]:
    """Build a reply, or a part of one; `call` is given with the last."""
    candidate = _build_candidate(parts)
    usage = {"promptTokenCount": head.num_prompt_tokens, "totalTokenCount": head.num_prompt_tokens}
    if call is not None:
        candidate["finishReason"] = "MAX_TOKENS" if call.completion.finish_reason == "length" else "STOP"
        num_sampled = len(call.completion.token_ids)
        usage = {
            "promptTokenCount": head.num_prompt_tokens,
            "candidatesTokenCount": num_sampled,
            "totalTokenCount": head.num_prompt_tokens + num_sampled,
            "thoughtsTokenCount": 0,
        }
    return {
        "candidates": [candidate],
        "usageMetadata": usage,
        "modelVersion": head.model,
        "responseId": head.id,
    }
