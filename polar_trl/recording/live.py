"""Tell a reply while it is sampled: only what no later token takes back, and nothing in training.

The engine puts ids into a list; whoever streams looks at it from time to time, and reads all of them with the parser
that reads the whole reply in the end. Told is what the parser gives, without what may still change:

- what could be the beginning of a tag or of a stop text, and all that follows a tag: a tool call is sent whole;
- white space at either end, which parsers trim, and half a character (U+FFFD at the end);
- text that begins as JSON where there are tools: some models call them so.

A parser that changes its mind all the same (text before a `</think>` that nothing has opened) is found out at the end,
by `Told.begins`: the stream then ends with an error after which clients ask again, and get the reply from the record.
"""

import time
from collections.abc import Callable, Sequence

from polar_trl.types import Message, TokenIds
from polar_trl.wire.base import Told

LOOK_COST = 20
"""A look that took a millisecond is followed by twenty without one: a twentieth of a core for each reply."""
_TAGS = ("<tool_call", "<think", "</think", "<function", "<|", "<｜", "<minimax:", "[TOOL_CALLS]")
_HALF = "\ufffd"


class LiveReply:
    """A reply that is being sampled.

    Args:
        parse: Reads sampled ids as the whole reply will be read.
        stops: Texts at which the reply will be cut.
        has_tools: Whether tools were declared.
    """

    def __init__(self, parse: Callable[[TokenIds], Message], *, stops: Sequence[str], has_tools: bool) -> None:
        self.token_ids: list[int] = []
        """Filled by the engine, from any thread."""
        self._parse = parse
        self._stops = tuple(stops)
        self._has_tools = has_tools
        self._told = Told()
        self._num_read = 0
        self._next_look_s = 0.0
        self._is_over = False
        """Nothing more is told before the end."""

    def look(self) -> Told:
        """Return what can be told now; it only grows."""
        ids, started = tuple(self.token_ids), time.monotonic()
        if self._is_over or len(ids) == self._num_read or started < self._next_look_s:
            return self._told
        self._num_read = len(ids)
        try:
            self._tell(self._parse(ids))
        except Exception:  # noqa: BLE001 - half a reply need not be readable; the whole one fails where it is read
            self._is_over = True
        ended = time.monotonic()
        self._next_look_s = ended + LOOK_COST * (ended - started)
        return self._told

    def _tell(self, message: Message) -> None:
        told, reasoning = self._told, message.reasoning or ""
        if message.tool_calls or (told.text and reasoning != told.reasoning):  # no dialect goes back to reasoning
            self._is_over = True
            return
        end, is_last = self._find_end(message.text)
        text = message.text[:end]
        self._is_over = is_last
        if not text:  # the reasoning may go on
            reasoning = reasoning[: self._find_end(reasoning)[0]] if not message.text else told.reasoning
        if reasoning.startswith(told.reasoning) and text.startswith(told.text):
            self._told = Told(reasoning=reasoning, text=text)

    def _find_end(self, text: str) -> tuple[int, bool]:
        """Find how far a text can be told, and whether that is its end: a tag or a stop text follows."""
        if text[:1].isspace() or (self._has_tools and text[:1] in ("{", "[")):
            return 0, False
        marks = (*_TAGS, *self._stops)
        found = [position for mark in marks if (position := text.find(mark)) >= 0]
        end = min([len(text), *found])
        end = min(end - _count_begun(mark, text[:end]) for mark in marks)
        return len(text[:end].rstrip(_HALF).rstrip()), bool(found)


def _count_begun(mark: str, text: str) -> int:
    """Count the characters at the end of a text that `mark` begins with."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)
