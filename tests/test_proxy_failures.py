"""The proxy when something goes wrong: bad requests, a failing engine, clients that hang up, sessions that end."""

import asyncio
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import (
    CHAT,
    HELLO,
    PARAMS,
    RENDERER,
    BusyEngine,
    GatedEngine,
    client,
    http,
    new_log,
    say,
    serve,
    wait_until,
)

from polar_trl.engine.base import GenerationParams
from polar_trl.engine.scripted import ScriptedEngine
from polar_trl.errors import EngineError, LawError
from polar_trl.proxy import Proxy
from polar_trl.tokens.bytes import ByteRenderer
from polar_trl.types import Completion, Endpoint, Message, TokenIds

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
        refused = agent.post(CHAT, json={"messages": [{"role": "user", "content": 5}], "stream": True})
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
        "could not process image: this model reads text only; leave the images out",
    )


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


class FailingEngine(ScriptedEngine):
    """Fails at once, then after a while, then no more."""

    def __init__(self, replies: list[TokenIds]) -> None:
        super().__init__(replies)
        self.delays = iter((0.0, 0.2))

    async def generate(self, prompt_ids: TokenIds, params: GenerationParams) -> Completion:
        delay = next(self.delays, None)
        if delay is None:
            return await super().generate(prompt_ids, params)
        await asyncio.sleep(delay)
        raise EngineError("the engine is closed")


def test_an_engine_failure_is_told_in_both_forms_and_may_be_tried_again() -> None:
    engine = FailingEngine([say("at last")])
    with serve(engine) as proxy, http(proxy.open_session(log := new_log())) as agent:
        # before its headers are sent, a stream fails as a plain request does
        early = agent.post(CHAT, json={"messages": HELLO, "stream": True})
        assert (early.status_code, early.json()["error"]["code"]) == (503, "overloaded")
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
    assert reply.status_code == 500
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
    connection = socket.create_connection(endpoint.origin.removeprefix("http://").split(":"), timeout=600)
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
