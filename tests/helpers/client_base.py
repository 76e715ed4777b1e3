"""Define the face that the clients of all formats show to the tests. No code is shared with the package's readers."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from conversations import Style

from polar_trl.json_text import replace_half_surrogates
from polar_trl.types import ChatRequest, Message, ToolCall, ToolKind
from polar_trl.wire.base import Incoming

Json = dict[str, Any]
SIGNATURE = "c2lnbmVk"
"""Of reasoning that nobody of ours signed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """A reply as a client read it."""

    text: str
    reasoning: str
    calls: tuple[ToolCall, ...]
    """With the ids that results must name; arguments as JSON text."""
    stop: str
    """Why it ended, in the format's own word."""


class Client(Protocol):
    """One agent's conversation: begun with a request, grown by replies and new messages."""

    dialect_name: ClassVar[str]
    kinds: ClassVar[tuple[ToolKind, ...]]
    """The kinds of tools that this format can declare."""
    raw_arguments: ClassVar[bool]
    """Tool arguments travel as the text that the policy wrote, not as an object."""
    style: Style

    def __init__(self, request: ChatRequest, style: Style) -> None: ...

    @staticmethod
    def carry(request: ChatRequest) -> ChatRequest:
        """The request without what this format cannot say, tool arguments as they stand."""
        ...

    @property
    def says_ids(self) -> bool:
        """Tell whether tool calls and results are sent with their ids."""
        ...

    def incoming(self) -> Incoming: ...

    def read(self, reply: bytes, *, streamed: bool) -> Seen:
        """Take a reply into the history."""
        ...

    def add(self, messages: Sequence[Message]) -> None: ...


def read_events(stream: bytes) -> list[tuple[str, str]]:
    """Server-sent events as (event, data), "message" where no event is named; comments are skipped."""
    events = []
    for block in stream.decode().split("\n\n"):
        name, data = "message", []
        for line in block.split("\n"):
            field, _, value = line.partition(":")
            if field == "event":
                name = value.strip()
            elif field == "data":
                data.append(value.removeprefix(" "))
            else:
                assert field == "", f"no field of an event: {line!r}"
        if data:
            events.append((name, "\n".join(data)))
    return events


def respell(arguments: str) -> str:
    """JSON text as JavaScript writes it: no spaces, whole floats as integers. What is no JSON stays."""
    try:
        value = json.loads(arguments, parse_constant=refuse_constant)
    except ValueError:
        return arguments
    text = json.dumps(whole(value), ensure_ascii=False, separators=(",", ":"))
    # JavaScript escapes what has no UTF-8 form
    return "".join(f"\\u{ord(sign):04x}" if "\ud800" <= sign <= "\udfff" else sign for sign in text)


def refuse_constant(name: str) -> None:
    raise ValueError(name)


def whole(value: Any) -> Any:
    """All of JavaScript's numbers are floats; whole ones below 1e21 are written without a point or an exponent."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        number = float(value)
        return int(number) if number.is_integer() and abs(number) < 1e21 else number
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    return [whole(item) for item in value] if isinstance(value, list) else value


def halves(text: str) -> list[str]:
    return [text] if len(text) < 2 else [text[: len(text) // 2], text[len(text) // 2 :]]


def set_fields(body: Json, style: Style, **fields: Any) -> Json:
    return body | {key: value for key, value in fields.items() if value is not None or style.nulls}


def as_object(call: ToolCall) -> Json:
    """Arguments for formats that carry an object; what is none, as our replies would have shown it to the client."""
    if not call.arguments.strip():
        return {}
    try:
        value = json.loads(call.arguments, parse_constant=refuse_constant)
        value = json.loads(replace_half_surrogates(json.dumps(value, ensure_ascii=False)))
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"unparsed_arguments": call.arguments}
