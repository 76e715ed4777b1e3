"""Parse tool calls in a reply's text: JSON in <tool_call> tags, and the XML of Qwen3.5 and Qwen3-Coder.

No call is lost: one that cannot be read keeps its text as arguments and is marked malformed.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from polar_trl.types import TokenIds, Tool, ToolCall

ParseStatus = Literal["ok", "malformed"]
ParsedCall = tuple[str, str, ParseStatus]
"""Name, arguments, whether they could be read."""

UNNAMED = "malformed_tool_call"
"""Name of a call in which none could be found; agents answer that they have no such tool, which the model sees."""

_OPEN = re.compile(r"<tool_call>\s*")
_CLOSE = re.compile(r"\s*</tool_call>")
_JSON_NAME = re.compile(r'"name"\s*:\s*"([^"]+)"')
_JSON_ARGUMENTS = re.compile(r'"arguments"\s*:\s*')
_XML_FUNCTION = re.compile(r"<function=([^>\n]+)>")
_XML_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_XML_FRAME = re.compile(r"\s*<function=[^>\n]+>\s*</function>\s*")
_DECODER = json.JSONDecoder()
_PYTHON_LITERALS = {"True": True, "False": False, "None": None}


def build_tool_calls(calls: Sequence[ParsedCall], prompt_ids: TokenIds, completion_ids: TokenIds) -> list[ToolCall]:
    """Build tool calls with ids of their own: a hash of the sample and its place, unique in a session."""
    if not calls:
        return []
    content = ",".join(map(str, (len(prompt_ids), *completion_ids))).encode()
    stem = hashlib.blake2b(content, digest_size=9).hexdigest()
    return [
        ToolCall(id=f"call_{stem}{position}", name=name, arguments=arguments, parse_status=status)
        for position, (name, arguments, status) in enumerate(calls)
    ]


def split_tagged_calls(text: str) -> tuple[str, list[ParsedCall]]:
    """Split a reply into its text without <tool_call> blocks, and the calls in them.

    A tag opens a call if JSON follows or if it stands first on its line; otherwise it is prose about tool calls and
    stays text. A call whose JSON is whole needs no closing tag.
    """
    kept: list[str] = []
    calls: list[ParsedCall] = []
    kept_to = position = 0
    while (opening := _OPEN.search(text, position)) is not None:
        is_json = text.startswith("{", opening.end())
        line_start = text.rfind("\n", 0, opening.start()) + 1
        if not is_json and text[max(line_start, kept_to) : opening.start()].strip():
            position = opening.end()
            continue
        kept.append(text[kept_to : opening.start()])
        end = _json_end(text, opening.end()) if is_json else None
        closing = _CLOSE.match(text, end) if end is not None else _CLOSE.search(text, opening.end())
        body_end = end if end is not None else closing.start() if closing else len(text)
        calls.append(parse_json_call(text[opening.end() : body_end]))
        kept_to = position = closing.end() if closing else body_end
    kept.append(text[kept_to:])
    if not calls:
        return text, []
    return "\n".join(part.strip() for part in kept if part.strip()), calls


def parse_json_call(body: str) -> ParsedCall:
    """Parse `{"name": ..., "arguments": {...}}` into a name and the arguments' own text, exactly as it stands."""
    body = body.strip()
    fields = _object_fields(body)
    if fields is None:
        name = _JSON_NAME.search(body)
        arguments = _JSON_ARGUMENTS.search(body)
        return name[1] if name else UNNAMED, body[arguments.end() :] if arguments else body, "malformed"
    name_text, arguments_text = fields.get("name", "null"), fields.get("arguments", "{}")
    name_value = json.loads(name_text)
    if not isinstance(name_value, str) or not name_value:
        return UNNAMED, body, "malformed"
    return name_value, arguments_text, "ok" if arguments_text.startswith("{") else "malformed"


def parse_xml_call(body: str, tools: Sequence[Tool]) -> ParsedCall | None:
    """Parse `<function=name><parameter=key>value</parameter></function>` into a name and JSON arguments, or None.

    Values keep their indentation: only the line breaks that the format puts around them are removed. They are read
    by the type that the tool declares. Any text left over (an unclosed parameter, a value that closes one early) makes
    the call malformed, and its arguments are then the text as sampled.
    """
    function = _XML_FUNCTION.search(body)
    if function is None:
        return None
    name = function[1].strip()
    if not _XML_FRAME.fullmatch(_XML_PARAMETER.sub("", body)):
        return name, body[function.end() :].strip(), "malformed"
    schemas: Any = next((tool.parameters.get("properties", {}) for tool in tools if tool.name == name), {})
    arguments: dict[str, Any] = {}
    status: ParseStatus = "ok"
    for key, text in _XML_PARAMETER.findall(body):
        schema = schemas.get(key) if isinstance(schemas, Mapping) else None
        arguments[key], readable = _read_value(text, _declared_types(schema))
        if not readable:
            status = "malformed"
    return name, json.dumps(arguments, ensure_ascii=False), status


def _json_end(text: str, start: int) -> int | None:
    try:
        return _DECODER.raw_decode(text, start)[1]
    except (ValueError, RecursionError):
        return None


def _object_fields(text: str) -> dict[str, str] | None:
    """Map each key of the outermost object to its value's own text; None if `text` is not one whole JSON object."""
    fields: dict[str, str] = {}
    try:
        value, end = _DECODER.raw_decode(text)
        if not isinstance(value, dict) or end != len(text):
            return None
        position = _skip(text, 1, ",")
        while text[position] != "}":
            key, position = _DECODER.raw_decode(text, position)
            start = _skip(text, position, ":")
            _, position = _DECODER.raw_decode(text, start)
            fields[key] = text[start:position]
            position = _skip(text, position, ",")
    except (ValueError, RecursionError):
        return None
    return fields


def _skip(text: str, position: int, separator: str) -> int:
    while text[position].isspace() or text[position] == separator:
        position += 1
    return position


def _declared_types(schema: Any) -> set[str]:
    """Return the JSON types that a parameter's schema allows; empty if it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    declared = schema.get("type", [])
    types = {declared} if isinstance(declared, str) else set(declared)
    for branch in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        types |= _declared_types(branch)
    return types


def _read_value(text: str, types: set[str]) -> tuple[Any, bool]:
    """Read a parameter's value; tell whether its text was of one of the types (any, where none is declared)."""
    if types == {"string"}:
        return text, True
    stripped = text.strip()
    try:
        value = _PYTHON_LITERALS[stripped] if stripped in _PYTHON_LITERALS else json.loads(stripped)
    except (ValueError, RecursionError):
        return text, not types or "string" in types
    if not types or _json_type(value) in types or (_json_type(value) == "integer" and "number" in types):
        return value, True
    return text, "string" in types


def _json_type(value: Any) -> str:
    for python_type, name in (
        (bool, "boolean"),
        (int, "integer"),
        (float, "number"),
        (str, "string"),
        (list, "array"),
        (dict, "object"),
    ):
        if isinstance(value, python_type):
            return name
    return "null"
