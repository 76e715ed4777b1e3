"""Parse Google's tools, whose own Schema becomes a JSON schema, and the choice among them.

Also reads an object's fields under either spelling. Refuses schemas nested deeper than any tool's (`WireError`).
"""

import re
from collections.abc import Mapping
from typing import Any

from polar_trl.errors import WireError
from polar_trl.types import Tool
from polar_trl.wire.base import json_type, list_unread, read_field, require_string

MAX_SCHEMA_DEPTH = 100
_DECLARATION_FIELDS = {"name", "description", "parameters", "parametersJsonSchema"}
_TOOL_CHOICES = {"MODE_UNSPECIFIED": "auto", "AUTO": "auto", "VALIDATED": "auto", "ANY": "required", "NONE": "none"}
_SNAKE = re.compile(r"_([a-z])")
# counts are 64-bit numbers in Google's Schema, which its JSON writes as strings
_SCHEMA_COUNTS = {"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"}


def parse_tools(body: Mapping[str, Any], unread: list[str]) -> tuple[Tool, ...]:
    """Parse the declared functions. Tools that Google would run itself are named in `unread`."""
    tools = []
    for index, raw in enumerate(read_field(body, "tools", list, "") or []):
        path = f"tools[{index}]"
        item = read_fields(raw, path)
        unread += list_unread(item, {"functionDeclarations"}, path)
        for place, declaration in enumerate(read_field(item, "functionDeclarations", list, path) or []):
            tools.append(_parse_declaration(declaration, f"{path}.functionDeclarations[{place}]", unread))
    return tuple(tools)


def _parse_declaration(raw: Any, path: str, unread: list[str]) -> Tool:
    declaration = read_fields(raw, path)
    unread += list_unread(declaration, _DECLARATION_FIELDS, path)
    parameters = read_field(declaration, "parametersJsonSchema", dict, path)
    if parameters is None and read_field(declaration, "parameters", dict, path) is not None:
        parameters = _build_json_schema(declaration["parameters"], f"{path}.parameters", 0)
    return Tool(
        name=require_string(declaration, "name", path),
        description=read_field(declaration, "description", str, path) or "",
        parameters=parameters or {},
    )


def _build_json_schema(raw: Any, path: str, depth: int) -> Any:
    """Build a JSON schema from Google's Schema: types in lower case, counts as numbers, `nullable` as a type."""
    if not isinstance(raw, dict):
        return raw  # additionalProperties may be a boolean
    if depth > MAX_SCHEMA_DEPTH:
        raise WireError(f"{path}: nest the parameters less deeply")
    schema: dict[str, Any] = {}
    for key, value in read_fields(raw, path).items():
        if key == "type" and isinstance(value, str):
            if value != "TYPE_UNSPECIFIED":
                schema["type"] = value.lower()
        elif key in ("properties", "defs", "$defs") and isinstance(value, dict):
            schema[key] = {name: _build_json_schema(item, path, depth + 1) for name, item in value.items()}
        elif key in ("anyOf", "oneOf", "allOf", "prefixItems") and isinstance(value, list):
            schema[key] = [_build_json_schema(item, path, depth + 1) for item in value]
        elif key in ("items", "additionalProperties", "not"):
            schema[key] = _build_json_schema(value, path, depth + 1)
        elif key in _SCHEMA_COUNTS and isinstance(value, str) and value.isdecimal():
            schema[key] = int(value)
        elif key not in ("nullable", "propertyOrdering"):
            schema[key] = value
    if raw.get("nullable") is True and isinstance(schema.get("type"), str):
        schema["type"] = [schema["type"], "null"]
    return schema


def parse_tool_choice(body: Mapping[str, Any], unread: list[str]) -> str:
    """ "auto", "none", "required", or the name of the one function that is allowed."""
    raw = body.get("toolConfig")
    if raw is None:
        return "auto"
    holder = read_fields(raw, "toolConfig")
    unread += list_unread(holder, {"functionCallingConfig"}, "toolConfig")
    if holder.get("functionCallingConfig") is None:
        return "auto"
    path = "toolConfig.functionCallingConfig"
    config = read_fields(holder["functionCallingConfig"], path)
    unread += list_unread(config, {"mode", "allowedFunctionNames"}, path)
    mode = (read_field(config, "mode", str, path) or "AUTO").upper()
    if mode not in _TOOL_CHOICES:
        raise WireError(f"{path}.mode: must be one of {', '.join(_TOOL_CHOICES)}")
    allowed = read_field(config, "allowedFunctionNames", list, path) or []
    if not all(isinstance(name, str) for name in allowed):
        raise WireError(f"{path}.allowedFunctionNames: must be an array of strings")
    if mode == "ANY" and len(allowed) == 1:
        return str(allowed[0])
    if allowed:
        unread.append(f"{path}.allowedFunctionNames")
    return _TOOL_CHOICES[mode]


def read_fields(raw: Any, path: str) -> dict[str, Any]:
    """Return an object's fields under their camelCase names. The object itself where they are: read, never changed.

    An empty array is an empty object, as PHP writes it.
    """
    if raw == []:
        return {}
    if not isinstance(raw, dict):
        raise WireError(f"{path}: must be an object, not {json_type(raw)}")
    if "_" not in "".join(raw):
        return raw
    return {_SNAKE.sub(_upper, key) if "_" in key else key: value for key, value in raw.items()}


def _upper(match: re.Match[str]) -> str:
    return match[1].upper()
