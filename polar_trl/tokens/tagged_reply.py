"""Split a reply into reasoning in <think> tags, text, and calls in <tool_call> tags.

Both renderers read replies with this, so that a checkpoint's replies are one thing whichever of them serves it.
Tags count where the format has them: a </think> inside a call's string closes nothing.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from polar_trl.tokens.base import DROPPED_TEXT, ParsedReply
from polar_trl.tokens.tool_calls import OPENING, ParsedCall, build_tool_calls, find_call_end, split_tagged_calls
from polar_trl.types import Message, TokenIds, Tool

IN_THINKING = "tool_calls_in_thinking"
"""Calls that stand in closed reasoning: drafts, which nobody makes."""
ENDED_THINKING = "tool_calls_ended_thinking"
"""Replies whose reasoning was never closed and holds calls: it ends at the first, and they are made."""
_THINKING_END = re.compile(rf"</think>|{OPENING.pattern}")


@dataclass(frozen=True, kw_only=True, slots=True)
class TaggedReply:
    """The parts of a reply's text."""

    text: str
    reasoning: str | None
    calls: Sequence[ParsedCall]
    losses: Mapping[str, int] = field(default_factory=dict)


def split_reply(text: str, *, has_thinking: bool, is_open: bool, tools: Sequence[Tool]) -> TaggedReply:
    """Split a reply.

    Args:
        text: What was sampled, without the token that ended the turn.
        has_thinking: Whether the format knows reasoning; else <think> is text.
        is_open: Whether the prompt has opened it already.
        tools: Those that were declared, for the types of their parameters.
    """
    reasoning, losses = None, Counter[str]()
    start = text.lstrip()
    if has_thinking and (is_open or start.startswith("<think>")):
        reasoning, text = _split_reasoning(start.removeprefix("<think>"), losses)
    text, calls = split_tagged_calls(text, tools)
    return TaggedReply(text=text, reasoning=reasoning, calls=calls, losses=losses)


def _split_reasoning(text: str, losses: Counter[str]) -> tuple[str | None, str]:
    """Split off reasoning at its end, or else at the first call in it; without either, all is reasoning."""
    first_call, num_calls, position = None, 0, 0
    while (found := _THINKING_END.search(text, position)) is not None:
        if found[0] == "</think>":
            losses.update({IN_THINKING: num_calls} if num_calls else {})
            return text[: found.start()].strip() or None, text[found.end() :].lstrip("\n")
        first_call = found.start() if first_call is None else first_call
        num_calls += 1
        position = find_call_end(text, found.end()) or found.end()
    if first_call is None:
        return text.strip() or None, ""
    losses[ENDED_THINKING] += 1
    return text[:first_call].strip() or None, text[first_call:]


def build_reply(
    reply: TaggedReply, prompt_ids: TokenIds, completion_ids: TokenIds, stop_token_ids: Sequence[int]
) -> ParsedReply:
    """Build the message of a reply that was split."""
    calls = build_tool_calls(reply.calls, prompt_ids, completion_ids)
    message = Message(role="assistant", text=reply.text, reasoning=reply.reasoning, tool_calls=tuple(calls))
    is_cut = find_turn_length(completion_ids, stop_token_ids) + 1 < len(completion_ids)
    return ParsedReply(message=message, losses={**reply.losses, **({DROPPED_TEXT: 1} if is_cut else {})})


def write_reply_start(reply: Message, *, has_thinking: bool, is_open: bool) -> str:
    """Write a reply that is to be continued, behind a prompt that has opened reasoning already or has not."""
    if not (reply.text or reply.reasoning):
        return ""
    if is_open:
        return f"{reply.reasoning or ''}\n</think>\n\n{reply.text}"
    return f"<think>\n{reply.reasoning}\n</think>\n\n{reply.text}" if has_thinking and reply.reasoning else reply.text


def find_turn_length(completion_ids: TokenIds, stop_token_ids: Sequence[int]) -> int:
    """Count the tokens before the first that ends the turn."""
    ends = (index for index, token_id in enumerate(completion_ids) if token_id in stop_token_ids)
    return next(ends, len(completion_ids))
