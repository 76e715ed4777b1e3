"""Google's bodies to normal form and back; no body that is JSON may fail with anything but a `WireError`."""

import base64

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_trl.errors import ContextOverflowError, WireError
from polar_trl.tokens.canonical import hash_conversation
from polar_trl.types import Call, ChatRequest, Completion, Message, RequestedSampling, Tool, ToolCall
from polar_trl.wire.base import UNPARSED_ARGUMENTS, Incoming, ItemMemo, ParsedRequest, ReplyHead
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


def call(message: Message, finish_reason: str = "stop") -> Call:
    completion = Completion(token_ids=(1, 2, 3), logprobs=(-0.5,) * 3, finish_reason=finish_reason)  # type: ignore[arg-type]
    return Call(
        session_id="s",
        index=4,
        dialect="google",
        request=ChatRequest(messages=(Message(role="user", text="hello"),)),
        prompt_ids=tuple(range(10)),
        completion=completion,
        message=message,
    )


HEAD = ReplyHead(id="s-4", model="policy", created_s=1700000000.7, num_prompt_tokens=10)


def events(*parts: bytes) -> list[dict[str, object]]:
    payloads = []
    for event in b"".join(parts).split(b"\n\n"):
        if event:
            assert event.startswith(b"data: ")
            payloads.append(orjson.loads(event.removeprefix(b"data: ")))
    return payloads


def test_a_whole_request_in_normal_form() -> None:
    schema = {"type": "object", "properties": {"cmd": {"type": "string"}}}
    parsed = read(
        orjson.dumps(
            {
                "systemInstruction": {"role": "user", "parts": [{"text": "be "}, {"text": "brief"}]},
                "contents": [
                    HELLO,
                    model(
                        {"text": "hm", "thought": True, "thoughtSignature": "eA=="},
                        {"text": "I look."},
                        function_call("sh", {"cmd": "ls"}, id="c1"),
                    ),
                    user(function_response("sh", "a.txt", id="c1"), {"text": "go on"}),
                ],
                "tools": [
                    {"functionDeclarations": [{"name": "sh", "description": "run", "parametersJsonSchema": schema}]}
                ],
                "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["sh"]}},
                "generationConfig": {
                    "maxOutputTokens": 9,
                    "temperature": 1,
                    "topP": 0.5,
                    "topK": 64.0,
                    "stopSequences": ["END", ""],
                },
            }
        ),
        STREAM,
        {"alt": "sse"},
    )
    assert parsed.reply_options == ()
    assert parsed.request == ChatRequest(
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
            Message(role="user", text="go on"),
        ),
        tools=(Tool(name="sh", description="run", parameters=schema),),
        tool_choice="sh",
        sampling=RequestedSampling(max_tokens=9, temperature=1, top_p=0.5, top_k=64, stop=("END",)),
        stream=True,
        model="policy",
    )


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


@pytest.mark.parametrize("contents", ["hello", {"parts": [{"text": "hello"}]}, [{"parts": {}, "role": ""}], ["hello"]])
def test_contents_may_be_a_string_or_a_single_content(contents: object) -> None:
    if contents == [{"parts": {}, "role": ""}]:
        assert refusal(contents=contents) == "contents[0].parts: must be an array, not an object"
    else:
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
        (None, "{}"),
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


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"contents": []}, "contents: must hold at least one content"),
        ({"contents": None}, "contents: must hold at least one content"),
        ({"contents": [3]}, "contents[0]: must be an object, not a number"),
        ({"contents": [{"role": "robot"}]}, "contents[0].role: must be user, model or function"),
        ({"contents": [{"role": ["user"]}]}, "contents[0].role: must be user, model or function"),
        ({"contents": [HELLO, {"parts": [None]}]}, "contents[1].parts[0]: must be an object, not null"),
        ({"contents": [user({"text": 1})]}, "contents[0].parts[0].text: must be a string, not a number"),
        ({"contents": [model({"functionCall": {}})]}, "contents[0].parts[0].functionCall.name: must be a string"),
        ({"contents": [model(function_call("a", [1]))]}, "contents[0].parts[0].functionCall.args: must be an object"),
        (
            {"contents": [user({"functionResponse": {"response": "x"}})]},
            "contents[0].parts[0].functionResponse.response: must be an object",
        ),
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
        ({"generationConfig": {"stopSequences": [1]}}, "generationConfig.stopSequences: must be an array of strings"),
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


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
fields = [
    "contents", "systemInstruction", "system_instruction", "tools", "toolConfig", "functionCallingConfig", "mode",
    "allowedFunctionNames", "generationConfig", "maxOutputTokens", "temperature", "topK", "stopSequences", "role",
    "parts", "text", "thought", "functionCall", "functionResponse", "function_call", "id", "name", "args", "response",
    "inlineData", "fileData", "mimeType", "data", "fileUri", "functionDeclarations", "parameters", "description",
    "parametersJsonSchema", "type", "properties", "items", "anyOf", "nullable", "minItems", "cachedContent", "output",
    "generateContentRequest",
]  # fmt: skip
words = st.sampled_from(["user", "model", "function", "image/png", "ANY", "STRING", "12"])
near_misses = st.recursive(
    json_values | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(fields), inner, max_size=6),
    max_leaves=20,
)


@given(
    json_values | near_misses | st.fixed_dictionaries({"contents": st.lists(near_misses, max_size=3)}),
    st.sampled_from([PLAIN, COUNT]),
)
def test_any_json_is_read_or_refused(value: object, path: str) -> None:
    try:
        request = read(orjson.dumps(value), path).request
    except WireError as error:
        assert error.status == 400
        assert orjson.loads(DIALECT.render_error(error))["error"]["message"] == str(error)
    else:
        assert request.messages


TOOLS_REPLY = Message(
    role="assistant",
    reasoning="think",
    text="look",
    tool_calls=(
        ToolCall(id="call_4_0", name="sh", arguments='{"a": 1}'),
        ToolCall(id="call_4_1", name="ls", arguments='{"a": ', parse_status="malformed"),
    ),
)


def test_a_plain_reply() -> None:
    assert orjson.loads(DIALECT.render(HEAD, call(Message(role="assistant", text="hi")))) == {
        "candidates": [{"content": {"role": "model", "parts": [{"text": "hi"}]}, "index": 0, "finishReason": "STOP"}],
        "usageMetadata": {
            "promptTokenCount": 10,
            "candidatesTokenCount": 3,
            "totalTokenCount": 13,
            "thoughtsTokenCount": 0,
        },
        "modelVersion": "policy",
        "responseId": "s-4",
    }


def test_a_plain_reply_with_thoughts_and_calls() -> None:
    candidate = orjson.loads(DIALECT.render(HEAD, call(TOOLS_REPLY)))["candidates"][0]
    thought, text, first, second = candidate["content"]["parts"]
    assert candidate["finishReason"] == "STOP"
    assert (thought["text"], thought["thought"]) == ("think", True)
    assert base64.b64decode(thought["thoughtSignature"], validate=True)
    assert text == {"text": "look"}
    assert first == {"functionCall": {"id": "call_4_0", "name": "sh", "args": {"a": 1}}}
    assert second == {"functionCall": {"id": "call_4_1", "name": "ls", "args": {UNPARSED_ARGUMENTS: '{"a": '}}}


def test_a_reply_cut_at_the_limit_says_so_even_with_tool_calls() -> None:
    reply = orjson.loads(DIALECT.render(HEAD, call(TOOLS_REPLY, "length")))
    assert reply["candidates"][0]["finishReason"] == "MAX_TOKENS"


@pytest.mark.parametrize("message", [TOOLS_REPLY, Message(role="assistant", text="a\nb"), Message(role="assistant")])
def test_a_stream_adds_up_to_the_plain_reply(message: Message) -> None:
    assert DIALECT.stream_start(HEAD) == b""
    chunks = events(DIALECT.ping(), *DIALECT.stream(HEAD, call(message)), DIALECT.ping())
    plain = orjson.loads(DIALECT.render(HEAD, call(message)))
    candidates = [chunk["candidates"][0] for chunk in chunks]  # type: ignore[index]
    parts = [part for candidate in candidates for part in candidate["content"]["parts"]]
    assert parts == plain["candidates"][0]["content"]["parts"]
    assert [candidate["finishReason"] for candidate in candidates if "finishReason" in candidate] == ["STOP"]
    assert chunks[1]["usageMetadata"]["promptTokenCount"] == 10  # type: ignore[index]
    assert chunks[-2]["usageMetadata"] == plain["usageMetadata"]
    assert candidates[0] == candidates[-1] == {"content": {"role": "model", "parts": []}, "index": 0}


@pytest.mark.parametrize("with_thoughts", [True, False])
def test_a_reply_sent_back_is_the_same_message(with_thoughts: bool) -> None:
    content = orjson.loads(DIALECT.render(HEAD, call(TOOLS_REPLY)))["candidates"][0]["content"]
    if not with_thoughts:
        content["parts"] = [part for part in content["parts"] if "thought" not in part]
    echoed = messages_of(HELLO, content)[1:]
    assert hash_conversation(echoed, ()) == hash_conversation([TOOLS_REPLY], ())
    assert echoed[0].reasoning == ("think" if with_thoughts else None)
    assert echoed[0].tool_calls[1] == TOOLS_REPLY.tool_calls[1]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (WireError("x"), "INVALID_ARGUMENT"),
        (WireError("x", status=401, kind="authentication"), "UNAUTHENTICATED"),
        (WireError("x", status=404, kind="not_found"), "NOT_FOUND"),
        (WireError("x", status=429, kind="overloaded"), "RESOURCE_EXHAUSTED"),
        (WireError("x", status=503, kind="overloaded"), "UNAVAILABLE"),
        (WireError("x", status=500, kind="internal"), "INTERNAL"),
    ],
)
def test_an_error_has_googles_name(error: WireError, status: str) -> None:
    assert DIALECT.error_status(error) == error.status
    assert orjson.loads(DIALECT.render_error(error)) == {
        "error": {"code": error.status, "message": "x", "status": status}
    }


def test_an_overflow_says_both_lengths() -> None:
    assert orjson.loads(DIALECT.render_error(ContextOverflowError(20, 10)))["error"] == {
        "code": 400,
        "message": "The input token count (20) exceeds the maximum number of tokens allowed (9).",
        "status": "INVALID_ARGUMENT",
    }


def test_an_overload_says_when_to_come_back() -> None:
    error = WireError("busy", status=429, kind="overloaded", retry_after_s=2.5)
    assert orjson.loads(DIALECT.render_error(error))["error"]["details"] == [
        {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "2.500s"}
    ]


def test_models() -> None:
    assert orjson.loads(DIALECT.render_models(Incoming(), "policy"))["models"][0]["name"] == "models/policy"
    asked = Incoming(path_params={"model": "org/x"})
    assert orjson.loads(DIALECT.render_models(asked, "policy"))["name"] == "models/org/x"


def test_the_list_of_models_under_v1_is_left_to_openai() -> None:
    listed = {route.path for route in DIALECT.routes if route.method == "GET"}
    assert listed == {
        f"/{version}/models{rest}" for version in ("v1beta", "v1alpha") for rest in ("", "/{model:path}")
    }
