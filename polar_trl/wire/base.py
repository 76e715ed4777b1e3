"""Define a dialect: parse request bodies into normal form, render recorded calls as reply bodies.

Pure: no sockets, no clocks, no tokens. A dialect never decides what is sampled; it only reads and writes.
"""

import gc
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any, Literal, Protocol, TypeVar

import orjson

from polar_trl.errors import WireError
from polar_trl.json_text import UNPARSED_ARGUMENTS, load_json
from polar_trl.types import Call, ChatRequest, Message, Purpose, Tool

_T = TypeVar("_T")
MAX_BODY_BYTES = 16 << 20
"""Agents send some hundred kilobytes; a context of a million tokens is 5 MB."""
MAX_VALUES = 1_000_000
"""Commas and opening brackets of a body: a value takes ten times the memory of the bytes that it is written in."""
MAX_LABEL_LENGTH = 256
"""Characters of the name of a model or a tool."""
MAX_STOPS = 64
MAX_STOP_LENGTH = 1024
MAX_UNREAD = 200
"""Fields that nobody reads are on record up to this number, each with so much of its path."""
_LARGE_BODY_BYTES = 1 << 20
_MAX_EXACT = 2.0**53
_REASONING_KEYS = ("text", "thinking", "reasoning", "content")
RouteKind = Literal["chat", "count", "models", "alive", "no_upgrade"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """A path that a dialect's clients call."""

    method: str
    path: str
    """Starlette's pattern, such as "/v1/models/{model:path}"."""
    kind: RouteKind
    """"chat" asks the policy, "count" asks how long a prompt is, "models" lists or describes the policy, "alive" is
    answered with an empty 200, "no_upgrade" with 426: a client that opens a WebSocket goes on over HTTP."""
    header: str | None = None
    """Only requests that carry this header (name in lower case): two dialects may share a path."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Incoming:
    """One HTTP request, as much of it as a dialect reads."""

    body: bytes = b""
    path: str = ""
    path_params: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    """Names in lower case."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedRequest:
    """A request body, read."""

    request: ChatRequest
    reply_options: tuple[str, ...] = ()
    """Wishes for the reply's form only, in the dialect's words, such as "include_usage"."""
    purpose: Purpose = "policy"
    """"auxiliary" where the request itself says so: a compaction endpoint, a search of a server tool."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyHead:
    """The part of a reply that is known before anything was sampled."""

    id: str
    """Unique in the session; dialects put their own prefix before it."""
    model: str
    created_s: float
    """Seconds since the epoch."""
    num_prompt_tokens: int
    options: tuple[str, ...] = ()
    """The `reply_options` of the request on this connection."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """The part of a reply that a stream has told before the reply had ended."""

    reasoning: str = ""
    """All of it, where there is text."""
    text: str = ""
    num_events: int = 0
    """That told it."""

    def begins(self, message: Message) -> bool:
        """Tell whether the message goes on from here."""
        reasoning = message.reasoning or ""
        is_whole = reasoning == self.reasoning if self.text else reasoning.startswith(self.reasoning)
        return is_whole and message.text.startswith(self.text)


NOTHING_TOLD = Told()


class ItemMemo:
    """The items of a session's last request, raw and parsed.

    Agents send the whole conversation with every call. Comparing the raw items that were there before costs a tenth of
    parsing them, and requests then share their objects.
    """

    def __init__(self) -> None:
        self._last: list[tuple[Any, object, Any]] = []
        """Each item raw, its `_hash_exactly` where it holds a number, and parsed."""

    def forget(self) -> None:
        """Let go of the last request."""
        self._last = []

    def parse_items(self, raw: list[Any], parse_item: Callable[[Any, int], _T]) -> list[_T]:
        """`parse_item(item, index)` of every item, or what it gave when the same item was last in that place.

        An item is a JSON value, or a tuple of its place and one.
        """
        last, self._last = self._last, []
        for index, item in enumerate(raw):
            if index < len(last) and last[index][0] == item:
                _, exact, parsed = last[index]
                if exact is not None and (now := _hash_exactly(item)) != exact:
                    exact, parsed = now, parse_item(item, index)
            else:
                exact, parsed = _hash_exactly(item) if _holds_number(item) else None, parse_item(item, index)
            self._last.append((item, exact, parsed))
        return [parsed for _, _, parsed in self._last]


def _holds_number(item: Any) -> bool:
    """Tell whether there is a number or a boolean in an item: true, 1 and 1.0 are equal in Python and not in JSON."""
    values = [item[1]] if isinstance(item, tuple) else [item]
    for value in values:  # it grows meanwhile
        if isinstance(value, dict):
            values += value.values()
        elif isinstance(value, list):
            values += value
        elif isinstance(value, (int, float)):
            return True
    return False


def _hash_exactly(item: Any) -> object:
    """Hash an item so that what differs in JSON differs here; nothing equals one that is nested too deeply."""
    try:
        return hash(orjson.dumps(item, option=orjson.OPT_SORT_KEYS))
    except orjson.JSONEncodeError:
        return object()


class Dialect(Protocol):
    """One wire format. Stateless: one instance serves all sessions."""

    name: str
    routes: tuple[Route, ...]
    open_calls_error: str
    """The provider's words for a conversation that ends with tool calls, without the results; {ids} are the calls'."""

    def parse(self, incoming: Incoming, memo: ItemMemo) -> ParsedRequest:
        """Parse the request into normal form. Raises `WireError` naming the field that is wrong.

        Args:
            memo: The session's.
        """
        ...

    def render(self, head: ReplyHead, call: Call) -> bytes:
        """Render the body of a plain reply."""
        ...

    def stream_start(self, head: ReplyHead) -> bytes:
        """Render the beginning of a stream, sent before the engine is asked; it may be empty."""
        ...

    def ping(self) -> bytes:
        """Render a keep-alive event for an open stream, which clients of this format ignore."""
        ...

    def stream_part(self, head: ReplyHead, told: Told, now: Told) -> Iterator[bytes]:
        """Render the events that lead from what was told to what can be told `now`.

        None where this reply is told whole.
        """
        ...

    def stream(self, head: ReplyHead, call: Call, told: Told = NOTHING_TOLD) -> Iterator[bytes]:
        """Render the events after `stream_start` and `stream_part`, the format's end of stream included."""
        ...

    def stream_error(self, error: WireError) -> bytes:
        """Render the last event of a stream that failed after its headers were sent."""
        ...

    def render_error(self, error: WireError) -> bytes:
        """Render the body of an error reply."""
        ...

    def error_status(self, error: WireError) -> int:
        """Return the HTTP status of an error reply: `error.status`, or one that these clients understand better."""
        ...

    def render_count(self, num_prompt_tokens: int) -> bytes:
        """Render the body for a route of kind "count"."""
        ...

    def render_models(self, incoming: Incoming, model: str) -> bytes:
        """Render the body for a route of kind "models"."""
        ...


def parse_key(incoming: Incoming) -> str | None:
    """Return the session key, wherever any provider's clients put it; None where there is none."""
    headers = incoming.headers
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and bearer.strip():
        return bearer.strip()
    return headers.get("x-api-key") or headers.get("x-goog-api-key") or incoming.query.get("key")


def find_tool(request: ChatRequest, name: str) -> Tool | None:
    """Return the declared tool that a tool call names; None where the model made it up."""
    return next((tool for tool in request.tools if tool.name == name), None)


def read_arguments(arguments: str) -> dict[str, Any]:
    """Parse tool arguments for formats that carry an object. Text that is no JSON object is passed on under one key:
    the tool then complains to the model about what the model wrote."""
    if not arguments.strip():
        return {}
    try:
        value = load_json(arguments)
        orjson.dumps([[[[[[[[value]]]]]]]])  # it reads deeper than it writes, and the body of a reply lies around it
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        value = None
    return value if isinstance(value, dict) else {UNPARSED_ARGUMENTS: arguments}


def render_arguments(value: Mapping[str, Any]) -> str:
    """Invert `read_arguments`: the arguments' text as close to what the model wrote as can be known."""
    if value.keys() == {UNPARSED_ARGUMENTS} and isinstance(value[UNPARSED_ARGUMENTS], str):
        return str(value[UNPARSED_ARGUMENTS])
    return orjson.dumps(value).decode()


def parse_object(body: bytes) -> dict[str, Any]:
    """Parse the JSON object that a request body holds."""
    if has_more_values(body, MAX_VALUES):
        raise WireError(f"the body holds more than {MAX_VALUES:,} values", status=413)
    with _COLLECTOR_PAUSE if len(body) > _LARGE_BODY_BYTES else nullcontext():
        try:
            value = load_json(body)
        except orjson.JSONDecodeError as error:
            raise WireError(f"the body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise WireError(f"the body must be a JSON object, not {json_type(value)}")
    return value


def has_more_values(body: bytes, limit: int) -> bool:
    """Tell whether a large JSON text could have more values than `limit`, from the commas and brackets in it."""
    if len(body) <= max(limit, _LARGE_BODY_BYTES):
        return False
    num_values = 0
    for start in range(0, len(body), _LARGE_BODY_BYTES):  # other threads run in between
        num_values += sum(body.count(mark, start, start + _LARGE_BODY_BYTES) for mark in (b",", b"[", b"{"))
        if num_values > limit:
            return True
    return False


def check_labels(request: ChatRequest) -> ChatRequest:
    """Return the request with no more than `MAX_UNREAD` unread fields. Raises `WireError` where a name or the stop
    texts are longer than any that a client of ours sends: they are kept for as long as the session is."""
    if len(request.model) > MAX_LABEL_LENGTH:
        raise WireError(f"model: must have at most {MAX_LABEL_LENGTH} characters")
    for index, tool in enumerate(request.tools):
        if len(tool.name) > MAX_LABEL_LENGTH:
            raise WireError(f"tools[{index}]: the name must have at most {MAX_LABEL_LENGTH} characters")
    stops = request.sampling.stop
    if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP_LENGTH for stop in stops):
        raise WireError(f"stop: must be at most {MAX_STOPS} texts of at most {MAX_STOP_LENGTH} characters each")
    if len(request.unread) > MAX_UNREAD or any(len(path) > MAX_LABEL_LENGTH for path in request.unread):
        request = replace(request, unread=tuple(path[:MAX_LABEL_LENGTH] for path in request.unread[:MAX_UNREAD]))
    return request


class _CollectorPause:
    """No garbage collection in here: reading JSON makes objects that live and no cycles, and walking through millions
    of them again and again takes several times longer than the reading. Threads may be in here together."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._num_inside = 0
        self._was_enabled = False

    def __enter__(self) -> None:
        with self._lock:
            if self._num_inside == 0:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._num_inside += 1

    def __exit__(self, *failure: object) -> None:
        with self._lock:
            self._num_inside -= 1
            if self._num_inside == 0 and self._was_enabled:
                gc.enable()


_COLLECTOR_PAUSE = _CollectorPause()


def json_type(value: object) -> str:
    """Return the name that JSON gives to a value's type, for messages."""
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "an array"}
    return names.get(type(value), "an object")


def read_field(holder: Mapping[str, Any], key: str, kind: type | tuple[type, ...], path: str) -> Any:
    """Return `holder[key]` if it has the wanted type, None where it is absent or null.

    JSON has one kind of number, so 8.0 is a whole one; an empty array is an empty object, as PHP writes it.

    `path` is the holder's own, "" for the body.
    """
    value = holder.get(key)
    if value is None:
        return None
    if kind is int and isinstance(value, float) and value.is_integer() and abs(value) < _MAX_EXACT:
        return int(value)
    if kind is dict and value == []:
        return {}
    # JSON's booleans are ints in Python
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        wanted = {str: "a string", int: "a whole number", bool: "a boolean", list: "an array", dict: "an object"}
        name = "a number" if isinstance(kind, tuple) else wanted[kind]
        raise WireError(f"{path}{'.' if path else ''}{key}: must be {name}, not {json_type(value)}")
    return value


def read_text(holder: Mapping[str, Any], key: str, path: str) -> str:
    """Return the text at `holder[key]`, "" where it is absent or null: tools that print nothing send that."""
    return read_field(holder, key, str, path) or ""


def read_texts(holder: Mapping[str, Any], key: str, path: str) -> tuple[str, ...]:
    """Return the texts of the array, or the one text, at `holder[key]`, without those that are empty or null."""
    value = holder.get(key)
    texts = [value] if value is None or isinstance(value, str) else value
    if not isinstance(texts, list) or not all(text is None or isinstance(text, str) for text in texts):
        raise WireError(f"{path}{'.' if path else ''}{key}: must be a string or an array of strings")
    return tuple(text for text in texts if text)


def read_call_arguments(holder: Mapping[str, Any], key: str, path: str) -> str:
    """Return the text of a tool call's arguments, which clients send as text or as the JSON itself."""
    value = holder.get(key)
    if value is None or isinstance(value, str):
        return value or ""
    try:
        return render_arguments(value) if isinstance(value, dict) else orjson.dumps(value).decode()
    except orjson.JSONEncodeError as error:
        raise WireError(f"{path}{'.' if path else ''}{key}: {error}; nest it less deeply") from error


def read_reasoning(value: Any) -> str:
    """Return the text of a reply's earlier reasoning in whatever shape it comes back, "" where there is none to read.

    Of any shape, since it is shown to no model: what was sampled stands in its place.
    """
    texts = []
    for part in value if isinstance(value, list) else [value]:
        if isinstance(part, dict):
            held = next((part[key] for key in _REASONING_KEYS if part.get(key)), "")
            inner = held if isinstance(held, list) else [held]
            texts += [text.get("text") if isinstance(text, dict) else text for text in inner]
        else:
            texts.append(part)
    return "".join(text for text in texts if isinstance(text, str))


def list_parts(content: Any, path: str) -> list[Any]:
    """Return a message's content as a list of parts: none where it is null, one where it is a text or an object."""
    if content is None:
        return []
    if isinstance(content, (str, dict)):
        return [content]
    if not isinstance(content, list):
        raise WireError(f"{path}: must be a string or an array of parts, not {json_type(content)}")
    return content


def require_string(holder: Mapping[str, Any], key: str, path: str) -> str:
    """Return `holder[key]`, which must be there."""
    value = holder.get(key)
    if not isinstance(value, str):
        raise WireError(f"{path}{'.' if path else ''}{key}: must be a string, not {json_type(value)}")
    return value


def list_unread(holder: Mapping[str, Any], known: AbstractSet[str], path: str) -> tuple[str, ...]:
    """List the paths of the fields of `holder` that nobody reads."""
    if holder.keys() <= known:
        return ()
    return tuple(f"{path}{'.' if path else ''}{key}" for key in holder if key not in known)
