"""Find the chat template's text for each assistant turn of a conversation, by writing it twice.

The second time, each assistant message is replaced by marks that occur nowhere else; what stands between the marks of
two turns is the template's own and the other messages', and is looked up in the first text. A turn that is not found
this way is None.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from polar_trl.tokens.chat_template import ChatTemplate
from polar_trl.types import Message, Tool

_MARK = "zqmark{kind}{turn}x{part}q"
_MARKED = re.compile(r"zqmark[a-z]+(\d+)x\d+q")
_OPENING = re.compile(r"<think>.*", re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """A prompt as the chat template writes it."""

    text: str
    turns: tuple[str | None, ...]
    """For each assistant message, from the opening of its turn to the token that ends it; None where not found."""
    contexts: tuple[str, ...]
    """The text before each turn, and after the last one; empty if a turn was not found."""
    opening: str
    """How the next reply is opened."""


class TurnWriter:
    """Writes conversations and finds the turns.

    Args:
        template: The chat template.
        tokenizer: Its `transformers` tokenizer.
    """

    def __init__(self, template: ChatTemplate, tokenizer: Any) -> None:
        self._template = template
        added = tokenizer.added_tokens_decoder.items()
        self.special_ids = frozenset(token_id for token_id, token in added if token.special)
        """Tokens of markup, which no text holds."""
        specials = sorted({token.content for _, token in added if token.special}, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, specials)) or r"(?!)")
        self.header = self._find_header()
        """What opens every assistant turn, without the opening of reasoning; "" where the template opens none."""

    def write(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Written:
        """Write the prompt of these messages. Raises `RenderError` if the template does."""
        text = self._template.write(messages, tools)
        opening = text[text.rfind(self.header) :] if self.header and self.header in text else ""
        numbers = {position: number for number, position in enumerate(_find_replies(messages))}
        marked = self._template.write(
            [mark_message(message, numbers[i]) if i in numbers else message for i, message in enumerate(messages)],
            tools,
        )
        turns, contexts = self._locate(text, marked, len(numbers))
        return Written(text=text, turns=turns, contexts=contexts, opening=opening)

    def write_reply(self, messages: Sequence[Message], reply: Message, tools: Sequence[Tool]) -> str:
        """Write the last message's turn, from its opening on, its end included."""
        text = self._template.write([*messages, reply], tools, opens_reply=False)
        first, _ = _find_marks(text)
        return text[self._find_start(text, first, 0) :]

    def cut_at_end(self, turn: str) -> tuple[str, str]:
        """Split a turn at the special token that ends it; also return that token, "" where none does."""
        end = self._special.search(turn, _find_marks(turn)[1])
        return (turn, "") if end is None else (turn[: end.start()], end[0])

    def find_end(self, messages: Sequence[Message], reply: Message, following: Sequence[Message], tools: Any) -> str:
        """Find the special token after a turn, once other messages follow; "" where there is none."""
        text = self._template.write([*messages, reply, *following], tools)
        end = self._special.search(text, _find_marks(text)[1])
        return "" if end is None else end[0]

    def _find_header(self) -> str:
        user = Message(role="user", text="probe question")
        closed, opened = self._template.write([user], opens_reply=False), self._template.write([user])
        earlier = self._template.write([user, Message(role="assistant", text=_mark("text", 0)), user])
        start = count_common(closed, opened)
        if start < len(closed):
            # a template that closes what is not opened: the opening begins with a token of its own
            start = next((m.start() for m in self._special.finditer(opened) if m.end() > start), len(opened))
        # what an earlier turn does not open with, such as the start of reasoning, is no part of it
        return _OPENING.sub("", opened[start:][: count_common(opened[start:], earlier[start:])])

    def _find_start(self, text: str, first: int, position: int) -> int:
        """Find the begin of the turn whose first mark is at `first`, not before `position`."""
        if self.header:
            found = text.rfind(self.header, position, first)
            return found if found >= 0 else first
        # nothing opens a turn: it begins where the token before it ends
        return max((match.end() for match in self._special.finditer(text, position, first)), default=first)

    def _locate(self, text: str, marked: str, num_turns: int) -> tuple[tuple[str | None, ...], tuple[str, ...]]:
        """Find the turns' own text and the contexts between them, in `text`."""
        spans = _find_turn_marks(marked, num_turns)
        starts: list[int] = []  # in `marked`, of each turn
        ends: list[tuple[int, str]] = []  # where the token after it ends, and that token
        for first, last in spans:
            if first < 0:
                return (None,) * num_turns, ()
            after = self._special.search(marked, last)
            starts.append(self._find_start(marked, first, ends[-1][0] if ends else 0))
            ends.append((last, "") if after is None else (after.end(), after[0]))
        turns: list[str | None] = []
        contexts: list[str] = []
        position = 0  # in `text`, where the turn before ends
        for turn in range(num_turns + 1):
            end, end_token = ends[turn - 1] if turn else (0, "")
            context = marked[end : starts[turn]] if turn < num_turns else marked[end:]
            sought = end_token + context + (self.header if turn < num_turns else "")
            found = text.find(sought, position)
            if found < 0 or (turn == 0 and found > 0):
                return (*turns, *((None,) * (num_turns - len(turns)))), ()
            if turn:
                turns.append(text[position : found + len(end_token)])
            contexts.append(context)
            position = found + len(end_token) + len(context)
        return tuple(turns), tuple(contexts)


def mark_message(message: Message, turn: int) -> Message:
    """Replace a turn's reasoning, text and arguments by marks. All turns get a text, so that none is lost."""
    return replace(
        message,
        text=_mark("text", turn),
        reasoning=_mark("reasoning", turn) if message.reasoning else None,
        tool_calls=tuple(
            replace(call, arguments=json.dumps({"key": _mark("argument", turn, part)}), parse_status="ok")
            for part, call in enumerate(message.tool_calls)
        ),
    )


def count_common(one: str, other: str) -> int:
    """Count the characters of the common prefix of two texts."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(one), len(other)))


def _mark(kind: str, turn: int, part: int = 0) -> str:
    return _MARK.format(kind=kind, turn=turn, part=part)


def _find_marks(text: str) -> tuple[int, int]:
    """Find where the marks of a text begin and end; (-1, -1) where there are none."""
    found = [match.span() for match in _MARKED.finditer(text)]
    return (found[0][0], found[-1][1]) if found else (-1, -1)


def _find_turn_marks(text: str, num_turns: int) -> list[tuple[int, int]]:
    """Find where the marks of each turn begin and end; (-1, -1) where there are none."""
    spans = [(-1, -1)] * num_turns
    for match in _MARKED.finditer(text):
        turn = int(match[1])
        spans[turn] = (match.start() if spans[turn][0] < 0 else spans[turn][0], match.end())
    return spans


def _find_replies(messages: Sequence[Message]) -> list[int]:
    return [position for position, message in enumerate(messages) if message.role == "assistant"]
