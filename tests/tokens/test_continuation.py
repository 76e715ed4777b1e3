from dataclasses import replace

import pytest
from tiny_tokenizers import (
    CHATML,
    READ_FILE,
    TOOLED,
    TRIMMING,
    build_tokenizer,
    calling,
    encode,
    encode_oddly,
    record_call,
    result,
    system,
    user,
)

from polar_trl.tokens.canonical import canonical_arguments, hash_conversation
from polar_trl.tokens.continuation import Continuations
from polar_trl.tokens.template import TemplateRenderer
from polar_trl.types import ChatRequest, Message, Tool

HEAD = (system("Be brief."), user("Where is it?"))


class Session:
    """A renderer, its continuations, and calls answered with texts that we choose."""

    def __init__(self, template=TOOLED):
        self.tokenizer = build_tokenizer(template)
        self.renderer = TemplateRenderer(self.tokenizer)
        self.continuations = Continuations(self.renderer)
        self.calls = []

    def ask(self, *messages, tools=(READ_FILE,)):
        return self.continuations.build_prompt(ChatRequest(messages=messages, tools=tools))

    def answer(self, prompt, text, *, end="<|im_end|>"):
        ids = encode_oddly(self.tokenizer, text) + encode(self.tokenizer, end)
        message = self.renderer.parse(prompt.ids, ids, prompt.request.tools)
        call = record_call(len(self.calls), prompt.request, prompt.ids, ids, message)
        self.calls.append(call)
        self.continuations.add(call)
        return message


def assert_extends(prompt, call):
    kept = call.prompt_ids + call.completion.token_ids
    assert prompt.ids[: len(kept)] == kept
    assert len(prompt.ids) > len(kept)
    assert (prompt.parent, prompt.forked) == (call.index, False)


def test_a_session_of_tool_calls_keeps_every_sampled_token():
    session = Session()
    history = [*HEAD]
    for turn in range(4):
        prompt = session.ask(*history)
        if turn:
            assert_extends(prompt, session.calls[-1])
        else:
            assert (prompt.parent, prompt.forked) == (None, False)
            assert prompt.ids == session.renderer.render(HEAD, (READ_FILE,))
        reply = session.answer(
            prompt, f'a panther\n<tool_call>\n{{"name": "read_file", "arguments": {{"path": "{turn}"}}}}\n</tool_call>'
        )
        history += [reply, result(f"text {turn}", reply.tool_calls[0].id)]


@pytest.mark.parametrize(
    "arguments",
    [
        '{"path": "a", "limit": 1, "whole": true}',
        '{"whole":true,"limit":1.0,"path":"\\u0061"}',
        '{\n  "limit": 1,\n  "path": "a",\n  "whole": true\n}',
    ],
)
def test_arguments_written_anew_still_match_and_are_replaced_by_the_sampled_ones(arguments):
    session = Session()
    sampled = '{"path":  "a", "limit": 1,   "whole": true}'
    session.answer(session.ask(*HEAD), f'<tool_call>\n{{"name": "read_file", "arguments": {sampled}}}\n</tool_call>')
    prompt = session.ask(*HEAD, calling(arguments, ids="invented"), result("text", "invented0"))

    assert_extends(prompt, session.calls[0])
    reply = session.calls[0].message
    assert prompt.request.messages == (*HEAD, reply, result("text", reply.tool_calls[0].id))
    assert reply.tool_calls[0].arguments == sampled


def test_parallel_results_continue_and_equal_a_whole_rendering_when_tokens_are_canonical():
    session = Session()
    prompt = session.ask(*HEAD)
    call = '<tool_call>\n{"name": "read_file", "arguments": {"path": "%s"}}\n</tool_call>'
    ids = encode(session.tokenizer, call % "a" + "\n" + call % "b" + "<|im_end|>")
    reply = session.renderer.parse(prompt.ids, ids, (READ_FILE,))
    session.continuations.add(record_call(0, prompt.request, prompt.ids, ids, reply))
    results = [result("one", reply.tool_calls[0].id), result("two", reply.tool_calls[1].id)]

    extended = session.ask(*HEAD, reply, *results)
    assert extended.parent == 0
    assert extended.ids == session.renderer.render([*HEAD, reply, *results], (READ_FILE,))


@pytest.mark.parametrize(
    "change",
    [
        lambda reply: replace(reply, reasoning=None),
        lambda reply: replace(reply, reasoning="something else"),
        lambda reply: replace(reply, text=reply.text.strip()),
        lambda reply: replace(reply, text=f"{reply.text}\n"),
    ],
)
def test_dropped_reasoning_and_trimmed_text_still_match(change):
    template = CHATML + "{# <think> #}"
    session = Session(template)
    reply = session.answer(session.ask(*HEAD), "<think>\nhm\n</think>\n\na phantom  ")
    assert (reply.reasoning, reply.text) == ("hm", "a phantom  ")

    prompt = session.ask(*HEAD, change(reply), user("next"))
    assert_extends(prompt, session.calls[0])
    assert prompt.request.messages[2] is reply


@pytest.mark.parametrize(
    "history",
    [
        (system("Be verbose."), HEAD[1]),
        (HEAD[0], user("Where is it? ")),
        (HEAD[1],),
    ],
)
def test_an_edited_beginning_is_a_new_root(history):
    session = Session()
    reply = session.answer(session.ask(*HEAD), "there")
    prompt = session.ask(*history, reply, user("next"))
    assert (prompt.parent, prompt.forked) == (None, False)
    assert prompt.ids == session.renderer.render([*history, reply, user("next")], (READ_FILE,))


def test_an_edited_reply_an_injected_reply_and_other_tools_are_rendered_anew():
    session = Session()
    reply = session.answer(session.ask(*HEAD), "there")
    edited = session.ask(*HEAD, replace(reply, text="here"), user("next"))
    assert (edited.parent, edited.forked) == (None, False)
    injected = (*HEAD, reply, user("next"), Message(role="assistant", text="mine"), user("more"))
    prompt = session.ask(*injected)
    assert (prompt.parent, prompt.forked) == (None, True)
    assert prompt.ids == session.renderer.render(injected, (READ_FILE,))
    other = session.ask(*HEAD, reply, user("next"), tools=(READ_FILE, Tool(name="more")))
    assert (other.parent, other.forked) == (None, False)


def test_a_request_that_ends_with_the_reply_is_rendered_anew():
    session = Session()
    reply = session.answer(session.ask(*HEAD), "there")
    prompt = session.ask(*HEAD, reply)
    assert (prompt.parent, prompt.forked) == (None, True)


def test_the_longest_match_wins_and_of_equal_ones_the_latest():
    session = Session()
    first = session.answer(session.ask(*HEAD), "there")
    session.answer(session.ask(*HEAD), "there")  # a retry that gave an equal reply
    assert session.ask(*HEAD, first, user("next")).parent == 1
    second = session.answer(session.ask(*HEAD, first, user("next")), "yes")
    assert session.ask(*HEAD, first, user("next"), second, user("more")).parent == 2
    assert session.ask(*HEAD, first, user("other")).parent == 1


def test_interleaved_conversations_do_not_mix():
    session = Session()
    main = session.answer(session.ask(*HEAD), "there")
    sub = session.answer(session.ask(user("A small task.")), "there")
    assert session.ask(*HEAD, main, user("next")).parent == 0
    assert session.ask(user("A small task."), sub, user("next")).parent == 1


def test_a_reply_that_the_template_would_trim_forks():
    session = Session(TRIMMING)
    reply = session.answer(session.ask(*HEAD, tools=()), "there \n")
    prompt = session.ask(*HEAD, reply, user("next"), tools=())
    assert (prompt.parent, prompt.forked) == (None, True)
    assert prompt.ids == session.renderer.render([*HEAD, reply, user("next")], ())


def test_a_cut_off_reply_is_continued_after_one_end_of_turn():
    session = Session()
    reply = session.answer(session.ask(*HEAD), "half an ans", end="")
    prompt = session.ask(*HEAD, reply, user("next"))
    assert_extends(prompt, session.calls[0])
    kept = len(session.calls[0].prompt_ids + session.calls[0].completion.token_ids)
    assert session.tokenizer.decode(prompt.ids[kept:]) == (
        "<|im_end|>\n<|im_start|>user\nnext<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_call_that_sampled_nothing_is_never_continued():
    session = Session()
    prompt = session.ask(*HEAD)
    budget = Message(role="assistant", text="out of budget")
    session.continuations.add(record_call(0, prompt.request, prompt.ids, (), budget))
    later = session.ask(*HEAD, budget, user("next"))
    assert (later.parent, later.forked) == (None, False)


@pytest.mark.parametrize("echoed", ["{}", '{"_raw": "x"}', '{"path": "a'])
def test_malformed_arguments_that_no_agent_can_repeat_still_match(echoed):
    session = Session()
    text = '<tool_call>\n{"name": "read_file", "arguments": {"path": "a\n</tool_call>'
    reply = session.answer(session.ask(*HEAD), text)
    assert reply.tool_calls[0].parse_status == "malformed"
    history = (*HEAD, calling(echoed, ids="x"), result("no such thing", "x0"))
    prompt = session.ask(*history)
    assert_extends(prompt, session.calls[0])
    session.answer(prompt, "sorry")
    later = session.ask(*history, session.calls[1].message, user("next"))
    assert_extends(later, session.calls[1])


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ('{"a": 1, "b": [1, 2]}', '{"b":[1,2],"a":1}', True),
        ('{"a": 1.0}', '{"a":1}', True),
        ('{"a": 1e3}', '{"a":1000}', True),
        ('{"a": 1700000000123456789}', '{"a":1700000000123456800}', True),
        ('{"a": [NaN, 1%s]}' % ("0" * 400), '{"a": [NaN, 1%s]}' % ("0" * 400), True),
        ('{"a": "1.0,"}', '{"a":"1.0,"}', True),
        ("", "{}", True),
        ('{"a": NaN}', '{"a":NaN}', True),
        ('{"a": true}', '{"a": 1}', False),
        ('{"a": "1"}', '{"a": 1}', False),
        ('{"a": [1, 2]}', '{"a": [2, 1]}', False),
        ('{"a": "x"', '{"a":"x"', False),
        ('{"a": 1.5}', '{"a": 1}', False),
    ],
)
def test_arguments_compare_as_json_values(one, other, equal):
    assert (canonical_arguments(one) == canonical_arguments(other)) == equal


def test_text_cannot_move_between_fields_and_keep_its_digest():
    conversations = [
        (user("ab"), user("c")),
        (user("a"), user("bc")),
        (user("abc"),),
        (system("ab"), user("c")),
        (user("ab"), Message(role="assistant", text="c")),
        (user("ab"), result("c")),
        (user("ab"), Message(role="user", text="", images=("c",))),
        (user("ab"), calling("{}", text="c")),
        (user("ab"), calling("{}", "{}", text="c")),
        (user("\ud800ab"), user("c")),
    ]
    hashes = {hash_conversation(messages, ()) for messages in conversations}
    assert len(hashes) == len(conversations)
    assert hash_conversation((user("a"),), (READ_FILE,)) != hash_conversation((user("a"),), ())
    developer = Message(role="developer", text="ab")
    assert hash_conversation((developer, user("c")), ()) == hash_conversation((system("ab"), user("c")), ())
