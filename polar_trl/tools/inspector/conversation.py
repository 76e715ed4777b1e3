"""Render a session's calls as the conversation that the agent saw, each call with the messages that it adds.

Long texts are cut to a beginning; `read_text` gives the rest in blocks. Characters that would act on whoever reads
them (controls, marks that turn or hide text) are shown by name.
"""

import json
import re
import unicodedata
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from polar_trl.types import Call, Message, ToolCall

CUT_CHARS = 4000
"""Of a text, in the answer that lists calls."""
BLOCK_CHARS = 65536
_UNUSUAL = re.compile("[^\n\t -~]")
_HIDDEN = frozenset({"Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp"})
"""Unicode categories: controls, formats, unassigned, private, surrogates, separators of lines and paragraphs."""
_BLANK = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180d\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
"""Letters, marks and selectors that are drawn as nothing."""
_JOINER = "\u200d"
_STYLES = "\ufe0e\ufe0f"


def build_calls(calls: Sequence[Call], first: int, count: int, references: dict[int, int]) -> list[dict[str, Any]]:
    """Build the JSON of some calls.

    Args:
        references: For a call that begins a trajectory, the earlier call to compare it with, where there is one.
    """
    return [_build_call(call, calls, references) for call in calls[first : first + count]]


def read_text(call: Call, part: str, offset: int) -> dict[str, Any]:
    """Read a block of one text. Raises `KeyError` for a part that the call does not have."""
    text = _find_text(call, part)
    return {
        "text": clean(text[offset : offset + BLOCK_CHARS]),
        "next": min(len(text), offset + BLOCK_CHARS),
        "length": len(text),
    }


def clean(text: str) -> str:
    """Replace hidden and control characters by their names; newlines and tabs stay."""
    return _UNUSUAL.sub(_show, text)


def _show(match: re.Match[str]) -> str:
    char, text, at = match[0], match.string, match.start()
    if unicodedata.category(char) not in _HIDDEN and not _BLANK.match(char):
        return char
    before, after = text[at - 1 : at], text[at + 1 : at + 2]  # at the start of the text nothing is before
    if char == _JOINER and _is_picture(before) and after and unicodedata.category(after) == "So":
        return char
    if char in _STYLES and _is_picture(before) and before not in _STYLES:
        return char
    return _name(char)


def _is_picture(char: str) -> bool:
    """Tell whether a character can be the part of an emoji that a joiner or a style follows."""
    return bool(char) and (char in _STYLES or unicodedata.category(char) in ("So", "Sk"))


def _name(char: str) -> str:
    if char < " ":
        return chr(0x2400 + ord(char))
    return "␡" if char == "\x7f" else f"⟨U+{ord(char):04X}⟩"


def _build_call(call: Call, calls: Sequence[Call], references: dict[int, int]) -> dict[str, Any]:
    reference = call.parent if call.parent is not None else references.get(call.index, call.index - 1)
    known: tuple[Message, ...] = ()
    if reference >= 0:
        known = (*calls[reference].request.messages, calls[reference].message)
    messages = call.request.messages
    pairs = zip(messages, known, strict=False)
    num_known = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    tools_changed = reference < 0 or call.request.tools != calls[reference].request.tools
    return {
        "index": call.index,
        "repeated": num_known,
        "repeated_of": reference if num_known else None,
        "repeats_reply": num_known == len(known),
        "messages": [
            _build_message(message, f"m{number}") for number, message in enumerate(messages) if number >= num_known
        ],
        "reply": _build_message(call.message, "reply"),
        "tools": [tool.name for tool in call.request.tools] if tools_changed else None,
        "num_tools": len(call.request.tools),
        "unread": [clean(path) for path in call.request.unread[:50]],
        "asked": {
            name: value
            for name in ("max_tokens", "temperature", "top_p", "top_k")
            if (value := getattr(call.request.sampling, name)) is not None
        },
    }


def _build_message(message: Message, part: str) -> dict[str, Any]:
    return {
        "role": message.role,
        "text": _cut(message.text, f"{part}.text"),
        "reasoning": None if message.reasoning is None else _cut(message.reasoning, f"{part}.reasoning"),
        "tool_calls": [
            {
                "id": clean(tool_call.id[:80]),
                "name": clean(tool_call.name[:200]),
                "malformed": tool_call.parse_status == "malformed",
                "arguments": _cut(_spread(tool_call), f"{part}.arguments.{number}"),
            }
            for number, tool_call in enumerate(message.tool_calls)
        ],
        "answers": None if message.tool_call_id is None else clean(message.tool_call_id[:80]),
        "images": len(message.images),
    }


def _cut(text: str, part: str) -> dict[str, Any]:
    return {"part": part, "text": clean(text[:CUT_CHARS]), "length": len(text), "next": min(len(text), CUT_CHARS)}


def _spread(tool_call: ToolCall) -> str:
    """Write the arguments one per line, unescaped, where all are texts; else as the model emitted them."""
    if tool_call.parse_status == "ok":
        try:
            arguments = json.loads(tool_call.arguments)
        except ValueError:
            return tool_call.arguments
        if isinstance(arguments, dict) and all(isinstance(value, str) for value in arguments.values()):
            return "\n".join(_spread_one(name, value) for name, value in arguments.items())
    return tool_call.arguments


def _spread_one(name: str, value: str) -> str:
    return f"{name}:\n{value}" if "\n" in value else f"{name}: {value}"


def _find_text(call: Call, part: str) -> str:
    name, _, rest = part.partition(".")
    if name == "tools":
        return json.dumps(
            [
                {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
                for tool in call.request.tools
            ],
            indent=1,
            ensure_ascii=False,
        )
    if name == "reply":
        message = call.message
    elif name[:1] == "m" and name[1:].isdecimal() and int(name[1:]) < len(call.request.messages):
        message = call.request.messages[int(name[1:])]
    else:
        raise KeyError(part)
    field, _, number = rest.partition(".")
    if field == "text":
        return message.text
    if field == "reasoning" and message.reasoning is not None:
        return message.reasoning
    if field == "arguments" and number.isdecimal() and int(number) < len(message.tool_calls):
        return _spread(message.tool_calls[int(number)])
    raise KeyError(part)
