import json

import pytest

from polar_trl.tokens.tool_calls import UNNAMED, build_tool_calls, parse_json_call, parse_xml_call, split_tagged_calls
from polar_trl.types import Tool

EDIT = Tool(
    name="edit",
    parameters={
        "type": "object",
        "properties": {
            "old": {"type": "string"},
            "all": {"type": "boolean"},
            "line": {"type": ["integer", "null"]},
            "tags": {"type": "array"},
            "any": {"anyOf": [{"type": "string"}, {"type": "number"}]},
        },
    },
)


def test_json_arguments_keep_their_own_text():
    body = ' {"arguments" : {"b": 1.0,  "a": "\\u00e9 } ,"} , "name": "f"}\n'
    assert parse_json_call(body) == ("f", '{"b": 1.0,  "a": "\\u00e9 } ,"}', "ok")


@pytest.mark.parametrize(
    ("body", "name", "arguments"),
    [
        ('{"name": "f", "arguments": {"a": "b', "f", '{"a": "b'),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', "f", '"{\\"a\\": 1}"'),
        ('{"arguments": {}}', UNNAMED, '{"arguments": {}}'),
        ("ls -l", UNNAMED, "ls -l"),
        ("[1]", UNNAMED, "[1]"),
        ("", UNNAMED, ""),
    ],
)
def test_a_call_that_cannot_be_read_is_kept_and_marked(body, name, arguments):
    assert parse_json_call(body) == (name, arguments, "malformed")


def test_tags_in_arguments_and_prose_do_not_end_or_begin_a_call():
    call = '{"name": "write", "arguments": {"text": "a </tool_call> b <tool_call>"}}'
    text, calls = split_tagged_calls(f"Use <tool_call> tags.\n<tool_call>\n{call}\n</tool_call>\nDone.")
    assert text == "Use <tool_call> tags.\nDone."
    assert calls == [("write", '{"text": "a </tool_call> b <tool_call>"}', "ok")]
    prose = "The tags <tool_call> and </tool_call> mark a call.  "
    assert split_tagged_calls(prose) == (prose, [])


def test_calls_without_a_closing_tag_are_not_lost():
    assert split_tagged_calls('<tool_call>\n{"name": "f", "arguments": {}}') == ("", [("f", "{}", "ok")])
    assert split_tagged_calls('a\n<tool_call>\n{"name": "f", "argu') == (
        "a",
        [(("f"), '{"name": "f", "argu', "malformed")],
    )
    two = '<tool_call>{"name": "f", "arguments": {}}<tool_call>{"name": "g", "arguments": {}}</tool_call>'
    assert split_tagged_calls(two) == ("", [("f", "{}", "ok"), ("g", "{}", "ok")])


def test_xml_values_keep_indentation_and_take_the_declared_type():
    body = (
        "\n<function=edit>\n<parameter=old>\n    return 1\n\n</parameter>\n<parameter=all>\nTrue\n</parameter>\n"
        "<parameter=line>\n3\n</parameter>\n<parameter=tags>\n[1, 2]\n</parameter>\n"
        "<parameter=any>\n12\n</parameter>\n</function>\n"
    )
    name, arguments, status = parse_xml_call(body, [EDIT])
    assert (name, status) == ("edit", "ok")
    assert json.loads(arguments) == {"old": "    return 1\n", "all": True, "line": 3, "tags": [1, 2], "any": 12}


def test_a_string_that_looks_like_json_stays_a_string():
    body = "<function=edit>\n<parameter=old>\ntrue\n</parameter>\n</function>"
    assert parse_xml_call(body, [EDIT]) == ("edit", '{"old": "true"}', "ok")
    assert parse_xml_call(body, []) == ("edit", '{"old": true}', "ok")


@pytest.mark.parametrize(
    "body",
    [
        "<function=edit>\n<parameter=old>\nx\n</function>",  # an unclosed parameter
        "<function=edit>\n<parameter=old>\nx\n</parameter>\n",  # an unclosed function
        "<function=edit>\n<parameter=old>\na </parameter> b\n</parameter>\n</function>",  # closed early
        "<function=edit>\n<parameter=all>\nperhaps\n</parameter>\n</function>",  # not of its type
    ],
)
def test_damaged_xml_is_malformed_and_never_an_empty_call(body):
    name, arguments, status = parse_xml_call(body, [EDIT])
    assert (name, status) == ("edit", "malformed")
    assert arguments not in ("", "{}")


def test_call_ids_are_stable_and_differ_between_turns():
    calls = [("f", "{}", "ok"), ("f", "{}", "ok")]
    first = build_tool_calls(calls, (1, 2), (3, 4))
    assert first == build_tool_calls(calls, (1, 2), (3, 4))
    ids = [call.id for call in (*first, *build_tool_calls(calls, (1, 2, 3), (3, 4)))]
    assert len(set(ids)) == 4
