"""Keep what a conversation says from being encoded as a chat format's own markup.

A tool's output may hold "<|im_end|>" or "</tool_response>". A chat template writes it into the same text as its own
marks, and the tokenizer makes the same tokens of both: whoever writes the output could end the turn and begin another.
A seam inside such words, set before the template writes and cut at before the text is encoded, keeps them words.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from polar_trl.types import Message, Tool

SEAM = "\ufdd0\ufdd1"
"""Two of Unicode's noncharacters, which no text holds; a text that does loses them."""
_NOTHING = re.compile(r"(?!)")


class PlainText:
    """Sets seams; whoever encodes cuts at them (`encoding`).

    Special tokens are words in every message. Other added tokens (<tool_call> and <think> of Qwen) are words in tools'
    results, where the chat template has them as its own marks; in other messages templates themselves look for them.

    Args:
        tokenizer: A `transformers` tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        added = tokenizer.added_tokens_decoder.values()
        special = {token.content for token in added if token.special}
        marks = {token.content for token in added if token.content in str(tokenizer.chat_template or "")}
        self._special, self._markup = _compile(special), _compile(special | marks)

    def set_seams(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages with a seam in each word that would be encoded as markup."""
        return [self._sew(message, self._markup if message.role == "tool" else self._special) for message in messages]

    def set_seams_in_tools(self, tools: Sequence[Tool]) -> Sequence[Tool]:
        """Return the tools, likewise."""
        texts = json.dumps(
            [[tool.name, tool.description, dict(tool.parameters)] for tool in tools], ensure_ascii=False
        )
        if self._special.search(texts) is None:
            return tools
        sewn = json.loads(_sew_text(texts, self._special))
        return [
            replace(tool, name=name, description=description, parameters=parameters)
            for tool, (name, description, parameters) in zip(tools, sewn, strict=True)
        ]

    def _sew(self, message: Message, pattern: re.Pattern[str]) -> Message:
        spoken = [message.text, message.reasoning or "", *(f"{c.name}{c.arguments}" for c in message.tool_calls)]
        if not any(map(pattern.search, spoken)):
            return message
        calls = [
            replace(call, name=_sew_text(call.name, pattern), arguments=_sew_text(call.arguments, pattern))
            for call in message.tool_calls
        ]
        reasoning = None if message.reasoning is None else _sew_text(message.reasoning, pattern)
        text = _sew_text(message.text, pattern)
        return replace(message, text=text, reasoning=reasoning, tool_calls=tuple(calls))


def _compile(words: Iterable[str]) -> re.Pattern[str]:
    """Compile a pattern of the first characters of these words, where they begin: one word may begin in another."""
    longer = sorted(re.escape(word) for word in words if len(word) > 1)
    return re.compile(f"(?={'|'.join(longer)})(.)", re.DOTALL) if longer else _NOTHING


def _sew_text(text: str, pattern: re.Pattern[str]) -> str:
    return pattern.sub(rf"\1{SEAM}", text)
