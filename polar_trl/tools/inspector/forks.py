"""Explain why a trajectory begins anew: the first token where its prompt differs, and the likely reason.

The difference is exact, found on token ids. The reason is a guess from the messages, shown as "likely".
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from polar_trl.tools.inspector.token_tracks import TokenTrack
from polar_trl.tools.inspector.vocabulary import Vocabulary
from polar_trl.types import Call, Message

BEFORE, AFTER = 48, 96
"""Tokens shown around the first difference."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fork:
    """The place and the likely reason of a new trajectory."""

    call: int
    """The call that begins it."""
    other_track: int
    """The track before it that agrees with it longest."""
    other_call: int
    """That track's last call before this one."""
    num_shared: int
    """Tokens that both begin with."""
    reason: str
    """A short name."""
    explanation: str
    """One or two sentences."""
    message: int | None
    """Index of the first message that differs, where the messages do."""


def find_fork(track: TokenTrack, earlier: Sequence[TokenTrack], calls: Sequence[Call]) -> Fork | None:
    """Find the fork that begins `track`; None where nothing came before."""
    call = calls[track.calls[0]]
    prompt = np.array(call.prompt_ids, dtype=np.int32)
    best: tuple[int, int, int] | None = None
    for number, other in enumerate(earlier):
        before = [index for index in other.calls if index < call.index]
        if not before:
            continue
        end = other.spans[other.calls.index(before[-1])][1]
        shared = count_shared(prompt, other.ids_T[:end])
        if best is None or (shared, before[-1]) > best[:2]:
            best = shared, before[-1], number
    if best is None:
        return None
    num_shared, other_call, other_track = best
    reason, explanation, message = _explain(call, calls, earlier[other_track], other_call, num_shared)
    return Fork(
        call=call.index,
        other_track=other_track,
        other_call=other_call,
        num_shared=num_shared,
        reason=reason,
        explanation=explanation,
        message=message,
    )


def build_excerpts(fork: Fork, track: TokenTrack, other: TokenTrack, vocabulary: Vocabulary) -> dict[str, Any]:
    """Spell both texts around the first difference: {"shared", "this", "other"}, each {"texts", "kinds", "first"}."""
    start = max(0, fork.num_shared - BEFORE)
    end_of_other = other.spans[other.calls.index(fork.other_call)][1]
    parts = {
        "shared": (track, start, fork.num_shared),
        "this": (track, fork.num_shared, min(fork.num_shared + AFTER, track.spans[0][0])),
        "other": (other, fork.num_shared, min(fork.num_shared + AFTER, end_of_other)),
    }
    return {name: _spell(part[0], part[1], part[2], vocabulary) for name, part in parts.items()}


def count_shared(left: Any, right: Any) -> int:
    """Count the elements of the longest common prefix of two arrays."""
    length = min(len(left), len(right))
    differs = left[:length] != right[:length]
    return int(np.argmax(differs)) if differs.any() else length


def _spell(track: TokenTrack, start: int, end: int, vocabulary: Vocabulary) -> dict[str, Any]:
    margin = max(0, start - 8)  # where a character may have begun
    pieces = vocabulary.spell(track.ids_T[margin:end].tolist())
    skip = start - margin
    return {"first": start, "texts": pieces.texts_T[skip:], "kinds": pieces.kinds_T[skip:]}


def _explain(
    call: Call, calls: Sequence[Call], other: TokenTrack, other_call: int, num_shared: int
) -> tuple[str, str, int | None]:
    """Return the reason's name, its sentences, and the first message that differs."""
    ends = {end: index for index, (_, end) in zip(other.calls, other.spans, strict=True) if index < call.index}
    before = calls[other_call]
    if num_shared in ends and num_shared < len(call.prompt_ids):
        parent = ends[num_shared]
        return (
            "branch",
            f"The prompt goes on from call {parent}, but so does another call already: two continuations of one reply "
            "(parallel branches, or a turn that the agent said again with other words). What both begin with is "
            "trained in the other trajectory only.",
            None,
        )
    if num_shared == len(call.prompt_ids):
        return (
            "resampled",
            "The whole prompt is the beginning of an earlier trajectory: the same question was asked again, and both "
            "answers were gone on from.",
            None,
        )
    this = call.request.messages
    theirs = (*before.request.messages, before.message)
    same = next((i for i, (x, y) in enumerate(zip(this, theirs, strict=False)) if not _is_same(x, y)), None)
    same = min(len(this), len(theirs)) if same is None else same
    if call.request.tools != before.request.tools:
        return _explain_tools(call, before, same)
    if same >= len(theirs):
        return _explain_rewriting(calls, other, num_shared)
    return _explain_messages(this, theirs, same, before)


def _explain_tools(call: Call, before: Call, same: int) -> tuple[str, str, int | None]:
    num_now, num_then = len(call.request.tools), len(before.request.tools)
    if same and call.request.messages[0].role in ("system", "developer"):
        return (
            "tools changed",
            f"The agent offers other tools than in call {before.index} ({num_now} instead of {num_then}), and tools "
            "stand at the beginning of the prompt.",
            same,
        )
    return (
        "sub-agent",
        f"Another conversation: its system prompt and its tools ({num_now} instead of {num_then}) are not those of "
        f"call {before.index}. Most likely a sub-agent or a side task of the agent.",
        same,
    )


def _explain_rewriting(calls: Sequence[Call], other: TokenTrack, num_shared: int) -> tuple[str, str, int | None]:
    """Explain a fork whose messages go on: the chat template wrote an earlier turn differently."""
    place = next((i for i, (start, end) in enumerate(other.spans) if num_shared < end), len(other.spans) - 1)
    turn, (start, _) = other.calls[place], other.spans[place]
    if calls[turn].message.reasoning and num_shared >= start - 8:
        return (
            "thinking dropped",
            f"The agent went on with the same messages, but the chat template leaves out the thinking of call {turn} "
            "once a new user turn begins. What the model had sampled is no longer in its prompt.",
            None,
        )
    if num_shared >= start and calls[turn].message.tool_calls:
        what = "arguments of a tool call, or the white space around them,"
    else:
        what = "white space or a separator"
    return (
        "template rewrote a turn",
        f"The agent went on with the same messages, but the prompt could not begin with the tokens of call {turn}: "
        f"the chat template writes {what} in another way than they were sampled.",
        None,
    )


def _explain_messages(
    this: Sequence[Message], theirs: Sequence[Message], same: int, before: Call
) -> tuple[str, str, int | None]:
    first_turn = next((i for i, message in enumerate(this) if message.role not in ("system", "developer")), 0)
    if same == 0 and this and this[0].role in ("system", "developer"):
        return (
            "sub-agent",
            f"Another conversation: its system prompt is not that of call {before.index}. Most likely a sub-agent or "
            "a side task of the agent.",
            0,
        )
    if same <= first_turn:
        return (
            "new conversation",
            f"Another conversation: its first user message is not that of call {before.index}. Most likely a "
            "sub-agent, or the agent summed up its history and began again.",
            same,
        )
    if len(this) < len(theirs):
        return (
            "compaction",
            f"The agent shortened its history: {len(this)} messages instead of {len(theirs)}, the first {same} of "
            "them the same.",
            same,
        )
    return (
        "rewritten history",
        f"The agent sent message {same} ({this[same].role if same < len(this) else 'none'}) in another form than "
        "before: it edited, cut or reordered its own history.",
        same,
    )


def _is_same(left: Message, right: Message) -> bool:
    """Tell whether two messages are equal but for fields that agents do not send back."""
    return _bare(left) == _bare(right)


def _bare(message: Message) -> Message:
    tool_calls = tuple(replace(tool_call, id="", parse_status="ok") for tool_call in message.tool_calls)
    return replace(message, reasoning=None, tool_calls=tool_calls, tool_call_id=None, text=message.text.strip())
