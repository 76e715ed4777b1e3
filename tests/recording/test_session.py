"""One session without HTTP: turns, budgets and closing, on an event loop of the test's own."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise, permutations, product
from typing import Any

import orjson
import pytest

from polar_trl.engine.base import GenerationParams
from polar_trl.engine.scripted import ScriptedEngine
from polar_trl.errors import LawError, WireError
from polar_trl.recording.log import SessionLog
from polar_trl.recording.session import ModelBackend, Session, SessionLimits, Turn
from polar_trl.tokens.bytes import START, ByteRenderer
from polar_trl.types import Message, TokenIds, Tool, ToolCall
from polar_trl.wire import DIALECTS
from polar_trl.wire.base import Dialect, Incoming
from polar_trl.wire.openai_chat import OpenAIChat

RENDERER = ByteRenderer()
DIALECT = OpenAIChat()
HELLO = {"role": "user", "content": "hello"}


def say(text: str = "", **fields: Any) -> TokenIds:
    return RENDERER.spell(Message(role="assistant", text=text, **fields))


def ask(*messages: dict[str, Any], **fields: Any) -> Incoming:
    return Incoming(body=orjson.dumps({"messages": messages or [HELLO], **fields}))


@pytest.fixture
def workers() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


class Bench:
    """A session, its engine and its record."""

    def __init__(
        self,
        engine: ScriptedEngine,
        workers: ThreadPoolExecutor,
        *,
        renderer: ByteRenderer = RENDERER,
        limits: SessionLimits = SessionLimits(),
        max_tokens: int = 100,
    ) -> None:
        params = GenerationParams(max_tokens=max_tokens)
        backend = ModelBackend(engine=engine, renderer=renderer, params=params, model="policy", workers=workers)
        self.engine = engine
        self.log = SessionLog(session_id="s1", task_id="t", group_id="g")
        self.session = Session(backend, self.log, limits)

    async def begin(self, incoming: Incoming, dialect: Dialect = DIALECT) -> Turn:
        turn, _ = await self.session.begin_turn(dialect, incoming)
        return turn

    async def list_turns(self, asks: Sequence[Incoming]) -> list[int]:
        """Ask one after the other; the number of the turn that answered each."""
        numbers = []
        for incoming in asks:
            turn = await self.begin(incoming)
            await turn.task
            self.session.leave(turn)
            numbers.append(turn.number)
        return numbers

    async def answer(self, incoming: Incoming) -> dict[str, Any]:
        """The message that the agent reads."""
        turn, parsed = await self.session.begin_turn(DIALECT, incoming)
        await asyncio.wait({turn.task})
        self.session.leave(turn)
        reply = orjson.loads(DIALECT.render(self.session.describe(turn, parsed), turn.result()))
        message: dict[str, Any] = reply["choices"][0]["message"]
        return message


def rewrite(message: dict[str, Any]) -> dict[str, Any]:
    """The reply as agents send it back: arguments serialised anew, other call ids, no reasoning, trimmed."""
    rewritten = {"role": "assistant", "content": (message["content"] or "").strip() or None}
    tool_calls = [
        {
            "id": f"mine_{call['id']}",
            "type": "function",
            "function": {
                "name": call["function"]["name"],
                "arguments": orjson.dumps(
                    orjson.loads(call["function"]["arguments"]), option=orjson.OPT_SORT_KEYS
                ).decode(),
            },
        }
        for call in message.get("tool_calls", ())
    ]
    return rewritten | ({"tool_calls": tool_calls} if tool_calls else {})


@pytest.mark.parametrize("padding", [0, 80_000])  # worked on in the event loop, and in a worker
def test_five_turns_of_a_rewritten_history_keep_their_tokens(workers: ThreadPoolExecutor, padding: int) -> None:
    def reply(number: int) -> TokenIds:
        arguments = f'{{"path":  "f{number}", "lines": [1.0, 2], "a": null}}'
        call = ToolCall(id="", name="read", arguments=arguments)
        ids = say(" look on\n", reasoning="hm" * number, tool_calls=(call,))
        return (*ids[:-1], START, ids[-1])  # a stray mark, which no text shows

    async def run(bench: Bench) -> None:
        history = [{"role": "system", "content": "s" * padding}, HELLO]
        for number in range(5):
            rewritten = rewrite(await bench.answer(ask(*history)))
            call_id = rewritten["tool_calls"][0]["id"]
            history += [rewritten, {"role": "tool", "tool_call_id": call_id, "content": f"file {number}"}]

    bench = Bench(ScriptedEngine(map(reply, range(5)), max_model_len=1 << 20), workers)
    asyncio.run(run(bench))
    calls = bench.log.calls
    assert [call.parent for call in calls] == [None, 0, 1, 2, 3]
    for number, (before, after) in enumerate(pairwise(calls)):
        known = before.prompt_ids + reply(number)
        result = Message(role="tool", text=f"file {number}")
        assert after.prompt_ids == known + RENDERER.render([result], ())
        # the results answer the ids on record, not those that the agent made up
        assert after.request.messages[-1].tool_call_id == before.message.tool_calls[0].id
    assert bench.log.counters == {}
    # each token and each message is held once, by the call that added it
    assert sum(len(call.prompt_ids.own) for call in calls) == len(calls[-1].prompt_ids)
    assert sum(len(call.request.messages.own) for call in calls[1:]) + 2 == len(calls[-1].request.messages)


class WhereRendered(ByteRenderer):
    """Notes the thread on which each prompt is built."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[str] = []

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> TokenIds:
        self.threads.append(threading.current_thread().name)
        return super().render(messages, tools)

    def extend(
        self, prompt_ids: TokenIds, completion_ids: TokenIds, new_messages: Sequence[Message], tools: Sequence[Tool]
    ) -> TokenIds:
        self.threads.append(threading.current_thread().name)
        extended = super().extend(prompt_ids, completion_ids, new_messages, tools)
        assert extended is not None
        return extended


def test_much_new_text_is_encoded_on_a_worker(workers: ThreadPoolExecutor) -> None:
    """The first prompt of a session holds up no other; what a turn adds to it is encoded at once."""
    first = {"role": "user", "content": "x" * 20_000}
    answer = {"role": "assistant", "content": "done"}
    renderer = WhereRendered()
    engine = ScriptedEngine(lambda _: say("done"), max_model_len=1 << 20)

    async def main() -> None:
        bench = Bench(engine, workers, renderer=renderer)
        for messages in ([first], [first, answer, HELLO], [first, answer, HELLO, answer, first]):
            turn = await bench.begin(ask(*messages))
            await turn.task

    asyncio.run(main())
    here = threading.current_thread().name
    assert [name == here for name in renderer.threads if name] == [False, True, False]


def test_a_retry_is_recognised_by_what_it_asks(workers: ThreadPoolExecutor) -> None:
    tool = {"type": "function", "function": {"name": "sh", "parameters": {"type": "object"}}}
    same = [ask(tools=[tool]), ask(tools=[tool], stream=True, temperature=None)]
    others = [
        ask(),
        ask(tools=[tool | {"function": {"name": "sh", "parameters": {}}}]),
        ask(tools=[tool], temperature=0.5),
        ask(tools=[tool], max_tokens=5),
        ask({"role": "user", "content": "hello "}, tools=[tool]),
        ask(HELLO, HELLO, tools=[tool]),
    ]

    bench = Bench(ScriptedEngine(lambda _: say("ok")), workers)
    assert asyncio.run(bench.list_turns([*same, *others, same[0]])) == [0, 0, 1, 2, 3, 4, 5, 6, 0]
    assert len(bench.engine.params) == len(bench.log.calls) == 7
    assert bench.log.counters == {"retries_replayed": 2}


@pytest.mark.parametrize(
    ("asked", "limits", "max_model_len", "counters"),
    [
        ({}, SessionLimits(), 1 << 20, {}),
        ({"max_tokens": 100}, SessionLimits(), 1 << 20, {}),
        ({"max_tokens": 9}, SessionLimits(), 1 << 20, {"answers_cut_at_asked_max_tokens": 1}),
        ({}, SessionLimits(max_sampled_tokens=9), 1 << 20, {"answers_cut_at_max_session_tokens": 1}),
        ({}, SessionLimits(), 60, {"answers_cut_at_window": 1}),
    ],
)
def test_a_limit_that_cuts_an_answer_before_the_longest_one_is_counted(
    workers: ThreadPoolExecutor, asked: dict[str, Any], limits: SessionLimits, max_model_len: int, counters: object
) -> None:
    engine = ScriptedEngine([say("long " * 100)], max_model_len=max_model_len)
    bench = Bench(engine, workers, limits=limits)
    asyncio.run(bench.answer(ask(**asked)))
    assert bench.log.calls[0].completion.finish_reason == "length" and bench.log.counters == counters


def ask_with(arguments: Any, default: Any = None) -> Incoming:
    """A history with one tool call, and a tool with one parameter."""
    call = {"id": "c", "type": "function", "function": {"name": "sh", "arguments": arguments}}
    history = [
        HELLO,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "x"},
    ]
    parameters = {"type": "object", "properties": {"n": {"default": default, "type": "number"}}}
    return ask(*history, tools=[{"type": "function", "function": {"name": "sh", "parameters": parameters}}])


@pytest.mark.parametrize("by_text", [False, True])
def test_two_requests_are_the_same_if_their_json_is(workers: ThreadPoolExecutor, by_text: bool) -> None:
    """1, 1.0 and true are equal in Python and not in JSON; in what order keys are written says nothing."""
    spell = (lambda value: orjson.dumps(value).decode()) if by_text else (lambda value: value)
    asks = [ask_with(spell({"n": value, "a": [{"b": 1, "c": 2}]})) for value in (1, True, 1.0, "1", None)]
    asks.append(ask_with(spell({"a": [{"c": 2, "b": 1}], "n": 1})))
    asks += [ask_with(spell({}), default=value) for value in (1, True, 1.0, False, 0)]
    reordered = orjson.loads(ask_with(spell({}), default=0).body)
    parameters = reordered["tools"][0]["function"]["parameters"]
    reordered["tools"][0]["function"]["parameters"] = dict(reversed(parameters.items()))
    asks.append(Incoming(body=orjson.dumps(reordered)))

    bench = Bench(ScriptedEngine(lambda _: say("ok")), workers)
    assert asyncio.run(bench.list_turns(asks)) == [0, 1, 2, 3, 4, 0, 5, 6, 7, 8, 9, 9]
    assert bench.log.counters == {"retries_replayed": 2}
    # each call has the arguments that its own request had
    said = [call.request.messages[1].tool_calls[0].arguments for call in bench.log.calls[:5]]
    assert [orjson.loads(arguments)["n"] for arguments in said] == [1, True, 1.0, "1", None]
    assert [type(orjson.loads(arguments)["n"]) for arguments in said[:3]] == [int, bool, float]


def test_the_same_json_is_read_anew_in_another_dialect(workers: ThreadPoolExecutor) -> None:
    """`polar-trl serve` has one key for all agents, and some agents speak two dialects."""
    replies = [{"role": "assistant", "content": "ok"}, {"role": "user", "content": "go on"}]
    turns = [{"role": "user", "parts": "hello"}, {"role": "model", "parts": "ok"}, {"role": "user", "parts": "go on"}]
    bodies = [
        orjson.dumps({"messages": [HELLO, *replies[:n]], "input": [HELLO, *replies[:n]], "contents": turns[: n + 1]})
        for n in (0, 2)
    ]

    async def run(bench: Bench) -> None:
        for pair in permutations(DIALECTS, 2):
            for dialect, body in product(pair, bodies):
                await (await bench.begin(Incoming(body=body), dialect)).task

    bench = Bench(ScriptedEngine(lambda _: say("ok")), workers)
    asyncio.run(run(bench))
    assert {call.dialect for call in bench.log.calls} == {dialect.name for dialect in DIALECTS}
    for call in bench.log.calls:
        assert [message.text for message in call.request.messages] in (["hello"], ["hello", "ok", "go on"])


def test_a_purpose_that_could_not_be_read_back_is_not_recorded(workers: ThreadPoolExecutor) -> None:
    bench = Bench(ScriptedEngine(lambda _: say("ok")), workers)
    bench.session._classify = lambda _: None  # type: ignore[assignment, return-value]
    with pytest.raises(TypeError, match="classify gives None, and not 'policy' or 'auxiliary'"):
        asyncio.run(bench.begin(ask()))
    assert bench.log.calls == ()


def test_a_failed_request_may_be_asked_again(workers: ThreadPoolExecutor) -> None:
    async def run(bench: Bench) -> None:
        turn = await bench.begin(ask())
        await asyncio.wait({turn.task})
        bench.session.leave(turn)
        with pytest.raises(WireError, match="no reply left") as caught:
            turn.result()
        assert (caught.value.status, caught.value.kind) == (503, "overloaded")
        again = await bench.begin(ask())
        assert again is not turn
        await asyncio.wait({again.task})

    bench = Bench(ScriptedEngine([]), workers)
    asyncio.run(run(bench))
    assert bench.log.calls == () and bench.log.counters == {"engine_errors": 2}


def test_closing_aborts_what_runs_and_ends_the_session(workers: ThreadPoolExecutor) -> None:
    async def run(bench: Bench) -> None:
        turns = [await bench.begin(ask(max_tokens=number)) for number in (1, 2)]
        await asyncio.sleep(0)  # the first steps of the turns: both wait for the engine
        await bench.session.close()
        for turn in turns:
            with pytest.raises(WireError, match="this session has ended") as caught:
                turn.result()
            assert caught.value.status == 401
            bench.session.leave(turn)
        with pytest.raises(WireError, match="this session has ended"):
            await bench.begin(ask())
        await bench.session.close()

    bench = Bench(ScriptedEngine(lambda _: say("x"), delay_s=60), workers)
    asyncio.run(run(bench))
    assert bench.engine.num_aborted == 2
    assert bench.log.calls == () and bench.log.counters == {"calls_aborted": 2}


def test_a_call_that_never_began_is_aborted_too(workers: ThreadPoolExecutor) -> None:
    async def run(bench: Bench) -> None:
        turn = await bench.begin(ask())
        bench.session.leave(turn)
        await bench.session.close()
        assert turn.task.cancelled()

    bench = Bench(ScriptedEngine([say("x")]), workers)
    asyncio.run(run(bench))
    assert bench.engine.params == [] and bench.log.calls == ()
    assert bench.log.counters == {"calls_aborted": 1}


class WaitingRenderer(ByteRenderer):
    """Renders or parses only once the event loop has begun to close the session. Bodies must be large."""

    def __init__(self, place: str) -> None:
        self._place = place
        self.loop: asyncio.AbstractEventLoop
        self.closing: asyncio.Task[None]
        self.bench: Bench

    def _wait(self, place: str) -> None:
        if place == self._place:
            asyncio.run_coroutine_threadsafe(self._close(), self.loop).result()

    async def _close(self) -> None:
        self.closing = asyncio.create_task(self.bench.session.close())
        await asyncio.sleep(0)

    def render(self, messages: Any, tools: Any) -> TokenIds:
        self._wait("render")
        return super().render(messages, tools)

    def parse(self, prompt_ids: TokenIds, completion_ids: TokenIds, tools: Any) -> Message:
        self._wait("parse")
        return super().parse(prompt_ids, completion_ids, tools)


@pytest.mark.parametrize("place", ["render", "parse"])
def test_closing_waits_for_what_is_being_worked_on(workers: ThreadPoolExecutor, place: str) -> None:
    """A prompt that is being built is aborted; a completion that was sampled is recorded."""
    renderer = WaitingRenderer(place)
    bench = renderer.bench = Bench(ScriptedEngine([say("x")], max_model_len=1 << 20), workers, renderer=renderer)

    async def run() -> None:
        renderer.loop = asyncio.get_running_loop()
        turn = await bench.begin(ask({"role": "user", "content": "x" * 80_000}))
        await asyncio.wait({turn.task})
        await renderer.closing
        assert turn.task.cancelled() == (place == "render")

    asyncio.run(run())
    assert len(bench.log.calls) == (place == "parse")
    assert bench.log.counters == ({"calls_aborted": 1} if place == "render" else {})


class LawlessRenderer(ByteRenderer):
    """Breaks a law at the end of every reply."""

    def parse(self, prompt_ids: TokenIds, completion_ids: TokenIds, tools: Any) -> Message:
        raise LawError(f"broken after {len(prompt_ids)} tokens")


def test_a_law_that_breaks_after_the_agent_hung_up_is_kept(workers: ThreadPoolExecutor) -> None:
    async def run(bench: Bench) -> None:
        for text in ("a", "bb"):
            turn = await bench.begin(ask({"role": "user", "content": text}))
            await asyncio.sleep(0)
            turn.sampled = True  # as if the engine had answered just before
            bench.session.leave(turn)
            await asyncio.wait({turn.task})
            with pytest.raises(WireError, match="the proxy failed"):
                turn.result()
        await bench.session.close()

    bench = Bench(ScriptedEngine([say("x"), say("y")]), workers, renderer=LawlessRenderer())
    asyncio.run(run(bench))
    num_tokens = len(RENDERER.render([Message(role="user", text="a")], ()))
    assert str(bench.session.broken_law) == f"broken after {num_tokens} tokens"
    assert bench.log.calls == () and bench.log.counters == {"internal_errors": 2}


def test_running_calls_count_for_the_budget(workers: ThreadPoolExecutor) -> None:
    async def run(bench: Bench) -> list[Turn]:
        turns = [await bench.begin(ask(max_tokens=number)) for number in range(1, 5)]
        await asyncio.wait({turn.task for turn in turns})
        return turns

    bench = Bench(ScriptedEngine(lambda _: (1,), delay_s=0.01), workers, limits=SessionLimits(max_calls=3))
    turns = asyncio.run(run(bench))
    sampled = [turn.result().completion.token_ids for turn in turns]
    assert sampled == [(1,), (1,), (1,), ()]
    assert len(bench.engine.params) == 3 and bench.log.counters == {"budget_messages": 1}


def test_a_session_out_of_budget_keeps_little_of_what_it_is_sent(workers: ThreadPoolExecutor) -> None:
    tool = {"type": "function", "function": {"name": "a", "description": "d" * 100_000}}

    async def run(bench: Bench) -> None:
        await bench.answer(ask())
        for number in range(25):
            messages = [{"role": "system", "content": f"{number}" * 30_000}, {"role": "user", "content": "x" * 30_000}]
            incoming = ask(*messages, tools=[tool], unknown=1)
            if number < 20:
                assert "budget of this session is used up" in (await bench.answer(incoming))["content"]
            else:
                with pytest.raises(WireError, match="budget of this session is used up") as caught:
                    await bench.begin(incoming)
                assert caught.value.status == 403
        assert len(bench.session._turns._turns) == 1

    bench = Bench(ScriptedEngine(lambda _: (1,), max_model_len=1 << 20), workers, limits=SessionLimits(max_calls=1))
    asyncio.run(run(bench))
    assert bench.log.counters == {"budget_messages": 25}
    requests = [call.request for call in bench.log.calls[1:]]
    assert [request.messages for request in requests] == [(Message(role="user", text="x" * 1000),)] * 20
    assert bench.log.num_bytes < 50_000


def test_a_session_ends_before_its_record_grows_without_end(
    workers: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polar_trl.recording.session.RECORD_BYTES_PER_TOKEN", 1)

    async def run(bench: Bench) -> None:
        for number in range(3):
            await bench.answer(ask({"role": "user", "content": f"{number}" * 100_000}))
        with pytest.raises(WireError, match="went past its limit of record and has ended") as caught:
            await bench.begin(ask())
        assert caught.value.status == 403 and bench.session.bounds.has_ended

    engine = ScriptedEngine(lambda _: (1,), max_model_len=200_000)
    bench = Bench(engine, workers, limits=SessionLimits(max_calls=5, max_record_bytes=1_000_000))
    asyncio.run(run(bench))
    assert len(bench.log.calls) == 3 and 1_000_000 < bench.log.num_bytes < 2_000_000
    assert bench.log.exceeded == "record" and bench.log.counters == {"record_exceeded": 1}


def test_an_agent_that_rewrites_a_full_context_at_every_call_gets_all_its_calls(workers: ThreadPoolExecutor) -> None:
    async def run(bench: Bench) -> None:
        for number in range(5):
            await bench.answer(ask({"role": "user", "content": f"{number}" * 199_000}))

    engine = ScriptedEngine(lambda _: (1,), max_model_len=200_000)
    bench = Bench(engine, workers, limits=SessionLimits(max_calls=5, max_record_bytes=1_000_000))
    asyncio.run(run(bench))
    assert len(bench.log.calls) == 5 and bench.log.num_bytes > 3_000_000 and bench.log.exceeded == ""


def test_what_was_sampled_is_recorded_though_the_session_went_past_a_limit(workers: ThreadPoolExecutor) -> None:
    async def run(bench: Bench) -> None:
        sampled, aborted = [await bench.begin(ask(max_tokens=number)) for number in (101, 102)]
        sampled.sampled = True  # as if the engine had answered just before
        bench.session.bounds.exceed("connections")
        await asyncio.wait({sampled.task, aborted.task})
        assert sampled.result().index == 0 and aborted.task.cancelled()

    bench = Bench(ScriptedEngine(lambda _: say("x")), workers)
    asyncio.run(run(bench))
    assert len(bench.log.calls) == 1
    assert bench.log.counters == {"connections_exceeded": 1, "calls_aborted": 1}


def test_text_that_cannot_fit_is_refused_without_being_encoded(workers: ThreadPoolExecutor) -> None:
    class NoRenderer(ByteRenderer):
        def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> TokenIds:
            raise AssertionError("it was encoded")

    async def run(bench: Bench) -> None:
        for messages in ([{"role": "user", "content": "x" * 32_001}], [HELLO] * 1000):
            with pytest.raises(WireError, match="prompt is too long") as caught:
                await bench.begin(ask(*messages))
            assert caught.value.kind == "context_overflow"

    bench = Bench(ScriptedEngine([], max_model_len=1000), workers, renderer=NoRenderer())
    asyncio.run(run(bench))
    assert bench.log.counters == {"context_overflows": 2}


def test_calls_with_the_same_tools_share_them(workers: ThreadPoolExecutor) -> None:
    tool = {"type": "function", "function": {"name": "a", "parameters": {"type": "object"}}}

    async def run(bench: Bench) -> None:
        for text in ("a", "b"):
            await bench.answer(ask({"role": "user", "content": text}, tools=[tool]))

    bench = Bench(ScriptedEngine(lambda _: say("x")), workers)
    asyncio.run(run(bench))
    first, second = bench.log.calls
    assert first.request.tools is second.request.tools
