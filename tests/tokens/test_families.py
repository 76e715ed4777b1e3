import json

import pytest
from tiny_tokenizers import (
    CHATML,
    READ_FILE,
    TOOLED,
    build_tokenizer,
    encode,
    encode_oddly,
    read_trl_template,
    record_call,
    result,
    system,
    user,
)

from polar_trl.errors import ConfigError, RenderError
from polar_trl.tokens.continuation import Continuations
from polar_trl.tokens.families import FamilyRenderer
from polar_trl.tokens.load import load_renderer
from polar_trl.tokens.template import TemplateRenderer
from polar_trl.types import ChatRequest, Message

HEAD = [system("Be brief."), user("Where is it?")]
TOOLS = [READ_FILE]
CALLS = {
    "qwen3": '<tool_call>\n{"name": "read_file", "arguments": {"path":  "%s"}}\n</tool_call>',
    "qwen3.5": "<tool_call>\n<function=read_file>\n<parameter=path>\n%s\n</parameter>\n</function>\n</tool_call>",
}
TEMPLATES = {"qwen3": "qwen3", "qwen3.5": "qwen3_5_think"}


def build(family, **kwargs):
    tokenizer = build_tokenizer(read_trl_template(TEMPLATES[family]))
    return tokenizer, FamilyRenderer(tokenizer, family, **kwargs)


def write_thought(family, thought):
    """Reasoning as the model samples it: Qwen3.5's prompt has opened it already."""
    return f"{thought}\n</think>\n\n" if family == "qwen3.5" else f"<think>\n{thought}\n</think>\n\n"


@pytest.mark.parametrize("family", ["qwen3", "qwen3.5"])
def test_parallel_tool_results_extend_odd_tokens_and_spell_what_the_template_writes(family):
    tokenizer, renderer = build(family)
    prompt = renderer.render(HEAD, TOOLS)
    text = (
        write_thought(family, "hm") + "I look.\n\n" + CALLS[family] % "a" + "\n" + CALLS[family] % "b" + "<|im_end|>"
    )
    odd = encode_oddly(tokenizer, text)
    assert odd != encode(tokenizer, text)
    reply = renderer.parse(prompt, odd, TOOLS)
    assert (reply.text, reply.reasoning) == ("I look.", "hm")
    assert [json.loads(call.arguments) for call in reply.tool_calls] == [{"path": "a"}, {"path": "b"}]
    results = [result("one", reply.tool_calls[0].id), result("two", reply.tool_calls[1].id)]

    extended = renderer.extend(prompt, odd, results, TOOLS)

    assert extended[: len(prompt + odd)] == prompt + odd
    tail = tokenizer.decode(extended[len(prompt + odd) :])
    assert tail.startswith(
        "\n<|im_start|>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|im_end|>\n"
    )


@pytest.mark.parametrize("family", ["qwen3", "qwen3.5"])
def test_extending_a_canonical_tool_turn_equals_rendering_the_whole(family):
    tokenizer, renderer = build(family)
    prompt = renderer.render(HEAD, TOOLS)
    call = CALLS[family].replace("  ", " ") % "a"
    completion = encode(tokenizer, write_thought(family, "hm") + call + "<|im_end|>")
    reply = renderer.parse(prompt, completion, TOOLS)
    results = [result("one", reply.tool_calls[0].id)]
    assert renderer.extend(prompt, completion, results, TOOLS) == renderer.render([*HEAD, reply, *results], TOOLS)


@pytest.mark.parametrize("family", ["qwen3", "qwen3.5"])
def test_a_new_user_turn_keeps_reasoning_or_forks_as_the_policy_says(family):
    tokenizer, keeping = build(family, thinking="keep")
    _, forking = build(family, thinking="template")
    prompt = keeping.render(HEAD, ())
    completion = encode(tokenizer, write_thought(family, "hm") + "There.<|im_end|>")
    for renderer, forked in ((keeping, False), (forking, True)):
        continuations = Continuations(renderer)
        request = ChatRequest(messages=tuple(HEAD))
        reply = renderer.parse(prompt, completion, ())
        continuations.add(record_call(0, request, prompt, completion, reply))
        answer = continuations.build_prompt(ChatRequest(messages=(*HEAD, reply, user("And now?"))))
        assert (answer.forked, answer.parent) == (forked, None if forked else 0)
        assert ("hm" in tokenizer.decode(answer.ids)) is not forked


@pytest.mark.parametrize("family", ["qwen3", "qwen3.5"])
@pytest.mark.parametrize(("sampled", "close"), [("answ", "<|im_end|>"), ("hm, so", "</think><|im_end|>")])
def test_a_cut_off_turn_is_closed_once_and_nothing_sampled_changes(family, sampled, close):
    tokenizer, renderer = build(family)
    prompt = renderer.render(HEAD, ())
    is_thinking = close.startswith("</think>")
    opening = "" if family == "qwen3.5" else "<think>\n"
    text = opening + sampled if is_thinking else write_thought(family, "x") + sampled
    cut = encode_oddly(tokenizer, text)
    extended = renderer.extend(prompt, cut, [user("next")], ())
    assert extended[: len(prompt + cut)] == prompt + cut
    assert tokenizer.decode(extended[len(prompt + cut) :]).startswith(f"{close}\n<|im_start|>user\nnext<|im_end|>\n")
    message = renderer.parse(prompt, cut, ())
    assert (message.text, message.reasoning) == (("", sampled) if is_thinking else (sampled, "x"))


def test_qwen3_arguments_are_the_sampled_text_and_later_text_is_kept():
    tokenizer, renderer = build("qwen3")
    prompt = renderer.render(HEAD, TOOLS)
    text = 'One.\n<tool_call>\n{"name": "read_file", "arguments": {"path":   "a", "limit": 1.0}}\n</tool_call>\nTwo.'
    message = renderer.parse(prompt, encode(tokenizer, text + "<|im_end|>"), TOOLS)
    assert message.text == "One.\nTwo."
    assert message.tool_calls[0].arguments == '{"path":   "a", "limit": 1.0}'


@pytest.mark.parametrize(
    ("family", "text", "name"),
    [
        ("qwen3", '<tool_call>\n{"name": "read_file", "arguments": {"path": }}\n</tool_call>', "read_file"),
        ("qwen3", '<tool_call>\n{"name": "read_file", "argum', "read_file"),
        ("qwen3", "<tool_call>\nls\n</tool_call>", "malformed_tool_call"),
        ("qwen3.5", "<tool_call>\n<function=read_file>\n<parameter=path>\na\n</tool_call>", "read_file"),
        ("qwen3.5", "<tool_call>\n<function=read_file>\n<parameter=path>\na", "read_file"),
        ("qwen3.5", "<tool_call>\nls\n</tool_call>", "malformed_tool_call"),
    ],
)
def test_bad_calls_are_kept_with_their_text_and_marked(family, text, name):
    tokenizer, renderer = build(family)
    prompt = renderer.render(HEAD, TOOLS)
    completion = encode(tokenizer, write_thought(family, "x") + text + "<|im_end|>")
    (call,) = renderer.parse(prompt, completion, TOOLS).tool_calls
    assert (call.name, call.parse_status) == (name, "malformed")
    assert call.arguments not in ("", "{}")


NESTED = '{"a": ' * 3000
DIGITS = "1" * 6000


@pytest.mark.parametrize(
    ("family", "body", "kept"),
    [
        ("qwen3", f'{{"name": "read_file", "arguments": {{"limit": {DIGITS}}}}}', DIGITS),
        ("qwen3", f'{{"name": "read_file", "arguments": {NESTED}', NESTED.strip()),
        ("qwen3.5", f"<function=read_file>\n<parameter=x>\n{'[' * 3000}\n</parameter>\n</function>", "[" * 3000),
        ("qwen3.5", f"<function=read_file>\n<parameter=limit>\n{DIGITS}\n</parameter>\n</function>", DIGITS),
    ],
)
def test_calls_that_break_the_json_reader_are_kept_and_marked(family, body, kept):
    tokenizer, renderer = build(family)
    prompt = renderer.render(HEAD, TOOLS)
    text = write_thought(family, "hm") + f"I look.\n<tool_call>\n{body}\n</tool_call><|im_end|>"
    message = renderer.parse(prompt, encode(tokenizer, text), TOOLS)
    assert (message.text.strip(), message.reasoning) == ("I look.", "hm")
    (call,) = message.tool_calls
    assert kept in call.arguments
    assert call.parse_status == "malformed"


def test_qwen35_arguments_keep_indentation():
    tokenizer, renderer = build("qwen3.5")
    prompt = renderer.render(HEAD, TOOLS)
    completion = encode(tokenizer, "x\n</think>\n\n" + CALLS["qwen3.5"] % "    return 1" + "<|im_end|>")
    (call,) = renderer.parse(prompt, completion, TOOLS).tool_calls
    assert json.loads(call.arguments) == {"path": "    return 1"}


def test_tokens_sampled_past_an_end_of_turn_raise_instead_of_vanishing():
    tokenizer, renderer = build("qwen3")
    prompt = renderer.render(HEAD, ())
    with pytest.raises(RenderError, match="changed sampled tokens"):
        renderer.extend(prompt, encode(tokenizer, "a<|im_end|>b"), [user("next")], ())


@pytest.mark.parametrize(
    ("template", "family"),
    [
        ("qwen3", "qwen3"),
        ("qwen3_5_think", "qwen3.5"),
        ("qwen3_5_nothink", "qwen3.5"),
        ("qwen3_6", "qwen3.6"),
        ("qwen3_8", "qwen3.8"),
    ],
)
def test_a_checkpoint_is_recognised_by_what_its_template_writes(template, family, tmp_path):
    tokenizer = build_tokenizer(read_trl_template(template))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))  # a wrong hint does no harm
    renderer = load_renderer(tokenizer, str(tmp_path))
    assert isinstance(renderer, FamilyRenderer)
    assert renderer.family == family
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "q"}], tokenize=False, add_generation_prompt=True
    )
    assert tokenizer.decode(renderer.render([user("q")], ())) == text


@pytest.mark.parametrize("template", [CHATML, TOOLED])
def test_another_chatml_is_not_taken_for_qwen3(template, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    tokenizer = build_tokenizer(template)
    assert isinstance(load_renderer(tokenizer, str(tmp_path)), TemplateRenderer)
    assert isinstance(load_renderer(tokenizer, "Qwen/Qwen3-8B"), TemplateRenderer)


def test_the_family_can_be_chosen_by_hand_and_unknown_ones_are_refused():
    tokenizer = build_tokenizer(read_trl_template("qwen3"))
    assert isinstance(load_renderer(tokenizer, "x", family="template"), TemplateRenderer)
    assert load_renderer(tokenizer, "x", family="qwen3.5").family == "qwen3.5"
    assert load_renderer(tokenizer, "x", family="auto").family == "qwen3"
    with pytest.raises(ConfigError, match="no model family 'Qwen-3'; did you mean 'qwen3'"):
        load_renderer(tokenizer, "x", family="Qwen-3")
    with pytest.raises(ConfigError, match="no model family 'zzzzzz'; known are deepseek-r1"):
        load_renderer(tokenizer, "x", family="zzzzzz")
    with pytest.raises(ConfigError, match="colour"):
        load_renderer(tokenizer, "x", family="qwen3", template_kwargs={"colour": "red"})


def test_the_choice_and_its_reason_are_logged(caplog):
    caplog.set_level("INFO", logger="polar_trl.tokens.load")
    load_renderer(build_tokenizer(read_trl_template("qwen3")), "x")
    load_renderer(build_tokenizer(CHATML), "Qwen/Qwen3-8B")
    assert caplog.messages[0] == "renderer: qwen3, which writes what the tokenizer's chat template writes"
    assert any(
        "not qwen3" in message and "differs from the chat template on" in message for message in caplog.messages
    )
    assert caplog.messages[-1] == "renderer: the tokenizer's own chat template"


@pytest.mark.parametrize("family", ["qwen3", "qwen3.5"])
def test_thinking_can_be_switched_off(family):
    tokenizer, _ = build(family)
    renderer = load_renderer(tokenizer, "x", template_kwargs={"enable_thinking": False})
    assert renderer.family == family
    prompt = renderer.render(HEAD, ())
    assert tokenizer.decode(prompt).endswith("<think>\n\n</think>\n\n")
    odd = encode_oddly(tokenizer, "There.<|im_end|>")
    assert renderer.parse(prompt, odd, ()) == Message(role="assistant", text="There.")
    assert renderer.extend(prompt, odd, [user("next")], ())[: len(prompt + odd)] == prompt + odd


@pytest.mark.parametrize("family", ["qwen3", "qwen3.5"])
def test_a_late_instruction_is_written_out(family):
    tokenizer, renderer = build(family)
    prompt = renderer.render(HEAD, ())
    completion = encode(tokenizer, write_thought(family, "x") + "There.<|im_end|>")
    late = Message(role="developer", text="Be quick.")
    extended = renderer.extend(prompt, completion, [late, user("next")], ())
    assert "Be quick.<|im_end|>" in tokenizer.decode(extended[len(prompt + completion) :])
    whole = renderer.render([*HEAD, Message(role="assistant", text="There."), late, user("next")], ())
    assert "Be quick.<|im_end|>" in tokenizer.decode(whole)


def test_images_are_refused_in_a_sentence():
    _, renderer = build("qwen3.5")
    with pytest.raises(RenderError, match="image"):
        renderer.render([Message(role="user", text="see", images=("data:image/png;base64,AA==",))], ())
