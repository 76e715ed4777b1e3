"""Parse the tools of the Responses API: declarations of every kind, and the choice among them.

Tools that a server would run itself (web_search, mcp, code_interpreter, tool_search ...) are left out and named in
`unread`.
"""

from collections.abc import Mapping
from typing import Any

from polar_trl.errors import WireError
from polar_trl.types import Tool
from polar_trl.wire.base import json_type, list_unread, read_field, require_string
from polar_trl.wire.freeform import FREEFORM_PARAMETERS, describe_grammar

LOCAL_SHELL = "local_shell"
_ACTION_FIELDS = ("command", "env", "timeout_ms", "user", "working_directory")
_FUNCTION_FIELDS = {"type", "name", "description", "parameters", "strict"}
_CUSTOM_FIELDS = {"type", "name", "description", "format"}
_NAMESPACE_FIELDS = {"type", "name", "description", "tools"}
_LOCAL_SHELL_TOOL = Tool(
    name=LOCAL_SHELL,
    description="Runs a command on this machine and returns what it printed.",
    parameters={
        "type": "object",
        "properties": {
            "command": {"type": "array", "items": {"type": "string"}, "description": "The program and its arguments."},
            "working_directory": {"type": "string"},
            "timeout_ms": {"type": "integer"},
        },
        "required": ["command"],
    },
    kind="local_shell",
)


def parse_tools(items: list[Any], path: str, unread: list[str]) -> tuple[Tool, ...]:
    """Parse the tools of a `tools` array at `path`; those left out are appended to `unread` by their path."""
    tools: list[Tool] = []
    for index, item in enumerate(items):
        here = f"{path}[{index}]"
        if not isinstance(item, dict):
            raise WireError(f"{here}: must be an object, not {json_type(item)}")
        if item.get("type") == "namespace":
            tools += _parse_namespace(item, here, unread)
        else:
            tools += _parse_tool(item, here, unread)
    return tuple(tools)


def parse_tool_choice(value: object, unread: list[str]) -> str:
    """ "auto", "none", "required" or a tool's name. A choice among some tools is one among all of them, and unread."""
    if not value:
        return "auto"
    if isinstance(value, str):
        if value not in ("auto", "none", "required"):
            raise WireError("tool_choice: must be auto, none, required or an object that names a tool")
        return value
    if not isinstance(value, dict):
        raise WireError(f"tool_choice: must be a string or an object, not {json_type(value)}")
    kind = value.get("type")
    if kind in ("function", "custom"):
        return qualify_name(value, "tool_choice")
    if kind == LOCAL_SHELL:
        return LOCAL_SHELL
    if kind == "allowed_tools":
        unread.append("tool_choice.tools")
        mode = read_field(value, "mode", str, "tool_choice") or "auto"
        if mode not in ("auto", "required"):
            raise WireError("tool_choice.mode: must be auto or required")
        return str(mode)
    unread.append("tool_choice")
    return "auto"


def qualify_name(holder: Mapping[str, Any], path: str) -> str:
    """Return a tool's name as the model sees it: with its namespace before it."""
    name = require_string(holder, "name", path)
    namespace = read_field(holder, "namespace", str, path)
    return f"{namespace}__{name}" if namespace else name


def _parse_namespace(item: dict[str, Any], path: str, unread: list[str]) -> list[Tool]:
    namespace = require_string(item, "name", path)
    unread += list_unread(item, _NAMESPACE_FIELDS, path)
    tools: list[Tool] = []
    for index, inner in enumerate(read_field(item, "tools", list, path) or []):
        here = f"{path}.tools[{index}]"
        if not isinstance(inner, dict):
            raise WireError(f"{here}: must be an object, not {json_type(inner)}")
        tools += _parse_tool(inner, here, unread, namespace)
    return tools


def _parse_tool(item: dict[str, Any], path: str, unread: list[str], namespace: str = "") -> list[Tool]:
    """Parse a tool; None where it is of a kind that no function stands for."""
    kind = item.get("type")
    if kind == LOCAL_SHELL and not namespace:
        return [_LOCAL_SHELL_TOOL]
    if kind not in ("function", "custom"):
        unread.append(path)
        return []
    unread += list_unread(item, _FUNCTION_FIELDS if kind == "function" else _CUSTOM_FIELDS, path)
    name = require_string(item, "name", path)
    description = read_field(item, "description", str, path) or ""
    name = f"{namespace}__{name}" if namespace else name
    if kind == "function":
        parameters = read_field(item, "parameters", dict, path) or {}
        return [Tool(name=name, description=description, parameters=parameters, namespace=namespace)]
    description = _add_format(description, read_field(item, "format", dict, path) or {}, f"{path}.format", unread)
    return [
        Tool(
            name=name,
            description=description,
            parameters=FREEFORM_PARAMETERS,
            kind="freeform",
            namespace=namespace,
        )
    ]


def _add_format(description: str, form: Mapping[str, Any], path: str, unread: list[str]) -> str:
    """Describe a custom tool together with the format of its input."""
    kind = form.get("type")
    if kind == "grammar":
        return describe_grammar(
            description, require_string(form, "syntax", path), require_string(form, "definition", path)
        )
    if kind not in (None, "text"):
        unread.append(path)
    return description


def read_local_shell_action(action: Mapping[str, Any]) -> dict[str, Any] | None:
    """A local shell command and how to run it, without fields that say nothing; None where one has a wrong type."""
    fields = {key: action[key] for key in _ACTION_FIELDS if action.get(key) not in (None, {})}
    command, env = fields.get("command"), fields.get("env", {})
    if not isinstance(command, list) or not isinstance(env, dict) or type(fields.get("timeout_ms", 0)) is not int:
        return None
    texts = (*command, *env.values(), fields.get("user", ""), fields.get("working_directory", ""))
    return fields if all(isinstance(text, str) for text in texts) else None
