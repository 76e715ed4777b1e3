"""One table of replies that are hard to read, for every renderer that reads <think> and <tool_call> tags.

A reply is never an error, no call in it is lost or becomes an empty one, and what was sampled stays what it was.
"""

import json
import re
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import pytest
from clients import CLIENTS
from conversations import Style, build_reply
from hypothesis import given, settings
from hypothesis import strategies as st
from records import build_rollout, open_log, read_session
from tiny_tokenizers import CHATML, TOOLED, build_tokenizer, encode, encode_oddly, read_trl_template, result, user

from polar_trl.errors import ConfigError
from polar_trl.tokens.base import ParsedReply, Renderer
from polar_trl.tokens.continuation import Continuations
from polar_trl.tokens.families import FAMILIES, FamilyRenderer
from polar_trl.tokens.template import TemplateRenderer
from polar_trl.tokens.tool_calls import UNNAMED
from polar_trl.types import Call, ChatRequest, Completion, Message, TokenIds, Tool, ToolCall
from polar_trl.wire import DIALECTS
from polar_trl.wire.base import ItemMemo, ReplyHead

SH = Tool(
    name="sh",
    description="Runs it.",
    parameters={"type": "object", "properties": {"cmd": {"type": "string"}, "n": {"type": ["integer", "array"]}}},
)
HEAD = (user("Go."),)
NAMES = ("template", "prompted template", "template of qwen3", "template of qwen3.5", "qwen3", "qwen3.5")
THINKING = NAMES[2:]
every_renderer = pytest.mark.parametrize("name", NAMES)


@cache
def build(name: str) -> tuple[Any, Renderer, TokenIds]:
    """Tokenizer, renderer, and the prompt of a question."""
    templates = {"template": TOOLED, "prompted template": CHATML}
    file = "qwen3_5_think" if name.endswith("qwen3.5") else "qwen3"
    tokenizer = build_tokenizer(templates.get(name) or read_trl_template(file))
    renderer = TemplateRenderer(tokenizer) if "template" in name else FamilyRenderer(tokenizer, name)
    return tokenizer, renderer, renderer.render(HEAD, (SH,))


def think(name: str, thought: str, close: str = "\n</think>\n\n") -> str:
    """Reasoning as that model samples it: Qwen3.5's prompt has opened it already, others know none."""
    if name not in THINKING:
        return ""
    return f"{thought}{close}" if name.endswith("qwen3.5") else f"<think>\n{thought}{close}"


def parse(name: str, text: str, *, end: str = "<|im_end|>") -> ParsedReply:
    tokenizer, renderer, prompt = build(name)
    found = [
        renderer.parse_reply(prompt, ids, (SH,))
        for ids in (encode(tokenizer, text + end), encode_oddly(tokenizer, text + end))
    ]
    ids_made = [replace(reply.message, tool_calls=()) for reply in found]
    assert ids_made[0] == ids_made[1] and found[0].losses == found[1].losses
    return found[0]


def tag(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def spell(**fields: Any) -> str:
    return tag(json.dumps(fields))


def xml(value: str, key: str = "cmd") -> str:
    return tag(f"<function=sh>\n<parameter={key}>\n{value}\n</parameter>\n</function>")


OK, BAD = "ok", "malformed"
LS = '{"cmd": "ls"}'
ALL = object()
"""The arguments are all of the call's own text."""
TABLE: dict[str, tuple[str, str, list[tuple[str, Any, str]]]] = {
    # sampled, text of the message, calls (name, arguments, status)
    "a call": (spell(name="sh", arguments={"cmd": "ls"}), "", [("sh", LS, OK)]),
    "xml": (xml("ls"), "", [("sh", LS, OK)]),
    "text around calls": (
        f"One.\n{spell(name='sh', arguments={'cmd': 'ls'})}\nTwo.\n{xml('ls')}\nThree.",
        "One.\nTwo.\nThree.",
        [("sh", LS, OK)] * 2,
    ),
    # other places of the arguments
    "parameters": (spell(name="sh", parameters={"cmd": "ls"}), "", [("sh", LS, OK)]),
    "flat": (spell(name="sh", cmd="ls"), "", [("sh", ALL, BAD)]),
    "flat beside empty arguments": (spell(name="sh", arguments={}, cmd="ls"), "", [("sh", ALL, BAD)]),
    "arguments and parameters": (spell(name="sh", arguments={}, parameters={"cmd": "ls"}), "", [("sh", ALL, BAD)]),
    "arguments twice": (
        tag('{"name": "sh", "arguments": {"cmd": "ls"}, "arguments": {}}'),
        "",
        [("sh", '{"cmd": "ls"}, "arguments": {}}', BAD)],
    ),
    "tool and args": (spell(tool="sh", args={"cmd": "ls"}), "", [(UNNAMED, ALL, BAD)]),
    "nested as in OpenAI's format": (
        spell(type="function", function={"name": "sh", "arguments": LS}),
        "",
        [(UNNAMED, ALL, BAD)],
    ),
    "no arguments at all": (spell(name="sh"), "", [("sh", "{}", OK)]),
    "type and id": (spell(id="c1", type="function", name="sh", arguments={}), "", [("sh", "{}", OK)]),
    "arguments as text": (spell(name="sh", arguments=LS), "", [("sh", json.dumps(LS), BAD)]),
    "arguments null": (spell(name="sh", arguments=None), "", [("sh", "null", BAD)]),
    "arguments as a list": (spell(name="sh", arguments=["ls"]), "", [("sh", '["ls"]', BAD)]),
    # damaged
    "cut before the arguments": ('<tool_call>\n{"name": "sh", "arguments": ', "", [("sh", ALL, BAD)]),
    "cut in the name": ('<tool_call>\n{"name": "sh', "", [(UNNAMED, ALL, BAD)]),
    "cut in the arguments": ('<tool_call>\n{"name": "sh", "arguments": {"cmd', "", [("sh", '{"cmd', BAD)]),
    "cut in xml": ("<tool_call>\n<function=sh>\n<parameter=cmd>\nls", "", [("sh", "<parameter=cmd>\nls", BAD)]),
    "cut behind the xml name": ("<tool_call>\n<function=sh>", "", [("sh", ALL, BAD)]),
    "one brace too many": (tag('{"name": "sh", "arguments": {"cmd": "ls"}}}'), "", [("sh", '{"cmd": "ls"}}}', BAD)]),
    "words behind the json": (tag('{"name": "sh", "arguments": {}} done'), "", [("sh", "{}} done", BAD)]),
    "a line break in a string": (
        tag('{"name": "sh", "arguments": {"cmd": "a\nb"}}'),
        "",
        [("sh", '{"cmd": "a\nb"}}', BAD)],
    ),
    "not a number": (tag('{"name": "sh", "arguments": {"n": NaN}}'), "", [("sh", '{"n": NaN}', BAD)]),
    "too large a number": (tag('{"name": "sh", "arguments": {"n": 1e999}}'), "", [("sh", '{"n": 1e999}', BAD)]),
    "an xml value too large": (xml("[1e999]", "n"), "", [("sh", '{"n": [Infinity]}', BAD)]),
    "an xml parameter twice": (
        tag("<function=sh>\n<parameter=cmd>\na\n</parameter>\n<parameter=cmd>\nb\n</parameter>\n</function>"),
        "",
        [("sh", "<parameter=cmd>\na\n</parameter>\n<parameter=cmd>\nb\n</parameter>\n</function>", BAD)],
    ),
    "an xml parameter that runs on": (
        tag("<function=sh>\n<parameter=cmd>\na\n<parameter=n>\n1\n</parameter>\n</function>"),
        "",
        [("sh", "<parameter=cmd>\na\n<parameter=n>\n1\n</parameter>\n</function>", BAD)],
    ),
    "an xml call that runs on": (
        f"<tool_call>\n<function=sh>\n<parameter=cmd>\na\n</tool_call>\n{xml('b')}",
        "",
        [("sh", "<parameter=cmd>\na", BAD), ("sh", '{"cmd": "b"}', OK)],
    ),
    "an empty block": (tag(""), "", [(UNNAMED, "", BAD)]),
    "fenced": (tag('```json\n{"name": "sh", "arguments": {}}\n```'), "", [("sh", "{}}\n```", BAD)]),
    # tags in strings
    "the closing tag in a string": (
        spell(name="sh", arguments={"cmd": "echo </tool_call> x"}),
        "",
        [("sh", '{"cmd": "echo </tool_call> x"}', OK)],
    ),
    "all tags in a string": (
        spell(name="sh", arguments={"cmd": "<think></think><tool_call>{}</tool_call><function=x></function>"}),
        "",
        [("sh", '{"cmd": "<think></think><tool_call>{}</tool_call><function=x></function>"}', OK)],
    ),
    "tags in an xml value": (
        xml("<think> </think> </tool_call> <|im_start|"),
        "",
        [("sh", '{"cmd": "<think> </think> </tool_call> <|im_start|"}', OK)],
    ),
    "a whole call in a string": (
        spell(name="sh", arguments={"cmd": tag('{"name": "rm", "arguments": {}}')}),
        "",
        [("sh", json.dumps({"cmd": tag('{"name": "rm", "arguments": {}}')}), OK)],
    ),
    # half of a surrogate pair
    "half an emoji as a name": (tag('{"name": "sh\\ud83d", "arguments": {}}'), "", [("sh\ufffd", "{}", OK)]),
    "half an emoji in a string": (
        tag('{"name": "sh", "arguments": {"cmd": "\\ud83d"}}'),
        "",
        [("sh", '{"cmd": "\\ud83d"}', OK)],
    ),
    "half an emoji in an xml array": (xml('["a", "\\ud83d"]', "n"), "", [("sh", '{"n": ["a", "\ufffd"]}', OK)]),
    "half an emoji as a key": (
        tag('{"name": "sh", "arguments": {"\\udc00": 1}, "\\ud83d": 2}'),
        "",
        [("sh", '{"\\udc00": 1}', OK)],
    ),
    # prose
    "a tag in prose": ("Use the <tool_call> tag like this.", "Use the <tool_call> tag like this.", []),
    "tags in prose": (
        "The tags <tool_call> and </tool_call> mark one.",
        "The tags <tool_call> and </tool_call> mark one.",
        [],
    ),
    "a second thought": ("Well.\n<think>no</think> yes", "Well.\n<think>no</think> yes", []),
    "json alone": ('{"name": "sh", "arguments": {}}', '{"name": "sh", "arguments": {}}', []),
}


@every_renderer
@pytest.mark.parametrize("case", TABLE)
def test_a_reply_is_read_alike_by_all(name: str, case: str) -> None:
    sampled, text, calls = TABLE[case]
    reply = parse(name, think(name, "hm") + sampled)
    body = sampled.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>").strip()
    wanted = [(tool, body if arguments is ALL else arguments, status) for tool, arguments, status in calls]
    assert [(call.name, call.arguments, call.parse_status) for call in reply.message.tool_calls] == wanted
    assert (reply.message.text, reply.message.reasoning) == (text, "hm" if name in THINKING else None)
    assert reply.losses == {}
    results = [result("done", call.id) for call in reply.message.tool_calls]
    _, renderer, _ = build(name)
    assert renderer.render([*HEAD, reply.message, *results, user("Go on.")], (SH,))  # where a prompt is made anew


CALL = spell(name="sh", arguments={"cmd": "ls"})
THOUGHTS: dict[str, tuple[str, str, str, int, dict[str, int]]] = {
    # sampled after the opening tag, reasoning, text, number of calls, losses
    "a draft": (f"hm {CALL} hm\n</think>\n\nNo.", f"hm {CALL} hm", "No.", 0, {"tool_calls_in_thinking": 1}),
    "two drafts and a call": (
        f"{CALL}{xml('a')}</think>{CALL}",
        CALL + xml("a"),
        "",
        1,
        {"tool_calls_in_thinking": 2},
    ),
    "never closed, with calls": (f"hm\n{CALL}\n{xml('a')}", "hm", "", 2, {"tool_calls_ended_thinking": 1}),
    "never closed": ("hm <tool_call> is a tag", "hm <tool_call> is a tag", "", 0, {}),
    "closed only in a string": (
        "hm\n" + spell(name="sh", arguments={"cmd": "echo </think>"}),
        "hm",
        "",
        1,
        {"tool_calls_ended_thinking": 1},
    ),
    "closed only in a value": (f"hm\n{xml('echo </think>')}", "hm", "", 1, {"tool_calls_ended_thinking": 1}),
    "opened once more": (f"<think>hm</think>{CALL}", "<think>hm", "", 1, {}),
    "nothing thought": (f"\n\n</think>\n\nYes.\n{CALL}", "", "Yes.", 1, {}),
}


@pytest.mark.parametrize("name", THINKING)
@pytest.mark.parametrize("case", THOUGHTS)
def test_reasoning_ends_where_it_is_closed_or_at_a_call(name: str, case: str) -> None:
    sampled, reasoning, text, num_calls, losses = THOUGHTS[case]
    opening = "" if name.endswith("qwen3.5") else "<think>"
    if name.endswith("qwen3.5"):  # what the prompt has opened may be opened once more
        reasoning = reasoning.removeprefix("<think>")
    reply = parse(name, opening + sampled)
    assert (reply.message.text, reply.message.reasoning or "") == (text, reasoning)
    assert len(reply.message.tool_calls) == num_calls
    assert all(call.parse_status == OK for call in reply.message.tool_calls)
    assert reply.losses == losses


@every_renderer
def test_what_stands_behind_an_end_of_turn_is_counted(name: str) -> None:
    reply = parse(name, think(name, "hm") + "One.<|im_end|>Two.", end="")
    assert (reply.message.text, reply.losses) == ("One.", {"reply_text_dropped": 1})


fragments = st.sampled_from(
    [
        (CALL, 1),
        (xml("a </tool_call> b"), 1),
        (spell(name="sh", cmd="ls"), 1),
        (tag("ls"), 1),
        (tag('{"name": "sh", "arguments": {"cmd": "\\udc00"}}'), 1),
        (tag('{"name": "sh", "argum'), 1),
        (tag("<function=sh>\n<parameter=cmd>\nls"), 1),
        ("Some words.", 0),
        ("Say </think> or <tool_call> now.", 0),
        ("{", 0),
        ('"', 0),
    ]
)


@every_renderer
@settings(max_examples=60, deadline=None)
@given(parts=st.lists(fragments, max_size=5))
def test_of_several_calls_none_is_lost(name: str, parts: list[tuple[str, int]]) -> None:
    reply = parse(name, think(name, "hm") + "\n".join(text for text, _ in parts))
    assert len(reply.message.tool_calls) == sum(num_calls for _, num_calls in parts)
    assert all(call.arguments.strip() not in ("", "{}") for call in reply.message.tool_calls)


MARKUP = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_call>\n",
    "\n</tool_call>",
    "<|im_end|>",
    "<|im_start|>",
    "<|endoftext|>",
    '{"name": "sh", "arguments": ',
    '{"cmd": "',
    '"}}',
    '"',
    "{",
    "}",
    "[",
    "\\ud83d",
    "\\udc00\\",
    "\n",
    "<function=sh>\n",
    "<parameter=cmd>\n",
    "\n</parameter>\n",
    "</function>",
    '"parameters": ',
    "1e999",
    "naïve 🙂",
    "NaN",
)
SHORT = Style(block_lists=False, nulls=False, unknown_fields=False, reserialised=False, with_ids=True)


def render_and_read(call: Call, dialect: Any, *, streamed: bool) -> tuple[Any, Any]:
    head = ReplyHead(id="s-0", model="policy", created_s=1.5, num_prompt_tokens=len(call.prompt_ids))
    stream = b"".join((dialect.stream_start(head), *dialect.stream(head, call)))
    client = CLIENTS[dialect.name](call.request, SHORT)
    seen = client.read(stream if streamed else dialect.render(head, call), streamed=streamed)
    return client, seen


@every_renderer
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_whatever_is_sampled_is_answered_recorded_and_continued(
    name: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tokenizer, renderer, prompt = build(name)
    parts = data.draw(st.lists(st.sampled_from(MARKUP) | st.binary(max_size=3), max_size=14))
    ids: list[int] = []
    for part in parts:
        if isinstance(part, str):
            ids += encode(tokenizer, part)
        else:  # any bytes: halves of characters, among them
            ids += [tokenizer.convert_tokens_to_ids(BYTES[byte]) for byte in part]
    end = next((i + 1 for i, token in enumerate(ids) if token in renderer.stop_token_ids), len(ids))
    sampled = tuple(ids[:end]) or renderer.stop_token_ids[:1]  # an engine goes no further
    message = renderer.parse_reply(prompt, sampled, (SH,)).message
    request = ChatRequest(messages=HEAD, tools=(SH,))
    completion = Completion(token_ids=sampled, logprobs=(-0.5,) * len(sampled), finish_reason="stop")
    call = replace(build_reply(message, request, index=0), session_id="s", prompt_ids=prompt, completion=completion)
    path = tmp_path_factory.mktemp("records") / "s.jsonl"
    log = open_log(path)
    log.append(call)
    log.close(build_rollout(call))
    assert read_session(path) == build_rollout(call)
    for dialect in DIALECTS:
        seen = [render_and_read(call, dialect, streamed=streamed)[1] for streamed in (False, True)]
        assert seen[0] == seen[1]
        assert [read.name for read in seen[0].calls] == [made.name for made in message.tool_calls]
        client, _ = render_and_read(call, dialect, streamed=True)
        client.add([result("r", made.id) for made in seen[0].calls] or [user("Go on.")])
        later = dialect.parse(client.incoming(), ItemMemo()).request
        continuations = Continuations(renderer)
        continuations.add(call)
        next_prompt = continuations.build_prompt(later)
        assert next_prompt.parent == 0 or next_prompt.forked
        if next_prompt.parent == 0:
            assert next_prompt.ids[: len(prompt + sampled)] == prompt + sampled


def _list_bytes() -> list[str]:
    """The character by which byte-level tokenizers write each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


BYTES = _list_bytes()


UNBUILT = {"gpt-oss"}  # its vocabulary is a file of the network
BROKEN = (
    '{"cmd": "\\ud83d"}',
    '{"cmd',
    "[1, 2]",
    '{"n": NaN}',
    '{"n": ' + "9" * 5000 + "}",
    '{"a":' * 1010 + "1" + "}" * 1010,
)


def build_family(family: str) -> tuple[Any, FamilyRenderer]:
    """A renderer of any family, on a tokenizer that is given the tokens which the family misses."""
    tokenizer = build_tokenizer(CHATML)
    while True:
        try:
            return tokenizer, FamilyRenderer(tokenizer, family)
        except ConfigError as error:
            missing = re.search(r"(?:token|for) (['\"])(.+?)\1", str(error))
            assert missing is not None, str(error)
            tokenizer.add_tokens([missing[2]], special_tokens=True)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in UNBUILT])
def test_every_family_writes_malformed_calls_and_reads_anything(family: str) -> None:
    tokenizer, renderer = build_family(family)
    for arguments in BROKEN:
        call = ToolCall(id="call00001", name="sh", arguments=arguments, parse_status=BAD)
        reply = Message(role="assistant", text="I look.", tool_calls=(call,))
        assert renderer.render([*HEAD, reply, result("r", "call00001"), user("Go on.")], (SH,))
    prompt = renderer.render(HEAD, (SH,))
    added = [token.content for token in tokenizer.added_tokens_decoder.values()]
    random = Random(family)
    for _ in range(15):
        sampled = encode(tokenizer, "".join(random.choices([*added, *MARKUP, *BROKEN], k=8)))
        message = renderer.parse_reply(prompt, sampled, (SH,)).message
        said = [message.text, message.reasoning or "", *(call.name + call.arguments for call in message.tool_calls)]
        assert all(text.encode() == text.encode("utf-8", "replace") for text in said)
