"""All dialects share the key, and tool arguments as objects."""

import gc
import json
from contextlib import suppress
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_trl.errors import WireError
from polar_trl.types import ChatRequest, RequestedSampling, Tool
from polar_trl.wire.base import (
    Incoming,
    ItemMemo,
    _CollectorPause,
    check_labels,
    parse_key,
    parse_object,
    read_arguments,
    render_arguments,
)


@pytest.mark.parametrize(
    ("headers", "query", "key"),
    [
        ({"authorization": "Bearer abc"}, {}, "abc"),
        ({"authorization": "bearer  abc "}, {}, "abc"),
        ({"x-api-key": "abc"}, {}, "abc"),
        ({"x-goog-api-key": "abc"}, {}, "abc"),
        ({}, {"key": "abc"}, "abc"),
        ({"authorization": "Basic abc"}, {}, None),
        ({"authorization": "Bearer "}, {}, None),
        ({"authorization": ""}, {}, None),
        ({}, {}, None),
    ],
)
def test_the_key_is_found_where_any_client_puts_it(
    headers: dict[str, str], query: dict[str, str], key: str | None
) -> None:
    assert parse_key(Incoming(headers=headers, query=query)) == key


@given(text=st.text() | st.sampled_from(["{}", '{"a": 1}', "[1]", "null", '{"a": ', ""]))
def test_arguments_that_are_no_object_survive_a_format_that_carries_objects(text: str) -> None:
    value = read_arguments(text)
    assert isinstance(value, dict)
    assert read_arguments(render_arguments(value)) == value


def test_arguments_too_deep_to_write_again_are_passed_on_as_text() -> None:
    deep = '{"a": ' + "[" * 400 + "]" * 400 + "}"
    assert read_arguments(render_arguments(read_arguments(deep))) == {"unparsed_arguments": deep}
    wide = '{"a": [' + ", ".join(["[]"] * 400) + "]}"
    assert read_arguments(wide)["a"] == [[]] * 400


numbers = st.sampled_from([0, 1, 2, 0.0, 1.0, 1.5, True, False, None, "1", "x"])
json_values = st.recursive(
    numbers, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
)


@given(first=json_values, second=json_values)
def test_an_item_is_known_if_it_is_the_same_json(first: Any, second: Any) -> None:
    """Which 1, 1.0 and true are not, though they are equal in Python; the order of keys is no difference."""
    memo = ItemMemo()
    (before,) = memo.parse_items([first], lambda item, index: [item])
    (after,) = memo.parse_items([second], lambda item, index: [item])
    is_same = json.dumps(first, sort_keys=True) == json.dumps(second, sort_keys=True)
    assert (after is before) is is_same
    assert memo.parse_items([second], lambda item, index: [item])[0] is after
    assert memo.parse_items([(0, second)], lambda item, index: [item])[0] is not after


def test_what_is_too_deep_to_compare_is_read_again() -> None:
    deep = orjson.loads('{"a":' * 300 + "1" + "}" * 300)
    memo = ItemMemo()
    (before,) = memo.parse_items([deep], lambda item, index: [item])
    assert memo.parse_items([deep], lambda item, index: [item])[0] is not before


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("ending", [b"}", b', "half": "\\ud83d"}', b"]"])
def test_reading_a_large_body_leaves_the_garbage_collector_as_it_was(enabled: bool, ending: bytes) -> None:
    body = b'{"a": "' + b"x" * 2_000_000 + b'"' + ending
    was_enabled = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with suppress(WireError):
            parse_object(body)
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()


def test_the_garbage_collector_waits_for_the_last_thread_that_reads() -> None:
    pause = _CollectorPause()
    with pause:
        with pause:
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


@pytest.mark.parametrize(
    "text", ["[" + "{}," * 900_000 + "1]", "[" * 3_000_000, '{"a": [' + '"",' * 2_000_000 + "1]}"]
)
def test_a_body_of_too_many_values_is_not_read(text: str) -> None:
    with pytest.raises(WireError, match="holds more than 1,000,000 values") as caught:
        parse_object(text.encode())
    assert caught.value.status == 413


def test_a_large_text_is_no_matter_of_values() -> None:
    assert len(parse_object(b'{"a": "' + b"a" * 5_000_000 + b'"}')["a"]) == 5_000_000


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "m" * 257}, "model: must have at most 256 characters"),
        ({"tools": (Tool(name="ok"), Tool(name="t" * 257))}, "tools[1]: the name must have at most 256 characters"),
        ({"sampling": RequestedSampling(stop=("a",) * 65)}, "stop: must be at most 64 texts"),
        ({"sampling": RequestedSampling(stop=("a" * 1025,))}, "stop: must be at most 64 texts"),
    ],
)
def test_labels_that_no_agent_sends_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(WireError) as caught:
        check_labels(ChatRequest(messages=(), **fields))
    assert str(caught.value).startswith(message)


def test_unread_fields_are_kept_up_to_a_number_and_a_length() -> None:
    few = ChatRequest(messages=(), model="m" * 256, unread=("a",) * 200)
    assert check_labels(few) is few
    many = check_labels(ChatRequest(messages=(), unread=("x" * 1000,) * 1000))
    assert many.unread == ("x" * 256,) * 200
