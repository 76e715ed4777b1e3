"""Prove that a chat template lets conversations be continued token by token, or say why not.

The law, on probe conversations of several shapes: what the template writes for (head, reply, tail) is what it writes
for the head with the reply opened, then the reply, then the end-of-turn token, then a text that depends on the tail
alone. Nothing is concluded from a template's source: only its output counts.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from polar_trl.errors import RenderError
from polar_trl.tokens.chat_template import ChatTemplate, ChatTokenizer
from polar_trl.types import Message, Tool, ToolCall

_MARK = "[reply of the probe]"
_THINKING = re.compile(r"<think>.*?(?:</think>\n{0,2}|\Z)", re.DOTALL)
_USER = Message(role="user", text="What is in the file?")


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnEnd:
    """The token that ends an assistant turn."""

    id: int
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Continuation:
    """The treatment of a reply by a chat template once more messages follow it."""

    refusal: str | None = None
    """Why no reply can be continued; None if replies can."""
    trims_replies: bool = False
    """It removes leading and trailing whitespace of replies."""
    drops_thinking: bool = False
    """It removes reasoning, or the opening of reasoning that it put into the prompt itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Probe:
    name: str
    head: tuple[Message, ...]
    reply: Message
    tail: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()


def find_turn_end(template: ChatTemplate, tokenizer: ChatTokenizer) -> TurnEnd | None:
    """Find the token that the template writes straight after a reply; None if it writes none of its own."""
    text = template.write([_USER, Message(role="assistant", text=_MARK)], opens_reply=False)
    _, found, close = text.rpartition(_MARK)
    ids = tokenizer.encode(close, add_special_tokens=False)
    if not found or not ids:
        return None
    token = tokenizer.convert_ids_to_tokens(ids[0])
    # only a special token splits the text for the tokenizer, so that what follows encodes the same on its own
    is_special = tokenizer.decode(ids[:1], skip_special_tokens=True) == ""
    return TurnEnd(id=ids[0], text=token) if token and is_special and close.startswith(token) else None


def write_tail(template: ChatTemplate, turn_end: TurnEnd, tail: Sequence[Message]) -> str:
    """Write these messages as the template does after an assistant turn's end, up to the next reply.

    Written after a stand-in conversation of one question and one reply, whose length does not grow with the session.
    """
    num_results = next((i for i, message in enumerate(tail) if message.role != "tool"), len(tail))
    if template.has_tools and num_results:
        calls = tuple(
            ToolCall(id=result.tool_call_id or f"call{i:05d}", name="probe", arguments=f'{{"key": "{_MARK}"}}')
            for i, result in enumerate(tail[:num_results])
        )
        reply = Message(role="assistant", tool_calls=calls)
    else:
        reply = Message(role="assistant", text=_MARK)
    text = template.write([_USER, reply, *tail])
    _, found_reply, text = text.partition(_MARK)
    if not found_reply:
        raise RenderError("the template rewrites earlier replies")
    _, found_end, rest = text.partition(turn_end.text)
    if not found_end:
        raise RenderError("the template does not end the turn before the new messages")
    return rest


def prove_continuation(template: ChatTemplate, turn_end: TurnEnd | None) -> Continuation:
    """Check the law on every probe."""
    if turn_end is None:
        return Continuation(refusal="the template does not write a reply as it is, with a special token after it")
    result = Continuation()
    for probe in _build_probes(template):
        try:
            found = _check(template, turn_end, probe)
        except RenderError as error:
            found = Continuation(refusal=str(error))
        if found.refusal is not None:
            return Continuation(refusal=f"{found.refusal} (found with the probe: {probe.name})")
        result = Continuation(
            trims_replies=result.trims_replies or found.trims_replies,
            drops_thinking=result.drops_thinking or found.drops_thinking,
        )
    return result


def _check(template: ChatTemplate, turn_end: TurnEnd, probe: _Probe) -> Continuation:
    opened = template.write(probe.head, probe.tools)
    whole = template.write([*probe.head, probe.reply, *probe.tail], probe.tools)
    end = turn_end.text + write_tail(template, turn_end, probe.tail)
    if not whole.endswith(end):
        return Continuation(refusal="what the template writes after a reply depends on more than the new messages")
    if not _without_thinking(whole).startswith(_without_thinking(opened)):
        return Continuation(refusal="the template rewrites what came before a reply, or does not open the reply")
    if probe.reply.tool_calls:
        return Continuation(drops_thinking=not whole.startswith(opened))
    reasoning = _write_reasoning(opened, probe.reply.reasoning)
    reply = probe.reply.text
    for text in (reply, reply.lstrip(), reply.rstrip(), reply.strip()):
        trims_replies = text != reply
        continued = opened + reasoning + text + end
        if whole == continued:
            return Continuation(trims_replies=trims_replies)
        if _without_thinking(whole) == _without_thinking(continued):
            return Continuation(trims_replies=trims_replies, drops_thinking=True)
    return Continuation(refusal=f"the template rewrites the reply {reply!r}")


def _write_reasoning(opened: str, reasoning: str | None) -> str:
    """Write reasoning as a model does after this prompt, which may have opened it already."""
    if opened.rstrip().endswith("<think>"):
        return f"{reasoning or ''}\n</think>\n\n"
    return f"<think>\n{reasoning}\n</think>\n\n" if reasoning else ""


def _without_thinking(text: str) -> str:
    return _THINKING.sub("", text)


def _build_probes(template: ChatTemplate) -> list[_Probe]:
    system = Message(role="system", text="Answer in one line.")
    followup = Message(role="user", text="And now?")
    earlier = (_USER, Message(role="assistant", text="A list of names."), Message(role="user", text="How many?"))
    texts = {
        "a plain reply": "Three.",
        "an empty line inside": "One.\n\nTwo.",
        "letters outside ASCII": "naïve – 日本語 🙂",
        "a reply that looks like markup": "<b>bold</b> {{ braces }}",
        "spaces around a reply": "  Three. ",
        "line breaks around a reply": "\n\nThree.\n",
    }
    probes = [
        _Probe(name=name, head=(_USER,), reply=Message(role="assistant", text=text), tail=(followup,))
        for name, text in texts.items()
    ]
    plain = Message(role="assistant", text="Three.")
    conversations: list[tuple[str, tuple[Message, ...], tuple[Message, ...]]] = [
        ("a system message", (system, _USER), (followup,)),
        ("several turns", earlier, (followup,)),
        ("several turns under a system message", (system, *earlier), (followup,)),
        ("an instruction between turns", (system, _USER), (replace(system, text="Be brief."), followup)),
        ("two user messages in a row", (_USER,), (followup, _USER)),
        ("whitespace around a question", (_USER,), (replace(followup, text="\n And now?\n"),)),
    ]
    probes += [_Probe(name=name, head=head, reply=plain, tail=tail) for name, head, tail in conversations]
    return probes + _build_tool_probes() + _build_thinking_probes(template)


def _build_tool_probes() -> list[_Probe]:
    tools = tuple(
        Tool(name=name, description="Runs it.", parameters={"type": "object", "properties": {"x": {"type": "string"}}})
        for name in ("first_tool", "second_tool")
    )
    calls = tuple(ToolCall(id=f"probe000{i}", name=tool.name, arguments='{"x": "y"}') for i, tool in enumerate(tools))
    results = tuple(Message(role="tool", text=f"result {call.name}", tool_call_id=call.id) for call in calls)
    one = Message(role="assistant", tool_calls=calls[:1])
    both = Message(role="assistant", text="Both.", tool_calls=calls)
    plain = Message(role="assistant", text="Three.")
    followup = Message(role="user", text="And now?")
    return [
        _Probe(name="a tool result", head=(_USER,), reply=one, tail=results[:1], tools=tools),
        _Probe(name="two tool results", head=(_USER,), reply=both, tail=results, tools=tools),
        _Probe(
            name="a question beside a tool result",
            head=(_USER,),
            reply=one,
            tail=(*results[:1], followup),
            tools=tools,
        ),
        _Probe(
            name="a reply after a tool result",
            head=(_USER, one, results[0]),
            reply=plain,
            tail=(followup,),
            tools=tools,
        ),
    ]


def _build_thinking_probes(template: ChatTemplate) -> list[_Probe]:
    if not template.has_thinking:
        return []
    reply = Message(role="assistant", text="Three.", reasoning="I count them.")
    followup = Message(role="user", text="And now?")
    return [_Probe(name="reasoning before a reply", head=(_USER,), reply=reply, tail=(followup,))]
