"""Streams that tell text while it is sampled, read by the providers' own clients, over a real socket."""

import asyncio
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import anthropic
import openai
import orjson
import pytest
from google import genai
from google.genai import types as google_types
from hypothesis import given, settings
from hypothesis import strategies as st
from sdks import SDKS, Sdk
from serving import CHAT, HELLO, RENDERER, http, new_log, say, serve, wait_until

from polar_trl.engine.base import GenerationParams
from polar_trl.engine.scripted import ScriptedEngine
from polar_trl.errors import EngineError
from polar_trl.recording import live as live_replies
from polar_trl.tokens.bytes import THINK_END, ByteRenderer
from polar_trl.types import Completion, Endpoint, Message, TokenIds, Tool, ToolCall

TEXT = "Let us say naïve 🙂 things, slowly."
REPLY = say(TEXT, reasoning="why not", tool_calls=(ToolCall(id="", name="sh", arguments='{"cmd": "ls"}'),))
PARAMS = GenerationParams(max_tokens=400)
every_sdk = pytest.mark.parametrize("sdk", SDKS.values(), ids=SDKS)


class Step(ScriptedEngine):
    """Gives the next part of its reply when what came before has been told."""

    def __init__(self, reply: TokenIds, parts: int = 4, failure: EngineError | None = None) -> None:
        super().__init__([reply, reply])
        self.failure = failure
        self.parts = parts
        self.seen: list[list[int]] = []
        self.may_go_on = 0

    async def generate_live(self, prompt_ids: TokenIds, params: GenerationParams, so_far: list[int]) -> Completion:
        completion = await self.generate(prompt_ids, params)
        self.seen.append(so_far)
        size = -(-len(completion.token_ids) // self.parts)
        for part in range(self.parts):
            so_far += completion.token_ids[part * size : (part + 1) * size]
            try:
                while self.may_go_on <= part:
                    await asyncio.sleep(0.002)
            except asyncio.CancelledError:
                self.num_aborted += 1
                raise
            if self.failure is not None:
                raise self.failure
        return completion


@every_sdk
def test_the_clients_put_together_what_is_recorded(sdk: type[Sdk]) -> None:
    engine = ScriptedEngine([REPLY, say("and on")], token_delay_s=0.004)
    with serve(engine, params=PARAMS, live=True) as proxy:
        asked = sdk(proxy.open_session(log := new_log()))
        answer = asked.ask(stream=True, tools=True)
        asked.give_results([(call_id, name, "a.txt") for call_id, name, _ in answer.calls])
        later = asked.ask(stream=True, tools=True)
    one, two = log.calls
    assert (answer.text, answer.reasoning) == (one.message.text, one.message.reasoning) == (TEXT, "why not")
    assert [(name, arguments) for _, name, arguments in answer.calls] == [("sh", {"cmd": "ls"})]
    assert answer.num_sampled_tokens == len(one.completion.token_ids) and one.completion.token_ids == REPLY
    # the same path as whole answers: the next prompt begins with what was sampled
    assert two.prompt_ids[: len(one.prompt_ids) + len(REPLY)] == one.prompt_ids + REPLY and two.parent == 0
    assert later.text == "and on" and log.counters == {}


def read_texts(endpoint: Endpoint, dialect: str) -> "list[tuple[str, str]]":
    """What each event of a stream adds, by kind: the client's own objects."""
    parts: list[tuple[str, str]] = []
    if dialect == "openai_chat":
        chat = openai.OpenAI(base_url=f"{endpoint.origin}/v1", api_key=endpoint.api_key, max_retries=0)
        messages: Any = HELLO
        for chunk in chat.chat.completions.create(model="m", messages=messages, stream=True):
            delta = chunk.choices[0].delta
            parts += [("reasoning", text) for text in [getattr(delta, "reasoning_content", "")] if text]
            parts += [("text", delta.content)] if delta.content else []
    elif dialect == "openai_responses":
        client = openai.OpenAI(base_url=f"{endpoint.origin}/v1", api_key=endpoint.api_key, max_retries=0)
        kinds = {"response.reasoning_summary_text.delta": "reasoning", "response.output_text.delta": "text"}
        with client.responses.stream(model="m", input="hello") as events:
            parts += [(kinds[event.type], event.delta) for event in events if event.type in kinds]
    elif dialect == "anthropic":
        claude = anthropic.Anthropic(base_url=endpoint.origin, api_key=endpoint.api_key, max_retries=0)
        with claude.messages.stream(model="m", max_tokens=300, messages=HELLO) as stream:
            for event in stream:
                if event.type in ("text", "thinking"):
                    parts.append(("text", event.text) if event.type == "text" else ("reasoning", event.thinking))
    else:
        options = google_types.HttpOptions(base_url=endpoint.origin)
        gemini = genai.Client(api_key=endpoint.api_key, vertexai=False, http_options=options)
        for reply in gemini.models.generate_content_stream(model="m", contents="hello"):
            for part in reply.candidates[0].content.parts or ():
                parts += [("reasoning" if part.thought else "text", part.text)] if part.text else []
    return parts


@pytest.mark.parametrize("dialect", SDKS)
def test_a_person_reads_it_as_it_comes(dialect: str) -> None:
    reply = say("one two three four five six seven eight", reasoning="thinking about numbers and more numbers")
    with serve(ScriptedEngine([reply], token_delay_s=0.02), params=PARAMS, live=True) as proxy:
        parts = read_texts(proxy.open_session(log := new_log()), dialect)
    texts = [text for kind, text in parts if kind == "text"]
    assert len(texts) > 3 and "".join(texts) == log.calls[0].message.text
    reasonings = [text for kind, text in parts if kind == "reasoning"]
    assert len(reasonings) > 3 and "".join(reasonings) == log.calls[0].message.reasoning
    assert [kind for kind, _ in parts] == ["reasoning"] * len(reasonings) + ["text"] * len(texts)


def test_nobody_looks_in_training() -> None:
    engine = Step(REPLY)
    with serve(engine, params=PARAMS) as proxy:
        SDKS["openai_chat"](proxy.open_session(new_log())).ask(stream=True)
        assert engine.seen == []
    with serve(engine, params=PARAMS, live=True) as proxy:
        SDKS["openai_chat"](proxy.open_session(new_log())).ask(stream=False)
        assert engine.seen == []


@every_sdk
def test_a_client_that_hangs_up_aborts_as_ever(sdk: type[Sdk]) -> None:
    engine = Step(REPLY)
    engine.may_go_on = 2
    with serve(engine, params=PARAMS, live=True) as proxy:
        asked = sdk(proxy.open_session(log := new_log()))
        with asked.open_stream():
            wait_until(lambda: bool(engine.seen and engine.seen[0]))
        wait_until(lambda: engine.num_aborted == 1)
        engine.may_go_on = 4
        # the same question again is sampled anew, and recorded
        assert asked.ask(stream=True).text == TEXT
    assert len(log.calls) == 1 and log.counters["calls_aborted"] == 1


def test_a_retry_that_joins_hears_all_of_it() -> None:
    engine = Step(say("one two three four"), parts=4)
    engine.may_go_on = 2
    with serve(engine, params=PARAMS, live=True) as proxy:
        endpoint = proxy.open_session(log := new_log())
        texts = []
        with http(endpoint) as client:
            body = {"messages": HELLO, "stream": True}
            with client.stream("POST", CHAT, json=body) as first, client.stream("POST", CHAT, json=body) as second:
                lines = [one.iter_lines() for one in (first, second)]
                heads = [[next(one) for one in [read] for _ in range(3)] for read in lines]
                wait_until(lambda: log.counters.get("retries_joined") == 1)
                engine.may_go_on = 4
                for head, read in zip(heads, lines, strict=True):
                    events = [orjson.loads(line[6:]) for line in [*head, *read] if line.startswith("data: {")]
                    texts.append("".join(event["choices"][0]["delta"].get("content") or "" for event in events))
    assert texts == ["one two three four"] * 2 and len(log.calls) == 1


@pytest.mark.parametrize("dialect", SDKS)
def test_an_engine_that_fails_in_the_middle_is_an_error(dialect: str) -> None:
    engine = Step(say("one two three four"), failure=EngineError("lost"))
    with serve(engine, params=PARAMS, live=True) as proxy:
        endpoint = proxy.open_session(log := new_log())

        def let() -> None:
            time.sleep(0.3)
            engine.may_go_on = 1

        threading.Thread(target=let).start()
        with pytest.raises((openai.APIError, anthropic.APIError, genai.errors.APIError)):  # type: ignore[attr-defined]
            read_texts(endpoint, dialect)
    assert log.calls == () and log.counters["engine_errors"] == 1


class Fickle(ByteRenderer):
    """Takes text for reasoning once an end of reasoning comes that nothing has begun."""

    def parse(self, prompt_ids: TokenIds, completion_ids: TokenIds, tools: Sequence[Tool]) -> Message:
        if THINK_END in completion_ids:
            place = completion_ids.index(THINK_END)
            before, after = (RENDERER.parse((), ids, ()) for ids in (completion_ids[:place], completion_ids[place:]))
            return replace(after, reasoning=before.text)
        return super().parse(prompt_ids, completion_ids, tools)


def test_what_is_read_in_another_way_at_the_end_is_told_again_from_the_record() -> None:
    reply = (*b"I think so far and on", THINK_END, *say("yes"))
    engine = Step(reply, parts=2)
    with serve(engine, Fickle(), params=PARAMS, live=True) as proxy:
        endpoint = proxy.open_session(log := new_log())
        with http(endpoint) as client:
            body = {"messages": HELLO, "stream": True}
            with client.stream("POST", CHAT, json=body) as response:
                lines = response.iter_lines()
                seen = [next(lines) for _ in range(3)]
                engine.may_go_on = 2
                seen += lines
            assert '"content":"I think' in seen[2]
            assert "ask again" in seen[-2] and "[DONE]" not in seen
            again = client.post(CHAT, json=body).text
            assert '"content":"yes"' in again and '"reasoning_content":"I think so far and on"' in again
            assert len(log.calls) == 1
            # once is enough: later replies of this session are told whole
            more = [*HELLO, {"role": "user", "content": "and?"}]
            assert '"content":"yes"' in client.post(CHAT, json=body | {"messages": more}).text
    assert len(engine.seen) == 1
    assert log.counters == {"streams_taken_back": 1, "retries_replayed": 1}


@settings(max_examples=25, deadline=None)
@given(
    text=st.text(st.sampled_from("ab <>{é🙂\n\t"), max_size=60),
    reasoning=st.none() | st.text(st.sampled_from("cd <é\n"), min_size=1, max_size=20),
    calls=st.booleans(),
    stop=st.sampled_from(["", "a b", "<"]),
    dialect=st.sampled_from(["openai_chat", "anthropic", "google"]),
)
def test_whatever_is_said_the_client_has_what_is_recorded(
    text: str, reasoning: str | None, calls: bool, stop: str, dialect: str
) -> None:
    tool_calls = (ToolCall(id="", name="sh", arguments='{"cmd": "ls"}'),) if calls else ()
    engine = ScriptedEngine([say(text, reasoning=reasoning, tool_calls=tool_calls)], token_delay_s=0.003)
    with pytest.MonkeyPatch.context() as patch, serve(engine, params=PARAMS, live=True) as proxy:
        patch.setattr(live_replies, "LOOK_COST", 0)
        answer = SDKS[dialect](proxy.open_session(log := new_log())).ask(stream=True, tools=True, stop=stop)
    (call,) = log.calls
    assert (answer.text, answer.reasoning) == (call.message.text, call.message.reasoning or "")
    assert len(answer.calls) == len(call.message.tool_calls) == int(calls)
    assert log.counters == {}


@pytest.mark.parametrize("live", [True, False])
def test_a_chat_of_googles_own_client_goes_on_where_it_was(live: bool) -> None:
    """It keeps each part of a stream as a content of its own."""
    replies = [say("one two three four five six\n", reasoning="so many words"), say("seven")]
    engine = ScriptedEngine(replies, token_delay_s=0.01)
    with serve(engine, params=PARAMS, live=live, ping_interval_s=10.0) as proxy:
        endpoint = proxy.open_session(log := new_log())
        options = google_types.HttpOptions(base_url=endpoint.origin)
        gemini = genai.Client(api_key=endpoint.api_key, vertexai=False, http_options=options)
        chat = gemini.chats.create(model="m")
        parts = [part.candidates[0].content.parts for part in chat.send_message_stream("hello")]
        assert all(parts) and (len(parts) > 4) == live
        assert chat.send_message("and?").text == "seven"
    one, two = log.calls
    assert two.parent == 0 and two.prompt_ids[: len(one.prompt_ids)] == one.prompt_ids and log.counters == {}
