"""Diff a sampled turn against the chat template's text for it: the kinds of difference, and the tokens side by side.

Equal means the same token ids.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import Any, Literal

from polar_trl.types import Call, TokenIds

Kind = Literal["reasoning", "arguments", "whitespace", "special tokens", "tokens", "other", "not found", "refused"]
"""Kinds of change: reasoning or its marks; tool arguments written anew; only whitespace; tokens of markup; the same
text in other tokens; anything else; unknown, since the turn was not found; or the template raised on the
conversation."""

_NUM_BEFORE = 3
"""Equal tokens shown before a difference; one is shown after it."""
_NUM_ROWS = 24
_MAX_MATRIX = 4_000_000
"""Cells of a comparison beyond which the middle of two turns is taken as one difference."""
_Opcode = tuple[str, int, int, int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenPair:
    """One line of a comparison. None on a side that has nothing there."""

    sampled: tuple[int, str] | None
    written: tuple[int, str] | None
    num_skipped: int = 0
    """Equal tokens before this line that are left out."""

    @property
    def is_equal(self) -> bool:
        return self.sampled is not None and self.written is not None and self.sampled[0] == self.written[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rewrite:
    """One way in which the template writes a turn that differs from what was sampled."""

    kinds: tuple[Kind, ...]
    call: int
    """Index of the first call whose prompt would have it."""
    since: str
    """When it begins, in words."""
    drops_reasoning: bool = False
    """The text of the reasoning is gone, not only its marks."""
    detail: str = ""
    """The template's error where it raised."""
    pairs: tuple[TokenPair, ...] = ()
    """The tokens of the differences and around them, from the first on."""
    num_more: int = 0
    """Lines that differ and come after those."""


def compare(
    tokenizer: Any, turn: Call, opening: str, written: str, *, special_ids: frozenset[int], call: int, since: str
) -> Rewrite | None:
    """Compare a sampled turn with the template's text for it, as token ids; None where they are equal.

    Args:
        tokenizer: The model's.
        turn: The call that sampled it.
        opening: How the template opens the reply in that call's prompt.
        written: The turn's text, opening and end included.
        special_ids: Tokens of markup.
        call, since: See `Rewrite`.
    """
    sampled_ids = (*_opening_ids(tokenizer, tuple(turn.prompt_ids), opening), *turn.completion.token_ids)
    written_ids = tuple(tokenizer.encode(written, add_special_tokens=False))
    if sampled_ids[-1] not in special_ids and written_ids and written_ids[-1] in special_ids:
        written_ids = written_ids[:-1]  # the end of a turn that was cut off is no rewriting
    if sampled_ids == written_ids:
        return None
    opcodes = _find_opcodes(sampled_ids, written_ids)
    kinds, drops = _find_kinds(tokenizer, turn, sampled_ids, written_ids, opcodes, special_ids)
    pairs, num_more = _choose(_align(tokenizer, sampled_ids, written_ids, opcodes))
    return Rewrite(kinds=kinds, call=call, since=since, drops_reasoning=drops, pairs=pairs, num_more=num_more)


def _opening_ids(tokenizer: Any, prompt_ids: TokenIds, opening: str) -> TokenIds:
    """Return the end of the prompt that opens the reply, as the engine was given it where that can be told."""
    ids = tuple(tokenizer.encode(opening, add_special_tokens=False)) if opening else ()
    return prompt_ids[len(prompt_ids) - len(ids) :] if prompt_ids[-len(ids) :] == ids and ids else ids


def _find_opcodes(ours: TokenIds, theirs: TokenIds) -> list[_Opcode]:
    start = next((i for i, (x, y) in enumerate(zip(ours, theirs, strict=False)) if x != y), None)
    start = min(len(ours), len(theirs)) if start is None else start
    end = 0
    while end < min(len(ours), len(theirs)) - start and ours[-1 - end] == theirs[-1 - end]:
        end += 1
    ours_middle, theirs_middle = ours[start : len(ours) - end], theirs[start : len(theirs) - end]
    if len(ours_middle) * len(theirs_middle) > _MAX_MATRIX:
        middle: Sequence[_Opcode] = [("replace", 0, len(ours_middle), 0, len(theirs_middle))]
    else:
        middle = SequenceMatcher(None, ours_middle, theirs_middle, autojunk=False).get_opcodes()
    opcodes = [(tag, a + start, b + start, c + start, d + start) for tag, a, b, c, d in middle]
    tail = ("equal", len(ours) - end, len(ours), len(theirs) - end, len(theirs))
    return [("equal", 0, start, 0, start), *opcodes, tail]


def _align(tokenizer: Any, ours: TokenIds, theirs: TokenIds, opcodes: Sequence[_Opcode]) -> list[TokenPair]:
    def show(token_id: int) -> tuple[int, str]:
        return token_id, tokenizer.decode([token_id], skip_special_tokens=False)

    pairs = []
    for tag, a, b, c, d in opcodes:
        if tag == "equal":
            pairs += [TokenPair(sampled=show(x), written=show(x)) for x in ours[a:b]]
        else:
            # never side by side: what differs is read as a block of one side, then of the other
            pairs += [TokenPair(sampled=show(x), written=None) for x in ours[a:b]]
            pairs += [TokenPair(sampled=None, written=show(x)) for x in theirs[c:d]]
    return pairs


def _choose(pairs: Sequence[TokenPair]) -> tuple[tuple[TokenPair, ...], int]:
    """Choose the lines to show, and count those that differ and are left out after them."""
    differing = [i for i, pair in enumerate(pairs) if not pair.is_equal]
    wanted = {j for i in differing for j in range(i - _NUM_BEFORE, i + 2) if 0 <= j < len(pairs)}
    shown: list[TokenPair] = []
    previous = min(wanted) - 1
    for position in sorted(wanted)[:_NUM_ROWS]:
        shown.append(replace(pairs[position], num_skipped=position - previous - 1))
        previous = position
    return tuple(shown), sum(i > previous for i in differing)


def _find_kinds(
    tokenizer: Any,
    call: Call,
    ours: TokenIds,
    theirs: TokenIds,
    opcodes: Sequence[_Opcode],
    special_ids: frozenset[int],
) -> tuple[tuple[Kind, ...], bool]:
    def decode(ids: TokenIds) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=False))

    sampled, written = decode(ours), decode(theirs)
    if sampled == written:
        return ("tokens",), False
    reasoning_end, arguments = _find_spans(call, sampled)
    kinds: dict[Kind, None] = {}
    for tag, a, b, c, d in opcodes:
        if tag == "equal":
            continue
        start, end = len(decode(ours[:a])), len(decode(ours[:b]))
        gone, new = sampled[start:end], decode(theirs[c:d])
        special = not special_ids.isdisjoint((*ours[a:b], *theirs[c:d]))
        kinds |= dict.fromkeys(_name_change(gone, new, start, reasoning_end, arguments, special=special))
    reasoning = call.message.reasoning
    drops = reasoning is not None and reasoning not in written
    return tuple(kinds), drops


def _name_change(
    gone: str, new: str, start: int, reasoning_end: int, arguments: Sequence[tuple[int, int]], *, special: bool
) -> list[Kind]:
    """Name one difference: the text that is `gone`, from character `start` of the sampled turn, and the `new` one."""
    if gone == new:
        return ["tokens"]
    in_reasoning = gone[: max(0, reasoning_end - start)]
    kinds: list[Kind] = ["reasoning"] if in_reasoning or "think>" in new else []
    rest, start = gone[len(in_reasoning) :], start + len(in_reasoning)
    if kinds and not rest.strip():
        return [*kinds, "whitespace"] if rest and rest != new else kinds
    if _overlaps(start, start + len(rest), arguments):
        return [*kinds, "arguments"]
    if "".join(rest.split()) == "".join(new.split()):
        return [*kinds, "whitespace"]
    if special:
        return [*kinds, "special tokens"]
    return kinds or ["other"]


def _overlaps(start: int, end: int, spans: Sequence[tuple[int, int]]) -> bool:
    """Tell whether [start, end) shares a character with a span; an insertion does at the edges, too."""
    if start == end:
        return any(first <= start <= last for first, last in spans)
    return any(start < last and first < end for first, last in spans)


def _find_spans(call: Call, text: str) -> tuple[int, list[tuple[int, int]]]:
    """Find the end of reasoning in a turn's text (0: it has none), and the span of each call's arguments."""
    end = 0
    if call.message.reasoning and call.message.reasoning in text:
        end = text.find(call.message.reasoning) + len(call.message.reasoning)
    closing = re.compile(r"\s*</think>\n{0,2}").match(text, end) if end else re.search(r"</think>\n{0,2}", text)
    end = closing.end() if closing else end
    arguments: list[tuple[int, int]] = []
    position = end
    for tool_call in call.message.tool_calls:
        start = text.find(tool_call.arguments, position) if tool_call.arguments else -1
        if start >= 0:
            position = start + len(tool_call.arguments)
        else:
            # no JSON stands there: from the tool's name to the end of the call
            start = max(position, text.find(tool_call.name, position) + len(tool_call.name))
            closing_tag = text.find("</tool_call>", start)
            position = closing_tag if closing_tag >= 0 else len(text)
        arguments.append((start, position))
    return end, arguments
