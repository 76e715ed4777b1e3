import pytest
from tiny_tokenizers import (
    ALTERNATING,
    CHATML,
    COUNTING,
    ENDLESS,
    FORGETFUL,
    HEADERS,
    READ_FILE,
    SHOUTING,
    SYSTEM_FIRST,
    TOOLED,
    TRIMMING,
    build_tokenizer,
    calling,
    encode,
    encode_oddly,
    read_trl_template,
    result,
    system,
    user,
)
from transformers import PreTrainedTokenizerFast

from polar_trl.errors import RenderError
from polar_trl.tokens.load import load_renderer
from polar_trl.tokens.template import TemplateRenderer
from polar_trl.types import Message

HEADS = [
    [user("Where is it?")],
    [system("Be brief."), user("Where is it?")],
    [user("a"), Message(role="assistant", text="b"), user("naïve 🙂\n\n  - c")],
]
TAILS = [[user("And now?")], [user("  one\n"), user("two")], [system("Be quick."), user("日本語")]]


@pytest.mark.parametrize("template", [CHATML, HEADERS, TRIMMING, FORGETFUL, TOOLED, SYSTEM_FIRST])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("tail", TAILS)
def test_extending_a_canonical_reply_equals_rendering_the_whole(template, head, tail):
    tokenizer = build_tokenizer(template)
    renderer = TemplateRenderer(tokenizer)
    prompt = renderer.render(head, ())
    completion = (*encode(tokenizer, "In the panther."), renderer.stop_token_ids[0])
    reply = renderer.parse(prompt, completion, ())

    extended = renderer.extend(prompt, completion, tail, ())

    assert extended == renderer.render([*head, reply, *tail], ())
    assert extended[: len(prompt) + len(completion)] == prompt + completion


@pytest.mark.parametrize("template", [CHATML, HEADERS, TOOLED])
def test_oddly_split_tokens_survive_and_spell_the_same_text(template):
    tokenizer = build_tokenizer(template)
    renderer = TemplateRenderer(tokenizer)
    prompt = renderer.render([user("q")], ())
    odd = (*encode_oddly(tokenizer, "a panther and a phantom"), renderer.stop_token_ids[0])
    reply = renderer.parse(prompt, odd, ())

    extended = renderer.extend(prompt, odd, [user("next")], ())
    whole = renderer.render([user("q"), reply, user("next")], ())

    assert extended[: len(prompt) + len(odd)] == prompt + odd
    assert whole[: len(prompt) + len(odd)] != prompt + odd  # encoding the text again loses what was sampled
    assert tokenizer.decode(extended) == tokenizer.decode(whole)


def test_a_cut_off_reply_gets_the_turn_end_once_and_the_separator_after_it():
    tokenizer = build_tokenizer(CHATML)
    renderer = TemplateRenderer(tokenizer)
    prompt = renderer.render([user("q")], ())
    cut = encode(tokenizer, "half an ans")
    (end,) = encode(tokenizer, "<|im_end|>")

    expected = encode(tokenizer, "<|im_end|>\n<|im_start|>user\nnext<|im_end|>\n<|im_start|>assistant\n")
    assert renderer.extend(prompt, cut, [user("next")], ()) == prompt + cut + expected
    assert renderer.extend(prompt, (*cut, end), [user("next")], ()) == prompt + cut + expected


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (SHOUTING, "rewrites"),
        (COUNTING, "before a reply"),
        (ENDLESS, "with a special token after it"),
    ],
)
def test_a_template_that_rewrites_history_is_refused_with_the_reason(template, reason):
    tokenizer = build_tokenizer(template)
    renderer = TemplateRenderer(tokenizer)
    prompt = renderer.render([user("q")], ())

    assert reason in renderer.continuation_refusal
    assert renderer.extend(prompt, encode(tokenizer, "answer<|im_end|>"), [user("next")], ()) is None
    with pytest.raises(RenderError, match=reason):
        TemplateRenderer(tokenizer, strict=True)


def test_a_trimming_template_refuses_exactly_the_replies_that_it_would_trim():
    tokenizer = build_tokenizer(TRIMMING)
    renderer = TemplateRenderer(tokenizer)
    prompt = renderer.render([user("q")], ())

    assert renderer.continuation_refusal is None
    assert renderer.extend(prompt, encode(tokenizer, " answer\n<|im_end|>"), [user("next")], ()) is None
    kept = renderer.extend(prompt, encode(tokenizer, "answer<|im_end|>"), [user("next")], ())
    assert kept == renderer.render([user("q"), Message(role="assistant", text="answer"), user("next")], ())
    with pytest.raises(RenderError, match="trims"):
        TemplateRenderer(tokenizer, strict=True)


def test_dropped_reasoning_is_kept_or_forks_as_the_policy_says():
    tokenizer = build_tokenizer(FORGETFUL)
    prompt = TemplateRenderer(tokenizer).render([user("q")], ())
    thought = encode(tokenizer, "<think>\nhm\n</think>\n\nanswer<|im_end|>")
    plain = encode(tokenizer, "answer<|im_end|>")

    kept = TemplateRenderer(tokenizer, thinking="keep").extend(prompt, thought, [user("next")], ())
    assert kept[: len(prompt + thought)] == prompt + thought
    by_template = TemplateRenderer(tokenizer, thinking="template")
    assert by_template.extend(prompt, thought, [user("next")], ()) is None
    assert by_template.extend(prompt, plain, [user("next")], ())[: len(prompt + plain)] == prompt + plain
    message = by_template.parse(prompt, thought, ())
    assert (message.text, message.reasoning) == ("answer", "hm")


def test_reasoning_that_the_prompt_opened_is_found():
    template = FORGETFUL.replace("<|im_start|>assistant\n{% endif", "<|im_start|>assistant\n<think>\n{% endif")
    tokenizer = build_tokenizer(template)
    renderer = TemplateRenderer(tokenizer)
    prompt = renderer.render([user("q")], ())

    assert renderer.continuation_refusal is None
    message = renderer.parse(prompt, encode(tokenizer, "hm\n</think>\n\nanswer<|im_end|>"), ())
    assert (message.text, message.reasoning) == ("answer", "hm")
    cut = renderer.parse(prompt, encode(tokenizer, "hm, so"), ())
    assert (cut.text, cut.reasoning) == ("", "hm, so")


@pytest.mark.parametrize("template", [TOOLED, CHATML])
def test_parallel_tool_results_extend_as_the_whole_conversation_renders(template):
    tokenizer = build_tokenizer(template)
    renderer = TemplateRenderer(tokenizer)
    head = [system("Be brief."), user("q")]
    prompt = renderer.render(head, [READ_FILE])
    text = (
        'I look.\n<tool_call>\n{"name": "read_file", "arguments": {"path": "a"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "read_file", "arguments": {"path": "b"}}\n</tool_call><|im_end|>'
    )
    completion = encode(tokenizer, text)
    reply = renderer.parse(prompt, completion, [READ_FILE])
    results = [result("one", reply.tool_calls[0].id), result("two", reply.tool_calls[1].id)]

    assert [call.arguments for call in reply.tool_calls] == ['{"path": "a"}', '{"path": "b"}']
    extended = renderer.extend(prompt, completion, results, [READ_FILE])
    assert extended == renderer.render([*head, reply, *results], [READ_FILE])
    assert tokenizer.decode(extended).count("<|im_start|>user") == 2


def test_tools_are_prompted_where_the_template_has_no_place_for_them():
    plain, tooled = TemplateRenderer(build_tokenizer(CHATML)), TemplateRenderer(build_tokenizer(TOOLED))
    assert plain.prompts_tools and not tooled.prompts_tools

    text = build_tokenizer(CHATML).decode(plain.render([system("Be brief."), user("q")], [READ_FILE]))
    assert text.startswith("<|im_start|>system\nBe brief.\n\n") and '"name": "read_file"' in text
    history = [user("q"), calling('{"path": "a"}'), result("one")]
    text = build_tokenizer(CHATML).decode(plain.render(history, ()))
    assert '<tool_call>\n{"name": "read_file", "arguments": {"path": "a"}}\n</tool_call><|im_end|>' in text
    assert "<|im_start|>user\n<tool_response>\none\n</tool_response><|im_end|>" in text


def test_system_messages_go_where_the_template_takes_them():
    tokenizer = build_tokenizer(SYSTEM_FIRST)
    developer = Message(role="developer", text="Be quick.")
    ids = TemplateRenderer(tokenizer).render([system("Be brief."), developer, user("q"), system("Stop.")], ())
    assert tokenizer.decode(ids) == (
        "<|im_start|>system\nBe brief.\n\nBe quick.<|im_end|>\n<|im_start|>user\nq<|im_end|>\n"
        "<|im_start|>user\nStop.<|im_end|>\n<|im_start|>assistant\n"
    )


def test_messages_are_joined_where_the_template_demands_alternation():
    tokenizer = build_tokenizer(ALTERNATING)
    renderer = TemplateRenderer(tokenizer)
    prompt = renderer.render([system("Be brief."), user("q"), user("r")], ())
    assert tokenizer.decode(prompt) == ("<|im_start|>user\nBe brief.\n\nq\n\nr<|im_end|>\n<|im_start|>assistant\n")
    completion = encode(tokenizer, "a<|im_end|>")
    extended = renderer.extend(prompt, completion, [user("s"), user("t")], ())
    assert tokenizer.decode(extended).endswith(
        "a<|im_end|>\n<|im_start|>user\ns\n\nt<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("template", [CHATML, HEADERS, TOOLED])
def test_ids_are_those_of_the_tokenizer_s_own_apply_chat_template(template):
    tokenizer = build_tokenizer(template)
    dicts = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "naïve 🙂"}]
    expected = tokenizer.apply_chat_template(dicts, add_generation_prompt=True, return_dict=False)
    assert list(TemplateRenderer(tokenizer).render([system("Be brief."), user("naïve 🙂")], ())) == expected


@pytest.mark.parametrize(
    ("name", "refused", "special"),
    [
        ("qwen2_5", False, "<|im_end|>"),
        ("qwen3_instruct_2507", False, "<|im_end|>"),
        ("qwen3_5_think", False, "<|im_end|>"),
        ("llama3", False, "<|eot_id|>"),
        ("gemma", False, "<end_of_turn>"),
        ("phi3", False, "<|end|>"),
        ("glm4moe", True, "<|user|>"),  # nothing ends a reply but the next role
    ],
)
def test_real_templates_are_judged_as_they_behave(name, refused, special):
    tokenizer = build_tokenizer(read_trl_template(name))
    tokenizer.add_special_tokens({"additional_special_tokens": [special]})
    renderer = TemplateRenderer(tokenizer)
    assert (renderer.continuation_refusal is not None) == refused
    if not refused:
        prompt = renderer.render([system("Be brief."), user("q")], [READ_FILE])
        completion = encode_oddly(tokenizer, f"a panther{special}")
        extended = renderer.extend(prompt, completion, [user("next")], [READ_FILE])
        assert extended[: len(prompt + completion)] == prompt + completion


def test_images_and_missing_templates_are_refused_in_a_sentence():
    renderer = TemplateRenderer(build_tokenizer(CHATML))
    with pytest.raises(RenderError, match="image"):
        renderer.render([Message(role="user", text="see", images=("data:image/png;base64,AA==",))], ())
    with pytest.raises(RenderError, match="no chat template"):
        TemplateRenderer(build_tokenizer(""))


def test_smollm2_s_own_template_is_continued_without_limits(smollm2):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(smollm2)
    renderer = load_renderer(tokenizer, str(smollm2), strict=True)
    assert isinstance(renderer, TemplateRenderer) and renderer.limits == ()
    head = [system("Be brief."), user("q")]
    prompt = renderer.render(head, [READ_FILE])
    text = '<tool_call>\n{"name": "read_file", "arguments": {"path": "a"}}\n</tool_call><|im_end|>'
    reply = renderer.parse(prompt, encode(tokenizer, text), [READ_FILE])
    results = [result("one", reply.tool_calls[0].id)]
    extended = renderer.extend(prompt, encode(tokenizer, text), results, [READ_FILE])
    assert extended == renderer.render([*head, reply, *results], [READ_FILE])
