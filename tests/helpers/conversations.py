"""Draw conversations in normal form, and what a policy and an agent then add to them, for the tests of all dialects.

Draws what the agents' wires were seen to carry and what could break a format: empty texts, odd unicode, arguments
that are no JSON. Draws no lone surrogates: bodies cannot hold them (see the fuzz tests).
"""

import json
from dataclasses import dataclass

from hypothesis import strategies as st

from polar_trl.types import (
    Call,
    ChatRequest,
    Completion,
    FinishReason,
    Message,
    RequestedSampling,
    Tool,
    ToolCall,
    ToolKind,
)

ODD_TEXTS = (
    "",
    " ",
    "\n\n lines \r\n\n",
    "\x00\x1f\x7f",
    "\ufeffbyte order",
    "\u2028\u2029\x85",
    "שלום \u202eright to left",
    "e\u0301 é ﬁ Å",
    "👩‍👩‍👧‍👦 🏳️‍🌈 \U0010ffff",
    '"quoted" \\ {"json": [1]} </tool_call><|im_end|>',
    "data: x\n\nevent: y\n: ping",
)
MALFORMED = ("", "  ", "{", '{"a": ', "[1]", "null", '"text"', "ls -l", '{"a": NaN}')
IMAGES = ("data:image/png;base64,iVBORw0KGgo=", "data:image/jpeg;base64,/9j/4AAQ", "https://example.org/a.png?b=1&c")

PNG = "data:image/png;base64,AA=="
WHOLE_REQUEST = ChatRequest(
    messages=(
        Message(role="system", text="be brief"),
        Message(role="user", text="hello"),
        Message(
            role="assistant",
            text="I look.",
            reasoning="hm",
            tool_calls=(ToolCall(id="c1", name="sh", arguments='{"cmd":"ls"}'),),
        ),
        Message(role="tool", text="a.txt", tool_call_id="c1"),
        Message(role="user", text="see this", images=(PNG,)),
    ),
    tools=(
        Tool(
            name="sh",
            description="run",
            parameters={"type": "object", "properties": {"cmd": {"type": "string"}}},
        ),
    ),
    tool_choice="sh",
    sampling=RequestedSampling(max_tokens=9, temperature=1, top_p=0.5, top_k=3, stop=("END",)),
    stream=True,
    model="policy",
)
"""What the tests of each dialect write as a body of that format, word for word."""


def build_reply(
    message: Message,
    request: ChatRequest | None = None,
    *,
    index: int = 4,
    finish_reason: FinishReason = "stop",
    stop_text: str | None = None,
) -> Call:
    """A call of ten prompt tokens, answered by `message` in three."""
    return Call(
        session_id="s",
        index=index,
        dialect="any",
        request=request or ChatRequest(messages=(Message(role="user", text="hello"),)),
        prompt_ids=tuple(range(10)),
        completion=Completion(token_ids=(1, 2, 3), logprobs=(-0.5,) * 3, finish_reason=finish_reason),
        message=message,
        stop_text=stop_text,
    )


texts = st.sampled_from(ODD_TEXTS) | st.text(max_size=20)
shown_texts = texts.filter(lambda text: bool(text.strip()))
images = st.lists(st.sampled_from(IMAGES), max_size=2).map(tuple)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(ODD_TEXTS)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
json_objects = st.dictionaries(
    st.sampled_from(["cmd", "пут", "", "a.b[0]"]) | st.text(max_size=5), json_values, max_size=3
)


def _spell_json(value: object, spelling: int) -> str:
    """Models write JSON in many ways."""
    if spelling == 0:
        return json.dumps(value)
    if spelling == 1:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return json.dumps(value, ensure_ascii=False, indent=2)


HALF = '{"half": "\\ud83d", "whole": "\\ud83d\\ude00", "path": "a\\\\ud83d"}'
json_object_texts = st.builds(_spell_json, json_objects, st.integers(0, 2)) | st.just(HALF)
names = st.from_regex(r"\A[a-z][a-z0-9-]{0,8}\Z")
schemas = st.sampled_from([{"type": "object"}, {}]) | st.fixed_dictionaries(
    {
        "type": st.just("object"),
        "properties": st.dictionaries(
            names, st.sampled_from([{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]), max_size=2
        ),
    }
)


def tools(kinds: tuple[ToolKind, ...]) -> st.SearchStrategy[tuple[Tool, ...]]:
    """Up to three tools of different names."""
    return st.lists(_tool(kinds), max_size=3, unique_by=lambda tool: tool.name).map(tuple)


@st.composite
def _tool(draw: st.DrawFn, kinds: tuple[ToolKind, ...]) -> Tool:
    kind = draw(st.sampled_from(kinds))
    if kind == "local_shell":
        return Tool(name="local_shell", kind=kind)
    description = draw(texts)
    if kind == "freeform":
        return Tool(name=draw(names), description=description, kind=kind)
    name, namespace = draw(names), ""
    if "local_shell" in kinds and draw(st.booleans()):  # the format that has that has namespaces too
        namespace = draw(st.sampled_from(["mcp", "a__b"]))
        name = f"{namespace}__{name}"
    return Tool(name=name, description=description, parameters=draw(schemas), namespace=namespace)


@st.composite
def _tool_call(draw: st.DrawFn, declared: tuple[Tool, ...], in_history: bool) -> ToolCall:
    """A call of a declared tool, or of one that the model made up."""
    known = {tool.name for tool in declared}
    made_up = names.filter(lambda name: name not in known)
    tool = draw(st.sampled_from(declared)) if declared and draw(st.integers(0, 5)) else Tool(name=draw(made_up))
    # a model may call any tool wrongly; a client that never talked to us sends only what the kind of call can carry
    may_be_malformed = tool.kind == "function" or not in_history
    if may_be_malformed and not draw(st.integers(0, 4)):
        arguments = draw(st.sampled_from(MALFORMED))
        return ToolCall(id="", name=tool.name, arguments=arguments, parse_status="malformed")
    if tool.kind == "freeform":
        return ToolCall(id="", name=tool.name, arguments=json.dumps({"input": draw(texts)}))
    if tool.kind == "local_shell":
        command = draw(st.lists(st.text(max_size=5), min_size=1, max_size=3))
        return ToolCall(id="", name=tool.name, arguments=json.dumps({"command": command}))
    return ToolCall(id="", name=tool.name, arguments=draw(json_object_texts))


@st.composite
def replies(draw: st.DrawFn, declared: tuple[Tool, ...], in_history: bool = False) -> Message:
    """Draw what a policy may say: reasoning, text, up to three tool calls (without ids), or nothing."""
    return Message(
        role="assistant",
        text=draw(texts),
        reasoning=draw(st.none() | shown_texts),
        tool_calls=tuple(draw(st.lists(_tool_call(declared, in_history), max_size=3))),
    )


@st.composite
def others(draw: st.DrawFn, with_images: bool, min_size: int = 0) -> list[Message]:
    """Draw what follows a reply and is no tool result."""
    roles = draw(st.lists(st.sampled_from(["user", "user", "system", "developer"]), min_size=min_size, max_size=2))
    return [
        Message(role=role, text=draw(texts), images=draw(images) if with_images and role == "user" else ())
        for role in roles
    ]


@st.composite
def tool_results(draw: st.DrawFn, tool_call_ids: list[str], with_images: bool) -> list[Message]:
    """One result per call, as parallel tools end: in any order."""
    return [
        Message(role="tool", text=draw(texts), tool_call_id=id, images=draw(images) if with_images else ())
        for id in draw(st.permutations(tool_call_ids))
    ]


@st.composite
def conversations(draw: st.DrawFn, declared: tuple[Tool, ...], with_images: bool) -> tuple[Message, ...]:
    """A history: never two assistant messages in a row, every tool call with an id of its own and a result."""
    roles = draw(st.lists(st.sampled_from(["system", "developer"]), max_size=2))
    messages = [Message(role=role, text=draw(shown_texts)) for role in roles]
    messages.append(Message(role="user", text=draw(texts), images=draw(images) if with_images else ()))
    for turn in range(draw(st.integers(0, 3))):
        reply = draw(replies(declared, in_history=True))
        calls = tuple(
            ToolCall(
                id=f"call_{turn}_{place}", name=call.name, arguments=call.arguments, parse_status=call.parse_status
            )
            for place, call in enumerate(reply.tool_calls)
        )
        messages.append(Message(role="assistant", text=reply.text, reasoning=reply.reasoning, tool_calls=calls))
        messages += draw(tool_results([call.id for call in calls], with_images))
        messages += draw(others(with_images, min_size=0 if calls else 1))
    return tuple(messages)


samplings = st.builds(
    RequestedSampling,
    max_tokens=st.none() | st.integers(1, 128_000),
    temperature=st.none() | st.floats(0, 2),
    top_p=st.none() | st.floats(0, 1),
    top_k=st.none() | st.integers(1, 100),
    stop=st.lists(shown_texts, max_size=2).map(tuple),
)


@st.composite
def requests(draw: st.DrawFn, kinds: tuple[ToolKind, ...] = ("function",), with_images: bool = True) -> ChatRequest:
    """A whole request in normal form."""
    declared = draw(tools(kinds))
    choices = ["auto", "none", "required", *(tool.name for tool in declared if tool.kind == "function")]
    return ChatRequest(
        messages=draw(conversations(declared, with_images)),
        tools=declared,
        tool_choice=draw(st.sampled_from(choices)) if declared else "auto",
        sampling=draw(samplings),
        stream=draw(st.booleans()),
        model=draw(st.sampled_from(["policy", "local-model", "gpt-5.5"])),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Style:
    """Draw what clients of one format do differently from each other, and no reader may mind."""

    block_lists: bool
    """Texts as lists of one or two blocks, not as strings, where both are allowed."""
    nulls: bool
    """Optional fields that are not set are sent as null."""
    unknown_fields: bool
    """With fields that nobody has heard of."""
    reserialised: bool
    """Tool arguments of the policy are written anew, as agents in JavaScript do."""
    with_ids: bool
    """Optional ids are sent."""


styles = st.builds(
    Style,
    block_lists=st.booleans(),
    nulls=st.booleans(),
    unknown_fields=st.booleans(),
    reserialised=st.booleans(),
    with_ids=st.booleans(),
)
