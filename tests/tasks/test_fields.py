"""Fields of a task are checked by the types that the dataclasses declare."""

import dataclasses
from collections.abc import Mapping
from typing import Any, get_type_hints

import pytest

from polar_trl.errors import TaskError
from polar_trl.tasks.fields import read_fields, require_type
from polar_trl.types import Task, TestSpec


@pytest.mark.parametrize("kind", [Task, TestSpec])
def test_every_field_has_a_type_that_can_be_checked(kind: type) -> None:
    given = {"id": "a", "instruction": "b", "fail_to_pass": ("c",)}
    for field in dataclasses.fields(kind):
        required = [name for name in given if name in get_type_hints(kind)]
        row = {name: given[name] for name in required} | {field.name: object()}
        with pytest.raises(TaskError, match=f"^here: 'x.{field.name}' must be .*, not <object"):
            read_fields(kind, row, "here", prefix="x.")


def test_lists_become_tuples_and_the_rest_stays() -> None:
    row = {"fail_to_pass": ["a"], "runner": "pytest", "gold_patch": None}
    assert read_fields(TestSpec, row, "here") == row | {"fail_to_pass": ("a",)}


@pytest.mark.parametrize(
    ("value", "annotation", "words"),
    [
        (True, float, "a number of seconds above 0"),
        (float("nan"), float, "a number of seconds above 0"),
        (["a", 1], tuple[str, ...], "a list of texts"),
        ("a", tuple[str, ...], "a list of texts"),
        ({"a": 1}, Mapping[str, str], "an object of texts"),
        (None, str, "text"),
        (1, bool, "true or false"),
    ],
)
def test_a_value_of_another_type(value: Any, annotation: Any, words: str) -> None:
    with pytest.raises(TaskError) as caught:
        require_type("f", value, annotation, "here")
    assert str(caught.value) == f"here: 'f' must be {words}, not {value!r}"
