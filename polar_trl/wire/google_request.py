"""Parse bodies of Google's generateContent into normal form.

Field names are read in camelCase and in snake_case, as Google does; paths in messages are in camelCase. Parts that
a chat model could not see anyway (searches, code that Google runs) are left out and named in `unread`. What would
make the answer a wrong one (several candidates, a cached prefix, media other than images) raises `WireError`.
"""

import mimetypes
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from polar_trl.errors import WireError
from polar_trl.json_text import is_json_object
from polar_trl.types import ChatRequest, Message, RequestedSampling, ToolCall
from polar_trl.wire.base import (
    ItemMemo,
    list_unread,
    read_call_arguments,
    read_field,
    read_texts,
    require_string,
)
from polar_trl.wire.google_tools import parse_tool_choice, parse_tools, read_fields

_BODY_FIELDS = {"contents", "systemInstruction", "tools", "toolConfig", "generationConfig", "cachedContent", "model"}
_CONFIG_FIELDS = {"maxOutputTokens", "temperature", "topP", "topK", "stopSequences", "candidateCount"}
_PART_FIELDS = {
    "text", "thought", "thoughtSignature", "functionCall", "functionResponse", "inlineData", "fileData",
}  # fmt: skip
# A response with one of these alone is that text. "output" and "error" are Google's own convention, "result" is what
# its Python client makes of a plain return value.
_PLAIN_RESPONSE_KEYS = ("output", "error", "result")


def parse_request(raw: Mapping[str, Any], memo: ItemMemo, *, model: str, stream: bool) -> ChatRequest:
    """Parse the request into normal form. Raises `WireError` naming the field that is wrong."""
    body = read_fields(raw, "")
    if body.get("cachedContent"):
        raise WireError("cachedContent: nothing is cached here; send the whole conversation")
    unread = list(list_unread(body, _BODY_FIELDS, ""))
    messages = (*_parse_system(body, unread), *_parse_contents(body, unread, memo))
    return ChatRequest(
        messages=messages,
        tools=parse_tools(body, unread),
        tool_choice=parse_tool_choice(body, unread),
        sampling=_parse_sampling(body, unread),
        stream=stream,
        model=model,
        unread=tuple(unread),
    )


@dataclass(slots=True)
class _Result:
    """A functionResponse part."""

    name: str
    id: str | None
    text: str
    images: tuple[str, ...]


@dataclass(slots=True)
class _Parts:
    """The parts of one or several contents, by kind and in order."""

    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    images: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    results: list[_Result] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Turn:
    """The contents from one reply of the model to the next, read."""

    messages: tuple[Message, ...]
    unread: tuple[str, ...]


def _parse_system(body: Mapping[str, Any], unread: list[str]) -> list[Message]:
    raw = body.get("systemInstruction")
    if raw is None:
        return []
    parts = _Parts()
    _parse_content(raw, "systemInstruction", "system", parts)
    unread += parts.unread
    text, images = "".join(parts.texts), tuple(parts.images)
    return [Message(role="system", text=text, images=images)] if parts.texts or images else []


def _parse_contents(body: Mapping[str, Any], unread: list[str], memo: ItemMemo) -> list[Message]:
    raw = body.get("contents")
    contents = raw if isinstance(raw, list) else [] if raw is None else [raw]
    if not contents:
        raise WireError("contents: must hold at least one content")
    messages: list[Message] = []
    seen: set[str] = set()
    for turn in memo.parse_items(_split_at_replies(contents), _parse_turn):
        messages += turn.messages
        for path in turn.unread:
            # histories repeat the same unknown field in every turn; its first place is enough
            name = path.rpartition(".")[2]
            if name not in seen:
                unread.append(path)
                seen.add(name)
    return messages


def _split_at_replies(contents: list[Any]) -> list[tuple[int, list[Any]]]:
    """Split the contents into runs that each begin with a reply (the first may not), each after the index of its first
    content: a run is read without knowing what was before it, and what was read once is known again."""
    runs: list[tuple[int, list[Any]]] = []
    was_reply = False
    for index, content in enumerate(contents):
        is_reply = _is_reply(content)
        if not runs or (is_reply and not was_reply):
            runs.append((index, []))
        runs[-1][1].append(content)
        was_reply = is_reply
    return runs


def _parse_turn(run: tuple[int, list[Any]], _: int) -> _Turn:
    start, contents = run
    num_replies = sum(map(_is_reply, contents))  # they come first
    reply = _Parts()
    for index, content in enumerate(contents[:num_replies], start):
        _parse_content(content, f"contents[{index}]", str(index), reply)
    messages = [_build_reply(reply)] if num_replies else []
    unread = reply.unread
    waiting = _Waiting(reply.calls)
    for index, content in enumerate(contents[num_replies:], start + num_replies):
        path = f"contents[{index}]"
        _check_role(content, path)
        parts = _Parts()
        _parse_content(content, path, str(index), parts)
        # results first: no chat template knows a user's words between a call and its result
        messages += _build_results(parts.results, waiting)
        if parts.texts or parts.images or not parts.results:
            messages.append(Message(role="user", text="".join(parts.texts), images=tuple(parts.images)))
        unread += parts.unread
    return _Turn(messages=tuple(messages), unread=tuple(unread))


def _build_reply(parts: _Parts) -> Message:
    return Message(
        role="assistant",
        text="".join(parts.texts),
        reasoning="".join(parts.thoughts) if parts.thoughts else None,
        tool_calls=tuple(parts.calls),
        images=tuple(parts.images),
    )


class _Waiting:
    """The calls of one reply, by name, that have no result yet."""

    def __init__(self, calls: Sequence[ToolCall]) -> None:
        self._ids = {call.id for call in calls}
        self._answered: set[str | None] = set()
        self._by_name: dict[str, deque[str]] = {}
        for call in calls:
            self._by_name.setdefault(call.name, deque()).append(call.id)

    def take(self, result: _Result) -> str | None:
        """Return the id of the call that a result answers; without a known id, the first of its name that waits."""
        call_id = result.id
        if call_id not in self._ids:
            queue = self._by_name.get(result.name, deque())
            while queue and queue[0] in self._answered:
                queue.popleft()
            call_id = queue[0] if queue else call_id
        self._answered.add(call_id)
        return call_id


def _build_results(results: Sequence[_Result], waiting: _Waiting) -> list[Message]:
    return [
        Message(role="tool", text=result.text, tool_call_id=waiting.take(result), images=result.images)
        for result in results
    ]


def _is_reply(content: Any) -> bool:
    return isinstance(content, dict) and content.get("role") == "model"


def _check_role(content: Any, path: str) -> None:
    role = content.get("role") if isinstance(content, dict) else None
    if role not in (None, "", "user", "model", "function", "tool"):
        raise WireError(f"{path}.role: must be user, model or function")


def _parse_content(raw: Any, path: str, place: str, parts: _Parts) -> None:
    """Add the parts of a content, which a client may write as a bare string, to `parts`."""
    if isinstance(raw, str):
        parts.texts.append(raw)
        return
    content = read_fields(raw, path)
    parts.unread += list_unread(content, {"role", "parts"}, path)
    is_reply = content.get("role") == "model"
    for index, part in enumerate(read_field(content, "parts", list, path) or []):
        # nothing but its place tells a call without an id from the others of the conversation
        _parse_part(part, f"{path}.parts[{index}]", parts, is_reply=is_reply, unnamed_id=f"unnamed_{place}_{index}")


def _parse_part(raw: Any, path: str, parts: _Parts, *, is_reply: bool, unnamed_id: str) -> None:
    part = {"text": raw} if raw is None or isinstance(raw, str) else read_fields(raw, path)
    parts.unread += list_unread(part, _PART_FIELDS, path)
    text = read_field(part, "text", str, path)
    if text is not None:
        is_thought = bool(read_field(part, "thought", bool, path)) and is_reply
        (parts.thoughts if is_thought else parts.texts).append(text)
    if part.get("inlineData") is not None or part.get("fileData") is not None:
        parts.images.append(_parse_image(part, path))
    if part.get("functionCall") is not None:
        parts.calls.append(_parse_call(part["functionCall"], f"{path}.functionCall", unnamed_id))
    if part.get("functionResponse") is not None:
        parts.results.append(_parse_result(part["functionResponse"], f"{path}.functionResponse"))


def _parse_call(raw: Any, path: str, unnamed_id: str) -> ToolCall:
    call = read_fields(raw, path)
    # the object's own keys are the tool's and stay as they are
    arguments = read_call_arguments(call, "args", path) if call.get("args") not in (None, []) else "{}"
    return ToolCall(
        id=read_field(call, "id", str, path) or unnamed_id,
        name=require_string(call, "name", path),
        arguments=arguments,
        parse_status="ok" if is_json_object(arguments) else "malformed",
    )


def _parse_result(raw: Any, path: str) -> _Result:
    result = read_fields(raw, path)
    images = []
    for index, part in enumerate(read_field(result, "parts", list, path) or []):
        here = f"{path}.parts[{index}]"
        images.append(_parse_image(read_fields(part, here), here))
    return _Result(
        name=read_field(result, "name", str, path) or "",
        id=read_field(result, "id", str, path),
        text=_build_result_text(result.get("response"), f"{path}.response"),
        images=tuple(images),
    )


def _build_result_text(response: Any, path: str) -> str:
    """Build the text of a function's response: the JSON as it is, or the one plain text that it wraps."""
    if isinstance(response, dict) and len(response) == 1:
        key, value = next(iter(response.items()))
        if key in _PLAIN_RESPONSE_KEYS and (value is None or isinstance(value, str)):
            response = value
    if response is None or isinstance(response, str):
        return response or ""
    try:
        return orjson.dumps(response).decode()
    except orjson.JSONEncodeError as error:
        raise WireError(f"{path}: {error}; nest it less deeply") from error


def _parse_image(part: Mapping[str, Any], path: str) -> str:
    """Parse the URL of the image in an inlineData or fileData part."""
    if part.get("inlineData") is not None:
        here = f"{path}.inlineData"
        data = read_fields(part["inlineData"], here)
        mime_type = require_string(data, "mimeType", here)
        # Google's Python client writes base64 in the alphabet of URLs, which data: URLs do not have
        content = require_string(data, "data", here).replace("-", "+").replace("_", "/")
        url = f"data:{mime_type};base64,{content}"
    else:
        here = f"{path}.fileData"
        data = read_fields(part.get("fileData"), here)
        url = require_string(data, "fileUri", here)
        mime_type = read_field(data, "mimeType", str, here) or mimetypes.guess_type(url)[0] or ""
    if not mime_type.startswith("image/"):
        raise WireError(f"{here}.mimeType: only images can be read, not {mime_type or 'a file of unknown type'}")
    return url


def _parse_sampling(body: Mapping[str, Any], unread: list[str]) -> RequestedSampling:
    raw = body.get("generationConfig")
    if raw is None:
        return RequestedSampling()
    path = "generationConfig"
    config = read_fields(raw, path)
    unread += list_unread(config, _CONFIG_FIELDS, path)
    if read_field(config, "candidateCount", int, path) not in (None, 0, 1):
        raise WireError(f"{path}.candidateCount: only one candidate per request is supported; send 1 or leave it out")
    max_tokens = read_field(config, "maxOutputTokens", int, path)
    if max_tokens is not None and max_tokens < 1:
        raise WireError(f"{path}.maxOutputTokens: must be at least 1")
    top_k = read_field(config, "topK", (int, float), path)  # Google's Python client sends 40.0
    return RequestedSampling(
        max_tokens=max_tokens,
        temperature=read_field(config, "temperature", (int, float), path),
        top_p=read_field(config, "topP", (int, float), path),
        top_k=None if top_k is None else int(top_k),
        stop=read_texts(config, "stopSequences", path),
    )
