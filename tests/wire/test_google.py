"""Render calls as Google's replies, errors and lists of models."""

import base64

import orjson
import pytest
from conversations import build_reply

from polar_trl.errors import ContextOverflowError, WireError
from polar_trl.tokens.canonical import hash_conversation
from polar_trl.types import Message, ToolCall
from polar_trl.wire.base import UNPARSED_ARGUMENTS, Incoming, ItemMemo, ReplyHead
from polar_trl.wire.google import Google

DIALECT = Google()
HEAD = ReplyHead(id="s-4", model="policy", created_s=1700000000.7, num_prompt_tokens=10)


def events(*parts: bytes) -> list[dict[str, object]]:
    payloads = []
    for event in b"".join(parts).split(b"\n\n"):
        if event:
            assert event.startswith(b"data: ")
            payloads.append(orjson.loads(event.removeprefix(b"data: ")))
    return payloads


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
    assert orjson.loads(DIALECT.render(HEAD, build_reply(Message(role="assistant", text="hi")))) == {
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
    candidate = orjson.loads(DIALECT.render(HEAD, build_reply(TOOLS_REPLY)))["candidates"][0]
    thought, text, first, second = candidate["content"]["parts"]
    assert candidate["finishReason"] == "STOP"
    assert (thought["text"], thought["thought"]) == ("think", True)
    assert base64.b64decode(thought["thoughtSignature"], validate=True)
    assert text == {"text": "look"}
    assert first == {"functionCall": {"id": "call_4_0", "name": "sh", "args": {"a": 1}}}
    assert second == {"functionCall": {"id": "call_4_1", "name": "ls", "args": {UNPARSED_ARGUMENTS: '{"a": '}}}


def test_a_reply_cut_at_the_limit_says_so_even_with_tool_calls() -> None:
    reply = orjson.loads(DIALECT.render(HEAD, build_reply(TOOLS_REPLY, finish_reason="length")))
    assert reply["candidates"][0]["finishReason"] == "MAX_TOKENS"


@pytest.mark.parametrize("message", [TOOLS_REPLY, Message(role="assistant", text="a\nb"), Message(role="assistant")])
def test_a_stream_adds_up_to_the_plain_reply(message: Message) -> None:
    assert DIALECT.stream_start(HEAD) == b""
    chunks = events(DIALECT.ping(), *DIALECT.stream(HEAD, build_reply(message)), DIALECT.ping())
    plain = orjson.loads(DIALECT.render(HEAD, build_reply(message)))
    candidates = [chunk["candidates"][0] for chunk in chunks]  # type: ignore[index]
    parts = [part for candidate in candidates for part in candidate["content"]["parts"]]
    assert parts == plain["candidates"][0]["content"]["parts"]
    assert [candidate["finishReason"] for candidate in candidates if "finishReason" in candidate] == ["STOP"]
    assert chunks[1]["usageMetadata"]["promptTokenCount"] == 10  # type: ignore[index]
    assert chunks[-2]["usageMetadata"] == plain["usageMetadata"]
    assert candidates[0] == candidates[-1] == {"content": {"role": "model", "parts": []}, "index": 0}


@pytest.mark.parametrize("with_thoughts", [True, False])
def test_a_reply_sent_back_is_the_same_message(with_thoughts: bool) -> None:
    content = orjson.loads(DIALECT.render(HEAD, build_reply(TOOLS_REPLY)))["candidates"][0]["content"]
    if not with_thoughts:
        content["parts"] = [part for part in content["parts"] if "thought" not in part]
    body = orjson.dumps({"contents": [{"role": "user", "parts": [{"text": "hello"}]}, content]})
    incoming = Incoming(body=body, path="/v1beta/models/policy:generateContent", path_params={"model": "policy"})
    echoed = DIALECT.parse(incoming, ItemMemo()).request.messages[1:]
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
        "message": "The input token count (20) exceeds the maximum number of tokens allowed (9). "
        "vllm_max_model_length sets the context length of 10 tokens; one token is kept for the answer.",
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
