"""Render without a tokenizer: ids 0-255 are the bytes of the text, five more are the marks of a chat format.

Exact by construction, so tests can check token-in-token-out without a model. Images raise `RenderError`.

    <start>role\\n text <end>                                         system, developer, user and tool turns
    <start>assistant\\n [<think>reasoning<think_end>] text [<call>name\\narguments]... <end>
"""

from collections.abc import Sequence
from itertools import pairwise

import orjson

from polar_trl.errors import RenderError
from polar_trl.tokens.base import Renderer
from polar_trl.types import Message, TokenIds, Tool, ToolCall

START, END, CALL, THINK, THINK_END = range(256, 261)


class ByteRenderer(Renderer):
    """Implements `tokens.base.Renderer`; tools are written into a first turn of their own."""

    stop_token_ids: tuple[int, ...] = (END,)
    vocab_size = 261

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> TokenIds:
        ids: list[int] = []
        if tools:
            specs = [
                {"name": tool.name, "description": tool.description, "parameters": tool.parameters} for tool in tools
            ]
            ids += _render_turn("tools", orjson.dumps(specs))
        return (*ids, *self._render_new(messages))

    def extend(
        self, prompt_ids: TokenIds, completion_ids: TokenIds, new_messages: Sequence[Message], tools: Sequence[Tool]
    ) -> TokenIds | None:
        closing = () if completion_ids[-1:] == (END,) else (END,)
        # in this order the history, the long part, is copied once
        return prompt_ids + (completion_ids + closing + self._render_new(new_messages))

    def continue_reply(self, prompt_ids: TokenIds, reply: Message) -> TokenIds:
        return prompt_ids + self.spell(reply)[:-1]

    def parse(self, prompt_ids: TokenIds, completion_ids: TokenIds, tools: Sequence[Tool]) -> Message:
        ids = [token_id for token_id in completion_ids if token_id not in (START, END)]
        reasoning = None
        if ids[:1] == [THINK]:
            end = ids.index(THINK_END) if THINK_END in ids else len(ids)
            reasoning = _decode(ids[1:end])
            ids = ids[end + 1 :]
        calls = [index for index, token_id in enumerate(ids) if token_id == CALL]
        spans = [ids[start + 1 : end] for start, end in pairwise([*calls, len(ids)])]
        text = _decode(ids[: calls[0]] if calls else ids)
        return Message(role="assistant", text=text, reasoning=reasoning, tool_calls=tuple(map(_parse_call, spans)))

    def spell(self, message: Message) -> TokenIds:
        """Return the ids that a model would sample to say this assistant message, the end of the turn included."""
        ids: list[int] = []
        if message.reasoning is not None:
            ids += [THINK, *message.reasoning.encode(), THINK_END]
        ids += message.text.encode()
        for tool_call in message.tool_calls:
            ids += [CALL, *f"{tool_call.name}\n{tool_call.arguments}".encode()]
        return (*ids, END)

    def _render_new(self, messages: Sequence[Message]) -> TokenIds:
        ids: list[int] = []
        for message in messages:
            if message.images:
                raise RenderError("could not process image: this model reads text only; leave the images out")
            if message.role == "assistant":
                ids += [START, *b"assistant\n", *self.spell(message)]
            else:
                ids += _render_turn(message.role, message.text.encode())
        return (*ids, START, *b"assistant\n")


def _render_turn(role: str, content: bytes) -> list[int]:
    return [START, *role.encode(), 10, *content, END]


def _parse_call(ids: list[int]) -> ToolCall:
    name, _, arguments = _decode(ids).partition("\n")
    try:
        parsed = isinstance(orjson.loads(arguments), dict)
    except orjson.JSONDecodeError:
        parsed = False
    return ToolCall(id="", name=name, arguments=arguments, parse_status="ok" if parsed else "malformed")


def _decode(ids: Sequence[int]) -> str:
    return bytes(token_id for token_id in ids if token_id < 256).decode(errors="replace")
