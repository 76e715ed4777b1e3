"""Test that prompts are encoded to the very ids that the tokenizer itself gives."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from renderers.base import create_renderer
from renderers.configs import config_from_name
from tiny_tokenizers import CHATML, READ_FILE, build_tokenizer, encode, read_trl_template, result, system, user

from polar_trl.tokens.chat_dicts import build_message_dict, build_tool_dict
from polar_trl.tokens.encoding import PromptTokenizer
from polar_trl.tokens.families import FamilyRenderer
from polar_trl.types import Message

TEMPLATES = {"qwen3": "qwen3", "qwen3.5": "qwen3_5_think"}
TOKENIZER = build_tokenizer(CHATML)
PROMPT_TOKENIZER = PromptTokenizer(TOKENIZER)
_MARKS = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "\n", " "]
PLAIN = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"))
"""Text without markup, which is written as words where the family itself would write marks."""
TEXTS = st.lists(PLAIN | st.sampled_from(_MARKS), max_size=30).map("".join)
SAMPLED = TEXTS.map(lambda text: text.replace("<|im_end|>", ""))
"""Nothing is sampled after the end of a turn."""


@settings(deadline=None)
@given(TEXTS)
def test_texts_have_the_ids_that_the_tokenizer_gives(text):
    assert PROMPT_TOKENIZER.encode(text, add_special_tokens=False) == list(encode(TOKENIZER, text))
    assert PROMPT_TOKENIZER.encode(text) == list(encode(TOKENIZER, text))  # remembered


def test_what_is_remembered_cannot_be_changed_by_who_got_it():
    PROMPT_TOKENIZER.encode("a word").clear()
    assert PROMPT_TOKENIZER.encode("a word") == list(encode(TOKENIZER, "a word"))


def test_padding_and_truncation_of_others_do_not_reach_prompts():
    tokenizer = build_tokenizer(CHATML)
    prompt_tokenizer = PromptTokenizer(tokenizer)
    text = "many words " * 20
    whole = list(encode(tokenizer, text))
    tokenizer.backend_tokenizer.enable_truncation(3)
    assert prompt_tokenizer.encode(text) == whole


def test_a_tokenizer_without_a_fast_one_inside_encodes_for_itself():
    class Slow:
        def encode(self, text, *, add_special_tokens):
            return [ord(letter) for letter in text]

    assert PromptTokenizer(Slow()).encode("ab" * 50) == [97, 98] * 50


@pytest.mark.parametrize("family", TEMPLATES)
@settings(deadline=None, max_examples=30)
@given(texts=st.tuples(PLAIN, PLAIN, SAMPLED, PLAIN), is_cut=st.booleans())
def test_prompts_are_those_that_the_family_writes_without_shortcuts(family, texts, is_cut):
    tokenizer = build_tokenizer(read_trl_template(TEMPLATES[family]))
    config = config_from_name(family).model_copy(update={"thinking_retention": "all"})
    plain, ours = create_renderer(tokenizer, config), FamilyRenderer(tokenizer, family)
    messages = [system(texts[0]), user(texts[1])]
    prompt = ours.render(messages, [READ_FILE])
    tools = [build_tool_dict(READ_FILE)]
    dicts = [build_message_dict(message, parse_arguments=False) for message in messages]
    assert list(prompt) == plain.render_ids(dicts, tools=tools, add_generation_prompt=True)
    completion = tuple(encode(tokenizer, texts[2] + ("" if is_cut else "<|im_end|>"))) or (prompt[0],)
    following: list[Message] = [result(texts[3], "a"), user(texts[0])]
    extended = ours.extend(prompt, completion, following, [READ_FILE])
    dicts = [build_message_dict(message, parse_arguments=False) for message in following]
    bridged = plain.bridge_to_next_turn(list(prompt), list(completion), dicts, tools=tools)
    assert extended == (None if bridged is None else tuple(bridged.token_ids))
