"""Parse tool calls in a reply's text: JSON in <tool_call> tags, and the XML of Qwen3.5 and Qwen3-Coder.

No call is lost, and none becomes an empty one: a call that cannot be read keeps its text as arguments and is marked
malformed.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from polar_trl.json_text import is_json_object, mend_json, replace_half_surrogates
from polar_trl.types import TokenIds, Tool, ToolCall

ParseStatus = Literal["ok", "malformed"]
ParsedCall = tuple[str, str, ParseStatus]
"""Name, arguments, whether they could be read."""

UNNAMED = "malformed_tool_call"
"""Name of a call in which none could be found; agents answer that they have no such tool, which the model sees."""

OPENING = re.compile(r"<tool_call>\s*(?=\{|<function=)")
"""A tag with a call behind it; a tag alone may be prose about tags."""
_TAG = re.compile(r"<tool_call>\s*")
_CLOSE = "</tool_call>"
_JSON_NAME = re.compile(r'"name"\s*:\s*"([^"]+)"')
_JSON_ARGUMENTS = re.compile(r'"(?:arguments|parameters)"\s*:\s*')
_JSON_FIELDS = {"name", "arguments", "parameters", "type", "id"}
_XML_FUNCTION = re.compile(r"<function=([^>\n]+)>")
_XML_FUNCTION_END = re.compile(r"\s*</function>")
_XML_KEY = re.compile(r"\s*<parameter=([^>\n]+)>\n?")
_XML_VALUE_END = "</parameter>"
_XML_NEXT = re.compile(r"\n<parameter=[^>\n]+>")
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


def split_tagged_calls(text: str, tools: Sequence[Tool] = ()) -> tuple[str, list[ParsedCall]]:
    """Split a reply into its text without <tool_call> blocks, and the calls in them.

    A tag opens a call if JSON or <function= follows or if it stands first on its line; otherwise it is prose about
    tool calls and stays text. Tags inside the strings of a call are part of them. A whole call needs no closing tag.
    """
    kept: list[str] = []
    calls: list[ParsedCall] = []
    kept_to = position = 0
    while (opening := _TAG.search(text, position)) is not None:
        line_start = text.rfind("\n", 0, opening.start()) + 1
        is_call = OPENING.match(text, opening.start()) is not None
        if not is_call and text[max(line_start, kept_to) : opening.start()].strip():
            position = opening.end()
            continue
        kept.append(text[kept_to : opening.start()])
        body_end, position = _find_block_end(text, opening.end())
        calls.append(parse_call(text[opening.end() : body_end], tools))
        kept_to = position
    kept.append(text[kept_to:])
    if not calls:
        return text, []
    return "\n".join(part.strip() for part in kept if part.strip()), calls


def find_call_end(text: str, start: int) -> int | None:
    """Find the end of the call that begins at `start`, its closing tag not included; None if it is not whole."""
    if text.startswith("{", start):
        try:
            return _DECODER.raw_decode(text, start)[1]
        except (ValueError, RecursionError):
            return None
    read = _read_xml(text, start)
    return read[1] if read is not None else None


def parse_call(body: str, tools: Sequence[Tool]) -> ParsedCall:
    """Parse the text between the tags of a call, in either form."""
    xml = None if body.lstrip().startswith("{") else parse_xml_call(body, tools)
    return parse_json_call(body) if xml is None else xml


def parse_json_call(body: str) -> ParsedCall:
    """Parse `{"name": ..., "arguments": {...}}` into a name and the arguments' own text, exactly as it stands.

    `parameters`, as Llama writes it, is another name for `arguments`. Arguments that stand anywhere else make the
    call malformed, with all of it as its arguments.
    """
    body = body.strip()
    fields = _object_fields(body)
    if fields is None:
        name = _JSON_NAME.search(body)
        arguments = _JSON_ARGUMENTS.search(body)
        rest = body[arguments.end() :] if arguments else ""
        return name[1] if name else UNNAMED, rest or body, "malformed"
    name_value = json.loads(mend_json(fields.get("name", "null")))
    if not isinstance(name_value, str) or not name_value:
        return UNNAMED, body, "malformed"
    given = [fields[key] for key in ("arguments", "parameters") if key in fields]
    arguments_text = given[0] if given else "{}"
    is_elsewhere = not arguments_text.strip("{} \t\r\n") and bool(fields.keys() - _JSON_FIELDS)
    if is_elsewhere or len(given) > 1:
        return name_value, body, "malformed"
    return name_value, arguments_text, "ok" if is_json_object(arguments_text) else "malformed"


def parse_xml_call(body: str, tools: Sequence[Tool]) -> ParsedCall | None:
    """Parse `<function=name><parameter=key>value</parameter></function>` into a name and JSON arguments, or None.

    Values keep their indentation: only the line breaks that the format puts around them are removed. They are read
    by the type that the tool declares. Any text left over (an unclosed parameter, a value that closes one early) and
    a parameter that stands twice make the call malformed, and its arguments are then the text as sampled.
    """
    function = _XML_FUNCTION.search(body)
    if function is None:
        return None
    name = function[1].strip() or UNNAMED
    before, rest = body[: function.start()].strip(), body[function.end() :].strip()
    as_sampled: ParsedCall = (name, body.strip() if before or not rest else rest, "malformed")
    read = _read_xml(body, function.start())
    if read is None or before or body[read[1] :].strip():
        return as_sampled
    texts = dict(read[0])
    if len(texts) < len(read[0]):
        return as_sampled
    schemas: Any = next((tool.parameters.get("properties", {}) for tool in tools if tool.name == name), {})
    arguments: dict[str, Any] = {}
    is_readable = True
    for key, text in texts.items():
        schema = schemas.get(key) if isinstance(schemas, Mapping) else None
        arguments[key], fits = _read_value(text, _declared_types(schema))
        is_readable = is_readable and fits
    try:
        spelled = replace_half_surrogates(json.dumps(arguments, ensure_ascii=False))
    except (ValueError, RecursionError):
        return as_sampled
    return name, spelled, "ok" if is_readable and is_json_object(spelled) else "malformed"


def _find_block_end(text: str, start: int) -> tuple[int, int]:
    """Find where the body of a block ends that begins at `start`, and where the text behind its closing tag begins."""
    end = find_call_end(text, start)
    closing = text.find(_CLOSE, start if end is None else end)
    if end is not None and (closing < 0 or text[end:closing].strip()):
        following = text.find("<tool_call>", end)
        if closing < 0 or 0 <= following < closing:
            return end, end
    return (len(text), len(text)) if closing < 0 else (closing, closing + len(_CLOSE))


def _read_xml(text: str, start: int) -> tuple[list[tuple[str, str]], int] | None:
    """Read the parameters of the function that begins at `start`, and its end; None if it is not whole."""
    function = _XML_FUNCTION.match(text, start)
    if function is None:
        return None
    parameters: list[tuple[str, str]] = []
    position = function.end()
    while (key := _XML_KEY.match(text, position)) is not None:
        value_end = text.find(_XML_VALUE_END, key.end())
        if value_end < 0:
            return None
        value = text[key.end() : value_end].removesuffix("\n")
        call_end = value.find(_CLOSE)
        if _XML_NEXT.search(value) or (call_end >= 0 and "<tool_call>" in value[call_end:]):
            return None  # it was not closed, and would take in the next one or the next call
        parameters.append((key[1], value))
        position = value_end + len(_XML_VALUE_END)
    closing = _XML_FUNCTION_END.match(text, position)
    return (parameters, closing.end()) if closing else None


def _object_fields(text: str) -> dict[str, str] | None:
    """Map each key of a JSON object to its value's own text; None if `text` is more or less, or a key stands twice."""
    fields: dict[str, str] = {}
    try:
        value, end = _DECODER.raw_decode(text)
        if not isinstance(value, dict) or end != len(text):
            return None
        position = _skip(text, 1, ",")
        while text[position] != "}":
            key, position = _DECODER.raw_decode(text, position)
            if key in fields:
                return None
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
    declared = schema.get("type")
    types = {name for name in (declared if isinstance(declared, list) else [declared]) if isinstance(name, str)}
    for key in ("anyOf", "oneOf"):
        branches = schema.get(key)
        for branch in branches if isinstance(branches, list) else []:
            types |= _declared_types(branch)
    return types


def _read_value(text: str, types: set[str]) -> tuple[Any, bool]:
    """Read a parameter's value; tell whether its text was of one of the types (any, where none is declared)."""
    if types == {"string"}:
        return text, True
    stripped = text.strip()
    try:
        value = _PYTHON_LITERALS[stripped] if stripped in _PYTHON_LITERALS else json.loads(stripped)
    except ValueError:
        return text, not types or "string" in types
    except RecursionError:
        return text, "string" in types
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
