"""What is hard to say in a format, sampled or sent, through the proxy: in all formats, streamed and not."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from clients import CLIENTS, Client, Seen
from conversations import Style
from serving import serve
from tiny_tokenizers import TOOLED, build_tokenizer, encode, read_trl_template, result, user

from polar_trl.engine.base import GenerationParams
from polar_trl.engine.scripted import ScriptedEngine
from polar_trl.reconstruct.laws import check_laws
from polar_trl.reconstruct.merge import build_prefix_merged
from polar_trl.recording.log import SessionLog, read_record
from polar_trl.tokens.families import FamilyRenderer
from polar_trl.tokens.template import TemplateRenderer
from polar_trl.types import ChatRequest, Message, Rollout, Tool, ToolCall
from polar_trl.wire import DIALECTS

SH = Tool(
    name="sh",
    description="Runs it.",
    parameters={"type": "object", "properties": {"cmd": {"type": "string"}, "n": {"type": "array"}}},
)
QUESTION = ChatRequest(messages=(user("Go."),), tools=(SH,), model="policy")
STYLE = Style(block_lists=False, nulls=False, unknown_fields=False, reserialised=False, with_ids=True)
every_dialect = pytest.mark.parametrize("dialect", [dialect.name for dialect in DIALECTS])
streamed_or_not = pytest.mark.parametrize("stream", [False, True])
every_renderer = pytest.mark.parametrize("name", ["template", "qwen3", "qwen3.5"])


def build(name: str) -> tuple[Any, Any]:
    if name == "template":
        tokenizer = build_tokenizer(TOOLED)
        return tokenizer, TemplateRenderer(tokenizer)
    tokenizer = build_tokenizer(read_trl_template("qwen3" if name == "qwen3" else "qwen3_5_think"))
    return tokenizer, FamilyRenderer(tokenizer, name)


class Talk:
    """One agent's session: its replies are texts, spelled as that renderer's model would sample them."""

    def __init__(self, name: str, dialect: str, request: ChatRequest, endpoint: Any, log: SessionLog) -> None:
        self.client: Client = CLIENTS[dialect](request, STYLE)
        self._stream = request.stream
        self._endpoint, self.log = endpoint, log

    def send(self) -> httpx.Response:
        incoming = self.client.incoming()
        headers = {**incoming.headers, "authorization": f"Bearer {self._endpoint.api_key}"}
        url, query = self._endpoint.origin + incoming.path, dict(incoming.query)
        return httpx.post(url, content=incoming.body, params=query, headers=headers, timeout=600)

    def ask(self) -> Seen:
        response = self.send()
        assert response.status_code == 200, response.text
        return self.client.read(response.content, streamed=self._stream)


@contextmanager
def talk(
    name: str,
    dialect: str,
    replies: list[str],
    request: ChatRequest = QUESTION,
    *,
    path: Path | None = None,
    **limits: Any,
) -> Iterator[Talk]:
    tokenizer, renderer = build(name)
    log = SessionLog(session_id="s", task_id="t", group_id="g", path=path)
    engine = ScriptedEngine([encode(tokenizer, text) for text in replies])
    with serve(engine, renderer, params=GenerationParams(**({"max_tokens": 500} | limits))) as proxy:
        endpoint = proxy.open_session(log)
        try:
            yield Talk(name, dialect, request, endpoint, log)
        finally:
            proxy.close_session(endpoint.api_key)
    rollout = Rollout(id="s", task_id="t", group_id="g", calls=log.calls)
    check_laws(rollout, build_prefix_merged(rollout))
    if path is not None:
        log.close(rollout)
        assert read_record(path).rollout == rollout


def think(name: str) -> str:
    return {"template": "", "qwen3": "<think>\nhm\n</think>\n\n", "qwen3.5": "hm\n</think>\n\n"}[name]


def tag(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


END = "<|im_end|>"
HARD = {
    "half an emoji as a name": tag('{"name": "sh\\ud83d", "arguments": {"cmd": "ls"}}'),
    "half an emoji in arguments": tag('{"name": "sh", "arguments": {"cmd": "\\ud83d", "\\udc00": 1}}'),
    "half an emoji in xml": tag('<function=sh>\n<parameter=n>\n["\\ud83d"]\n</parameter>\n</function>'),
    "half an emoji in a custom tool": tag('{"name": "patch", "arguments": {"input": "\\ud83d"}}'),
    "parameters": tag('{"name": "sh", "parameters": {"cmd": "ls"}}'),
    "flat": tag('{"name": "sh", "cmd": "ls"}'),
    "tags in strings": tag('{"name": "sh", "arguments": {"cmd": "</tool_call></think>"}}'),
    "cut": '<tool_call>\n{"name": "sh", "arguments": {"cmd": "l',
    "no number": tag('{"name": "sh", "arguments": {"n": NaN}}'),
    "nothing": "",
}


@every_dialect
@streamed_or_not
@every_renderer
def test_every_hard_reply_is_answered_recorded_and_continued(
    name: str, stream: bool, dialect: str, tmp_path: Path
) -> None:
    for number, (what, sampled) in enumerate(HARD.items()):
        replies = [think(name) + sampled + END, think(name) + "Done." + END]
        request = replace(QUESTION, stream=stream)
        with talk(name, dialect, replies, request, path=tmp_path / f"{number}.jsonl") as agent:
            seen = agent.ask()
            assert [call.name for call in seen.calls] == [call.name for call in agent.log.calls[0].message.tool_calls]
            assert all(call.arguments.strip() not in ("", "{}") for call in seen.calls), what
            json.dumps([seen.text, seen.reasoning, [call.name for call in seen.calls]], ensure_ascii=False).encode()
            agent.client.add([result("r", call.id) for call in seen.calls] or [user("Go on.")])
            assert agent.ask().text.strip() == "Done."
            assert agent.log.calls[1].parent == 0, what
        assert "internal_errors" not in agent.log.counters


@every_dialect
def test_losses_are_counters_of_the_session(dialect: str) -> None:
    draft = tag('{"name": "sh", "arguments": {"cmd": "a"}}')
    replies = [f"hm {draft}\n</think>\n\n{HARD['flat']}{HARD['cut']}{END}", f"hm {draft}{END}"]
    with talk("qwen3.5", dialect, replies) as agent:
        seen = agent.ask()
        agent.client.add([result("r", call.id) for call in seen.calls])
        assert len(agent.ask().calls) == 1
        assert agent.log.counters == {
            "tool_calls_malformed": 2,
            "tool_calls_in_thinking": 1,
            "tool_calls_ended_thinking": 1,
        }


@every_dialect
@streamed_or_not
def test_halves_that_an_agent_sends_become_one_sign(stream: bool, dialect: str) -> None:
    half = "a\ud83d"
    call = ToolCall(id=half, name="sh", arguments='{"cmd": "\ud83d"}')
    messages = (
        user(half),
        Message(role="assistant", text=half, reasoning=half, tool_calls=(call,)),
        result(half, half),
    )
    tool = replace(SH, description=half, parameters={"type": "object", "properties": {half: {"type": "string"}}})
    request = replace(QUESTION, messages=messages, tools=(tool,), stream=stream)
    with talk("qwen3", dialect, [f"Yes.{END}"], request) as agent:
        assert agent.ask().text == "Yes."
        (recorded,) = agent.log.calls
        assert [message.text for message in recorded.request.messages] == ["a\ufffd"] * 3
        assert recorded.request.tools[0].description == "a\ufffd"
        assert recorded.request.messages[2].tool_call_id == recorded.request.messages[1].tool_calls[0].id


def test_half_a_sign_in_a_path_is_no_fault_of_ours() -> None:
    with talk("qwen3", "google", [f"Yes.{END}"]) as agent:
        body = agent.client.incoming().body
        url = f"{agent._endpoint.origin}/v1beta/models/x%ED%A0%BD:generateContent?key={agent._endpoint.api_key}"
        response = httpx.post(url, content=body, headers={"user-agent": "\xed\xa0\xbd".encode("latin-1")}, timeout=600)
        assert response.status_code == 200, response.text
        response.json()


BEGUN = replace(QUESTION, messages=(*QUESTION.messages, Message(role="assistant", text='Sure: {"a":')))


@every_dialect
@streamed_or_not
@every_renderer
def test_a_conversation_that_ends_with_the_assistant_is_continued(name: str, stream: bool, dialect: str) -> None:
    with talk(name, dialect, [f" 1}}{END}", think(name) + f"Done.{END}"], replace(BEGUN, stream=stream)) as agent:
        assert agent.ask().text == " 1}"
        tokenizer, _ = build(name)
        first = agent.log.calls[0]
        assert tokenizer.decode(first.prompt_ids).endswith('Sure: {"a":')
        assert tokenizer.decode(first.prompt_ids).count(END) == 2  # of the tools and of the question
        agent.client.add([user("Go on.")])
        assert agent.ask().text.strip() == "Done."
        assert agent.log.calls[1].parent == 0


@every_dialect
@every_renderer
def test_a_reply_that_was_cut_goes_on_from_its_own_tokens(name: str, dialect: str) -> None:
    replies = [think(name) + "One two three four five " * 4, f" six.{END}"]
    with talk(name, dialect, replies, max_tokens=30) as agent:
        agent.ask()
        first = agent.log.calls[0]
        assert first.completion.finish_reason == "length"
        agent.ask()
        second = agent.log.calls[1]
        assert second.parent == 0
        assert tuple(second.prompt_ids) == tuple(first.prompt_ids) + first.completion.token_ids


REFUSALS = {
    "openai_chat": "must be followed by tool messages responding to each 'tool_call_id'",
    "openai_responses": "No tool output found for function call c1.",
    "anthropic": "`tool_use` ids were found without `tool_result` blocks immediately after: c1.",
    "google": "the number of function response parts is equal to the number of function call parts",
}


@every_dialect
def test_calls_without_results_are_refused_in_the_providers_words(dialect: str) -> None:
    call = Message(role="assistant", tool_calls=(ToolCall(id="c1", name="sh", arguments='{"cmd": "ls"}'),))
    with talk("qwen3", dialect, [], replace(QUESTION, messages=(user("Go."), call))) as agent:
        response = agent.send()
        assert response.status_code == 400
        assert REFUSALS[dialect] in json.dumps(response.json(), ensure_ascii=False)
        assert not agent.log.calls
