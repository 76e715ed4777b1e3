"""The same request again: replayed so often, at the cost of the budget, and sampled anew after an empty answer."""

from collections import Counter
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import CHAT, HELLO, call_tool, http, new_log, say, serve

from polar_trl.engine.scripted import ScriptedEngine
from polar_trl.reconstruct.laws import check_laws
from polar_trl.reconstruct.merge import build_prefix_merged
from polar_trl.recording.session import SessionLimits
from polar_trl.recording.turn import MAX_REPLAYS
from polar_trl.types import Message, Rollout

ASKS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 90},
    "/v1beta/models/policy:generateContent": {"contents": [{"role": "user", "parts": [{"text": "hello"}]}]},
}


def number_answers() -> ScriptedEngine:
    numbers = count()
    return ScriptedEngine(lambda _: say(f"answer {next(numbers)}"))


@pytest.mark.parametrize("path", ASKS)
@pytest.mark.parametrize("empty", [say(""), say(" \n"), say("", reasoning="hm")], ids=["none", "blank", "reasoning"])
def test_after_an_empty_answer_another_one_is_sampled(path: str, empty: tuple[int, ...]) -> None:
    engine = ScriptedEngine([empty, empty, say("something"), say("never asked for")])
    with serve(engine) as proxy, http(proxy.open_session(log := new_log())) as agent:
        texts = [agent.post(path, json=ASKS[path]).text for _ in range(4)]
    assert ["something" in text for text in texts] == [False, False, True, True]
    assert log.counters == {"empty_answers_resampled": 2, "retries_replayed": 1}
    texts = [call.message.text.strip() for call in log.calls]
    assert texts == ["", "", "something"] and {call.parent for call in log.calls} == {None}
    rollout = Rollout(id="s1", task_id="t", group_id="g", calls=log.calls, reward=1.0)
    merged = build_prefix_merged(rollout)
    check_laws(rollout, merged)
    assert [row.call_indices for row in merged.trajectories] == [(2,)]
    assert merged.counters["superseded_calls"] == 2


def test_a_tool_call_without_text_is_no_empty_answer() -> None:
    engine = ScriptedEngine([call_tool("sh", "{}"), say("second")])
    with serve(engine) as proxy, http(proxy.open_session(log := new_log())) as agent:
        first, again = (agent.post(CHAT, json={"messages": HELLO}).content for _ in range(2))
    assert first == again and log.counters == {"retries_replayed": 1}


@pytest.mark.parametrize("path", ASKS)
def test_an_answer_is_given_again_so_often_and_then_another_one(path: str) -> None:
    with serve(number_answers()) as proxy, http(proxy.open_session(log := new_log())) as agent:
        texts = [agent.post(path, json=ASKS[path]).text for _ in range(2 * MAX_REPLAYS + 2)]
    assert [text.count("answer 0") for text in texts] == [1] * (1 + MAX_REPLAYS) + [0] * (1 + MAX_REPLAYS)
    assert [text.count("answer 1") for text in texts] == [0] * (1 + MAX_REPLAYS) + [1] * (1 + MAX_REPLAYS)
    assert log.counters == {"retries_replayed": 2 * MAX_REPLAYS, "repeats_resampled": 1}


@pytest.mark.parametrize("path", ASKS)
def test_replays_are_counted_in_the_budget(path: str) -> None:
    limits = SessionLimits(max_calls=5)
    with serve(number_answers()) as proxy, http(proxy.open_session(log := new_log(), limits)) as agent:
        replies = [agent.post(path, json=ASKS[path]) for _ in range(60)]
    said = Counter("budget of this session" in reply.text for reply in replies)
    assert said == {False: 5, True: 55}
    assert sum(call.is_answered for call in log.calls) == 2 and len(log.calls) == 22
    assert replies[-1].status_code == 403 and log.counters["budget_messages"] == 55


class Step:
    """What an agent does next."""

    def __init__(self, question: int, answer: str) -> None:
        self.question, self.answer = question, answer


steps = st.lists(st.builds(Step, st.integers(0, 2), st.sampled_from(["", "x", "y"])), max_size=40)


@settings(max_examples=25, deadline=None)
@given(steps=steps, max_calls=st.integers(1, 12))
def test_whatever_is_repeated_the_budget_holds(steps: list[Step], max_calls: int) -> None:
    """Answers and replays together are no more than the budget; an answer is given to its own question only."""
    said = {say(text): text for text in ("", "x", "y")}
    answers: list[str] = []

    def reply(_: tuple[int, ...]) -> tuple[int, ...]:
        return next(ids for ids, text in said.items() if text == answers[-1])

    given: Counter[int] = Counter()
    limits = SessionLimits(max_calls=max_calls)
    with serve(ScriptedEngine(reply)) as proxy, http(proxy.open_session(log := new_log(), limits)) as agent:
        for step in steps:
            answers.append(step.answer)
            response = agent.post(CHAT, json={"messages": [{"role": "user", "content": f"{step.question}"}]})
            given[step.question] += response.status_code == 200 and "budget" not in response.text
    assert given.total() <= max_calls
    for call in log.calls:
        if call.is_answered:
            assert call.request.messages[0] in [Message(role="user", text=f"{number}") for number in range(3)]
    assert sum(call.is_answered for call in log.calls) + log.counters.get("retries_replayed", 0) == given.total()
