"""Parse Google's bodies into normal form, or refuse them by the field that is wrong."""

from dataclasses import replace
from typing import Literal

import orjson
import pytest
from conversations import WHOLE_REQUEST

from polar_trl.errors import WireError
from polar_trl.types import Message, ToolCall
from polar_trl.wire.base import Incoming, ItemMemo, ParsedRequest
from polar_trl.wire.google import Google

DIALECT = Google()
HELLO = {"role": "user", "parts": [{"text": "hello"}]}
PLAIN = "/v1beta/models/policy:generateContent"
STREAM = "/v1beta/models/policy:streamGenerateContent"
COUNT = "/v1beta/models/policy:countTokens"


def parse(path: str = PLAIN, **body: object) -> ParsedRequest:
    return read(orjson.dumps({"contents": [HELLO], **body}), path)


def read(body: bytes, path: str = PLAIN, query: dict[str, str] | None = None) -> ParsedRequest:
    incoming = Incoming(body=body, path=path, path_params={"model": "policy"}, query=query or {})
    return DIALECT.parse(incoming, ItemMemo())


def refusal(**body: object) -> str:
    with pytest.raises(WireError) as caught:
        parse(**body)  # type: ignore[arg-type]
    assert caught.value.status == 400
    return str(caught.value)


def model(*parts: object) -> dict[str, object]:
    return {"role": "model", "parts": list(parts)}


def user(*parts: object) -> dict[str, object]:
    return {"role": "user", "parts": list(parts)}


def function_call(name: str, args: object = None, **fields: object) -> dict[str, object]:
    return {"functionCall": {"name": name, "args": args or {}, **fields}}


def function_response(name: str, output: object, **fields: object) -> dict[str, object]:
    return {"functionResponse": {"name": name, "response": {"output": output}, **fields}}


def messages_of(*contents: object) -> tuple[Message, ...]:
    return parse(contents=list(contents)).request.messages


def test_a_whole_request_in_normal_form() -> None:
    schema = WHOLE_REQUEST.tools[0].parameters
    body = {
        "systemInstruction": {"role": "user", "parts": [{"text": "be "}, {"text": "brief"}]},
        "contents": [
            HELLO,
            model(
                {"text": "hm", "thought": True, "thoughtSignature": "eA=="},
                {"text": "I look."},
                function_call("sh", {"cmd": "ls"}, id="c1"),
            ),
            user(
                function_response("sh", "a.txt", id="c1"),
                {"text": "see this"},
                {"inlineData": {"mimeType": "image/png", "data": "AA=="}},
            ),
        ],
        "tools": [{"functionDeclarations": [{"name": "sh", "description": "run", "parametersJsonSchema": schema}]}],
        "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["sh"]}},
        "generationConfig": {
            "maxOutputTokens": 9,
            "temperature": 1,
            "topP": 0.5,
            "topK": 3.0,
            "stopSequences": ["END", ""],
        },
    }
    parsed = read(orjson.dumps(body), STREAM, {"alt": "sse"})
    assert parsed.reply_options == ()
    assert parsed.request == WHOLE_REQUEST


def test_snake_case_says_the_same() -> None:
    camel = parse(
        systemInstruction={"parts": [{"text": "x"}]},
        contents=[
            HELLO,
            model(function_call("sh")),
            user({"functionResponse": {"name": "sh", "response": {"a_b": 1}}}),
        ],
        tools=[{"functionDeclarations": [{"name": "sh", "parameters": {"type": "OBJECT", "minProperties": "1"}}]}],
        toolConfig={"functionCallingConfig": {"mode": "NONE"}},
        generationConfig={"maxOutputTokens": 3, "topK": 4},
    )
    snake = parse(
        system_instruction={"parts": [{"text": "x"}]},
        contents=[
            HELLO,
            model({"function_call": {"name": "sh", "args": {}}}),
            user({"function_response": {"name": "sh", "response": {"a_b": 1}}}),
        ],
        tools=[{"function_declarations": [{"name": "sh", "parameters": {"type": "OBJECT", "min_properties": "1"}}]}],
        tool_config={"function_calling_config": {"mode": "NONE"}},
        generation_config={"max_output_tokens": 3, "top_k": 4},
    )
    assert snake == camel
    assert camel.request.tool_choice == "none"
    assert camel.request.messages[-1].text == '{"a_b":1}'


@pytest.mark.parametrize("contents", ["hello", {"parts": [{"text": "hello"}]}, ["hello"]])
def test_contents_may_be_a_string_or_a_single_content(contents: object) -> None:
    assert parse(contents=contents).request.messages == (Message(role="user", text="hello"),)


def test_a_reply_in_several_contents_is_one_message() -> None:
    assert messages_of(HELLO, model({"text": "a"}), model({"text": "b"}, function_call("sh")), model()) == (
        Message(role="user", text="hello"),
        Message(role="assistant", text="ab", tool_calls=(ToolCall(id="unnamed_2_1", name="sh", arguments="{}"),)),
    )


def test_results_without_ids_answer_the_calls_by_name_and_order() -> None:
    calls = model(function_call("a"), function_call("b"), function_call("a"))
    answers = user(function_response("a", "1"), function_response("a", "2"), function_response("b", "3"))
    found = {message.text: message.tool_call_id for message in messages_of(HELLO, calls, answers)[2:]}
    assert found == {"1": "unnamed_1_0", "2": "unnamed_1_2", "3": "unnamed_1_1"}


def test_results_are_matched_over_several_contents_and_only_to_the_reply_before() -> None:
    first, second = model(function_call("a")), model(function_call("a"), function_call("a"))
    answers = [{"role": "function", "parts": [function_response("a", text)]} for text in "123"]
    messages = messages_of(HELLO, first, answers[0], second, answers[1], answers[2])
    assert [message.tool_call_id for message in messages if message.role == "tool"] == [
        "unnamed_1_0",
        "unnamed_3_0",
        "unnamed_3_1",
    ]


def test_a_second_result_of_one_call_takes_no_other_call() -> None:
    # Gemini CLI 0.61.0 sends two after a stream that broke
    calls = model(function_call("a", id="x"), function_call("a", id="y"))
    answers = user(
        function_response("a", "1", id="x"), function_response("a", "1", id="x"), function_response("a", "2", id="y")
    )
    assert [message.tool_call_id for message in messages_of(HELLO, calls, answers)[2:]] == ["x", "x", "y"]


def test_a_result_of_no_call_keeps_its_id() -> None:
    results = messages_of(user(function_response("a", "1", id="x"), function_response("b", "2")))
    assert [message.tool_call_id for message in results] == ["x", None]


def test_results_come_before_the_words_of_the_same_content() -> None:
    messages = messages_of(HELLO, model(function_call("a")), user({"text": "note"}, function_response("a", "1")))
    assert [message.role for message in messages] == ["user", "assistant", "tool", "user"]


@pytest.mark.parametrize(
    ("response", "text"),
    [
        ({"output": "a\nb"}, "a\nb"),
        ({"error": "no such file"}, "no such file"),
        ({"result": "done"}, "done"),
        ({"output": {"a": 1}}, '{"output":{"a":1}}'),
        ({"output": "a", "error": "b"}, '{"output":"a","error":"b"}'),
        ({"other": "a"}, '{"other":"a"}'),
        ({}, "{}"),
        (None, ""),
        ({"output": None}, ""),
        ("plain", "plain"),
        ([1, "a"], '[1,"a"]'),
    ],
)
def test_the_text_of_a_result(response: object, text: str) -> None:
    result = {"functionResponse": {"name": "a", "response": response}}
    assert messages_of(user(result))[0].text == text


def test_images() -> None:
    inline = {"inlineData": {"mimeType": "image/png", "data": "-_8="}}
    by_uri = {"fileData": {"fileUri": "https://x/y.png"}}
    typed = {"fileData": {"fileUri": "https://x/y", "mimeType": "image/webp"}}
    result = {"functionResponse": {"name": "a", "response": {"output": "see"}, "parts": [inline]}}
    assert messages_of(user({"text": "see"}, inline, by_uri, typed), model(function_call("a")), user(result)) == (
        Message(role="user", text="see", images=("data:image/png;base64,+/8=", "https://x/y.png", "https://x/y")),
        Message(role="assistant", tool_calls=(ToolCall(id="unnamed_1_0", name="a", arguments="{}"),)),
        Message(role="tool", text="see", tool_call_id="unnamed_1_0", images=("data:image/png;base64,+/8=",)),
    )


def test_googles_schema_becomes_a_json_schema() -> None:
    schema = {
        "type": "OBJECT",
        "properties": {
            "type": {"type": "STRING", "nullable": True, "enum": ["STRING"]},
            "many": {"type": "ARRAY", "items": {"type": "INTEGER"}, "maxItems": "3"},
            "any_of": {"anyOf": [{"type": "NUMBER"}, {"type": "TYPE_UNSPECIFIED"}]},
        },
        "required": ["type"],
        "propertyOrdering": ["type", "many"],
    }
    tool = parse(tools=[{"functionDeclarations": [{"name": "f", "parameters": schema}]}]).request.tools[0]
    assert tool.parameters == {
        "type": "object",
        "properties": {
            "type": {"type": ["string", "null"], "enum": ["STRING"]},
            "many": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
            "any_of": {"anyOf": [{"type": "number"}, {}]},
        },
        "required": ["type"],
    }


def test_what_is_not_understood_is_named_by_path() -> None:
    executed = {"executableCode": {"language": "PYTHON", "code": "1"}}
    request = parse(
        safetySettings=[],
        contents=[HELLO, model(executed, {"text": "x"}), user({"text": "y"}), model(executed), HELLO],
        tools=[
            {"googleSearch": {}},
            {"functionDeclarations": [{"name": "sh", "behavior": "BLOCKING"}], "codeExecution": {}},
            {"urlContext": {}},
        ],
        toolConfig={"functionCallingConfig": {"mode": "VALIDATED", "allowedFunctionNames": ["sh"]}, "x": 1},
        generationConfig={"thinkingConfig": {}, "responseSchema": {}, "candidateCount": 1},
    ).request
    assert request.unread == (
        "safetySettings",
        "contents[1].parts[0].executableCode",
        "tools[0].googleSearch",
        "tools[1].codeExecution",
        "tools[1].functionDeclarations[0].behavior",
        "tools[2].urlContext",
        "toolConfig.x",
        "toolConfig.functionCallingConfig.allowedFunctionNames",
        "generationConfig.thinkingConfig",
        "generationConfig.responseSchema",
    )
    assert [tool.name for tool in request.tools] == ["sh"]
    assert request.tool_choice == "auto"


@pytest.mark.parametrize(
    ("mode", "choice"),
    [("AUTO", "auto"), ("ANY", "required"), ("NONE", "none"), ("VALIDATED", "auto"), ("any", "required")],
)
def test_tool_choice(mode: str, choice: str) -> None:
    assert parse(toolConfig={"functionCallingConfig": {"mode": mode}}).request.tool_choice == choice


def test_a_history_that_was_read_before_is_read_as_without_memory() -> None:
    memo = ItemMemo()
    grown = [HELLO, model(function_call("a")), user(function_response("a", "1")), model({"text": "x"}), HELLO]
    edited = [HELLO, HELLO, *grown[1:]]
    known: tuple[Message, ...] = ()
    for contents in (grown[:1], grown[:3], grown, edited, grown[:2]):
        body = orjson.dumps({"contents": contents})
        request = DIALECT.parse(Incoming(body=body, path=PLAIN, path_params={"model": "policy"}), memo).request
        assert request == read(body).request
        if len(contents) == 5 and contents is grown:
            assert all(now is before for now, before in zip(request.messages, known, strict=False))
        known = request.messages
    with pytest.raises(WireError, match=r"contents\[1\]\.parts\[0\]\.text"):
        DIALECT.parse(Incoming(body=orjson.dumps({"contents": [HELLO, model({"text": 1})]}), path=PLAIN), memo)


def test_a_stream_that_is_no_server_sent_events_is_refused() -> None:
    for query in ({}, {"alt": "json"}):
        with pytest.raises(WireError, match=r"^alt: "):
            read(orjson.dumps({"contents": [HELLO]}), STREAM, query)


def test_counted_requests_are_read_bare_or_wrapped() -> None:
    bare = parse(COUNT, systemInstruction={"parts": [{"text": "x"}]})
    inner = {"model": "models/policy", "contents": [HELLO], "systemInstruction": {"parts": [{"text": "x"}]}}
    assert read(orjson.dumps({"generateContentRequest": inner}), COUNT) == bare
    assert bare.request.messages[0] == Message(role="system", text="x")
    with pytest.raises(WireError, match=r"^generateContentRequest\.contents\[0\]\.role: "):
        read(orjson.dumps({"generateContentRequest": {"contents": [{"role": "robot"}]}}), COUNT)


def replied(arguments: str, status: Literal["ok", "malformed"] = "ok") -> Message:
    call = ToolCall(id="c1", name="a", arguments=arguments, parse_status=status)
    return Message(role="assistant", tool_calls=(call,))


def call_with(**fields: object) -> dict[str, object]:
    return model({"functionCall": {"name": "a", "id": "c1", **fields}})


@pytest.mark.parametrize(
    ("content", "read"),
    [
        ({"role": "user", "parts": None}, Message(role="user")),
        ({"role": "user"}, Message(role="user")),
        ({"role": None, "parts": [{"text": "x"}]}, Message(role="user", text="x")),
        ("x", Message(role="user", text="x")),
        ({"role": "user", "parts": {"text": "x"}}, Message(role="user", text="x")),
        (user(None, {}, "x", {"text": None}, {"text": None, "thought": None}), Message(role="user", text="x")),
        (user({"text": "x", "inlineData": None, "functionCall": None}), Message(role="user", text="x")),
        (user({"functionResponse": {"name": "a", "response": None}}), Message(role="tool")),
        (user({"functionResponse": {"name": None, "id": None, "parts": None}}), Message(role="tool")),
        (model({"text": None, "thought": True}), Message(role="assistant")),
        (model({"thought": True, "thoughtSignature": "x"}, {"text": "x"}), Message(role="assistant", text="x")),
        (call_with(args=None), replied("{}")),
        (call_with(), replied("{}")),
        (call_with(args=[]), replied("{}")),
        (call_with(args={"n": 1.0}), replied('{"n":1.0}')),
        (call_with(args='{"n": 1}'), replied('{"n": 1}')),
        (call_with(args=[1]), replied("[1]", "malformed")),
    ],
)
def test_what_says_nothing_is_accepted_in_a_content(content: object, read: Message) -> None:
    assert messages_of(HELLO, content)[1:] == (read,)


def test_what_says_nothing_is_accepted_in_a_body() -> None:
    names = ("systemInstruction", "tools", "toolConfig", "generationConfig", "cachedContent", "safetySettings")
    nothing = parse(**dict.fromkeys(names)).request  # type: ignore[arg-type]
    assert replace(nothing, unread=()) == parse().request
    empty = parse(systemInstruction={"parts": [None]}, tools=[], toolConfig={}, generationConfig={}, cachedContent="")
    assert empty.request == parse().request
    assert parse(systemInstruction=[], toolConfig=[], generationConfig=[]).request == parse().request  # PHP's {}
    config = {"maxOutputTokens": 8.0, "stopSequences": [None, "END"], "candidateCount": None, "topP": None}
    sampling = parse(generationConfig=config).request.sampling
    assert (sampling.max_tokens, sampling.stop) == (8, ("END",))


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"contents": []}, "contents: must hold at least one content"),
        ({"contents": None}, "contents: must hold at least one content"),
        ({"contents": [3]}, "contents[0]: must be an object, not a number"),
        ({"contents": [{"role": "robot"}]}, "contents[0].role: must be user, model or function"),
        ({"contents": [{"role": ["user"]}]}, "contents[0].role: must be user, model or function"),
        ({"contents": [HELLO, {"parts": [3]}]}, "contents[1].parts[0]: must be an object, not a number"),
        ({"contents": [{"parts": 3}]}, "contents[0].parts: must be a string or an array of parts, not a number"),
        ({"contents": [HELLO, None]}, "contents[1]: must be an object, not null"),
        ({"contents": [user({"text": 1})]}, "contents[0].parts[0].text: must be a string, not a number"),
        ({"contents": [model({"functionCall": {}})]}, "contents[0].parts[0].functionCall.name: must be a string"),
        (
            {"contents": [user({"inlineData": {"mimeType": "application/pdf", "data": ""}})]},
            "contents[0].parts[0].inlineData.mimeType: only images can be read, not application/pdf",
        ),
        (
            {"contents": [user({"fileData": {"fileUri": "gs://x"}})]},
            "contents[0].parts[0].fileData.mimeType: only images can be read, not a file of unknown type",
        ),
        ({"systemInstruction": 1}, "systemInstruction: must be an object, not a number"),
        ({"tools": {}}, "tools: must be an array, not an object"),
        ({"tools": [{"functionDeclarations": [{}]}]}, "tools[0].functionDeclarations[0].name: must be a string"),
        (
            {"toolConfig": {"functionCallingConfig": {"mode": "X"}}},
            "toolConfig.functionCallingConfig.mode: must be one",
        ),
        ({"generationConfig": {"candidateCount": 2}}, "generationConfig.candidateCount: only one candidate"),
        ({"generationConfig": {"maxOutputTokens": 0}}, "generationConfig.maxOutputTokens: must be at least 1"),
        ({"generationConfig": {"stopSequences": [1]}}, "generationConfig.stopSequences: must be a string or an"),
        ({"generationConfig": {"temperature": "hot"}}, "generationConfig.temperature: must be a number, not a string"),
        ({"cachedContent": "cachedContents/1"}, "cachedContent: nothing is cached here"),
    ],
)
def test_a_bad_field_is_refused_by_its_path(body: dict[str, object], sentence: str) -> None:
    assert refusal(**body).startswith(sentence)


def nest(body: object) -> bytes:
    """The body as JSON, with 300 objects in each other where it says "deep"."""
    return orjson.dumps(body).replace(b'"deep"', b'{"items":' * 300 + b"{}" + b"}" * 300)


@pytest.mark.parametrize(
    ("body", "path"),
    [
        (
            {"contents": [model({"functionCall": {"name": "a", "args": "deep"}})]},
            "contents[0].parts[0].functionCall.args",
        ),
        ({"contents": [user(function_response("a", "deep"))]}, "contents[0].parts[0].functionResponse.response"),
        (
            {"contents": [HELLO], "tools": [{"functionDeclarations": [{"name": "a", "parameters": "deep"}]}]},
            "tools[0].functionDeclarations[0].parameters",
        ),
    ],
)
def test_what_is_nested_too_deeply_is_refused_by_its_path(body: object, path: str) -> None:
    with pytest.raises(WireError) as caught:
        read(nest(body))
    assert str(caught.value).startswith(f"{path}: ")
