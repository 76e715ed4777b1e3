"""Parse Responses bodies as Codex and the official clients send them, and render calls as they read them."""

from typing import Any, Literal

import orjson
import pytest
from conversations import build_reply

from polar_trl.errors import ContextOverflowError, WireError
from polar_trl.types import Call, Message, ToolCall
from polar_trl.wire.base import Incoming, ItemMemo, ParsedRequest, ReplyHead
from polar_trl.wire.openai_responses import OpenAIResponses
from polar_trl.wire.openai_responses_request import COMPACTION_PROMPT, SUMMARY_LEAD

DIALECT = OpenAIResponses()
HEAD = ReplyHead(id="s-0", model="m", created_s=1.0, num_prompt_tokens=7)
USER = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}


def parse(path: str = "/v1/responses", **body: Any) -> ParsedRequest:
    return DIALECT.parse(Incoming(body=orjson.dumps({"input": [USER], **body}), path=path), ItemMemo())


def read_events(call: Call, head: ReplyHead = HEAD) -> list[dict[str, Any]]:
    stream = DIALECT.stream_start(head) + b"".join(DIALECT.stream(head, call))
    events = []
    for block in stream.decode().strip().split("\n\n"):
        name, data = block.split("\n")
        event = orjson.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def test_a_codex_request_is_read() -> None:
    request = parse(
        model="local",
        stream=True,
        store=False,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="k",
        client_metadata={"a": "b"},
        reasoning={"summary": "auto"},
        input=[
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "rules"}]},
            USER,
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}], "encrypted_content": "x"},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
            {"type": "function_call", "call_id": "c1", "name": "exec_command", "arguments": '{"cmd": "ls"}'},
            {"type": "function_call", "call_id": "c2", "name": "spawn", "namespace": "agents", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c2", "output": "two"},
            {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "one"}]},
        ],
    ).request
    assert request.messages == (
        Message(role="developer", text="rules"),
        Message(role="user", text="hi"),
        Message(
            role="assistant",
            text="I look.",
            reasoning="hm",
            tool_calls=(
                ToolCall(id="c1", name="exec_command", arguments='{"cmd": "ls"}'),
                ToolCall(id="c2", name="agents__spawn", arguments="{}"),
            ),
        ),
        Message(role="tool", text="two", tool_call_id="c2"),
        Message(role="tool", text="one", tool_call_id="c1"),
    )
    assert (request.stream, request.model, request.unread) == (True, "local", ("reasoning",))


def test_every_kind_of_tool_is_shown_or_named() -> None:
    request = parse(
        tools=[
            {"type": "function", "name": "f", "parameters": {"type": "object"}},
            {
                "type": "custom",
                "name": "apply_patch",
                "format": {"type": "grammar", "syntax": "lark", "definition": "G"},
            },
            {"type": "local_shell"},
            {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "g", "parameters": {}}]},
            {"type": "web_search"},
            {"type": "tool_search", "execution": "client"},
        ],
        input=[USER, {"type": "additional_tools", "role": "developer", "tools": [{"type": "custom", "name": "exec"}]}],
    ).request
    assert [(tool.name, tool.kind, tool.namespace) for tool in request.tools] == [
        ("f", "function", ""),
        ("apply_patch", "freeform", ""),
        ("local_shell", "local_shell", ""),
        ("n__g", "function", "n"),
        ("exec", "freeform", ""),
    ]
    assert "G" in request.tools[1].description
    assert request.unread == ("tools[4]", "tools[5]")


def test_a_reply_calls_what_was_declared_and_comes_back_as_it_was() -> None:
    request = parse(
        tools=[
            {"type": "custom", "name": "patch"},
            {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "g", "parameters": {}}]},
            {"type": "local_shell"},
        ]
    ).request
    calls = (
        ToolCall(id="a", name="patch", arguments='{"input": "*** Begin"}'),
        ToolCall(id="b", name="patch", arguments='{"wrong": 1}'),
        ToolCall(id="c", name="n__g", arguments='{"x":  1}'),
        ToolCall(id="d", name="local_shell", arguments='{"command":["ls"]}'),
    )
    message = Message(role="assistant", text="now", reasoning="hm", tool_calls=calls)
    output = orjson.loads(DIALECT.render(HEAD, build_reply(message, request)))["output"]
    assert [item["type"] for item in output] == [
        "reasoning",
        "message",
        "custom_tool_call",
        "custom_tool_call",
        "function_call",
        "local_shell_call",
    ]
    assert output[0]["encrypted_content"]
    assert output[2]["input"] == "*** Begin"
    assert (output[4]["name"], output[4]["namespace"], output[4]["arguments"]) == ("g", "n", '{"x":  1}')
    echoed = parse(input=[USER, *output]).request.messages[1]
    assert (echoed.text, echoed.reasoning) == ("now", "hm")
    assert [orjson.loads(call.arguments) for call in echoed.tool_calls] == [
        {"input": "*** Begin"},
        {"wrong": 1},
        {"x": 1},
        {"command": ["ls"]},
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        '{"command": "ls"}',
        '{"command": ["ls"], "timeout_ms": 1.5}',
        '{"command": ["ls"], "cwd": "/"}',
        '{"command": [1]}',
        '{"command": ["ls"], "env": {}}',
        "ls",
    ],
)
def test_what_a_local_shell_call_cannot_carry_goes_as_it_is(arguments: str) -> None:
    request = parse(tools=[{"type": "local_shell"}]).request
    message = Message(role="assistant", tool_calls=(ToolCall(id="d", name="local_shell", arguments=arguments),))
    (item,) = orjson.loads(DIALECT.render(HEAD, build_reply(message, request)))["output"]
    assert (item["type"], item["name"], item["arguments"]) == ("function_call", "local_shell", arguments)


def test_a_local_shell_call_keeps_what_it_was_told() -> None:
    request = parse(tools=[{"type": "local_shell"}]).request
    arguments = '{"command":["ls"],"env":{"A":"b"},"timeout_ms":5,"working_directory":"/tmp"}'
    message = Message(role="assistant", tool_calls=(ToolCall(id="d", name="local_shell", arguments=arguments),))
    (item,) = orjson.loads(DIALECT.render(HEAD, build_reply(message, request)))["output"]
    assert item["type"] == "local_shell_call"
    assert parse(input=[USER, item]).request.messages[1].tool_calls == message.tool_calls


@pytest.mark.parametrize(
    ("value", "choice", "unread"),
    [
        (None, "auto", ()),
        ("required", "required", ()),
        ({"type": "function", "name": "f"}, "f", ()),
        ({"type": "function", "name": "f", "namespace": "n"}, "n__f", ()),
        ({"type": "custom", "name": "patch"}, "patch", ()),
        ({"type": "local_shell"}, "local_shell", ()),
        ({"type": "allowed_tools", "mode": "required", "tools": []}, "required", ("tool_choice.tools",)),
        ({"type": "web_search"}, "auto", ("tool_choice",)),
    ],
)
def test_a_choice_of_tools(value: object, choice: str, unread: tuple[str, ...]) -> None:
    request = parse(tool_choice=value).request
    assert (request.tool_choice, request.unread) == (choice, unread)


def test_what_is_not_read_is_named_once() -> None:
    request = parse(
        truncation="auto",
        parallel_tool_calls=False,
        text={"format": {"type": "json_object"}, "verbosity": "low"},
        top_logprobs=None,
        input=[
            USER | {"x_new": 1},
            USER | {"x_new": 2},
            {"type": "web_search_call", "id": "w", "status": "completed"},
            {"type": "message", "role": "assistant", "content": "found"},
            {"type": "web_search_call", "id": "w", "status": "completed"},
            {"type": "x_news"},
        ],
    ).request
    assert request.unread == (
        "truncation",
        "text.verbosity",
        "text.format",
        "parallel_tool_calls",
        "input[0].x_new",
        "input[2]",
        "input[5]",
    )
    assert [message.text for message in request.messages] == ["hi", "hi", "found"]


def test_a_history_that_was_read_before_gives_the_same_messages() -> None:
    memo = ItemMemo()
    reply = [
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    ]
    items = [USER, *reply, {"type": "function_call_output", "call_id": "c", "output": "x"}]
    bodies = [orjson.dumps({"input": history}) for history in (items, [*items, *reply], [USER, USER, *items])]
    first, grown, other = (DIALECT.parse(Incoming(body=body), memo).request for body in bodies)
    assert all(ours is theirs for ours, theirs in zip(first.messages, grown.messages, strict=False))
    for body, request in zip(bodies, (first, grown, other), strict=True):
        assert request == DIALECT.parse(Incoming(body=body), ItemMemo()).request


def test_images_come_from_messages_and_results() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": "high"}
    request = parse(
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "see"}, image]},
            {"type": "function_call", "call_id": "c", "name": "view", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": [image]},
        ]
    ).request
    assert [message.images for message in request.messages] == [(image["image_url"],), (), (image["image_url"],)]


def test_a_stream_has_every_event_and_ends_with_the_whole() -> None:
    call = build_reply(
        Message(role="assistant", text="t", reasoning="r", tool_calls=(ToolCall(id="c", name="f", arguments="{}"),)),
        parse().request,
    )
    events = read_events(call)
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:2] == ["created", "in_progress"] and kinds[-1] == "completed"
    assert kinds.count("output_item.added") == kinds.count("output_item.done") == 3
    for kind in ("reasoning_summary_text.delta", "output_text.delta", "function_call_arguments.done"):
        assert kind in kinds
    usage = events[-1]["response"]["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (7, 3, 10)
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]


def test_a_reply_that_ends_at_its_token_limit_is_incomplete() -> None:
    last = read_events(build_reply(Message(role="assistant", text="t"), parse().request, finish_reason="length"))[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


@pytest.mark.parametrize("way", ["endpoint", "trigger"])
def test_a_compaction_is_a_summary_that_comes_back(way: str) -> None:
    tools = [{"type": "function", "name": "f", "parameters": {}}]
    if way == "endpoint":
        parsed = parse("/v1/responses/compact", tools=tools)
    else:
        parsed = parse(tools=tools, input=[USER, {"type": "compaction_trigger"}])
    assert (parsed.purpose, parsed.request.tool_choice) == ("auxiliary", "none")
    assert parsed.request.messages[-1] == Message(role="user", text=COMPACTION_PROMPT)
    head = ReplyHead(id="s-0", model="m", created_s=1.0, num_prompt_tokens=7, options=parsed.reply_options)
    call = build_reply(Message(role="assistant", text="all is well é"), parsed.request)
    reply = orjson.loads(DIALECT.render(head, call))
    assert reply["object"] == ("response.compaction" if way == "endpoint" else "response")
    (item,) = reply["output"]
    assert item["type"] == "compaction"
    again = parse(input=[item, USER]).request
    assert again.messages[0] == Message(role="user", text=SUMMARY_LEAD + "all is well é")


def called(arguments: str, status: Literal["ok", "malformed"] = "ok") -> Message:
    call = ToolCall(id="c", name="sh", arguments=arguments, parse_status=status)
    return Message(role="assistant", tool_calls=(call,))


CALL = {"type": "function_call", "call_id": "c", "name": "sh"}
RESULT = {"type": "function_call_output", "call_id": "c"}
SAID = {"type": "message", "role": "assistant"}
PART = {"type": "output_text", "text": "x"}
SPOKEN = Message(role="assistant", text="x")


@pytest.mark.parametrize(
    ("items", "read"),
    [
        ([{"role": "user", "content": None}], Message(role="user")),
        ([{"type": None, "role": "user"}], Message(role="user")),
        ([{"role": "user", "content": [None, {}, "x"]}], Message(role="user", text="x")),
        ([{"role": "user", "content": [{"type": "input_text", "text": None}]}], Message(role="user")),
        ([{"role": "user", "content": [{"type": "note", "text": "x"}]}], Message(role="user", text="x")),
        ([{"role": "user", "content": {"text": "x"}}], Message(role="user", text="x")),
        ([RESULT | {"output": None}], Message(role="tool", tool_call_id="c")),
        ([RESULT], Message(role="tool", tool_call_id="c")),
        (
            [RESULT | {"output": [{"type": "input_text", "text": "x"}]}],
            Message(role="tool", tool_call_id="c", text="x"),
        ),
        (
            [{"type": "custom_tool_call_output", "call_id": "c", "output": None}],
            Message(role="tool", tool_call_id="c"),
        ),
        ([SAID | {"content": None}], Message(role="assistant")),
        ([SAID | {"content": [PART | {"annotations": None, "logprobs": None}], "status": None}], SPOKEN),
        (
            [SAID | {"content": [{"type": "reasoning_text", "text": "why"}, PART]}],
            Message(role="assistant", text="x", reasoning="why"),
        ),
        ([{"type": "reasoning", "summary": None, "content": None}, SAID | {"content": [PART]}], SPOKEN),
        ([{"type": "reasoning", "summary": [None, {"text": None}, {}]}, SAID | {"content": "x"}], SPOKEN),
        (
            [{"type": "reasoning", "summary": [], "content": "why"}, SAID | {"content": "x"}],
            Message(role="assistant", text="x", reasoning="why"),
        ),
        ([CALL | {"arguments": None}], called("", "malformed")),
        ([CALL | {"arguments": {"cmd": "ls"}, "namespace": None}], called('{"cmd":"ls"}')),
        ([CALL | {"arguments": [1]}], called("[1]", "malformed")),
        ([CALL | {"type": "custom_tool_call", "input": None}], called('{"input":""}')),
    ],
)
def test_what_says_nothing_is_accepted_in_items(items: list[Any], read: Message) -> None:
    assert parse(input=[USER, *items]).request.messages[1:] == (read,)


def test_what_says_nothing_is_accepted_in_a_body() -> None:
    names = (
        "instructions", "tools", "tool_choice", "stream", "text", "previous_response_id", "conversation", "prompt",
        "background", "max_output_tokens", "temperature", "parallel_tool_calls", "model", "reasoning",
    )  # fmt: skip
    assert parse(**dict.fromkeys(names)).request == parse().request
    empty = parse(tools=[], tool_choice="", previous_response_id="", conversation={}, prompt={}, background=False)
    assert empty.request == parse().request
    tools = [{"type": "function", "name": "sh", "description": None, "parameters": None, "strict": None}]
    assert parse(max_output_tokens=8.0, tools=tools).request.sampling.max_tokens == 8


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input": [None]}, r"input\[0\]: must be an object, not null"),
        ({"input": [{"role": "user", "content": 3}]}, r"input\[0\].content: must be a string or an array of parts"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": 3}]}]},
            r"input\[0\].content\[0\].text",
        ),
        ({"input": [{"type": "function_call", "arguments": "{}"}]}, r"input\[0\].name: must be a string, not null"),
        ({"input": []}, "input: must hold at least one message"),
        ({"input": 3}, "input: must be a string or an array of items, not a number"),
        ({"input": [3]}, r"input\[0\]: must be an object"),
        ({"input": [{"role": "boss", "content": "x"}]}, r"input\[0\].role: must be one of"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, r"input\[0\].content\[0\].type: only"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, r"input\[0\]: nothing is stored here"),
        ({"previous_response_id": "r"}, "previous_response_id: nothing is stored here; send the whole"),
        ({"conversation": "c"}, "conversation: nothing is stored here"),
        ({"background": True}, "background: must be false"),
        ({"prompt": {"id": "p"}}, "prompt: nothing is stored here"),
        ({"input": [{"type": "compaction_trigger"}]}, "input: must hold at least one message"),
        (
            {"input": [{"type": "compaction", "encrypted_content": "gAAA_foreign"}]},
            r"input\[0\].encrypted_content: was not made here",
        ),
        (
            {"input": [{"type": "local_shell_call", "call_id": "c", "action": {"command": "ls"}}]},
            r"input\[0\].action: must be an object with a command",
        ),
        ({"tool_choice": "some"}, "tool_choice: must be auto, none, required or"),
        ({"max_output_tokens": 0}, "max_output_tokens: must be at least 1"),
        ({"tools": [{"type": "function"}]}, r"tools\[0\].name: must be a string, not null"),
    ],
)
def test_what_cannot_be_served_is_named(body: dict[str, Any], message: str) -> None:
    with pytest.raises(WireError, match=f"^{message}"):
        parse(**body)


def test_an_overflow_has_the_code_that_codex_looks_for() -> None:
    body = orjson.loads(DIALECT.render_error(ContextOverflowError(20, 10)))
    assert body["error"]["code"] == "context_length_exceeded"


def test_a_stream_that_fails_says_so_twice() -> None:
    error = WireError("busy", status=429, kind="overloaded", retry_after_s=2.0)
    names = [line for line in DIALECT.stream_error(error).decode().split("\n") if line.startswith("event: ")]
    assert names == ["event: error", "event: response.failed"]
    assert b"try again in 2.000s" in DIALECT.stream_error(error)
