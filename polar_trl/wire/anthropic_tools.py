"""Parse tools of Anthropic Messages into functions.

Tools that Anthropic defines and the client runs (bash, the text editor, memory) carry no schema in the request; what
is written here is their documented input. Tools that run on Anthropic's servers are left out and named in `unread`, as
are deferred ones until the conversation refers to them.
"""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any

from polar_trl.errors import WireError
from polar_trl.types import Tool
from polar_trl.wire.base import json_type, read_field, require_string

_STRING = {"type": "string"}
_BASH = Tool(
    name="bash",
    description="Run a command in a shell that keeps its state between calls.",
    parameters={
        "type": "object",
        "properties": {"command": _STRING, "restart": {"type": "boolean", "description": "Start the shell anew."}},
    },
)
_LINES = {"type": "array", "items": {"type": "integer"}}
_EDIT_FIELDS = {
    "path": _STRING,
    "file_text": _STRING,
    "old_str": _STRING,
    "new_str": _STRING,
    "insert_line": {"type": "integer"},
    "insert_text": _STRING,
    "view_range": _LINES,
}
_EDITOR = Tool(
    name="str_replace_based_edit_tool",
    description="View, create and edit text files.",
    parameters={
        "type": "object",
        "properties": {
            "command": {"type": "string", "enum": ["view", "create", "str_replace", "insert"]},
            **_EDIT_FIELDS,
        },
        "required": ["command", "path"],
    },
)
_MEMORY = Tool(
    name="memory",
    description="Keep notes in files below /memories.",
    parameters={
        "type": "object",
        "properties": {
            "command": {"type": "string", "enum": ["view", "create", "str_replace", "insert", "delete", "rename"]},
            **_EDIT_FIELDS,
            "old_path": _STRING,
            "new_path": _STRING,
        },
        "required": ["command"],
    },
)
_CUSTOM = Tool(name="")
# types carry the date of their version: "bash_20250124"
_CLIENT_TOOLS = {"bash_": _BASH, "text_editor_": _EDITOR, "memory_": _MEMORY}


def parse_tools(body: Mapping[str, Any], unread: list[str], named: AbstractSet[str]) -> tuple[Tool, ...]:
    """Parse the tools that the model is shown.

    Args:
        body: Of the request.
        unread: Gets the paths of those it is not shown.
        named: Deferred tools that the conversation refers to.
    """
    tools = []
    for index, item in enumerate(read_field(body, "tools", list, "") or []):
        path = f"tools[{index}]"
        if not isinstance(item, dict):
            raise WireError(f"{path}: must be an object, not {json_type(item)}")
        tool = _parse_tool(item, path)
        is_hidden = read_field(item, "defer_loading", bool, path) and item.get("name") not in named
        if tool is None or is_hidden:
            unread.append(path)
        else:
            tools.append(tool)
    return tuple(tools)


def has_only_server_tools(body: Mapping[str, Any]) -> bool:
    """Return whether the request is a client's own search or the like, which no policy can answer.

    The tools must have been parsed before.
    """
    items = body.get("tools") or []
    return bool(items) and all(_find_kind(item, "") is None for item in items)


def parse_tool_choice(body: Mapping[str, Any], unread: list[str]) -> str:
    """ "auto", "none", "required" or the name of a tool."""
    choice = read_field(body, "tool_choice", dict, "")
    if not choice:
        return "auto"
    kind = choice.get("type")
    if kind == "tool":
        return require_string(choice, "name", "tool_choice")
    if kind not in ("auto", "any", "none"):
        raise WireError("tool_choice.type: must be auto, any, tool or none")
    if choice.get("disable_parallel_tool_use"):
        unread.append("tool_choice.disable_parallel_tool_use")
    return "required" if kind == "any" else str(kind)


def _parse_tool(item: Mapping[str, Any], path: str) -> Tool | None:
    """Parse a tool; None for one that runs on a server."""
    known = _find_kind(item, path)
    if known is None:
        return None
    if known is _CUSTOM:
        return Tool(
            name=require_string(item, "name", path),
            description=read_field(item, "description", str, path) or "",
            parameters=read_field(item, "input_schema", dict, path) or {},
        )
    return replace(known, name=read_field(item, "name", str, path) or known.name)


def _find_kind(item: Mapping[str, Any], path: str) -> Tool | None:
    """Return the documented fields of a tool that its client runs; None for a tool that runs on a server."""
    kind = read_field(item, "type", str, path) or "custom"
    if kind == "custom":
        return _CUSTOM
    return next((tool for prefix, tool in _CLIENT_TOOLS.items() if kind.startswith(prefix)), None)
