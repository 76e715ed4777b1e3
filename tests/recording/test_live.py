"""What is told of a reply while it is sampled is how the whole reply begins, whatever is sampled."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_tokenizers import CHATML, TOOLED, build_tokenizer, encode, encode_oddly, read_trl_template, user

from polar_trl.recording import live
from polar_trl.recording.live import LiveReply
from polar_trl.recording.session import _cut_at_stop
from polar_trl.tokens.base import Renderer
from polar_trl.tokens.bytes import CALL, END, THINK, THINK_END, ByteRenderer
from polar_trl.tokens.families import FamilyRenderer
from polar_trl.tokens.template import TemplateRenderer
from polar_trl.types import Message, TokenIds, Tool

TOOLS = (Tool(name="read_file", parameters={"type": "object", "properties": {"path": {"type": "string"}}}),)
CALLED = '{"name": "read_file", "arguments": {"path": "a"}}'
PIECES = st.sampled_from(
    [
        *(
            "hello",
            " world",
            " ",
            "\n",
            "\n\n",
            "  \t",
            "naïve",
            "🙂",
            "👩‍👩‍👧",
            "中文",
            "\u0301",
            "e",
            "<",
            "</",
            "|>",
            "{",
        ),
        *("<think>", "</think>", "<tool_call>", "</tool_call>", "\n<tool_call>\n", CALLED, "<function=read_file>"),
        *("<parameter=path>\na\n</parameter>", "</function>", "STOP", "ST", "<thi", "<tool", "if a < b: x<y>z", "```"),
        *("<tool_response>", "<|im_start|>", "<|header|>", "1 2", "Human:", "\r\n"),
    ]
)
STOPS = st.sampled_from([(), ("STOP",), ("\n\n", "Human:"), ("lo w", "hello world\n")])


def build_renderers() -> dict[str, tuple[Renderer, object]]:
    plain, tooled = build_tokenizer(CHATML), build_tokenizer(TOOLED)
    known = {name: build_tokenizer(read_trl_template(name)) for name in ("qwen3", "qwen3_5_think")}
    return {
        "plain": (TemplateRenderer(plain), plain),
        "tooled": (TemplateRenderer(tooled), tooled),
        "template": (TemplateRenderer(known["qwen3"]), known["qwen3"]),
        "open": (TemplateRenderer(known["qwen3_5_think"]), known["qwen3_5_think"]),
        "qwen3": (FamilyRenderer(known["qwen3"], "qwen3"), known["qwen3"]),
        "qwen3.5": (FamilyRenderer(known["qwen3_5_think"], "qwen3.5"), known["qwen3_5_think"]),
    }


@pytest.fixture(scope="module")
def renderers() -> dict[str, tuple[Renderer, object]]:
    return build_renderers()


@pytest.fixture(autouse=True)
def every_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look is a look, however quickly it follows the last."""
    monkeypatch.setattr(live, "LOOK_COST", 0)


def tell(
    renderer: Renderer, ids: TokenIds, stops: tuple[str, ...] = (), tools: tuple[Tool, ...] = TOOLS, every: int = 1
) -> tuple[list[tuple[str, str]], Message]:
    """What was told, look by look, and the whole reply. Asserts that it only grew and is how the reply begins."""
    prompt = renderer.render([user("hello")], tools)
    reply = LiveReply(lambda so_far: renderer.parse(prompt, so_far, tools), stops=stops, has_tools=bool(tools))
    told = [("", "")]
    for count in range(1, len(ids) + 1):
        reply.token_ids.append(ids[count - 1])
        if count % every:
            continue
        now = reply.look()
        assert now.reasoning.startswith(told[-1][0]) and now.text.startswith(told[-1][1])
        told.append((now.reasoning, now.text))
    whole, _ = _cut_at_stop(renderer.parse(prompt, ids, tools), stops)
    assert reply.look().begins(whole), (told[-1], whole)
    return told, whole


@pytest.mark.parametrize("name", ["plain", "tooled", "template", "open", "qwen3", "qwen3.5"])
@settings(max_examples=250, deadline=None)
@given(
    pieces=st.lists(PIECES, max_size=12), stops=STOPS, oddly=st.booleans(), ends=st.booleans(), every=st.integers(1, 4)
)
def test_what_was_told_is_how_the_reply_begins(
    renderers: dict[str, tuple[Renderer, object]],
    name: str,
    pieces: list[str],
    stops: tuple[str, ...],
    oddly: bool,
    ends: bool,
    every: int,
) -> None:
    renderer, tokenizer = renderers[name]
    ids = (encode_oddly if oddly else encode)(tokenizer, "".join(pieces))
    tell(renderer, (*ids, *renderer.stop_token_ids[:1]) if ends else ids, stops, every=every)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from([*b"ab <\n", *"é🙂".encode(), 0xFF, CALL, THINK, THINK_END, END]), max_size=30), STOPS)
def test_bytes_that_are_half_a_character_are_held(ids: list[int], stops: tuple[str, ...]) -> None:
    tell(ByteRenderer(), tuple(ids), stops)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 505), max_size=40))
@example([])
def test_any_ids_at_all(ids: list[int]) -> None:
    renderer, tokenizer = build_renderers()["template"]
    tell(renderer, tuple(token for token in ids if token < len(tokenizer)))  # type: ignore[arg-type]


def test_text_is_told_as_it_comes_and_a_tool_call_is_not() -> None:
    renderer, tokenizer = build_renderers()["qwen3"]
    ids = encode(
        tokenizer,
        "<think>\nI look <b>first</b>.\n</think>\n\nna\u00efve \U0001f642!\n<tool_call>\n" + CALLED + "\n</tool_call>",
    )
    told, whole = tell(renderer, (*ids, *renderer.stop_token_ids[:1]))
    reasonings, texts = {reasoning for reasoning, _ in told}, {text for _, text in told}
    assert {"", "I", "I look <b>first</b>."} <= reasonings and len(reasonings) > 8
    assert {"", "na\u00efve", "na\u00efve \U0001f642!"} <= texts and all("\ufffd" not in text for text in texts)
    assert whole.tool_calls and told[-1] == (whole.reasoning, whole.text)


def test_nothing_is_told_of_what_may_be_a_stop_text() -> None:
    renderer = ByteRenderer()
    told, whole = tell(renderer, renderer.spell(Message(role="assistant", text="one STONE two STOP three")), ("STOP",))
    texts = [text for _, text in told]
    assert whole.text == "one STONE two " and texts[-1] == "one STONE two"
    assert "one S" not in texts and "one ST" not in texts and "one STON" in texts


def test_json_is_held_where_it_may_be_a_call() -> None:
    ids = ByteRenderer().spell(Message(role="assistant", text='{"a": 1}'))
    assert {text for _, text in tell(ByteRenderer(), ids)[0]} == {""}
    assert '{"a"' in {text for _, text in tell(ByteRenderer(), ids, tools=())[0]}


def test_a_parser_that_cannot_read_half_a_reply_has_it_told_whole() -> None:
    def parse(ids: TokenIds) -> Message:
        raise IndexError("half")

    reply = LiveReply(parse, stops=(), has_tools=False)
    reply.token_ids += [1, 2]
    assert reply.look() == reply.look() == live.Told()


def test_looks_take_a_twentieth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(live, "LOOK_COST", 20)
    monkeypatch.setattr(live.time, "monotonic", lambda: now[0])
    looks = []

    def parse(ids: TokenIds) -> Message:
        looks.append(now[0])
        now[0] += 1.0
        return Message(role="assistant", text="a" * len(ids))

    reply = LiveReply(parse, stops=(), has_tools=False)
    for _ in range(100):
        reply.token_ids.append(1)
        reply.look()
        now[0] += 0.5
    assert looks == [0.0, 21.0, 42.0]


def test_reasoning_that_goes_on_after_text_is_told_no_more() -> None:
    def parse(ids: TokenIds) -> Message:
        return Message(role="assistant", reasoning="ab" if len(ids) > 2 else "a", text="x" * len(ids))

    reply = LiveReply(parse, stops=(), has_tools=False)
    for token in range(4):
        reply.token_ids.append(token)
        told = reply.look()
    assert (told.reasoning, told.text) == ("a", "xx") and not told.begins(parse((0,) * 4))
