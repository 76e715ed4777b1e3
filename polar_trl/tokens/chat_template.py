"""Apply a tokenizer's own chat template, and make up for what it lacks.

What a template accepts is found by trying, once, when it is wrapped:

- system messages that it refuses or drops become user messages (or join the first system message);
- user messages in a row are joined where it demands alternation;
- arguments that are no object are wrapped in one where it takes nothing else;
- **prompted tools**: where it has no place for tools, or writes calls in a form that cannot be read back from a reply,
  the tools are listed in the system message, calls are JSON in <tool_call> tags, and results are user messages with
  <tool_response> tags.

A tokenizer without a chat template raises `RenderError`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from polar_trl.errors import RenderError
from polar_trl.tokens.canonical import canonical_arguments
from polar_trl.tokens.chat_dicts import (
    SystemPlacement,
    build_message_dict,
    build_tool_dict,
    place_system,
    wrap_malformed,
)
from polar_trl.tokens.tool_calls import UNNAMED, split_tagged_calls
from polar_trl.types import Message, Tool, ToolCall


class ChatTokenizer(Protocol):
    """The part of a `transformers` tokenizer that is used here."""

    chat_template: Any
    eos_token_id: int | None
    added_tokens_decoder: dict[int, Any]

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...

    def convert_ids_to_tokens(self, ids: int) -> str: ...

    def apply_chat_template(self, conversation: list[dict[str, Any]], **kwargs: Any) -> Any: ...


_USER = Message(role="user", text="probe question")
_REPLY = Message(role="assistant", text="probe answer")
_TOOL = Tool(
    name="probe_tool",
    description="Looks something up.",
    parameters={"type": "object", "properties": {"probe_key": {"type": "string"}}, "required": ["probe_key"]},
)
_TOOL_CALL = ToolCall(id="probe0001", name="probe_tool", arguments='{"probe_key": "probe value"}')


class ChatTemplate:
    """Writes conversations. `system`, `joins_users`, `has_tools` and `has_thinking` say what the template takes.

    `reply_opening` is the mark at which a reply begins, "" where there is none.
    """

    def __init__(self, tokenizer: ChatTokenizer, *, kwargs: Mapping[str, Any] | None = None) -> None:
        if not tokenizer.chat_template:
            raise RenderError(
                "the tokenizer has no chat template; use an instruct model, or set `chat_template` on it"
            )
        self._tokenizer = tokenizer
        self._kwargs = dict(kwargs or {})
        self.system: SystemPlacement = "anywhere"
        self.joins_users = False
        self.has_tools = True
        self.has_text_arguments = True
        self.has_thinking = "<think>" in str(tokenizer.chat_template)
        whole = self.write([_USER])  # a template that cannot write this is of no use: let its error out
        before = self.write([_USER], opens_reply=False)
        self.reply_opening = whole.removeprefix(before).partition("<think>")[0] if whole.startswith(before) else ""
        self.joins_users = not self._writes([_USER, replace(_USER, text="second question")], "second question")
        self.system = self._find_system_placement()
        self.has_tools = self._find_tools()
        self.has_text_arguments = self._find_text_arguments()

    def write(self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, opens_reply: bool = True) -> str:
        """Write the conversation's text; with `opens_reply`, up to where the model's next reply begins.

        Raises `RenderError`, with the template's own words, if the template refuses the conversation.
        """
        if not self.has_tools:
            messages, tools = _write_tools_as_text(messages, tools), ()
        elif not self.has_text_arguments:
            messages = [wrap_malformed(message) for message in messages]
        messages = place_system(messages, self.system, at_start=True)
        if self.joins_users:
            messages = _join_users(messages)
        dicts = [build_message_dict(message, parse_arguments=True) for message in messages]
        try:
            text = self._tokenizer.apply_chat_template(
                dicts,
                tools=[build_tool_dict(tool) for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=opens_reply,
                **self._kwargs,
            )
        except Exception as error:  # templates are programs: they raise anything
            raise RenderError(f"the chat template refuses the conversation: {error}") from error
        return str(text)

    def _writes(self, messages: Sequence[Message], expected: str, tools: Sequence[Tool] = ()) -> bool:
        try:
            return expected in self.write(messages, tools)
        except RenderError:
            return False

    def _find_system_placement(self) -> SystemPlacement:
        system = Message(role="system", text="probe instruction")
        if not self._writes([system, _USER], system.text):
            return "never"
        try:
            text = self.write([_USER, _REPLY, system, _USER])
        except RenderError:
            return "first"
        # some templates move every instruction to the start, which would rewrite what came before
        return "anywhere" if 0 <= text.find(_REPLY.text) < text.find(system.text) else "first"

    def _find_text_arguments(self) -> bool:
        malformed = replace(_TOOL_CALL, arguments='{"probe_key": "probe val')
        return self._writes([_USER, Message(role="assistant", tool_calls=(malformed,)), _USER], "probe val", [_TOOL])

    def _find_tools(self) -> bool:
        result = Message(role="tool", text="probe result", tool_call_id=_TOOL_CALL.id)
        asked = [_USER, Message(role="assistant", tool_calls=(_TOOL_CALL,)), result]
        if not self._writes([_USER], "probe_key", [_TOOL]) or not self._writes(asked, result.text, [_TOOL]):
            return False
        _, calls = split_tagged_calls(self.write(asked, [_TOOL]))
        if not calls:
            return False
        name, arguments, _ = calls[-1]
        return name == _TOOL_CALL.name and canonical_arguments(arguments) == canonical_arguments(_TOOL_CALL.arguments)


def _write_tools_as_text(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    written: list[Message] = []
    for position, message in enumerate(messages):
        if message.role == "tool":
            text = f"<tool_response>\n{message.text}\n</tool_response>"
            if position and messages[position - 1].role == "tool":
                written[-1] = replace(
                    written[-1], text=f"{written[-1].text}\n{text}", images=written[-1].images + message.images
                )
            else:
                written.append(Message(role="user", text=text, images=message.images))
        elif message.tool_calls:
            calls = [_write_call(call) for call in message.tool_calls]
            text = "\n".join([message.text, *calls] if message.text else calls)
            written.append(replace(message, text=text, tool_calls=()))
        else:
            written.append(message)
    if not tools:
        return written
    listing = _write_tool_list(tools)
    if written and written[0].role in ("system", "developer"):
        return [replace(written[0], text=f"{written[0].text}\n\n{listing}"), *written[1:]]
    return [Message(role="system", text=listing), *written]


def _write_tool_list(tools: Sequence[Tool]) -> str:
    lines = "\n".join(json.dumps(build_tool_dict(tool)["function"], ensure_ascii=False) for tool in tools)
    return (
        f"You can use these tools, each described by one line of JSON:\n<tools>\n{lines}\n</tools>\n"
        "To use a tool, write its name and arguments as JSON between tags, then end your turn:\n"
        '<tool_call>\n{"name": "tool name", "arguments": {"argument name": "value"}}\n</tool_call>\n'
        "Its result comes back between <tool_response> tags."
    )


def _write_call(call: ToolCall) -> str:
    arguments = call.arguments if call.arguments.strip() else "{}"
    body = arguments if call.name == UNNAMED else f'{{"name": {json.dumps(call.name)}, "arguments": {arguments}}}'
    return f"<tool_call>\n{body}\n</tool_call>"


def _join_users(messages: Sequence[Message]) -> list[Message]:
    joined: list[Message] = []
    for message in messages:
        if joined and message.role == joined[-1].role == "user":
            joined[-1] = replace(
                joined[-1], text=f"{joined[-1].text}\n\n{message.text}", images=joined[-1].images + message.images
            )
        else:
            joined.append(message)
    return joined
