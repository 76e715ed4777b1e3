"""The official clients of every provider against the proxy, row by row; docs/dialects.md shows the table.

Each row runs for each dialect that has the thing at all: `LACKS` names what a format does not have.
"""

import gzip
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest
from sdks import SDKS, Sdk
from serving import RENDERER, BusyEngine, GatedEngine, say, wait_until

from polar_trl.engine.base import Engine, GenerationParams
from polar_trl.engine.scripted import ScriptedEngine
from polar_trl.proxy import Proxy
from polar_trl.recording.log import SessionLog
from polar_trl.types import Endpoint, TokenIds, ToolCall
from polar_trl.wire import DIALECTS

STOPS = {
    "openai_chat": {"end": "stop", "tools": "tool_calls", "length": "length", "sequence": "stop"},
    "openai_responses": {"end": "completed", "tools": "completed", "length": "max_output_tokens"},
    "anthropic": {"end": "end_turn", "tools": "tool_use", "length": "max_tokens", "sequence": "stop_sequence STOP"},
    "google": {"end": "STOP", "tools": "STOP", "length": "MAX_TOKENS", "sequence": "STOP"},
}
ERRORS: dict[str, dict[str, tuple[int, str]]] = {
    "openai_chat": {
        "bad key": (401, "invalid_api_key"),
        "bad field": (400, "invalid_request_error"),
        "overflow": (400, "context_length_exceeded"),
        "overloaded": (429, "overloaded"),
    },
    "openai_responses": {
        "bad key": (401, "invalid_api_key"),
        "bad field": (400, "invalid_request_error"),
        "overflow": (400, "context_length_exceeded"),
        "overloaded": (429, "overloaded"),
    },
    "anthropic": {
        "bad key": (401, "authentication_error"),
        "bad field": (400, "invalid_request_error"),
        "overflow": (400, "invalid_request_error"),
        "overloaded": (529, "overloaded_error"),
    },
    "google": {
        "bad key": (401, "UNAUTHENTICATED"),
        "bad field": (400, "INVALID_ARGUMENT"),
        "overflow": (400, "INVALID_ARGUMENT"),
        "overloaded": (429, "RESOURCE_EXHAUSTED"),
    },
}
LACKS = {"openai_chat": {"counting"}, "openai_responses": {"stop sequence"}, "anthropic": set(), "google": set()}
every_dialect = pytest.mark.parametrize("name", [dialect.name for dialect in DIALECTS])
plain_and_streamed = pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])


def those_with(thing: str) -> pytest.MarkDecorator:
    names = [dialect.name for dialect in DIALECTS if thing not in LACKS[dialect.name]]
    return pytest.mark.parametrize("name", names)


def call_sh(*commands: str, **fields: Any) -> TokenIds:
    calls = [ToolCall(id="", name="sh", arguments=f'{{"cmd":  "{command}"}}') for command in commands]
    return say(tool_calls=tuple(calls), **fields)


class Bench:
    """A proxy with one session."""

    def __init__(self, proxy: Proxy) -> None:
        self.log = SessionLog(session_id="s", task_id="t", group_id="g")
        self.endpoint = proxy.open_session(self.log)

    def check_continued(self, counters: dict[str, int] | None = None) -> None:
        """Every call's prompt begins with the prompt and sampled ids of the one before."""
        for before, after in zip(self.log.calls, self.log.calls[1:], strict=False):
            known = before.prompt_ids + before.completion.token_ids
            assert after.prompt_ids[: len(known)] == known
            assert after.parent == before.index
        assert self.log.counters == (counters or {})


@contextmanager
def serve(engine: Engine) -> Iterator[Bench]:
    with Proxy(engine, RENDERER, params=GenerationParams(max_tokens=100), ping_interval_s=0.02) as proxy:
        yield Bench(proxy)


def catch(sdk: Sdk, **options: Any) -> tuple[int, str, str]:
    with pytest.raises(sdk.error_class) as caught:
        sdk.ask(**options)
    return sdk.explain(caught.value)


# Answers


@every_dialect
@plain_and_streamed
def test_text(name: str, stream: bool) -> None:
    with serve(ScriptedEngine([say("hi é👩‍👧"), say("bye")])) as bench:
        sdk = SDKS[name](bench.endpoint)
        answer = sdk.ask(stream=stream)
        sdk.say("more")
        sdk.ask(stream=stream)
    assert (answer.text, answer.reasoning, answer.calls) == ("hi é👩‍👧", "", ())
    assert answer.stop == STOPS[name]["end"]
    assert answer.num_prompt_tokens == len(bench.log.calls[0].prompt_ids)
    assert answer.num_sampled_tokens == len(bench.log.calls[0].completion.token_ids)
    assert {call.dialect for call in bench.log.calls} == {name}
    bench.check_continued()


@every_dialect
@plain_and_streamed
@pytest.mark.parametrize("commands", [("ls",), ("ls", "pwd", "ls")], ids=["one", "parallel"])
def test_tools(name: str, stream: bool, commands: tuple[str, ...]) -> None:
    with serve(ScriptedEngine([call_sh(*commands, text="I look"), say("done")])) as bench:
        sdk = SDKS[name](bench.endpoint)
        answer = sdk.ask(stream=stream, tools=True)
        sdk.give_results([(id, called, f"result {place}") for place, (id, called, _) in enumerate(answer.calls)])
        last = sdk.ask(stream=stream, tools=True)
    assert answer.text == "I look"
    assert [(called, arguments) for _, called, arguments in answer.calls] == [("sh", {"cmd": cmd}) for cmd in commands]
    assert len({id for id, _, _ in answer.calls}) == len(commands)
    assert (answer.stop, last.stop) == (STOPS[name]["tools"], STOPS[name]["end"])
    results = bench.log.calls[1].request.messages[2:]
    assert [result.text for result in results] == [f"result {place}" for place in range(len(commands))]
    assert [result.tool_call_id for result in results] == [call.id for call in bench.log.calls[0].message.tool_calls]
    bench.check_continued()


@every_dialect
@plain_and_streamed
def test_reasoning(name: str, stream: bool) -> None:
    with serve(ScriptedEngine([call_sh("ls", text="I look", reasoning="hm\n so"), say("done")])) as bench:
        sdk = SDKS[name](bench.endpoint)
        answer = sdk.ask(stream=stream, tools=True)
        ((id, called, _),) = answer.calls
        sdk.give_results([(id, called, "a.txt")])
        sdk.ask(stream=stream, tools=True)
    assert (answer.reasoning, answer.text) == ("hm\n so", "I look")
    bench.check_continued()


@every_dialect
@plain_and_streamed
def test_length(name: str, stream: bool) -> None:
    with serve(ScriptedEngine([say("a long answer"), say("on")])) as bench:
        sdk = SDKS[name](bench.endpoint)
        answer = sdk.ask(stream=stream, max_tokens=6)
        sdk.say("go on")
        sdk.ask(stream=stream)
    assert (answer.text, answer.stop, answer.num_sampled_tokens) == ("a long", STOPS[name]["length"], 6)
    bench.check_continued({"answers_cut_at_asked_max_tokens": 1})


@those_with("stop sequence")
@plain_and_streamed
def test_a_stop_sequence(name: str, stream: bool) -> None:
    engine = ScriptedEngine([say("one STOP two"), say("three")])
    with serve(engine) as bench:
        sdk = SDKS[name](bench.endpoint)
        answer = sdk.ask(stream=stream, stop="STOP")
        sdk.say("go on")
        sdk.ask(stream=stream)
    assert (answer.text, answer.stop) == ("one ", STOPS[name]["sequence"])
    assert engine.params[0].stop == ("STOP",)
    bench.check_continued()


@every_dialect
def test_pings_are_ignored(name: str) -> None:
    with serve(ScriptedEngine([say("at last")], delay_s=0.3)) as bench:
        answer = SDKS[name](bench.endpoint).ask(stream=True)
    assert (answer.text, answer.stop) == ("at last", STOPS[name]["end"])


# Errors


@every_dialect
def test_a_bad_key(name: str) -> None:
    with serve(ScriptedEngine([])) as bench:
        stranger = SDKS[name](replace(bench.endpoint, api_key="wrong"))
        status, kind, message = catch(stranger)
    assert (status, kind) == ERRORS[name]["bad key"]
    assert message.startswith("unknown API key")


@every_dialect
@plain_and_streamed
def test_a_bad_field_is_named_by_its_path(name: str, stream: bool) -> None:
    with serve(ScriptedEngine([])) as bench:
        status, kind, message = catch(SDKS[name](bench.endpoint), stream=stream, wrong={"temperature": "hot"})
    path = "generationConfig.temperature" if name == "google" else "temperature"
    assert (status, kind) == ERRORS[name]["bad field"]
    assert message == f"{path}: must be a number, not a string"


@every_dialect
def test_a_conversation_that_does_not_fit(name: str) -> None:
    with serve(ScriptedEngine([], max_model_len=50)) as bench:
        status, kind, message = catch(SDKS[name](bench.endpoint, text="x" * 60), stream=True)
    assert (status, kind) == ERRORS[name]["overflow"]
    assert "maximum" in message
    assert bench.log.counters == {"context_overflows": 1}


@every_dialect
def test_a_busy_engine(name: str) -> None:
    with serve(BusyEngine([])) as bench:
        status, kind, _ = catch(SDKS[name](bench.endpoint))
    assert (status, kind) == ERRORS[name]["overloaded"]
    with serve(BusyEngine([say("hi")])) as bench:
        assert SDKS[name](bench.endpoint, attempts=2).ask().text == "hi"
    assert len(bench.log.calls) == 1
    assert bench.log.counters == {"calls_sent_back": 1}


# Connections


class DroppingRelay:
    """Passes bytes on to the proxy; of the first connection's answer, none."""

    def __init__(self, origin: str) -> None:
        host, port = origin.removeprefix("http://").split(":")
        self.upstream = (host, int(port))
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.origin = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.num_connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            self.num_connections += 1
            server = socket.create_connection(self.upstream)
            threading.Thread(target=self._pass_on, args=(client, server, False), daemon=True).start()
            drop = self.num_connections == 1
            threading.Thread(target=self._pass_on, args=(server, client, drop), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, drop: bool) -> None:
        try:
            while (data := source.recv(1 << 16)) and not drop:
                sink.sendall(data)
            for end in (source, sink):
                end.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other direction was closed first

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()


@every_dialect
def test_an_answer_that_was_lost_is_given_again(name: str) -> None:
    with serve(ScriptedEngine([say("hi")])) as bench:
        relay = DroppingRelay(bench.endpoint.origin)
        sdk = SDKS[name](replace(bench.endpoint, origin=relay.origin), attempts=2)
        if sdk.lost_class is not None:
            with pytest.raises(sdk.lost_class):
                sdk.ask()
        assert sdk.ask().text == "hi"
        relay.close()
    assert relay.num_connections == 2
    assert len(bench.log.calls) == 1
    assert bench.log.counters == {"retries_replayed": 1}


@every_dialect
def test_hanging_up_aborts_the_generation(name: str) -> None:
    engine = GatedEngine()
    with serve(engine) as bench:
        with SDKS[name](bench.endpoint).open_stream():
            assert engine.num_aborted == 0
        wait_until(lambda: engine.num_aborted == 1)
        engine.gate.set()
        assert SDKS[name](bench.endpoint).ask().text == "done"
    assert bench.log.counters == {"calls_aborted": 1}
    assert len(bench.log.calls) == 1


# Raw requests, for what the clients cannot be made to do


def build_raw(name: str, *, stream: bool) -> tuple[str, dict[str, Any]]:
    """Path and body of a question."""
    hello = {"role": "user", "content": "hello"}
    if name == "google":
        method = "streamGenerateContent?alt=sse" if stream else "generateContent"
        return f"/v1beta/models/m:{method}", {"contents": [{"role": "user", "parts": [{"text": "hello"}]}]}
    if name == "openai_responses":
        return "/v1/responses", {"model": "m", "input": [hello], "stream": stream}
    path = "/v1/messages" if name == "anthropic" else "/v1/chat/completions"
    return path, {"model": "m", "max_tokens": 90, "messages": [hello], "stream": stream}


def http(name: str, endpoint: Endpoint) -> httpx.Client:
    header = {"anthropic": "x-api-key", "google": "x-goog-api-key"}.get(name, "authorization")
    key = endpoint.api_key if header != "authorization" else f"Bearer {endpoint.api_key}"
    return httpx.Client(base_url=endpoint.origin, headers={header: key}, timeout=600)


@every_dialect
def test_a_slow_answer_is_pinged(name: str) -> None:
    (dialect,) = [dialect for dialect in DIALECTS if dialect.name == name]
    path, body = build_raw(name, stream=True)
    with serve(ScriptedEngine([say("at last")], delay_s=0.3)) as bench, http(name, bench.endpoint) as agent:
        stream = agent.post(path, json=body).content
    assert stream.count(dialect.ping()) >= 3


@every_dialect
def test_a_compressed_body(name: str) -> None:
    path, body = build_raw(name, stream=False)
    with serve(ScriptedEngine([say("hi")])) as bench, http(name, bench.endpoint) as agent:
        plain = httpx.Request("POST", "http://x", json=body).content
        headers = {"content-encoding": "gzip", "content-type": "application/json"}
        packed = agent.post(path, content=gzip.compress(plain), headers=headers)
        again = agent.post(path, content=plain)
    assert packed.status_code == 200
    assert packed.json() == again.json()
    assert bench.log.counters == {"retries_replayed": 1}


@every_dialect
def test_a_retry_of_an_answered_request_is_replayed(name: str) -> None:
    with serve(ScriptedEngine([say("hi", reasoning="why")])) as bench:
        plain = SDKS[name](bench.endpoint).ask()
        # an agent whose stream broke may ask again without, and the other way round
        assert SDKS[name](bench.endpoint).ask(stream=True) == plain
    assert len(bench.log.calls) == 1
    assert bench.log.counters == {"retries_replayed": 1}


# Other routes


@those_with("counting")
def test_counting(name: str) -> None:
    with serve(ScriptedEngine([say("hi")])) as bench:
        sdk = SDKS[name](bench.endpoint)
        counted = sdk.count()
        assert bench.log.calls == ()
        assert sdk.ask().num_prompt_tokens == counted
    assert counted == len(bench.log.calls[0].prompt_ids)


@every_dialect
def test_model_listing(name: str) -> None:
    with serve(ScriptedEngine([])) as bench:
        assert SDKS[name](bench.endpoint).list_models() == ["policy"]
