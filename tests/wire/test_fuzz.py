"""Bodies that no honest agent sends: each is read or refused with an error that the format can show, and the proxy
serves on. How long large ones take is measured by scripts/bench/bench_parse.py."""

import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import httpx
import orjson
import pytest
from clients import CLIENTS
from conversations import Style, json_values, requests, styles
from hypothesis import given, settings
from hypothesis import strategies as st
from large_bodies import SHAPES, build

from polar_trl.engine.base import GenerationParams
from polar_trl.engine.scripted import ScriptedEngine
from polar_trl.errors import WireError
from polar_trl.proxy import Proxy
from polar_trl.recording.log import SessionLog
from polar_trl.recording.session import SessionLimits
from polar_trl.tokens.bytes import ByteRenderer
from polar_trl.tokens.continuation import Continuations
from polar_trl.types import ChatRequest, Message, RequestedSampling, Tool, ToolCall, ToolKind
from polar_trl.wire import DIALECTS
from polar_trl.wire.base import Dialect, Incoming, ItemMemo

RENDERER = ByteRenderer()
REPLY = RENDERER.spell(Message(role="assistant", text="ok"))
every_dialect = pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)

# Spliced into the text of a body in place of these names, since Python's own writer refuses them.
SPLICES = {
    "@lists@": "[" * 300 + "]" * 300,
    "@objects@": '{"a":' * 300 + "1" + "}" * 300,
    "@many lists@": "[" * 1000 + "]" * 1000,
    "@too many lists@": "[" * 1100 + "]" * 1100,
    "@integer@": "9" * 400,
    "@long integer@": "9" * 5000,
    "@float@": "1e999",
    "@half@": '"\\ud83d"',
    "@not a number@": "NaN",
    "@infinity@": "-Infinity",
}
# copies: what is drawn is changed in its place, and would be another value for the next example
odd_values = st.sampled_from([{}, [], "", [{}], 0, -1, 1.5, True, None]).map(deepcopy)
junk = json_values | st.sampled_from(list(SPLICES)) | odd_values
WORDS = (
    "user", "assistant", "model", "tool", "system", "text", "auto", "any", "none", "type", "function", "image",
    "tool_use", "tool_result", "thinking", "reasoning", "message", "function_call", "function_call_output", "custom",
    "compaction_trigger", "additional_tools", "namespace", "functionCall", "functionResponse", "inlineData",
)  # fmt: skip


def _slots(value: Any) -> list[tuple[Any, Any]]:
    """Every place in a JSON value, as (holder, key or index)."""
    places: list[tuple[Any, Any]] = []
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            places.append((value, key))
            places += _slots(item)
    return places


def _mutate(draw: st.DrawFn, body: dict[str, Any]) -> None:
    places = _slots(body)
    if not places:
        return
    holder, key = places[draw(st.integers(0, len(places) - 1))]
    kind = draw(st.sampled_from(["replace", "replace", "word", "delete", "wrap", "copy", "double", "add"]))
    if kind == "replace":
        holder[key] = draw(junk)
    elif kind == "word":
        holder[key] = draw(st.sampled_from(WORDS))
    elif kind == "delete":
        del holder[key]
    elif kind == "wrap":
        holder[key] = [holder[key]] if draw(st.booleans()) else {draw(st.sampled_from(WORDS)): holder[key]}
    elif kind == "copy":
        other, other_key = places[draw(st.integers(0, len(places) - 1))]
        holder[key] = json.loads(json.dumps(other[other_key]))
    elif kind == "double" and isinstance(holder, list):
        holder.insert(key, json.loads(json.dumps(holder[key])))
    elif isinstance(holder, dict):
        holder[draw(st.sampled_from(WORDS))] = draw(junk)


def _write(body: dict[str, Any]) -> bytes:
    text = json.dumps(body)
    for name, splice in SPLICES.items():
        text = text.replace(f'"{name}"', splice)
    return text.encode()


@st.composite
def broken_bodies(draw: st.DrawFn, dialect: Dialect) -> tuple[Incoming, bytes]:
    """A request that was valid, and the bytes to send in place of its body."""
    client_class = CLIENTS[dialect.name]
    incoming = client_class(draw(requests(client_class.kinds)), draw(styles)).incoming()
    body = json.loads(incoming.body)
    for _ in range(draw(st.integers(1, 3))):
        _mutate(draw, body)
    raw = _write(body)
    kind = draw(st.sampled_from(["whole"] * 6 + ["cut", "byte", "random"]))
    if kind == "cut":
        raw = raw[: draw(st.integers(0, len(raw)))]
    elif kind == "byte":
        place = draw(st.integers(0, len(raw)))
        raw = raw[:place] + draw(st.binary(min_size=1, max_size=3)) + raw[place + 1 :]
    elif kind == "random":
        raw = draw(st.binary(max_size=60))
    return incoming, raw


def _rich_request(kinds: tuple[ToolKind, ...]) -> ChatRequest:
    """With everything that a format can say."""
    tools = [Tool(name=kind if kind == "local_shell" else f"t-{kind}", description="d", kind=kind) for kind in kinds]
    calls = [
        ToolCall(id="c1", name="t-function", arguments='{"a": {"b": [1]}}'),
        ToolCall(id="c2", name="t-freeform", arguments='{"input": "x"}'),
        ToolCall(id="c3", name="local_shell", arguments='{"command": ["ls"]}'),
    ]
    image = "data:image/png;base64,iVBORw0KGgo="
    calls = [call for call in calls if call.name in {tool.name for tool in tools}]
    return ChatRequest(
        messages=(
            Message(role="system", text="be brief"),
            Message(role="user", text="hello", images=(image,)),
            Message(role="assistant", text="hi", reasoning="why", tool_calls=tuple(calls)),
            *(Message(role="tool", text="ok", tool_call_id=call.id, images=(image,)) for call in calls),
            Message(role="developer", text="go on"),
        ),
        tools=tuple(replace(tool, parameters={"properties": {"a": {"type": "string"}}}) for tool in tools),
        tool_choice="t-function",
        sampling=RequestedSampling(max_tokens=9, temperature=1, top_p=0.5, top_k=3, stop=("END",)),
        model="policy",
    )


STRANGE = [*SPLICES, *WORDS, {}, [], [{}], [[]], "", 0, -1, 1.5, True, None, {"type": "text"}, {"role": "user"}]


@every_dialect
@pytest.mark.parametrize("block_lists", [False, True])
def test_every_place_of_a_body_may_hold_anything(dialect: Dialect, block_lists: bool) -> None:
    client_class = CLIENTS[dialect.name]
    style = Style(block_lists=block_lists, nulls=True, unknown_fields=True, reserialised=False, with_ids=True)
    incoming = client_class(_rich_request(client_class.kinds), style).incoming()
    dialect.parse(incoming, ItemMemo())
    body = json.loads(incoming.body)
    num_refused = 0
    for holder, key in _slots(body):
        kept = holder[key]
        for value in STRANGE:
            holder[key] = value
            broken = replace(incoming, body=_write(body))
            try:
                request = dialect.parse(broken, ItemMemo()).request
                messages = _without_images(request.messages)
                Continuations(RENDERER).build_prompt(replace(request, messages=messages, tools=()))
            except WireError as error:
                num_refused += 1
                assert 400 <= dialect.error_status(error) < 500
                assert orjson.loads(dialect.render_error(error))
        holder[key] = kept
    assert num_refused


MAY_BE_NULL = {
    "content", "output", "text", "arguments", "input", "args", "response", "parts", "description", "parameters",
    "input_schema", "tool_calls", "tool_call_id", "reasoning_content", "summary", "thinking", "tools", "tool_choice",
    "stream", "stop", "stop_sequences", "max_tokens", "temperature", "top_p", "top_k", "model", "system",
    "systemInstruction", "instructions", "generationConfig", "toolConfig", "functionDeclarations", "thought",
    "thoughtSignature", "maxOutputTokens", "topP", "topK", "stopSequences", "max_output_tokens",
}  # fmt: skip


@every_dialect
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_null_is_read_wherever_it_says_nothing(dialect: Dialect, data: st.DataObject) -> None:
    client_class = CLIENTS[dialect.name]
    incoming = client_class(data.draw(requests(client_class.kinds)), data.draw(styles)).incoming()
    body = json.loads(incoming.body)
    places = [
        (holder, key)
        for holder, key in _slots(body)
        if key in MAY_BE_NULL and not (holder is body and key == "input") and "properties" not in holder
    ]
    for place in data.draw(st.lists(st.integers(0, len(places) - 1), max_size=4)) if places else []:
        holder, key = places[place]
        holder[key] = None
    request = dialect.parse(replace(incoming, body=orjson.dumps(body)), ItemMemo()).request
    Continuations(RENDERER).build_prompt(replace(request, messages=_without_images(request.messages)))


def _without_images(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    return tuple(replace(message, images=()) for message in messages)


@every_dialect
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_json_is_read_or_refused(dialect: Dialect, data: st.DataObject) -> None:
    style = Style(block_lists=True, nulls=True, unknown_fields=False, reserialised=False, with_ids=True)
    incoming = CLIENTS[dialect.name](_rich_request(CLIENTS[dialect.name].kinds), style).incoming()
    fields = sorted({key for _, key in _slots(json.loads(incoming.body)) if isinstance(key, str)})
    near_misses = st.recursive(
        json_values | st.sampled_from(WORDS),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(fields), inner, max_size=6),
        max_leaves=20,
    )
    history = st.dictionaries(st.sampled_from(["messages", "input", "contents"]), st.lists(near_misses, max_size=3))
    body = orjson.dumps(data.draw(json_values | near_misses | history))
    try:
        request = dialect.parse(replace(incoming, body=body), ItemMemo()).request
    except WireError as error:
        assert error.status == 400
        assert orjson.loads(dialect.render_error(error))["error"]["message"] == str(error)
    else:
        assert request.messages


@every_dialect
@settings(max_examples=250, deadline=None)
@given(st.data())
def test_a_broken_body_is_read_or_refused(dialect: Dialect, data: st.DataObject) -> None:
    incoming, raw = data.draw(broken_bodies(dialect))
    memo = ItemMemo()
    dialect.parse(incoming, memo)
    broken = replace(incoming, body=raw)
    try:
        parsed = dialect.parse(broken, memo)
    except WireError as error:
        assert 400 <= dialect.error_status(error) < 500
        assert orjson.loads(dialect.render_error(error))
        assert dialect.stream_error(error)
        # what a session remembers of its last request changes no answer
        with pytest.raises(WireError) as again:
            dialect.parse(broken, ItemMemo())
        assert str(again.value) == str(error)
    else:
        assert parsed == dialect.parse(broken, ItemMemo())
        assert parsed.request.messages


class Served:
    """A session of a proxy, and a plain client of it."""

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy
        log = SessionLog(session_id="s", task_id="t", group_id="g")
        self.endpoint = proxy.open_session(log, SessionLimits(max_calls=1_000_000))
        headers = {"authorization": f"Bearer {self.endpoint.api_key}", "anthropic-version": "2023-06-01"}
        self.http = httpx.Client(base_url=self.endpoint.origin, headers=headers, timeout=600)
        self.num_checks = 0

    def post(self, path: str, body: bytes) -> httpx.Response:
        return self.http.post(path, content=body, params={"alt": "sse"})

    def check_serves(self) -> None:
        """A question that was not asked before gets its answer."""
        self.num_checks += 1
        message = {"role": "user", "content": f"still there? {self.num_checks}"}
        reply = self.http.post("/v1/chat/completions", json={"messages": [message]})
        assert reply.json()["choices"][0]["message"]["content"] == "ok"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    engine = ScriptedEngine(lambda prompt_ids: REPLY, max_model_len=1 << 30)
    with Proxy(engine, RENDERER, params=GenerationParams(max_tokens=100)) as proxy:
        yield Served(proxy)


def _post_paths(dialect: Dialect) -> list[str]:
    """Chat and counting alike."""
    return [route.path.replace("{model:path}", "policy") for route in dialect.routes if route.method == "POST"]


@every_dialect
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_the_proxy_outlives_broken_bodies(served: Served, dialect: Dialect, data: st.DataObject) -> None:
    _, raw = data.draw(broken_bodies(dialect))
    reply = served.post(data.draw(st.sampled_from(_post_paths(dialect))), raw)
    assert reply.status_code == 200 or 400 <= reply.status_code < 500, reply.text
    if reply.status_code != 200:
        assert reply.json()
    served.check_serves()


@every_dialect
@settings(max_examples=30, deadline=None)
@given(
    model=st.text(min_size=1, max_size=12), query=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2)
)
def test_any_name_of_a_model_may_stand_in_a_path(
    served: Served, dialect: Dialect, model: str, query: dict[str, str]
) -> None:
    for route in dialect.routes:
        path = route.path.replace("{model:path}", quote(model, safe="/"))
        reply = served.http.request(route.method, path, params=query, content=b"{}")
        assert reply.status_code == 200 or 400 <= reply.status_code < 500, (route, reply.text)
    served.check_serves()


@every_dialect
@pytest.mark.parametrize(("shape", "megabytes"), [*((shape, 1) for shape in SHAPES), ("long history", 5)])
def test_a_large_body_is_answered(served: Served, dialect: Dialect, shape: str, megabytes: int) -> None:
    incoming = build(dialect.name, shape, megabytes * 1_000_000)
    own = Served(served.proxy)  # what a session remembers of it goes with the session
    reply = own.post(incoming.path, incoming.body)
    assert reply.status_code in (200, 400), reply.text[:500]
    assert reply.json()
    own.check_serves()
    served.proxy.close_session(own.endpoint.api_key)


_Make = Callable[[], bytes]


@every_dialect
@pytest.mark.parametrize(
    "make",
    [
        lambda: b'{"a": "\xff\xfe"}',
        lambda: '{"a": 1}'.encode("utf-16"),
        lambda: b"\xef\xbb\xbf{}",
        lambda: b"\x00" * 100,
        lambda: b"",
    ],
    ids=["wrong utf-8", "utf-16", "byte order mark", "zeros", "empty"],
)
def test_bytes_that_are_no_text_are_refused(served: Served, dialect: Dialect, make: _Make) -> None:
    for path in _post_paths(dialect):
        assert served.post(path, make()).status_code == 400
    served.check_serves()
