"""Each refused request is counted by its reason and logged once for it, in the words that the agent got."""

import logging
from typing import Any

import openai
import orjson
import pytest
from serving import CHAT, HELLO, client, http, new_log, say, serve

from polar_trl.engine.scripted import ScriptedEngine

GOOGLE = "/v1beta/models/policy:generateContent"
CONTENTS = [{"role": "user", "parts": [{"text": "hello"}]}]
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": ""}}
REFUSED: list[tuple[str, Any, str, int]] = [
    (CHAT, {"messages": HELLO, "n": 2}, "refused_n", 400),
    (CHAT, {"messages": [{"role": "robot"}]}, "refused_messages", 400),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "refused_messages", 400),
    (CHAT, {"messages": HELLO, "tools": 5}, "refused_tools", 400),
    (CHAT, b"{", "refused_body", 400),
    (CHAT, b"\0" * ((16 << 20) + 1), "refused_body", 413),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 2000}]}, "context_overflows", 400),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 99_000}]}, "context_overflows", 400),
    ("/v1/completions", {"prompt": "x"}, "refused_path", 404),
    ("/v1/responses", {"input": "x", "previous_response_id": "r"}, "refused_previous_response_id", 400),
    ("/v1/responses", {"input": "x" * 2000}, "context_overflows", 400),
    ("/v1/messages", {"messages": [{"role": "user", "content": [PDF]}]}, "refused_messages", 400),
    ("/v1/messages", {"messages": [{"role": "user", "content": "x" * 2000}]}, "context_overflows", 400),
    (GOOGLE, {"contents": CONTENTS, "cachedContent": "c"}, "refused_cachedContent", 400),
    (GOOGLE, {"contents": [{"role": "user", "parts": [{"text": "x" * 2000}]}]}, "context_overflows", 400),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "u"}]}]},
        "refused_template",
        400,
    ),
]


@pytest.mark.parametrize(("path", "body", "counter", "status"), REFUSED)
def test_a_refusal_is_counted_and_logged_once(
    caplog: pytest.LogCaptureFixture, path: str, body: Any, counter: str, status: int
) -> None:
    content = body if isinstance(body, bytes) else orjson.dumps(body)
    with (
        caplog.at_level(logging.WARNING, "polar_trl"),
        serve(ScriptedEngine(lambda _: say("ok"), max_model_len=1000)) as proxy,
        http(proxy.open_session(log := new_log())) as agent,
    ):
        replies = [agent.post(path, content=content) for _ in range(3)]
        assert agent.post(CHAT, json={"messages": HELLO}).status_code == 200
    assert [reply.status_code for reply in replies] == [status] * 3
    assert log.counters == {counter: 3} and len(log.calls) == 1
    (line,) = caplog.messages
    assert line.startswith(f"session s1: a request was refused (HTTP {status}): {log.last_refusal}")
    message = replies[0].json()["error"]["message"]
    if counter == "context_overflows":
        # each format has its own first words, by which agents know the error; the numbers and the key are in all
        for text in (message, line):
            assert "vllm_max_model_length sets the context length of 1000 tokens" in text
            assert "20" in text or "3094" in text
    else:
        assert message == log.last_refusal


def test_each_reason_is_logged_for_each_session(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "polar_trl"), serve(ScriptedEngine([])) as proxy:
        for name in ("s1", "s2"):
            with http(proxy.open_session(new_log(name))) as agent:
                for body in ({"n": 2}, {"messages": HELLO, "n": 2}, {"messages": []}, {"messages": 5}):
                    assert agent.post(CHAT, json=body).status_code == 400
    assert [line.split(":")[0] for line in caplog.messages] == ["session s1", "session s1", "session s2", "session s2"]


def test_what_a_count_or_another_path_is_refused_ends_no_session() -> None:
    with serve(ScriptedEngine(lambda _: say("ok"))) as proxy, http(proxy.open_session(log := new_log())) as agent:
        assert agent.post(CHAT, json={"messages": HELLO}).status_code == 200
        assert agent.post("/v1/messages/count_tokens", json={"messages": 3}).status_code == 400
        assert agent.post("/api/event_logging/batch", json={}).status_code == 404
        assert agent.get("/v1/responses").status_code == 426
        assert log.unanswered_refusal == ""
        assert agent.post(CHAT, json={"messages": 3}).status_code == 400
        assert log.unanswered_refusal.startswith("messages: must be an array")
        assert agent.post(CHAT, json={"messages": HELLO, "max_tokens": 3}).status_code == 200
        assert log.unanswered_refusal == ""
    assert log.counters == {"refused_messages": 2, "refused_path": 1}


def test_an_official_client_reads_both_numbers_and_the_key() -> None:
    with (
        serve(ScriptedEngine([], max_model_len=100)) as proxy,
        pytest.raises(
            openai.BadRequestError,
            match=r"context length is 100 tokens.* resulted in 2.. tokens.*vllm_max_model_length",
        ),
    ):
        client(proxy.open_session(new_log())).chat.completions.create(
            model="m", messages=[{"role": "user", "content": "x" * 200}]
        )
