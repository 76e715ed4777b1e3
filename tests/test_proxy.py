"""The proxy over real sockets: what agents get, what is recorded, and that both are one."""

import asyncio
import gzip
import socket
from typing import Any

import httpx
import orjson
import pytest
from serving import (
    CHAT,
    HELLO,
    PARAMS,
    RENDERER,
    GatedEngine,
    call_tool,
    client,
    http,
    new_log,
    say,
    serve,
)

from polar_trl.engine.scripted import ScriptedEngine
from polar_trl.errors import ConfigError
from polar_trl.proxy import Proxy
from polar_trl.recording.log import SessionLog
from polar_trl.recording.session import SessionLimits
from polar_trl.types import ChatRequest, Endpoint, Message, Purpose, TokenIds, Tool, ToolCall

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
    assert log.counters == {"answers_cut_at_max_session_tokens": 1, "budget_messages": 1}


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
