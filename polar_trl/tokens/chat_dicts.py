"""Build the dictionaries that chat templates read, with system messages where the template takes them.

Images raise `RenderError`: the engine is given token ids only.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from polar_trl.errors import RenderError
from polar_trl.json_text import UNPARSED_ARGUMENTS, mend_json
from polar_trl.types import Message, Tool

SystemPlacement = Literal["anywhere", "first", "never"]
"""Place at which a chat template accepts system messages and writes them out."""


def place_system(messages: Sequence[Message], placement: SystemPlacement, *, at_start: bool) -> list[Message]:
    """Developer messages become system messages; those that the template would refuse or drop become user messages.

    Args:
        messages: The conversation, or (`at_start` False) a tail of it.
        placement: What the template takes. With "first", system messages that open the conversation are joined to one.
        at_start: Whether the first message opens the conversation.
    """
    placed = [replace(message, role="system") if message.role == "developer" else message for message in messages]
    if placement == "anywhere":
        return placed
    num_leading = 0
    if at_start and placement == "first":
        while num_leading < len(placed) and placed[num_leading].role == "system":
            num_leading += 1
    tail = [replace(message, role="user") if message.role == "system" else message for message in placed[num_leading:]]
    if not num_leading:
        return tail
    text = "\n\n".join(message.text for message in placed[:num_leading])
    return [replace(placed[0], text=text), *tail]


def build_message_dict(message: Message, *, parse_arguments: bool) -> dict[str, Any]:
    """Build one message as a chat template reads it.

    Args:
        message: Images raise `RenderError`.
        parse_arguments: Give tool arguments as objects where they are valid JSON, else as the text that was sampled;
            half surrogates are U+FFFD in both.
    """
    if message.images:
        raise RenderError(
            # the first words make Claude Code 2.1.332 leave the image out and go on
            "could not process image: this model is served text only; "
            "keep the agent from attaching images or screenshots"
        )
    result: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.reasoning:
        result["reasoning_content"] = message.reasoning
    if message.tool_calls:
        result["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": _arguments(call.arguments, parse=parse_arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        result["tool_call_id"] = message.tool_call_id
    return result


def build_tool_dict(tool: Tool) -> dict[str, Any]:
    """Build a tool in the envelope that chat templates were trained with."""
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)},
    }


def wrap_malformed(message: Message) -> Message:
    """Make objects of arguments that are none, for formats that carry nothing else: as dialects do, which do not."""
    calls = tuple(
        call
        if isinstance(_arguments(call.arguments, parse=True), dict)
        else replace(call, arguments=json.dumps({UNPARSED_ARGUMENTS: call.arguments}, ensure_ascii=False))
        for call in message.tool_calls
    )
    return message if calls == message.tool_calls else replace(message, tool_calls=calls)


def _arguments(text: str, *, parse: bool) -> Any:
    if not text.strip():
        return {} if parse else "{}"
    text = mend_json(text)  # templates that read it themselves would write what no tokenizer takes
    if not parse:
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
