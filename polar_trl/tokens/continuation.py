"""Build prompt ids that begin with the tokens sampled before (token-in-token-out), wherever the messages allow it.

An agent sends the whole conversation with every call. This module recognizes the part that is an earlier call and
its reply, takes over that call's ids as they are, and renders only the messages after it. Sampled text is
never encoded again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from polar_trl.errors import RenderError
from polar_trl.tokens.base import Renderer
from polar_trl.tokens.canonical import extend_hash, hash_conversation, hash_tools
from polar_trl.types import Call, ChatRequest, Message, SharedSequence, TokenIds, Tool, begins_with


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """The prompt of a request for the engine, and the call that it continues."""

    ids: TokenIds
    """[P]"""
    parent: int | None
    """Index of the call whose prompt and sampled ids begin `ids`; None where they were rendered anew."""
    parent_ids: Sequence[int] = ()
    """That call's prompt, which a record need not hold again."""
    forked: bool
    """An earlier call matched by its messages, but its tokens could not be kept: rendered anew."""
    request: ChatRequest
    """The request, with the matched messages as they were recorded: reasoning, ids and arguments as sampled."""

    def rendered_as(self, ids: TokenIds) -> "Prompt":
        """Return the prompt with the ids that a server made of it. Where they do not begin with what was known of
        them, it continues no call."""
        if begins_with(ids, self.ids):
            return replace(self, ids=ids)
        return replace(self, ids=ids, parent=None, parent_ids=())


class Continuations:
    """The calls of one session so far, found by a hash of their messages and reply (see `canonical`).

    With recorded calls a = (s, u) -> r and b = (s, u, r, t) -> q, the request (s, u, r, t, q, v) continues b: its
    prompt is b's prompt, b's sampled ids, then v. The request (s, u, r, w) continues a. The request (s, u, r, t, x, v)
    with an x that was never sampled matches a, whose reply is followed by more than new messages: rendered anew, and
    counted as forked. Of calls with equal messages and equal replies the latest is continued.

    Malformed tool arguments are a case of their own: dialects that carry arguments as objects cannot send them, so no
    agent repeats them. A reply with such a call is recognised by its text and the names of its calls.
    """

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._calls: dict[bytes, Call] = {}
        """Hash of a call's messages and reply -> the call."""
        self._hashes: dict[int, bytes] = {}
        """Index of a call -> that hash."""
        self._walked: list[tuple[bytes, Message, bytes]] = []
        """The messages of the last request, each between the hashes before and after it. A dialect gives a history
        that was read before as the same objects, whose hashes are then known."""
        self._latest: tuple[Call, TokenIds] | None = None
        """The latest call, which the next one most often continues, and its prompt as the engine had it."""
        self._malformed: dict[bytes, bytes] = {}
        """For replies with malformed arguments: the hash without any arguments -> the hash with them."""

    def add(self, call: Call, prompt_ids: TokenIds | None = None) -> None:
        """Make a finished call known. One that sampled nothing (a budget message) is never continued.

        Args:
            call: The call.
            prompt_ids: Its prompt as the engine had it, where that is at hand: it is kept until the next call.
        """
        if not call.is_answered:
            return
        self._latest = None if prompt_ids is None else (call, prompt_ids)
        before = self._hash_request(call)
        key = extend_hash(before, call.message)
        self._calls[key] = call
        self._hashes[call.index] = key
        if any(tool_call.parse_status == "malformed" for tool_call in call.message.tool_calls):
            self._malformed[extend_hash(before, call.message, with_arguments=False)] = key
        *others, last = call.request.messages
        if last.role == "assistant" and not last.tool_calls:
            # formats with one message for a turn send back what was continued and the reply as one
            start = hash_conversation(others, call.request.tools)
            for between in ("", "\n\n"):
                whole = replace(call.message, text=f"{last.text}{between}{call.message.text}")
                self._calls[extend_hash(start, whole)] = call

    def build_prompt(self, request: ChatRequest) -> Prompt:
        """Build the prompt ids of a request; tokenizes only the messages that no recorded call covers.

        A conversation that ends with the assistant's words ends within its turn: the model goes on from them.

        Raises `RenderError` if the chat template cannot express the conversation.
        """
        last = request.messages[-1]
        if last.role != "assistant" or last.tool_calls or len(request.messages) == 1:
            return self._build_prompt(request)
        call, num_matched = self._find_parent(request)
        if call is not None and num_matched == len(request.messages):
            return self._go_on_from(call, request)
        prompt = self._build_prompt(replace(request, messages=tuple(request.messages[:-1])))
        messages = SharedSequence((last,), SharedSequence.of(prompt.request.messages))
        ids = self._renderer.continue_reply(prompt.ids, last)
        return replace(prompt, ids=ids, request=replace(prompt.request, messages=messages))

    def _go_on_from(self, call: Call, request: ChatRequest) -> Prompt:
        """Build the prompt of a reply that is sent back to be continued: as it was sampled, up to its end of turn."""
        sampled = call.completion.token_ids
        is_ended = sampled[-1:] != () and sampled[-1] in self._renderer.stop_token_ids
        messages = SharedSequence((call.message,), SharedSequence.of(call.request.messages))
        return Prompt(
            ids=tuple(call.prompt_ids) + (sampled[:-1] if is_ended else sampled),
            parent=None if is_ended else call.index,
            parent_ids=() if is_ended else call.prompt_ids,
            forked=is_ended,
            request=replace(request, messages=messages),
        )

    def _build_prompt(self, request: ChatRequest) -> Prompt:
        parent, num_matched = self._find_parent(request)
        if parent is None:
            ids = self._renderer.render(request.messages, request.tools)
            return Prompt(ids=ids, parent=None, forked=False, request=request)

        reply = request.messages[num_matched - 1]
        new_messages = _restore_call_ids(request.messages[num_matched:], reply, parent.message)
        before = SharedSequence.of(parent.request.messages)
        request = replace(request, messages=SharedSequence((parent.message, *new_messages), before))
        if new_messages and all(message.role != "assistant" for message in new_messages):
            extended = self._extend(parent, new_messages, request.tools)
            if extended is not None:
                return Prompt(
                    ids=extended, parent=parent.index, parent_ids=parent.prompt_ids, forked=False, request=request
                )
        ids = self._renderer.render(request.messages, request.tools)
        return Prompt(ids=ids, parent=None, forked=True, request=request)

    def _extend(self, parent: Call, new_messages: Sequence[Message], tools: Sequence[Tool]) -> TokenIds | None:
        """Extend a call's ids by new messages, and make sure that they are in the result as they were."""
        latest, known = self._latest or (None, ())
        prompt = known if latest is parent else tuple(parent.prompt_ids)
        sampled = parent.completion.token_ids
        ids = self._renderer.extend(prompt, sampled, new_messages, tools)
        end = len(prompt) + len(sampled)
        if ids is not None and (ids[: len(prompt)] != prompt or ids[len(prompt) : end] != sampled):
            raise RenderError(
                f"the renderer changed tokens of call {parent.index} while it continued it "
                f"({len(prompt)} prompt and {len(sampled)} sampled ones)"
            )
        return ids

    def _hash_request(self, call: Call) -> bytes:
        if call.parent is None:
            return hash_conversation(call.request.messages, call.request.tools)
        key = self._hashes[call.parent]
        parent = self._calls[key]
        for message in call.request.messages[len(parent.request.messages) + 1 :]:
            key = extend_hash(key, message)
        return key

    def _find_parent(self, request: ChatRequest) -> tuple[Call | None, int]:
        parent, num_matched = None, 0
        if not self._calls:
            return parent, num_matched
        key = hash_tools(request.tools)
        known, self._walked = self._walked, []
        for position, message in enumerate(request.messages, start=1):
            before = key
            if position <= len(known) and known[position - 1][0] == before and known[position - 1][1] is message:
                key = known[position - 1][2]
            else:
                key = extend_hash(before, message)
            self._walked.append((before, message, key))
            if self._malformed and message.tool_calls and key not in self._calls:
                loose = extend_hash(before, message, with_arguments=False)
                key = self._malformed.get(loose, key)
            call = self._calls.get(key)
            if call is not None:
                parent, num_matched = call, position
        return parent, num_matched


def _restore_call_ids(
    messages: Sequence[Message], echoed_reply: Message, recorded_reply: Message
) -> tuple[Message, ...]:
    """Point tool results that answer ids which the agent invented back at the recorded ids."""
    recorded = {
        echoed.id: ours.id
        for echoed, ours in zip(echoed_reply.tool_calls, recorded_reply.tool_calls, strict=True)
        if echoed.id != ours.id
    }
    if not recorded:
        return tuple(messages)
    return tuple(
        replace(message, tool_call_id=recorded[message.tool_call_id])
        if message.role == "tool" and message.tool_call_id in recorded
        else message
        for message in messages
    )
