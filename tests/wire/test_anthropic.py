"""Parse Anthropic's Messages bodies into normal form, and render calls as messages and events."""

from dataclasses import replace
from typing import Literal

import orjson
import pytest
from conversations import WHOLE_REQUEST, build_reply

from polar_trl.errors import ContextOverflowError, WireError
from polar_trl.types import Message, Tool, ToolCall
from polar_trl.wire.anthropic import SIGNATURE, Anthropic
from polar_trl.wire.base import Incoming, ItemMemo, ParsedRequest, ReplyHead

DIALECT = Anthropic()
HELLO = {"role": "user", "content": "hello"}
TEXT = {"type": "text", "text": "x"}
PNG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
LOOK = {"name": "look", "description": "see", "input_schema": {"type": "object"}}


def parse(headers: dict[str, str] | None = None, **body: object) -> ParsedRequest:
    body_bytes = orjson.dumps({"max_tokens": 9, "messages": [HELLO], **body})
    return DIALECT.parse(Incoming(body=body_bytes, headers=headers or {}), ItemMemo())


def messages_of(*messages: object) -> tuple[Message, ...]:
    return parse(messages=messages).request.messages


def result(content: object, **fields: object) -> dict[str, object]:
    return {"type": "tool_result", "tool_use_id": "c1", "content": content, **fields}


def head(*options: str) -> ReplyHead:
    return ReplyHead(id="s-4", model="policy", created_s=1700000000.7, num_prompt_tokens=10, options=options)


def events(*parts: bytes) -> list[dict[str, object]]:
    payloads = []
    for event in b"".join(parts).removesuffix(b"\n\n").split(b"\n\n"):
        name, data = event.split(b"\n")
        payload = orjson.loads(data.removeprefix(b"data: "))
        assert name == b"event: " + payload["type"].encode()
        payloads.append(payload)
    return payloads


def test_a_whole_request_in_normal_form() -> None:
    parsed = parse(
        model="policy",
        stream=True,
        system=[{"type": "text", "text": "be brief"}],
        messages=[
            HELLO,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "c1", "name": "sh", "input": {"cmd": "ls"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    result("a.txt", is_error=True),
                    {"type": "text", "text": "see "},
                    PNG,
                    {"type": "text", "text": "this"},
                ],
            },
        ],
        tools=[{"name": "sh", "description": "run", "input_schema": WHOLE_REQUEST.tools[0].parameters}],
        tool_choice={"type": "tool", "name": "sh"},
        temperature=1,
        top_p=0.5,
        top_k=3,
        stop_sequences=["END", ""],
    )
    assert parsed.purpose == "policy"
    assert parsed.request == WHOLE_REQUEST


def test_system_blocks_are_paragraphs_and_may_stand_between_messages() -> None:
    blocks = [{"type": "text", "text": "be brief"}, {"type": "text", "text": "be kind"}]
    request = parse(system=blocks, messages=[HELLO, {"role": "system", "content": "a date"}]).request
    assert request.messages == (
        Message(role="system", text="be brief\n\nbe kind"),
        Message(role="user", text="hello"),
        Message(role="system", text="a date"),
    )


def test_results_in_any_order_with_images() -> None:
    uses = [{"type": "tool_use", "id": id, "name": "look", "input": {}} for id in ("c1", "c2")]
    results = [{"type": "tool_result", "tool_use_id": "c2", "content": [TEXT, PNG]}, result("y")]
    messages = messages_of(HELLO, {"role": "assistant", "content": uses}, {"role": "user", "content": results})
    assert [call.arguments for call in messages[1].tool_calls] == ["{}", "{}"]
    assert messages[2:] == (
        Message(role="tool", text="x", tool_call_id="c2", images=("data:image/png;base64,AA==",)),
        Message(role="tool", text="y", tool_call_id="c1"),
    )


def test_moving_cache_markers_change_nothing() -> None:
    plain = messages_of(HELLO, {"role": "assistant", "content": "hi"}, {"role": "user", "content": [result("a")]})
    marker = {"cache_control": {"type": "ephemeral"}}
    marked = messages_of(
        {"role": "user", "content": [{"type": "text", "text": "hello"} | marker]},
        {"role": "assistant", "content": [{"type": "text", "text": "hi"} | marker]},
        {"role": "user", "content": [result([{"type": "text", "text": "a"} | marker]) | marker]},
    )
    assert plain == marked


def test_the_count_of_requests_in_the_system_prompt_is_left_out() -> None:
    system = [{"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1"}, TEXT]
    request = parse(system=system).request
    assert request.messages[0] == Message(role="system", text="x")
    assert request.unread == ("system[0]",)


def test_what_is_not_understood_is_named_once() -> None:
    unseen = [{"type": "redacted_thinking", "data": "x"}, {"type": "server_tool_use", "id": "s"}]
    parsed = parse(
        thinking={"type": "adaptive"},
        output_config={"effort": "high"},
        messages=[HELLO | {"name": "bob"}, {"role": "assistant", "content": unseen}, HELLO | {"name": "eve"}],
        tools=[{"type": "web_search_20250305", "name": "web_search"}, LOOK, {"type": "mcp_toolset"}],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
    )
    assert sorted(parsed.request.unread) == [
        "messages[0].name",
        "messages[1].content[0].redacted_thinking",
        "messages[1].content[1].server_tool_use",
        "output_config",
        "thinking",
        "tool_choice.disable_parallel_tool_use",
        "tools[0]",
        "tools[2]",
    ]
    assert parsed.request.messages[1] == Message(role="assistant")
    assert parsed.purpose == "policy"


def test_an_empty_assistant_message_is_read() -> None:
    assert messages_of(HELLO, {"role": "assistant", "content": []}, HELLO)[1] == Message(role="assistant")


def test_neighbouring_assistant_messages_are_one_turn() -> None:
    use = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
    split = messages_of(
        HELLO, {"role": "assistant", "content": "I "}, {"role": "assistant", "content": [TEXT, use]}, HELLO
    )
    assert split == messages_of(HELLO, {"role": "assistant", "content": [{"type": "text", "text": "I x"}, use]}, HELLO)


def test_results_come_before_the_users_words() -> None:
    message = {"role": "user", "content": [TEXT, result("a")]}
    assert [message.role for message in messages_of(HELLO, message)] == ["user", "tool", "user"]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        ([], ""),
        ([TEXT, TEXT], "xx"),
        ([{"type": "search_result", "source": "u", "title": "t", "content": [TEXT]}], "x"),
        (
            [{"type": "tool_reference", "tool_name": "Fetch"}, {"type": "tool_reference", "tool_name": "Go"}],
            "Fetch\nGo",
        ),
        ([{"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "doc"}}], "doc"),
        ([{"type": "document", "source": {"type": "content", "content": [TEXT]}}], "x"),
        ([{"type": "document", "source": {"type": "content", "content": "y"}}], "y"),
    ],
)
def test_tool_results(content: object, text: str) -> None:
    tool = messages_of(HELLO, {"role": "user", "content": [result(content)]})[1]
    assert tool == Message(role="tool", text=text, tool_call_id="c1")


def test_input_that_was_no_json_comes_back_as_it_was_written() -> None:
    raw = '{"command": "pri'
    value = {"__unparsedToolInput": {"raw": raw, "len": len(raw)}}
    use = {"type": "tool_use", "id": "c", "name": "look", "input": value}
    (tool_call,) = messages_of(HELLO, {"role": "assistant", "content": [use]})[1].tool_calls
    assert tool_call == ToolCall(id="c", name="look", arguments=raw, parse_status="malformed")


# Tools


def test_tools_that_the_client_runs_get_the_schema_they_come_without() -> None:
    types = ["bash_20250124", "text_editor_20250728", "memory_20250818"]
    tools = parse(tools=[{"type": kind} for kind in types] + [{"type": "custom"} | LOOK]).request.tools
    assert [tool.name for tool in tools] == ["bash", "str_replace_based_edit_tool", "memory", "look"]
    assert all("command" in tool.parameters["properties"] for tool in tools[:3])
    assert parse(tools=[{"type": types[1], "name": "edit"}]).request.tools[0].name == "edit"


def test_a_deferred_tool_is_shown_once_it_is_referred_to() -> None:
    tools = [LOOK, LOOK | {"name": "fetch", "defer_loading": True}]
    before = parse(tools=tools).request
    assert ([tool.name for tool in before.tools], before.unread) == (["look"], ("tools[1]",))
    found = {"role": "user", "content": [result([{"type": "tool_reference", "tool_name": "fetch"}])]}
    after = parse(tools=tools, messages=[HELLO, found]).request
    assert ([tool.name for tool in after.tools], after.unread) == (["look", "fetch"], ())


@pytest.mark.parametrize(
    ("tools", "purpose"),
    [
        ([{"type": "web_search_20250305", "name": "web_search"}], "auxiliary"),
        ([{"type": "web_search_20250305", "name": "web_search"}, LOOK], "policy"),
        ([LOOK | {"defer_loading": True}], "policy"),
        ([], "policy"),
    ],
)
def test_a_request_with_server_tools_alone_is_a_side_request(tools: list[object], purpose: str) -> None:
    assert parse(tools=tools).purpose == purpose


@pytest.mark.parametrize(
    ("choice", "read"), [("auto", "auto"), ("any", "required"), ("none", "none"), ("tool", "look")]
)
def test_tool_choice(choice: str, read: str) -> None:
    assert parse(tools=[LOOK], tool_choice={"type": choice, "name": "look"}).request.tool_choice == read


# What says nothing, and refusals


def used(arguments: str, status: Literal["ok", "malformed"] = "ok") -> Message:
    call = ToolCall(id="c1", name="look", arguments=arguments, parse_status=status)
    return Message(role="assistant", tool_calls=(call,))


SPOKEN = Message(role="assistant", text="x")
USE = {"type": "tool_use", "id": "c1", "name": "look"}


@pytest.mark.parametrize(
    ("role", "content", "read"),
    [
        ("user", None, Message(role="user")),
        ("user", [], Message(role="user")),
        ("user", TEXT, Message(role="user", text="x")),
        ("user", [None, {}, TEXT, {"type": "text", "text": None}, {"type": "text"}], Message(role="user", text="x")),
        ("user", [{"type": "note", "text": "x"}], Message(role="user", text="x")),
        ("user", [{"text": "x"}], Message(role="user", text="x")),
        ("user", [result(None)], Message(role="tool", tool_call_id="c1")),
        ("user", [result([None, TEXT])], Message(role="tool", tool_call_id="c1", text="x")),
        ("user", [result(TEXT, is_error=None)], Message(role="tool", tool_call_id="c1", text="x")),
        ("user", [TEXT, {"type": "search_result", "content": None}], Message(role="user", text="x")),
        ("assistant", None, Message(role="assistant")),
        ("assistant", [{"type": "thinking", "thinking": None}, TEXT], SPOKEN),
        ("assistant", [{"type": "thinking"}, TEXT], SPOKEN),
        ("assistant", [{"type": "thinking", "thinking": "why"}, TEXT], replace(SPOKEN, reasoning="why")),
        ("assistant", [{"type": "redacted_thinking"}, TEXT], SPOKEN),
        ("assistant", [USE], used("{}")),
        ("assistant", [USE | {"input": None}], used("{}")),
        ("assistant", [USE | {"input": []}], used("{}")),
        ("assistant", [USE | {"input": {"at": True}}], used('{"at":true}')),
        ("assistant", [USE | {"input": '{"at": 1}'}], used('{"at": 1}')),
        ("assistant", [USE | {"input": [1]}], used("[1]", "malformed")),
    ],
)
def test_what_says_nothing_is_accepted_in_a_message(role: str, content: object, read: Message) -> None:
    assert messages_of(HELLO, {"role": role, "content": content})[1:] == (read,)


def test_what_says_nothing_is_accepted_in_a_body() -> None:
    names = ("system", "tools", "tool_choice", "stream", "stop_sequences", "temperature", "top_k", "model")
    assert parse(**dict.fromkeys(names)).request == parse().request  # type: ignore[arg-type]
    assert parse(system=[None], tools=[], tool_choice={}, stop_sequences=[None, ""]).request == parse().request
    request = parse(max_tokens=8.0, tools=[{"type": None, "name": "a", "description": None, "input_schema": None}])
    assert request.request.sampling.max_tokens == 8 and request.request.tools == (Tool(name="a"),)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"messages": []}, "messages: must hold at least one message"),
        ({"messages": {}}, "messages: must be an array, not an object"),
        ({"messages": ["hi"]}, "messages[0]: must be an object, not a string"),
        ({"messages": [{"role": "tool", "content": ""}]}, "messages[0].role: must be user, assistant or system"),
        ({"messages": [HELLO | {"content": 3}]}, "messages[0].content: must be a string or an array of parts, not a"),
        ({"messages": [HELLO | {"content": [3]}]}, "messages[0].content[0]: must be an object, not a number"),
        ({"messages": [HELLO | {"content": [TEXT | {"text": 3}]}]}, "messages[0].content[0].text: must be a string"),
        ({"messages": [HELLO | {"content": {"stdout": "x"}}]}, "messages[0].content[0].type: null is no block"),
        ({"messages": [HELLO | {"content": [{"type": "video"}]}]}, "messages[0].content[0].type: 'video' is no block"),
        (
            {"messages": [HELLO | {"content": [{"type": "tool_use", "id": "c", "input": {}}]}]},
            "messages[0].content[0].name: must be a string, not null",
        ),
        (
            {"messages": [HELLO | {"content": [{"type": "image", "source": {"type": "file"}}]}]},
            "messages[0].content[0].source.type: only base64 and url images can be read",
        ),
        # the words "does not support PDF input" make Claude Code leave the document out
        (
            {"messages": [HELLO | {"content": [{"type": "document", "source": {"type": "base64"}}]}]},
            "messages[0].content[0].source: this model does not support PDF input",
        ),
        ({"system": 3}, "system: must be a string or an array of text blocks, not a number"),
        ({"max_tokens": 0}, "max_tokens: must be at least 1"),
        ({"temperature": "hot"}, "temperature: must be a number, not a string"),
        ({"stop_sequences": [1]}, "stop_sequences: must be a string or an array of strings"),
        ({"tools": [{"description": "x"}]}, "tools[0].name: must be a string, not null"),
        ({"tool_choice": {"type": "sometimes"}}, "tool_choice.type: must be auto, any, tool or none"),
        ({"tool_choice": "auto"}, "tool_choice: must be an object, not a string"),
    ],
)
def test_a_bad_field_is_refused_by_its_path(body: dict[str, object], sentence: str) -> None:
    with pytest.raises(WireError) as caught:
        parse(**body)
    assert caught.value.status == 400
    assert str(caught.value).startswith(sentence)


# Replies

ANSWER = Message(
    role="assistant",
    text="I look",
    reasoning="hm",
    tool_calls=(
        ToolCall(id="c0", name="look", arguments='{"at":  1}'),
        ToolCall(id="c1", name="look", arguments=""),
        ToolCall(id="c2", name="look", arguments='{"at": ', parse_status="malformed"),
    ),
)


def test_a_plain_reply() -> None:
    assert orjson.loads(DIALECT.render(head(), build_reply(ANSWER))) == {
        "id": "msg_s-4",
        "type": "message",
        "role": "assistant",
        "model": "policy",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": SIGNATURE},
            {"type": "text", "text": "I look"},
            {"type": "tool_use", "id": "c0", "name": "look", "input": {"at": 1}},
            {"type": "tool_use", "id": "c1", "name": "look", "input": {}},
            {"type": "tool_use", "id": "c2", "name": "look", "input": {"unparsed_arguments": '{"at": '}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 10,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 3,
        },
    }


def test_a_streamed_reply() -> None:
    start, *blocks, delta, stop = events(
        DIALECT.stream_start(head()),
        *DIALECT.stream(head(), build_reply(Message(role="assistant", text="hi", reasoning="hm"))),
    )
    message = start["message"]
    assert isinstance(message, dict)
    assert (message["usage"]["input_tokens"], message["content"], message["stop_reason"]) == (10, [], None)
    assert blocks == [
        {
            "type": "content_block_start",
            "index": 0,
            "content_block": {"type": "thinking", "thinking": "", "signature": ""},
        },
        {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "hm"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "signature_delta", "signature": SIGNATURE}},
        {"type": "content_block_stop", "index": 0},
        {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "hi"}},
        {"type": "content_block_stop", "index": 1},
    ]
    assert delta == {
        "type": "message_delta",
        "delta": {"stop_reason": "end_turn", "stop_sequence": None},
        "usage": {"output_tokens": 3},
    }
    assert stop == {"type": "message_stop"}


def stream_inputs(agent: str, *arguments: str) -> list[str]:
    """The tool input that an agent is streamed."""
    options = parse({"user-agent": agent}).reply_options
    calls = tuple(ToolCall(id="c", name="look", arguments=text) for text in arguments)
    streamed = events(*DIALECT.stream(head(*options), build_reply(Message(role="assistant", tool_calls=calls))))
    deltas = [event["delta"] for event in streamed if event["type"] == "content_block_delta"]
    return [delta["partial_json"] for delta in deltas if isinstance(delta, dict)]


def test_broken_input_is_streamed_as_written_to_the_one_agent_that_reads_it() -> None:
    broken = '{"at": '
    assert stream_inputs("claude-cli/2.1.332 (external, sdk-cli)", broken) == [broken]
    assert stream_inputs("Anthropic/Python 2.14.0", broken) == ['{"unparsed_arguments":"{\\"at\\": "}']


def test_input_that_is_json_but_no_object_is_wrapped_for_all() -> None:
    # sent as it is, it would come back as an array, for which no format has a place
    for agent in ("claude-cli/2.1.332", "x"):
        assert stream_inputs(agent, "[1]", '{"at":  1}', " ") == ['{"unparsed_arguments":"[1]"}', '{"at":  1}', "{}"]


@pytest.mark.parametrize(
    ("message", "finish_reason", "stop_text", "stop"),
    [
        (ANSWER, "stop", None, ("tool_use", None)),
        (ANSWER, "length", None, ("max_tokens", None)),
        (Message(role="assistant", text="x"), "stop", "END", ("stop_sequence", "END")),
        (Message(role="assistant"), "stop", None, ("end_turn", None)),
    ],
)
def test_why_it_stopped(
    message: Message, finish_reason: str, stop_text: str | None, stop: tuple[str, str | None]
) -> None:
    body = orjson.loads(DIALECT.render(head(), build_reply(message, finish_reason=finish_reason, stop_text=stop_text)))
    assert (body["stop_reason"], body["stop_sequence"]) == stop


def test_an_empty_reply_has_no_blocks() -> None:
    empty = build_reply(Message(role="assistant"))
    assert orjson.loads(DIALECT.render(head(), empty))["content"] == []
    assert [event["type"] for event in events(*DIALECT.stream(head(), empty))] == ["message_delta", "message_stop"]


def test_a_ping() -> None:
    assert DIALECT.ping() == b'event: ping\ndata: {"type":"ping"}\n\n'


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (WireError("x"), 400, "invalid_request_error"),
        (WireError("x", status=401, kind="authentication"), 401, "authentication_error"),
        (WireError("x", status=404, kind="not_found"), 404, "not_found_error"),
        (WireError("x", status=413), 413, "request_too_large"),
        (WireError("x", status=429, kind="overloaded"), 529, "overloaded_error"),
        (WireError("x", status=500, kind="internal"), 500, "api_error"),
    ],
)
def test_errors(error: WireError, status: int, kind: str) -> None:
    assert DIALECT.error_status(error) == status
    body = {"type": "error", "error": {"type": kind, "message": "x"}, "request_id": None}
    assert orjson.loads(DIALECT.render_error(error)) == body
    assert events(DIALECT.stream_error(error)) == [body]


def test_an_overflow_is_said_in_the_words_that_make_claude_code_compact() -> None:
    error = orjson.loads(DIALECT.render_error(ContextOverflowError(100, 64)))["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith("prompt is too long: 100 tokens > 63 maximum")


def test_models() -> None:
    entry = {"type": "model", "id": "policy", "display_name": "policy", "created_at": "1970-01-01T00:00:00Z"}
    listed = orjson.loads(DIALECT.render_models(Incoming(), "policy"))
    assert listed == {"data": [entry], "has_more": False, "first_id": "policy", "last_id": "policy"}
    asked = orjson.loads(DIALECT.render_models(Incoming(path_params={"model": "claude"}), "policy"))
    assert asked == entry | {"id": "claude", "display_name": "claude"}
