"""Map custom tools (free-form input, in OpenAI's formats) to functions with one string argument, and back.

Nothing that the model wrote is lost: arguments that are not exactly {"input": text} go to the client whole, and
the call's id says so when it comes back.
"""

from collections.abc import Mapping
from typing import Any

import orjson

from polar_trl.json_text import load_json
from polar_trl.types import ToolCall

RAW_INPUT_SUFFIX = "_raw"
"""Ends the id of a call whose arguments were not {"input": text}: its input is all of them."""
FREEFORM_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The whole input, as plain text."}},
    "required": ["input"],
}


def describe_grammar(description: str, syntax: str, definition: str) -> str:
    """Describe a tool with its grammar in words: nothing here samples under one."""
    grammar = f"The input must match this grammar ({syntax}):\n{definition}"
    return f"{description}\n\n{grammar}" if description else grammar


def render_input(tool_call: ToolCall) -> tuple[str, str]:
    """Render the id and the input with which a client sees a call of a custom tool."""
    try:
        value = load_json(tool_call.arguments)
    except ValueError:
        value = None
    if isinstance(value, dict) and value.keys() == {"input"} and isinstance(value["input"], str):
        return tool_call.id, value["input"]
    return tool_call.id + RAW_INPUT_SUFFIX, tool_call.arguments


def parse_input(call_id: str, text: str) -> str:
    """Invert `render_input`: return the call's arguments."""
    return text if call_id.endswith(RAW_INPUT_SUFFIX) else orjson.dumps({"input": text}).decode()
