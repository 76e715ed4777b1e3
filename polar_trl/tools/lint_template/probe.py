"""Make the calls of a probe session in which an agent and the model do all that chat templates stumble over.

The model's samples are in its own format: the template's form of the turn, in which arguments are then spelled as a
model may spell them and a template would not. A conversation on which the template raises ends there, with the reason.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from polar_trl.errors import RenderError
from polar_trl.tokens.base import Renderer
from polar_trl.tokens.continuation import Continuations
from polar_trl.tools.lint_template.load import LoadedModel, Policy
from polar_trl.tools.lint_template.written import TurnWriter
from polar_trl.types import Call, ChatRequest, Completion, Message, TokenIds, Tool, ToolCall

_PROPERTIES: Mapping[str, Any] = {
    "command": {"type": "string"},
    "timeout_s": {"type": "number"},
    "flags": {"type": "array", "items": {"type": "string"}},
    "quiet": {"type": "boolean"},
}
TOOLS = (
    Tool(
        name="read_file",
        description="Reads a file.",
        parameters={"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    ),
    Tool(
        name="run",
        description="Runs a command.",
        parameters={"type": "object", "properties": dict(_PROPERTIES), "required": ["command"]},
    ),
)
_ODD = r'{"timeout_s":1.0, "command": "grep -c na\u00efve notes.txt", "flags" : ["-a","-b"],"quiet": true}'
"""Valid JSON as no serialiser writes it: uneven spaces, keys in no order, an escaped letter, a whole number as 1.0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    """One request and the turn that answers it."""

    new: tuple[Message, ...]
    reply: Message
    name: str
    conversation: str = "main"
    cut: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """A session under one policy."""

    calls: tuple[Call, ...]
    names: tuple[str, ...]
    """Of each call, the case that its turn probes."""
    refusal: str | None = None
    """Why the session ended early, if it did."""
    unreadable: tuple[int, ...] = ()
    """Calls whose tool calls could not be read back from what was sampled."""


def run_probe(model: LoadedModel, writer: TurnWriter, policy: Policy) -> Session:
    """Run the probe under one policy. Calls have log-probabilities of 0; nothing is sampled."""
    renderer = model.renderers[policy]
    continuations, calls, unreadable = Continuations(renderer), list[Call](), list[int]()
    histories: dict[str, tuple[Message, ...]] = {}
    steps = _list_steps()
    for index, step in enumerate(steps):
        history = histories.get(step.conversation, ())
        messages = (*history, *_answer_calls(history, step.new))
        try:
            prompt = continuations.build_prompt(ChatRequest(messages=messages, tools=TOOLS))
            ids = _spell(model, writer, renderer, messages, step)
        except RenderError as error:
            names = tuple(step.name for step in steps[:index])
            return Session(
                calls=tuple(calls), names=names, refusal=f"{step.name}: {error}", unreadable=tuple(unreadable)
            )
        message = renderer.parse(prompt.ids, ids, TOOLS)
        if [call.name for call in message.tool_calls] != [call.name for call in step.reply.tool_calls]:
            unreadable.append(index)
            message = step.reply
        call = Call(
            session_id="probe",
            index=index,
            dialect="probe",
            request=prompt.request,
            prompt_ids=prompt.ids,
            completion=Completion(
                token_ids=ids, logprobs=(0.0,) * len(ids), finish_reason="length" if step.cut else "stop"
            ),
            message=message,
            parent=prompt.parent,
        )
        continuations.add(call)
        calls.append(call)
        histories[step.conversation] = (*prompt.request.messages, message)
    return Session(calls=tuple(calls), names=tuple(step.name for step in steps), unreadable=tuple(unreadable))


def replay(renderer: Renderer, recorded: Sequence[Call]) -> Session:
    """Replay a recorded session's requests and samples, with the prompts that this renderer gives."""
    continuations, calls, position = Continuations(renderer), list[Call](), dict[int, int]()
    names: list[str] = []
    refusal = None
    for call in recorded:
        try:
            prompt = continuations.build_prompt(call.request)
        except RenderError as error:
            refusal = f"call {call.index}: {error}"
            break
        position[call.index] = len(calls)
        call = replace(call, index=len(calls), request=prompt.request, prompt_ids=prompt.ids, parent=prompt.parent)
        continuations.add(call)
        calls.append(call)
        names.append(_describe(call.message))
    return Session(calls=tuple(calls), names=tuple(names), refusal=refusal)


def _list_steps() -> list[_Step]:
    system = Message(role="system", text="You work in a repository. Be brief.")
    helper = Message(role="system", text="You are a helper of another agent. Only answer its question.")
    first = Message(role="user", text="Why does the test fail?")
    look = _call("read_file", '{"path": "notes.txt"}')
    odd = _call("run", _ODD)
    result = Message(role="tool", text="line one\nline two")
    plain = Message(role="assistant", text="All is done.")
    return [
        _Step(
            name="reasoning, then a tool call",
            new=(system, first),
            reply=Message(role="assistant", text="I look.", reasoning="The notes may say why.", tool_calls=(look,)),
        ),
        _Step(
            name="unusual JSON arguments", new=(result,), reply=Message(role="assistant", text="", tool_calls=(odd,))
        ),
        _Step(
            name="reasoning, then text",
            new=(result,),
            reply=Message(role="assistant", text="A name is missing.", reasoning="It is not defined."),
        ),
        _Step(
            name="two tool calls at once",
            new=(_user("Then look at both files."),),
            reply=Message(role="assistant", text="Both.", tool_calls=(look, odd)),
        ),
        _Step(
            name="whitespace around the text",
            new=(result, result),
            reply=Message(role="assistant", text="\n  Both are empty. \n"),
        ),
        _Step(name="empty reasoning", new=(_user("Sure?"),), reply=Message(role="assistant", text="Yes.")),
        _Step(
            name="cut off by the length limit",
            new=(_user("Explain."),),
            reply=Message(role="assistant", text="The file was made, but nothing was ever written to it, because"),
            cut=True,
        ),
        _Step(name="text only", new=(_user("Go on."),), reply=plain),
        _Step(
            name="a sub-agent's reply",
            new=(helper, _user("What is in notes.txt?")),
            reply=Message(role="assistant", text="Two lines.", reasoning="I have seen it."),
            conversation="helper",
        ),
        _Step(name="the last reply", new=(_user("Thanks."),), reply=plain),
        _Step(name="a sub-agent's last reply", new=(_user("Thanks."),), reply=plain, conversation="helper"),
    ]


def _user(text: str) -> Message:
    return Message(role="user", text=text)


def _call(name: str, arguments: str) -> ToolCall:
    return ToolCall(id="", name=name, arguments=arguments)


def _answer_calls(history: Sequence[Message], new: Sequence[Message]) -> list[Message]:
    """Point the tool results among new messages at the calls of the turn before."""
    ids = [call.id for call in history[-1].tool_calls] if history else []
    return [
        replace(message, tool_call_id=ids[i]) if message.role == "tool" and i < len(ids) else message
        for i, message in enumerate(new)
    ]


def _spell(
    model: LoadedModel, writer: TurnWriter, renderer: Renderer, messages: Sequence[Message], step: _Step
) -> TokenIds:
    """Return the ids that a model samples to take this turn, after the prompt that the template writes."""
    marked, values = _mark_values(step.reply)
    opening = writer.write(messages, TOOLS).opening
    turn = writer.write_reply(messages, marked, TOOLS)
    if not any(value in turn for value in values):
        turn = writer.header + _write_plainly(marked)
    turn, end = writer.cut_at_end(turn)
    results = [Message(role="tool", text="result", tool_call_id=call.id) for call in marked.tool_calls]
    end = end or writer.find_end(messages, marked, results or [_user("next")], TOOLS)
    text = _strip_opening(turn, opening, writer.header, marked.reasoning, model.template.has_thinking)
    text = _respell(text, values)
    ids = tuple(model.tokenizer.encode(text, add_special_tokens=False))
    if step.cut:
        return ids[: -(len(ids) // 3)]
    ends = model.tokenizer.encode(end, add_special_tokens=False)
    # the engine stops at no other token
    return (*ids, ends[0] if ends and ends[0] in renderer.stop_token_ids else renderer.stop_token_ids[0])


def _mark_values(reply: Message) -> tuple[Message, dict[str, Any]]:
    """Put a mark in the place of each value; also return the values: texts, or a whole object's own text."""
    values: dict[str, Any] = {}

    def mark(kind: str, value: Any) -> str:
        name = f"zqmark{kind}{len(values)}x0q"
        values[name] = value
        return name

    calls: list[ToolCall] = []
    for call in reply.tool_calls:
        arguments = {key: mark("value", value) for key, value in json.loads(call.arguments).items()}
        values[json.dumps(arguments, sort_keys=True)] = call.arguments
        calls.append(replace(call, id=f"probe{len(calls):04d}", arguments=json.dumps(arguments)))
    marked = replace(
        reply,
        text=mark("text", reply.text) if reply.text else "",
        reasoning=mark("reasoning", reply.reasoning) if reply.reasoning else None,
        tool_calls=tuple(calls),
    )
    return marked, values


def _write_plainly(reply: Message) -> str:
    """Write a turn in a readable form, for a template that does not write the turn's contents."""
    calls = [
        f'<tool_call>\n{{"name": "{call.name}", "arguments": {call.arguments}}}\n</tool_call>'
        for call in reply.tool_calls
    ]
    return "\n".join([reply.text, *calls] if reply.text else calls)


def _strip_opening(turn: str, opening: str, header: str, reasoning: str | None, has_thinking: bool) -> str:
    """Return the sampled part of a turn: the rest is in the prompt."""
    thinks = opening.rstrip().endswith("<think>")
    if reasoning is not None and reasoning not in turn and has_thinking:
        body = turn.removeprefix(header)
        return f"{'' if thinks else '<think>' + chr(10)}{reasoning}\n</think>\n\n{body}"
    if turn.startswith(opening):
        return turn[len(opening) :]
    body = turn.removeprefix(header)
    if thinks and "</think>" not in body:
        return f"\n</think>\n\n{body}"  # a model that was made to think ends that first
    _, closed, rest = body.partition("</think>")
    return rest.lstrip("\n") if closed and "</think>" in opening else body


def _respell(text: str, values: Mapping[str, Any]) -> str:
    """Replace the marks: whole objects by their odd spelling, values that stand alone by their own."""
    decoder, position = json.JSONDecoder(), 0
    while (position := text.find("{", position)) >= 0:
        try:
            found, end = decoder.raw_decode(text, position)
            spelled = values.get(json.dumps(found, sort_keys=True))
        except ValueError:
            spelled = None
        if spelled is not None:
            text = text[:position] + spelled + text[end:]
            position += len(spelled)
        else:
            position += 1
    for name, value in values.items():
        if name.startswith("zqmark"):
            text = text.replace(name, value if isinstance(value, str) else json.dumps(value, separators=(",", ":")))
    return text


def _describe(message: Message) -> str:
    parts = ["reasoning"] if message.reasoning else []
    parts += ["text"] if message.text.strip() else []
    parts += [f"call of {call.name}" for call in message.tool_calls]
    return ", ".join(parts) or "nothing"
