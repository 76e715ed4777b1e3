"""Parse Chat Completions bodies into normal form, and render calls as completions and chunks."""

from dataclasses import replace
from typing import Literal

import orjson
import pytest
from conversations import PNG, WHOLE_REQUEST, build_reply
from hypothesis import given
from hypothesis import strategies as st

from polar_trl.errors import ContextOverflowError, WireError
from polar_trl.tokens.canonical import canonical_arguments
from polar_trl.types import ChatRequest, Message, RequestedSampling, Tool, ToolCall
from polar_trl.wire.base import Incoming, ItemMemo, ParsedRequest, ReplyHead
from polar_trl.wire.openai_chat import OpenAIChat

DIALECT = OpenAIChat()
HELLO = {"role": "user", "content": "hello"}


def parse(**body: object) -> ParsedRequest:
    return read(orjson.dumps({"messages": [HELLO], **body}))


def read(body: bytes) -> ParsedRequest:
    return DIALECT.parse(Incoming(body=body), ItemMemo())


def refusal(**body: object) -> str:
    with pytest.raises(WireError) as caught:
        parse(**body)
    assert caught.value.status == 400
    return str(caught.value)


def head(*options: str) -> ReplyHead:
    return ReplyHead(id="s-4", model="policy", created_s=1700000000.7, num_prompt_tokens=10, options=options)


def events(*parts: bytes) -> list[object]:
    """The payloads of a stream, "[DONE]" as text."""
    payloads = []
    for event in b"".join(parts).split(b"\n\n"):
        if event:
            assert event.startswith(b"data: ")
            data = event.removeprefix(b"data: ")
            payloads.append(data.decode() if data == b"[DONE]" else orjson.loads(data))
    return payloads


def test_a_whole_request_in_normal_form() -> None:
    function = {"name": "sh", "arguments": '{"cmd":"ls"}'}
    parsed = parse(
        model="policy",
        stream=True,
        stream_options={"include_usage": True},
        messages=[
            {"role": "system", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]},
            HELLO,
            {
                "role": "assistant",
                "content": "I look.",
                "reasoning_content": "hm",
                "tool_calls": [{"id": "c1", "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "a.txt"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "see this"}, {"type": "image_url", "image_url": {"url": PNG}}],
            },
        ],
        tools=[
            {
                "type": "function",
                "function": {"name": "sh", "description": "run", "parameters": WHOLE_REQUEST.tools[0].parameters},
            }
        ],
        tool_choice={"type": "function", "function": {"name": "sh"}},
        max_tokens=9,
        temperature=1,
        top_p=0.5,
        top_k=3,
        stop="END",
    )
    assert parsed.reply_options == ("include_usage",)
    assert parsed.request == WHOLE_REQUEST


def test_developer_messages_may_stand_anywhere_and_a_call_needs_no_text() -> None:
    function = {"name": "sh", "arguments": '{"cmd":  "ls"}'}
    calls = [{"id": "c1", "type": "function", "function": function}]
    spoken = {"role": "assistant", "content": None, "tool_calls": calls}
    assert parse(messages=[HELLO, spoken, {"role": "developer", "content": "late"}]).request.messages[1:] == (
        Message(role="assistant", tool_calls=(ToolCall(id="c1", name="sh", arguments='{"cmd":  "ls"}'),)),
        Message(role="developer", text="late"),
    )


def test_reasoning_is_read_under_either_name() -> None:
    for name in ("reasoning", "reasoning_content"):
        messages = [HELLO, {"role": "assistant", "content": "x", name: "why"}, HELLO]
        assert parse(messages=messages).request.messages[1].reasoning == "why"


def test_what_is_not_understood_is_named_by_path() -> None:
    parsed = parse(
        logit_bias={"1": 2},
        messages=[HELLO | {"name": "bob"}, HELLO | {"name": "eve"}],
        tools=[{"type": "web_search"}, {"type": "function", "function": {"name": "sh"}}, {"type": ["new"]}],
    )
    assert parsed.request.unread == ("logit_bias", "messages[0].name", "tools[0]", "tools[2]")
    assert [tool.name for tool in parsed.request.tools] == ["sh"]


def test_fields_that_change_no_prompt_are_named_and_do_no_harm() -> None:
    fields = {
        "store": True,
        "metadata": {"a": "b"},
        "seed": 1,
        "user": "u",
        "reasoning_effort": "high",
        "parallel_tool_calls": False,
        "logprobs": True,
        "top_logprobs": 5,
        "prediction": {"type": "content", "content": "x"},
        "modalities": ["text", "audio"],
        "audio": {"voice": "alloy"},
        "functions": [{"name": "sh"}],
        "function_call": {"name": "sh"},
        "response_format": {"type": "json_object"},
        "stream": None,
        "n": 1,
    }
    request = parse(**fields).request
    assert request == ChatRequest(messages=parse().request.messages, unread=tuple(fields)[:-2])


def test_a_choice_of_a_tool_that_is_not_there_chooses_nothing() -> None:
    choice = {"type": "function", "function": {"name": "ls"}}
    tools = [{"type": "function", "function": {"name": "sh"}}]
    request = parse(tools=tools, tool_choice=choice).request
    assert (request.tool_choice, request.unread) == ("auto", ("tool_choice",))
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}
    assert parse(tool_choice=allowed).request.unread == ("tool_choice",)


CUSTOM_TOOLS = [
    {
        "type": "custom",
        "custom": {
            "name": "patch",
            "description": "Change files.",
            "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: WORD"}},
        },
    },
    {"type": "custom", "custom": {"name": "note", "format": {"type": "text"}}},
]


def test_a_custom_tool_is_a_function_of_one_string() -> None:
    request = parse(tools=CUSTOM_TOOLS, tool_choice={"type": "custom", "custom": {"name": "note"}}).request
    patch, note = request.tools
    assert patch.description == "Change files.\n\nThe input must match this grammar (lark):\nstart: WORD"
    assert (patch.kind, note.kind, note.description) == ("freeform", "freeform", "")
    assert list(note.parameters["properties"]) == note.parameters["required"] == ["input"]
    assert (request.tool_choice, request.unread) == ("note", ())


@pytest.mark.parametrize("arguments", ['{"input": "say \\"x\\""}', '{"input": 3}', '{"other": ""}', '{"inp', "{}"])
def test_a_call_of_a_custom_tool_comes_back_as_it_was_sampled(arguments: str) -> None:
    parsed = parse(tools=CUSTOM_TOOLS).request
    message = Message(role="assistant", tool_calls=(ToolCall(id="c", name="patch", arguments=arguments),))
    reply = orjson.loads(DIALECT.render(head(), replace(build_reply(message), request=parsed)))["choices"][0][
        "message"
    ]
    (sent,) = reply["tool_calls"]
    assert (sent["type"], sent["custom"]["name"]) == ("custom", "patch")
    if arguments.startswith('{"input": "'):
        assert (sent["id"], sent["custom"]["input"]) == ("c", 'say "x"')
    (echoed,) = parse(messages=[HELLO, reply]).request.messages[1].tool_calls
    assert echoed.name == "patch"
    assert canonical_arguments(echoed.arguments) == canonical_arguments(arguments)


def test_malformed_arguments_in_the_history_are_kept_and_marked() -> None:
    broken = {"id": "c", "function": {"name": "sh", "arguments": '{"a":'}}
    request = parse(messages=[HELLO, {"role": "assistant", "tool_calls": [broken]}]).request
    assert request.messages[1].tool_calls == (
        ToolCall(id="c", name="sh", arguments='{"a":', parse_status="malformed"),
    )


def test_a_history_that_was_read_before_is_read_as_without_memory() -> None:
    memo = ItemMemo()
    calls = [{"id": "c", "type": "function", "function": {"name": "sh", "arguments": "{}"}}]
    grown: list[dict[str, object]] = [
        HELLO,
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "content": "x"},
    ]
    edited = [HELLO | {"content": "hello!"}, *grown[1:], HELLO | {"name": "bob"}]
    before: tuple[Message, ...] = ()
    for messages in (grown[:1], grown, edited, grown[:2]):
        body = orjson.dumps({"messages": messages})
        request = DIALECT.parse(Incoming(body=body), memo).request
        assert request == read(body).request
        before = before or request.messages
        if messages is grown:
            assert request.messages[0] is before[0]
    with pytest.raises(WireError, match=r"messages\[1\]\.content"):
        DIALECT.parse(Incoming(body=orjson.dumps({"messages": [HELLO, {"role": "user", "content": 3}]})), memo)


def call_with(**function: object) -> dict[str, object]:
    call = {"id": None, "type": "function", "function": {"name": "sh", **function}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def called(arguments: str, status: Literal["ok", "malformed"] = "ok") -> Message:
    call = ToolCall(id="", name="sh", arguments=arguments, parse_status=status)
    return Message(role="assistant", tool_calls=(call,))


SAID = {"role": "assistant", "content": "x"}
SPOKEN = Message(role="assistant", text="x")


@pytest.mark.parametrize(
    ("message", "read"),
    [
        ({"role": "user", "content": None}, Message(role="user")),
        ({"role": "user"}, Message(role="user")),
        ({"role": "system", "content": None}, Message(role="system")),
        ({"role": "tool", "content": None}, Message(role="tool")),
        ({"role": "tool", "tool_call_id": None, "content": []}, Message(role="tool")),
        ({"role": "tool", "tool_call_id": "c"}, Message(role="tool", tool_call_id="c")),
        ({"role": "tool", "content": {"type": "text", "text": "x"}}, Message(role="tool", text="x")),
        ({"role": "user", "content": ["a", None, {}, {"type": "text", "text": None}]}, Message(role="user", text="a")),
        ({"role": "user", "content": [{"text": "a"}, {"type": "note", "text": "b"}]}, Message(role="user", text="ab")),
        ({"role": "user", "content": [{"type": "input_text", "text": "a"}]}, Message(role="user", text="a")),
        ({"role": "user", "content": [{"type": "summary_text", "text": "a"}]}, Message(role="user", text="a")),
        ({"role": "assistant", "content": None, "tool_calls": None}, Message(role="assistant")),
        (SAID | {"tool_calls": [], "reasoning_content": None, "reasoning": None, "name": None}, SPOKEN),
        (SAID | {"reasoning": {"effort": "high"}, "reasoning_content": [3, None]}, SPOKEN),
        (SAID | {"reasoning": [{"type": "text", "text": "why"}]}, replace(SPOKEN, reasoning="why")),
        (SAID | {"thinking": {"thinking": "why", "signature": "s"}}, replace(SPOKEN, reasoning="why")),
        (
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "why"}, {"type": "text", "text": "x"}]},
            replace(SPOKEN, reasoning="why"),
        ),
        (
            {
                "role": "assistant",
                "content": ["x", {"type": "thinking", "thinking": [{"type": "text", "text": "why"}]}],
            },
            replace(SPOKEN, reasoning="why"),
        ),
        ({"role": "assistant", "content": [{"type": "redacted_thinking", "data": "?"}, "x"]}, SPOKEN),
        ({"role": "assistant", "content": [{"type": "reasoning", "text": None}, "x"]}, SPOKEN),
        (call_with(arguments={"cmd": "ls"}), called('{"cmd":"ls"}')),
        (call_with(arguments=None), called("", "malformed")),
        (call_with(), called("", "malformed")),
        (call_with(arguments={}), called("{}")),
        (call_with(arguments=["ls"]), called('["ls"]', "malformed")),
    ],
)
def test_what_says_nothing_is_accepted_in_a_message(message: dict[str, object], read: Message) -> None:
    assert parse(messages=[HELLO, message]).request.messages[1:] == (read,)


def test_what_says_nothing_is_accepted_in_a_body() -> None:
    nothing = dict.fromkeys(("tools", "tool_choice", "stream", "stream_options", "n", "model", "temperature", "stop"))
    assert parse(**nothing).request == parse().request
    assert parse(tools=[], tool_choice="", stop=[], stream_options={}).request == parse().request
    request = parse(max_tokens=8.0, stop=[None, "", "END"], tools=[{"function": {"name": "sh", "parameters": []}}])
    assert request.request.sampling == RequestedSampling(max_tokens=8, stop=("END",))
    assert request.request.tools == (Tool(name="sh"),)


def test_the_smaller_token_limit_counts() -> None:
    assert parse(max_tokens=7, max_completion_tokens=5).request.sampling.max_tokens == 5


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"messages": []}, "messages: must hold at least one message"),
        ({"messages": None}, "messages: must hold at least one message"),
        ({"messages": {}}, "messages: must be an array, not an object"),
        ({"messages": ["hi"]}, "messages[0]: must be an object, not a string"),
        ({"messages": [HELLO, {"role": "robot", "content": ""}]}, "messages[1].role: must be one of system, "),
        ({"messages": [{"role": ["user"]}]}, "messages[0].role: must be one of system, "),
        (
            {"messages": [{"role": "user", "content": 3}]},
            "messages[0].content: must be a string or an array of parts, not a number",
        ),
        ({"messages": [HELLO | {"content": [{"type": "text", "text": 3}]}]}, "messages[0].content[0].text: must be a"),
        ({"messages": [HELLO | {"content": [{"type": "file"}]}]}, "messages[0].content[0].type: only text"),
        ({"messages": [HELLO | {"content": {"stdout": "x"}}]}, "messages[0].content[0].type: only text"),
        ({"messages": [HELLO | {"content": [3]}]}, "messages[0].content[0]: must be an object, not a number"),
        (
            {"messages": [HELLO | {"content": [{"type": "image_url", "image_url": None}]}]},
            "messages[0].content[0].image_url: must be a string or an object with a url, not null",
        ),
        ({"messages": [None]}, "messages[0]: must be an object, not null"),
        ({"messages": [HELLO | {"content": [{"type": "context"}]}]}, "messages[0].content[0].type: only text and"),
        ({"messages": [HELLO | {"content": [{"type": "thinking"}]}]}, "messages[0].content[0].type: only text and"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function: must be an"),
        ({"n": 2}, "n: only one choice per request is supported; send n=1 or leave it out"),
        ({"n": 0}, "n: only one choice"),
        ({"max_tokens": 0}, "max_tokens: must be at least 1"),
        ({"max_tokens": True}, "max_tokens: must be a whole number, not a boolean"),
        ({"temperature": "hot"}, "temperature: must be a number, not a string"),
        ({"stop": [1]}, "stop: must be a string or an array of strings"),
        ({"stop": {}}, "stop: must be a string or an array of strings"),
        ({"stop": False}, "stop: must be a string or an array of strings"),
        ({"stream": "yes"}, "stream: must be a boolean, not a string"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage: must be a boolean, not a number"),
        ({"tools": [{"type": "function"}]}, "tools[0].function: must be an object with a name"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name: must be a string, not null"),
        ({"tools": [{"type": "custom"}]}, "tools[0].custom: must be an object with a name"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].custom.name: must be a string, not null"),
        (
            {"tools": [{"type": "custom", "custom": {"name": "p", "format": {"type": "grammar"}}}]},
            "tools[0].custom.format.grammar.syntax: must be a string, not null",
        ),
        ({"tool_choice": "sometimes"}, "tool_choice: must be auto, none, required or"),
        ({"tool_choice": {"type": "custom"}}, "tool_choice.custom.name: must be a string, not null"),
        ({"max_tokens": 8.5}, "max_tokens: must be a whole number, not a number"),
        ({"max_tokens": 1e300}, "max_tokens: must be a whole number, not a number"),
    ],
)
def test_a_bad_field_is_refused_by_its_path(body: dict[str, object], sentence: str) -> None:
    assert refusal(**body).startswith(sentence)


@pytest.mark.parametrize("body", [b"", b"{", b"nope", b'{"messages": NaN}', b"\xff\xfe", b"[" * 100_000])
def test_a_body_that_is_not_json_is_refused(body: bytes) -> None:
    with pytest.raises(WireError, match="the body is not valid JSON") as caught:
        read(body)
    assert caught.value.status == 400


def test_half_an_emoji_is_replaced() -> None:
    body = b'{"messages": [{"role": "user", "content": "cut \\ud83d here \\\\ud83d \\u00e9"}]}'
    assert read(body).request.messages[0].text == "cut \ufffd here \\ud83d é"


@given(st.binary(max_size=50))
def test_any_bytes_are_read_or_refused(body: bytes) -> None:
    with pytest.raises(WireError):
        read(body)


TOOLS_REPLY = Message(
    role="assistant",
    reasoning="think",
    tool_calls=(
        ToolCall(id="call_4_0", name="sh", arguments='{"a": '),
        ToolCall(id="call_4_1", name="ls", arguments="{}"),
    ),
)


def test_a_plain_reply() -> None:
    body = orjson.loads(DIALECT.render(head(), build_reply(Message(role="assistant", text="hi"))))
    assert body == {
        "id": "chatcmpl-s-4",
        "object": "chat.completion",
        "created": 1700000000,
        "model": "policy",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hi"},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 10, "completion_tokens": 3, "total_tokens": 13},
    }


def test_a_plain_reply_with_tools_and_reasoning() -> None:
    choice = orjson.loads(DIALECT.render(head(), build_reply(TOOLS_REPLY)))["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "reasoning_content": "think",
        "tool_calls": [
            {"id": "call_4_0", "type": "function", "function": {"name": "sh", "arguments": '{"a": '}},
            {"id": "call_4_1", "type": "function", "function": {"name": "ls", "arguments": "{}"}},
        ],
    }


def test_a_reply_cut_at_the_limit_says_so_even_with_tool_calls() -> None:
    assert (
        orjson.loads(DIALECT.render(head(), build_reply(TOOLS_REPLY, finish_reason="length")))["choices"][0][
            "finish_reason"
        ]
        == "length"
    )


@pytest.mark.parametrize(
    "message", [TOOLS_REPLY, Message(role="assistant", text="one\ntwo"), Message(role="assistant")]
)
def test_a_stream_adds_up_to_the_plain_reply(message: Message) -> None:
    *chunks, usage, done = events(
        DIALECT.stream_start(head("include_usage")), *DIALECT.stream(head("include_usage"), build_reply(message))
    )
    plain = orjson.loads(DIALECT.render(head(), build_reply(message)))
    total: dict[str, object] = {"role": None, "content": "", "reasoning_content": "", "tool_calls": []}
    for chunk in chunks:
        for key, value in chunk["choices"][0]["delta"].items():  # type: ignore[index]
            total[key] = value if key == "role" else total[key] + value  # type: ignore[operator]
    whole = plain["choices"][0]["message"]
    assert total["role"] == "assistant"
    assert total["content"] == (whole["content"] or "")
    assert total["reasoning_content"] == whole.get("reasoning_content", "")
    indexed = [{"index": index, **item} for index, item in enumerate(whole.get("tool_calls", []))]
    assert total["tool_calls"] == indexed
    assert chunks[-1]["choices"][0]["finish_reason"] == plain["choices"][0]["finish_reason"]  # type: ignore[index]
    assert usage["choices"] == [] and usage["usage"] == plain["usage"]  # type: ignore[index, call-overload]
    assert {chunk["id"] for chunk in chunks} == {plain["id"]}  # type: ignore[index]
    assert done == "[DONE]"


def test_usage_is_streamed_only_when_asked_for() -> None:
    chunks = events(*DIALECT.stream(head(), build_reply(Message(role="assistant", text="hi"))))
    assert all("usage" not in chunk for chunk in chunks[:-1])  # type: ignore[operator]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (WireError("x", status=401, kind="authentication"), "invalid_api_key"),
        (ContextOverflowError(20, 10), "context_length_exceeded"),
        (WireError("x", status=503, kind="overloaded"), "overloaded"),
        (WireError("x", status=500, kind="internal"), "internal_error"),
        (WireError("x", status=404, kind="not_found"), "not_found"),
        (WireError("x"), None),
    ],
)
def test_an_error_body_has_the_code_that_clients_look_for(error: WireError, code: str | None) -> None:
    assert orjson.loads(DIALECT.render_error(error))["error"]["code"] == code


def test_an_error_body_names_the_field() -> None:
    body = orjson.loads(DIALECT.render_error(WireError("messages[3].content: must be a string")))["error"]
    assert body["param"] == "messages[3].content"
    assert body["type"] == "invalid_request_error"


def test_an_overflow_says_both_lengths() -> None:
    text = orjson.loads(DIALECT.render_error(ContextOverflowError(20, 10)))["error"]["message"]
    assert text.startswith("This model's maximum context length is 10 tokens.") and "20 tokens" in text


def test_models() -> None:
    assert orjson.loads(DIALECT.render_models(Incoming(), "policy"))["data"][0]["id"] == "policy"
    asked = Incoming(path_params={"model": "org/x"})
    assert orjson.loads(DIALECT.render_models(asked, "policy"))["id"] == "org/x"
