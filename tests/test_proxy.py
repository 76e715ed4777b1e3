"""The proxy over real sockets: what agents get, what is recorded, and that both are one."""

import asyncio
import gzip
import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polar_trl.engine.base import Engine, GenerationParams
from polar_trl.engine.scripted import ScriptedEngine
from polar_trl.errors import ConfigError, EngineBusyError, EngineError, LawError
from polar_trl.proxy import Proxy, SessionLimits
from polar_trl.record import SessionLog
from polar_trl.tokens.base import Renderer
from polar_trl.tokens.bytes import ByteRenderer
from polar_trl.types import ChatRequest, Completion, Endpoint, Message, Purpose, TokenIds, Tool, ToolCall

RENDERER = ByteRenderer()
PARAMS = GenerationParams(max_tokens=100, temperature=0.7)
HELLO = [{"role": "user", "content": "hello"}]
CHAT = "/v1/chat/completions"


def say(text: str = "", **fields: Any) -> TokenIds:
    return RENDERER.spell(Message(role="assistant", text=text, **fields))


def call_tool(name: str, arguments: str) -> TokenIds:
    return say(tool_calls=(ToolCall(id="", name=name, arguments=arguments),))


def new_log(session_id: str = "s1") -> SessionLog:
    return SessionLog(session_id=session_id, task_id="t", group_id="g")


@contextmanager
def serve(engine: Engine, renderer: Renderer = RENDERER, **settings: Any) -> Iterator[Proxy]:
    with Proxy(engine, renderer, **({"params": PARAMS, "ping_interval_s": 0.02} | settings)) as proxy:
        yield proxy


def http(endpoint: Endpoint) -> httpx.Client:
    headers = {"authorization": f"Bearer {endpoint.api_key}"}
    return httpx.Client(base_url=endpoint.origin, headers=headers, timeout=20)


def client(endpoint: Endpoint) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{endpoint.origin}/v1", api_key=endpoint.api_key, timeout=20, max_retries=0)


class GatedEngine:
    """Tells when a request has come in and answers when it is let."""

    max_model_len = 1000
    policy_version = 0

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.gate = threading.Event()
        self.num_requests = 0
        self.num_aborted = 0

    async def generate(self, prompt_ids: TokenIds, params: GenerationParams) -> Completion:
        self.num_requests += 1
        self.entered.release()
        try:
            while not self.gate.is_set():
                await asyncio.sleep(0.005)
        except asyncio.CancelledError:
            self.num_aborted += 1
            raise
        return Completion(token_ids=say("done"), logprobs=(-1.0,) * 5, finish_reason="stop")


def wait_until(condition: Callable[[], bool]) -> None:
    tick = threading.Event()
    for _ in range(2000):
        if condition():
            return
        tick.wait(0.005)
    raise AssertionError("it never came true")


# What a session looks like from both sides


def test_a_plain_call_is_answered_and_recorded() -> None:
    with serve(ScriptedEngine([say("hi", reasoning="hm")])) as proxy:
        endpoint = proxy.open_session(log := new_log())
        reply = client(endpoint).chat.completions.create(model="any", messages=HELLO)  # type: ignore[arg-type]
    message = reply.choices[0].message
    assert (reply.id, reply.model, reply.choices[0].finish_reason) == ("chatcmpl-s1-0", "any", "stop")
    assert (message.content, message.reasoning_content) == ("hi", "hm")  # type: ignore[attr-defined]
    (call,) = log.calls
    assert call.prompt_ids == RENDERER.render([Message(role="user", text="hello")], [])
    assert call.completion.token_ids == say("hi", reasoning="hm")
    assert call.completion.logprobs == (-0.5,) * len(call.completion.token_ids)
    assert call.message == Message(role="assistant", text="hi", reasoning="hm")
    assert (call.index, call.parent, call.dialect, call.request.model) == (0, None, "openai_chat", "any")
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == len(call.prompt_ids)
    assert reply.usage.completion_tokens == len(call.completion.token_ids)


def test_tokens_go_in_as_they_came_out() -> None:
    # spelled as no tokenizer of ours would: a stray mark inside, which the text does not show
    odd = (*b"look", 256, *b"ing", *call_tool("sh", '{"cmd":  "ls"}'))
    tools = [Tool(name="sh", description="run", parameters={"type": "object"})]
    with serve(ScriptedEngine([odd, say("done")])) as proxy:
        endpoint = proxy.open_session(log := new_log())
        create = client(endpoint).chat.completions.create
        asked: dict[str, Any] = {
            "model": "m",
            "tools": [
                {
                    "type": "function",
                    "function": {"name": "sh", "description": "run", "parameters": {"type": "object"}},
                }
            ],
        }
        first = create(messages=HELLO, **asked).choices[0]  # type: ignore[call-overload]
        assert first.finish_reason == "tool_calls"
        (tool_call,) = first.message.tool_calls
        assert (tool_call.id, tool_call.function.arguments) == ("call_0_0", '{"cmd":  "ls"}')
        answer = first.message.model_dump(exclude_none=True)
        answer["tool_calls"][0]["function"]["arguments"] = '{"cmd":"ls"}'  # agents write the JSON anew
        result = {"role": "tool", "tool_call_id": tool_call.id, "content": "a.txt"}
        create(messages=[*HELLO, answer, result], **asked)  # type: ignore[call-overload]
    one, two = log.calls
    assert one.prompt_ids == RENDERER.render([Message(role="user", text="hello")], tools)
    assert two.parent == 0
    new = RENDERER.extend(one.prompt_ids, one.completion.token_ids, [Message(role="tool", text="a.txt")], tools)
    assert two.prompt_ids == new
    assert two.request.messages[1] == one.message
    assert log.counters == {}


def test_a_stream_says_what_the_record_says() -> None:
    reply = say("text", reasoning="why", tool_calls=(ToolCall(id="", name="sh", arguments="{}"),))
    with serve(ScriptedEngine([reply], delay_s=0.1)) as proxy:
        endpoint = proxy.open_session(log := new_log())
        stream = client(endpoint).chat.completions.create(
            model="m",
            messages=HELLO,  # type: ignore[arg-type]
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == "text"
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == "why"
    (tool_call,) = [call for delta in deltas for call in delta.tool_calls or []]
    assert (tool_call.index, tool_call.id) == (0, "call_0_0")
    assert tool_call.function is not None
    assert (tool_call.function.name, tool_call.function.arguments) == ("sh", "{}")
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "tool_calls"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(log.calls[0].completion.token_ids) == len(reply)
    assert {chunk.id for chunk in chunks} == {"chatcmpl-s1-0"}


def test_a_stream_is_kept_alive_by_pings() -> None:
    engine = GatedEngine()
    with serve(engine) as proxy:
        endpoint = proxy.open_session(new_log())
        with http(endpoint).stream("POST", CHAT, json={"messages": HELLO, "stream": True}) as response:
            lines = response.iter_lines()
            seen = [next(lines) for _ in range(7)]
            engine.gate.set()
            rest = list(lines)
    assert orjson.loads(seen[0].removeprefix("data: "))["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert seen[1:] == ["", ": ping", "", ": ping", "", ": ping"]
    assert rest[-2:] == ["data: [DONE]", ""]


def test_the_record_is_written_before_the_reply_is_sent() -> None:
    class SeenLog(SessionLog):
        def append(self, call: Any) -> None:
            super().append(call)
            order.append(len(self.calls))

    order: list[int] = []
    with serve(ScriptedEngine([say("a"), say("b")])) as proxy:
        log = SeenLog(session_id="s1", task_id="t", group_id="g")
        with http(proxy.open_session(log)) as agent:
            for number, text in enumerate(("one", "two"), start=1):
                assert agent.post(CHAT, json={"messages": [{"role": "user", "content": text}]}).status_code == 200
                assert order == list(range(1, number + 1))


# Sampling belongs to the trainer


def test_the_agent_chooses_only_a_lower_limit_and_stops() -> None:
    engine = ScriptedEngine(lambda prompt_ids: say("one STOP two"), max_model_len=200)
    with serve(engine) as proxy, http(proxy.open_session(log := new_log())) as agent:
        body = {"messages": HELLO, "temperature": 0, "top_p": 0.1, "max_tokens": 50, "stop": ["STOP"]}
        reply = agent.post(CHAT, json=body).json()
        agent.post(CHAT, json={"messages": HELLO, "max_tokens": 5000})
        agent.post(CHAT, json={"messages": [{"role": "user", "content": "x" * 150}]})
    assert reply["choices"][0]["message"]["content"] == "one "
    assert log.calls[0].completion.token_ids == say("one STOP two")
    assert log.calls[0].message.text == "one "
    assert log.calls[0].request.sampling.temperature == 0
    assert [params.max_tokens for params in engine.params] == [50, 100, 200 - len(log.calls[2].prompt_ids)]
    assert {(params.temperature, params.top_p) for params in engine.params} == {(0.7, 1.0)}
    assert [params.stop for params in engine.params] == [("STOP",), (), ()]
    assert engine.params[0].stop_token_ids == RENDERER.stop_token_ids


def test_a_reply_that_was_cut_is_continued_as_it_is() -> None:
    engine = ScriptedEngine([say("a long answer"), say("ok")])
    with serve(engine) as proxy, http(proxy.open_session(log := new_log())) as agent:
        first = agent.post(CHAT, json={"messages": HELLO, "max_tokens": 6}).json()["choices"][0]
        assert (first["finish_reason"], first["message"]["content"]) == ("length", "a long")
        agent.post(CHAT, json={"messages": [*HELLO, first["message"], {"role": "user", "content": "go on"}]})
    one, two = log.calls
    known = one.prompt_ids + one.completion.token_ids
    assert two.prompt_ids[: len(known)] == known


def test_tools_are_not_shown_where_none_may_be_called() -> None:
    tool = {"type": "function", "function": {"name": "sh"}}
    with serve(ScriptedEngine([say("x")])) as proxy, http(proxy.open_session(log := new_log())) as agent:
        agent.post(CHAT, json={"messages": HELLO, "tools": [tool], "tool_choice": "none"})
    (call,) = log.calls
    assert call.prompt_ids == RENDERER.render([Message(role="user", text="hello")], [])
    assert (call.request.tools, call.request.tool_choice, call.request.unread) == ((), "none", ("tools",))


# Errors


def test_keys_paths_and_methods() -> None:
    with serve(ScriptedEngine([])) as proxy:
        endpoint = proxy.open_session(new_log())
        with httpx.Client(base_url=endpoint.origin) as stranger, http(endpoint) as agent:
            assert stranger.head("/").status_code == 200
            for key in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {endpoint.api_key}"}):
                refused = stranger.post(CHAT, json={"messages": HELLO}, headers=key)
                assert refused.status_code == 401
                assert refused.json()["error"]["code"] == "invalid_api_key"
            assert stranger.get("/v1/models").status_code == 401
            # a large body is read to its end before it is refused, so that the client hears why
            assert stranger.post(CHAT, content=b"x" * 3_000_000).status_code == 401
            for method, path, status in (("POST", "/v1/nowhere", 404), ("GET", CHAT, 405), ("GET", "/", 405)):
                wrong = agent.request(method, path)
                assert wrong.status_code == status
                assert wrong.json()["error"]["message"] == f"{method} {path} is not served here"
            assert agent.get("/v1/models").json()["data"][0]["id"] == endpoint.model == "policy"
            assert agent.get("/v1/models/org/name").json()["id"] == "org/name"
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{endpoint.origin}/v1", api_key="wrong").models.list()


def test_a_bad_request_is_refused_with_a_status_even_when_streaming() -> None:
    with serve(ScriptedEngine([])) as proxy, http(proxy.open_session(log := new_log())) as agent:
        refused = agent.post(CHAT, json={"messages": [{"role": "user"}], "stream": True})
    assert refused.status_code == 400
    assert refused.headers["x-should-retry"] == "false"
    assert refused.json()["error"]["param"] == "messages[0].content"
    assert log.calls == ()


def test_tools_that_cannot_be_written_again_are_refused() -> None:
    deep = '{"a":' * 300 + "1" + "}" * 300
    body = '{"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function": '
    with serve(ScriptedEngine([])) as proxy, http(proxy.open_session(new_log())) as agent:
        refused = agent.post(CHAT, content=f'{body}{{"name": "sh", "parameters": {deep}}}}}]}}')
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].endswith("nest the parameters less deeply")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["messages", "n"]), inner),
        max_leaves=12,
    )
)
def test_no_json_value_makes_the_proxy_fail(fuzzed: httpx.Client, value: object) -> None:
    refused = fuzzed.post(CHAT, content=json.dumps(value))  # NaN and Infinity too, which are no JSON
    assert refused.status_code == 400
    assert refused.json()["error"]["type"] == "invalid_request_error"


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[httpx.Client]:
    with serve(ScriptedEngine([])) as proxy, http(proxy.open_session(new_log())) as agent:
        yield agent


def test_a_conversation_that_does_not_fit_is_refused() -> None:
    with serve(ScriptedEngine([], max_model_len=50)) as proxy:
        endpoint = proxy.open_session(log := new_log())
        with pytest.raises(openai.BadRequestError) as caught:
            client(endpoint).chat.completions.create(
                model="m",
                messages=[{"role": "user", "content": "x" * 50}],
                stream=True,
            )
    assert caught.value.code == "context_length_exceeded"
    assert log.calls == () and log.counters == {"context_overflows": 1}


def test_an_image_is_refused_by_a_text_model() -> None:
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}
    with serve(ScriptedEngine([])) as proxy, http(proxy.open_session(new_log())) as agent:
        refused = agent.post(CHAT, json={"messages": [image]})
    assert (refused.status_code, refused.json()["error"]["message"]) == (
        400,
        "this model reads text only; leave the images out",
    )


class BusyEngine(ScriptedEngine):
    """Sends the first request back."""

    async def generate(self, prompt_ids: TokenIds, params: GenerationParams) -> Completion:
        if not self.params:
            self.params.append(params)
            raise EngineBusyError("the weights are changing", retry_after_s=0.2)
        return await super().generate(prompt_ids, params)


def test_a_busy_engine_sends_the_client_back_with_a_time() -> None:
    log = new_log()
    with serve(BusyEngine([say("hi")])) as proxy:
        endpoint = proxy.open_session(log)
        sent_back = http(endpoint).post(CHAT, json={"messages": HELLO})
        again = http(endpoint).post(CHAT, json={"messages": HELLO})
    assert (sent_back.status_code, sent_back.headers["retry-after"]) == (429, "1")
    assert sent_back.headers["x-should-retry"] == "true"
    assert again.json()["choices"][0]["message"]["content"] == "hi"
    # not a failure of the session: its work can be graded
    assert dict(log.counters) == {"calls_sent_back": 1}


@pytest.mark.parametrize("purpose", ["policy", "auxiliary"])
def test_a_call_is_recorded_with_its_purpose(purpose: Purpose) -> None:
    log, asked = new_log(), list[ChatRequest]()

    def classify(request: ChatRequest) -> Purpose:
        asked.append(request)
        return purpose

    with serve(ScriptedEngine([say("hi")])) as proxy:
        http(proxy.open_session(log, classify=classify)).post(CHAT, json={"messages": HELLO})
    assert [call.purpose for call in log.calls] == [purpose]
    assert [request.messages for request in asked] == [log.calls[0].request.messages]


def test_a_compressed_body_is_read() -> None:
    log = new_log()
    with serve(ScriptedEngine([say("hi")])) as proxy:
        endpoint = proxy.open_session(log)
        body = gzip.compress(orjson.dumps({"messages": HELLO}))
        good = http(endpoint).post(CHAT, content=body, headers={"content-encoding": "gzip"})
        bad = http(endpoint).post(CHAT, content=body[:-9], headers={"content-encoding": "gzip"})
    assert (good.status_code, bad.status_code) == (200, 400)
    assert bad.json()["error"]["message"].startswith("content-encoding: the body is not valid gzip")


def test_an_engine_failure_is_told_in_both_forms_and_may_be_tried_again() -> None:
    def answer(prompt_ids: TokenIds) -> TokenIds:
        if len(engine.params) < 3:
            raise EngineError("the engine is closed")
        return say("at last")

    engine = ScriptedEngine(answer)
    with serve(engine) as proxy, http(proxy.open_session(log := new_log())) as agent:
        plain = agent.post(CHAT, json={"messages": HELLO})
        assert (plain.status_code, plain.json()["error"]["code"]) == (503, "overloaded")
        streamed = agent.post(CHAT, json={"messages": HELLO, "stream": True})
        assert streamed.status_code == 200
        last = streamed.text.strip().split("\n\n")[-1]
        assert orjson.loads(last.removeprefix("data: "))["error"]["message"] == "the engine is closed"
        again = agent.post(CHAT, json={"messages": HELLO})
        assert again.json()["choices"][0]["message"]["content"] == "at last"
    assert len(log.calls) == 1 and log.counters == {"engine_errors": 2}


class BrokenRenderer(ByteRenderer):
    """Fails where told, with what it was told."""

    def __init__(self, place: str, error: Exception) -> None:
        self._place = place
        self._error = error

    def render(self, messages: Any, tools: Any) -> TokenIds:
        if self._place == "render":
            raise self._error
        return super().render(messages, tools)

    def parse(self, prompt_ids: TokenIds, completion_ids: TokenIds, tools: Any) -> Message:
        raise self._error


@pytest.mark.parametrize("place", ["render", "parse"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_fault_of_ours_is_answered_logged_and_counted(
    place: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    renderer = BrokenRenderer(place, KeyError("secret"))
    with serve(ScriptedEngine([say("x")]), renderer) as proxy, http(proxy.open_session(log := new_log())) as agent:
        reply = agent.post(CHAT, json={"messages": HELLO, "stream": stream})
    assert reply.status_code == (200 if stream and place == "parse" else 500)
    assert "internal_error" in reply.text and "secret" not in reply.text
    assert log.counters == {"internal_errors": 1}
    assert "KeyError: 'secret'" in caplog.text


@pytest.mark.parametrize("place", ["render", "parse"])
def test_a_broken_law_reaches_whoever_closes_the_session(place: str) -> None:
    law = LawError("law 2 is broken")
    with serve(ScriptedEngine([say("x")]), BrokenRenderer(place, law)) as proxy:
        endpoint = proxy.open_session(new_log())
        with http(endpoint) as agent:
            assert agent.post(CHAT, json={"messages": HELLO}).status_code == 500
        with pytest.raises(LawError, match="law 2"):
            proxy.close_session(endpoint.api_key)


# Hanging up, trying again, ending


def send_by_hand(endpoint: Endpoint, body: dict[str, Any]) -> socket.socket:
    """A connection with a request on it. Closing it hangs up."""
    payload = orjson.dumps(body)
    connection = socket.create_connection(endpoint.origin.removeprefix("http://").split(":"), timeout=20)
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {endpoint.api_key}\r\n"
    connection.sendall(f"{head}content-length: {len(payload)}\r\n\r\n".encode() + payload)
    return connection


@pytest.mark.parametrize("stream", [False, True])
def test_hanging_up_aborts_the_generation(stream: bool) -> None:
    engine = GatedEngine()
    with serve(engine) as proxy:
        connection = send_by_hand(proxy.open_session(log := new_log()), {"messages": HELLO, "stream": stream})
        engine.entered.acquire()
        connection.close()
        wait_until(lambda: engine.num_aborted == 1)
    assert log.calls == () and log.counters == {"calls_aborted": 1}


def test_the_same_request_again_gets_the_recorded_answer() -> None:
    engine = ScriptedEngine([say("first"), say("second")])
    with serve(engine) as proxy, http(proxy.open_session(log := new_log())) as agent:
        one = agent.post(CHAT, json={"messages": HELLO})
        two = agent.post(CHAT, content=b'{"messages":  [{"content": "hello", "role": "user"}]}')
        streamed = agent.post(CHAT, json={"messages": HELLO, "stream": True})
        other = agent.post(CHAT, json={"messages": HELLO, "max_tokens": 50})
    assert two.content == one.content
    assert '"content":"first"' in streamed.text
    assert other.json()["choices"][0]["message"]["content"] == "second"
    assert len(log.calls) == len(engine.params) == 2
    assert log.counters == {"retries_replayed": 2}


def test_a_retry_joins_the_running_call_and_keeps_it_alive() -> None:
    engine = GatedEngine()
    with serve(engine) as proxy:
        endpoint = proxy.open_session(log := new_log())
        first = send_by_hand(endpoint, {"messages": HELLO, "stream": True})
        engine.entered.acquire()
        second = send_by_hand(endpoint, {"messages": HELLO})
        wait_until(lambda: log.counters == {"retries_joined": 1})
        first.close()
        assert httpx.head(endpoint.origin).status_code == 200  # comes after the hang-up
        engine.gate.set()
        assert b'"content":"done"' in second.recv(10_000)
        second.close()
    assert engine.num_requests == 1 and engine.num_aborted == 0
    assert len(log.calls) == 1 and log.counters == {"retries_joined": 1}


def test_a_call_is_aborted_when_the_last_one_hangs_up() -> None:
    engine = GatedEngine()
    with serve(engine) as proxy:
        endpoint = proxy.open_session(log := new_log())
        first = send_by_hand(endpoint, {"messages": HELLO})
        engine.entered.acquire()
        second = send_by_hand(endpoint, {"messages": HELLO})
        wait_until(lambda: log.counters == {"retries_joined": 1})
        first.close()
        second.close()
        wait_until(lambda: engine.num_aborted == 1)
        engine.gate.set()
        with http(endpoint) as agent:
            assert agent.post(CHAT, json={"messages": HELLO}).status_code == 200
    assert engine.num_requests == 2 and len(log.calls) == 1
    assert log.counters == {"retries_joined": 1, "calls_aborted": 1}


def test_closing_a_session_aborts_its_calls_and_ends_its_key() -> None:
    engine = GatedEngine()
    with serve(engine) as proxy, ThreadPoolExecutor(2) as threads:
        doomed, other = proxy.open_session(log := new_log()), proxy.open_session(other_log := new_log("s2"))
        with http(doomed) as agent, http(other) as survivor:
            plain = threads.submit(agent.post, CHAT, json={"messages": HELLO})
            engine.entered.acquire()
            kept = threads.submit(survivor.post, CHAT, json={"messages": HELLO})
            engine.entered.acquire()
            proxy.close_session(doomed.api_key)
            assert engine.num_aborted == 1
            assert plain.result().status_code == 401
            assert agent.post(CHAT, json={"messages": HELLO}).status_code == 401
            proxy.close_session(doomed.api_key)
            engine.gate.set()
            assert kept.result().status_code == 200
    assert (len(log.calls), len(other_log.calls)) == (0, 1)
    assert log.counters == {"calls_aborted": 1} and other_log.counters == {}


def test_stop_ends_open_streams_with_an_error_event() -> None:
    engine = GatedEngine()
    proxy = Proxy(engine, RENDERER, params=PARAMS)
    proxy.start()
    with ThreadPoolExecutor(1) as threads, http(proxy.open_session(new_log())) as agent:
        reply = threads.submit(agent.post, CHAT, json={"messages": HELLO, "stream": True})
        engine.entered.acquire()
        proxy.stop()
        assert "invalid_api_key" in reply.result().text
        with pytest.raises(httpx.ConnectError):
            agent.head("/")
    assert engine.num_aborted == 1


def test_stop_ends_every_session_though_one_broke_a_law() -> None:
    class Lawless(ByteRenderer):
        def render(self, messages: Any, tools: Any) -> TokenIds:
            if messages[0].text == "break":
                raise LawError("law 2 is broken")
            return super().render(messages, tools)

    engine = GatedEngine()
    proxy = Proxy(engine, Lawless(), params=PARAMS)
    proxy.start()
    broken, running = proxy.open_session(new_log("s1")), proxy.open_session(log := new_log("s2"))
    with http(broken) as agent, http(running) as other, ThreadPoolExecutor(1) as threads:
        assert agent.post(CHAT, json={"messages": [{"role": "user", "content": "break"}]}).status_code == 500
        reply = threads.submit(other.post, CHAT, json={"messages": HELLO})
        engine.entered.acquire()
        with pytest.raises(LawError, match="law 2"):
            proxy.stop()
        assert reply.result().status_code == 401
        with pytest.raises(httpx.ConnectError):
            agent.head("/")
    assert engine.num_aborted == 1 and log.counters == {"calls_aborted": 1}


def test_a_session_out_of_calls_gets_a_final_message() -> None:
    engine = ScriptedEngine([say("one"), say("two")])
    with serve(engine) as proxy:
        endpoint = proxy.open_session(log := new_log(), SessionLimits(max_calls=2))
        with http(endpoint) as agent:
            replies = [agent.post(CHAT, json={"messages": HELLO, "max_tokens": 10 + n}).json() for n in range(4)]
    last = replies[2]["choices"][0]
    assert (last["finish_reason"], last["message"]["role"]) == ("stop", "assistant")
    assert "budget of this session is used up" in last["message"]["content"]
    assert replies[2]["usage"]["completion_tokens"] == 0
    assert [call.completion.token_ids for call in log.calls] == [say("one"), say("two"), (), ()]
    assert log.calls[2].message.text == last["message"]["content"]
    assert log.counters == {"budget_messages": 2}


def test_sampled_tokens_never_exceed_their_budget() -> None:
    with serve(ScriptedEngine(lambda prompt_ids: say("0123456789"))) as proxy:
        endpoint = proxy.open_session(log := new_log(), SessionLimits(max_sampled_tokens=15))
        with http(endpoint) as agent:
            reasons = [
                agent.post(CHAT, json={"messages": HELLO, "max_tokens": 50 + n}).json()["choices"][0]["finish_reason"]
                for n in range(3)
            ]
    assert reasons == ["stop", "length", "stop"]
    assert [len(call.completion.token_ids) for call in log.calls] == [11, 4, 0]
    assert log.counters == {"budget_messages": 1}


def test_an_empty_completion_is_an_empty_message_and_no_budget_message() -> None:
    with serve(ScriptedEngine([()])) as proxy, http(proxy.open_session(log := new_log())) as agent:
        reply = agent.post(CHAT, json={"messages": HELLO}).json()
    assert reply["choices"][0]["message"]["content"] == ""
    assert log.calls[0].prompt_ids and log.counters == {}


# Many at once


def echo(prompt_ids: TokenIds) -> TokenIds:
    """Says the last message again."""
    text = bytes(token_id for token_id in prompt_ids if token_id < 256).decode()
    return say(text.split("user\n")[-1].removesuffix("assistant\n"))


@pytest.mark.parametrize("padding", [0, 80_000])
def test_fifty_concurrent_calls_keep_to_their_sessions(padding: int) -> None:
    engine = ScriptedEngine(echo, delay_s=0.02, max_model_len=1 << 20)
    history = [{"role": "system", "content": "x" * padding}]

    async def post(agent: httpx.AsyncClient, endpoint: Endpoint, text: str) -> str:
        body = {"messages": [*history, {"role": "user", "content": text}], "stream": text.endswith("0")}
        reply = await agent.post(
            endpoint.origin + CHAT, json=body, headers={"authorization": f"Bearer {endpoint.api_key}"}
        )
        assert reply.status_code == 200
        assert f'"content":"{text}"' in reply.text
        return text

    async def post_all(endpoints: list[Endpoint]) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=30, limits=limits) as agent:
            jobs = [post(agent, ends, f"{key}-{n}") for key, ends in enumerate(endpoints) for n in range(10)]
            await asyncio.gather(*jobs)

    with serve(engine) as proxy:
        logs = [new_log(f"s{number}") for number in range(5)]
        asyncio.run(post_all([proxy.open_session(log) for log in logs]))
    for key, log in enumerate(logs):
        assert {call.message.text for call in log.calls} == {f"{key}-{n}" for n in range(10)}
        assert [call.index for call in log.calls] == list(range(10))
        assert {call.session_id for call in log.calls} == {log.session_id}


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port} .*choose another port"):
            Proxy(ScriptedEngine([]), RENDERER, params=PARAMS, port=port).start()
