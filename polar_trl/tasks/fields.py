"""Check JSON values against declared types, and read the fields of a dataclass from a JSON object.

The sentences of the errors follow from the annotations of `Task` and `TestSpec`: a new field of a known type needs no
line here.
"""

import dataclasses
import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_type_hints

from polar_trl.errors import TaskError
from polar_trl.types import TestSpec


def _is_texts(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(item, str) for item in value)


def _is_text_map(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(item, str) for item in value.values())


def _is_seconds(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


# annotation: its words in an error, and the check of a value
_TYPES: Mapping[Any, tuple[str, Callable[[Any], bool]]] = {
    str: ("text", lambda value: isinstance(value, str)),
    str | None: ("text", lambda value: isinstance(value, str | None)),
    bool: ("true or false", lambda value: isinstance(value, bool)),
    int | float: ("a number", lambda value: isinstance(value, int | float)),
    float: ("a number of seconds above 0", _is_seconds),
    Literal["none", "public"]: ("'none' or 'public'", lambda value: value in ("none", "public")),
    Literal["train", "mask", "leave_out"] | None: (
        "'train', 'mask' or 'leave_out'",
        lambda value: value in (None, "train", "mask", "leave_out"),
    ),
    tuple[str, ...]: ("a list of texts", _is_texts),
    Mapping[str, str]: ("an object of texts", _is_text_map),
    Mapping[str, Any]: ("an object", lambda value: isinstance(value, Mapping)),
    TestSpec | None: ("an object", lambda value: isinstance(value, Mapping | None)),
}


def _is_required(field: "dataclasses.Field[Any]") -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def require_type(name: str, value: Any, annotation: Any, where: str) -> None:
    """Raise `TaskError`, which begins with `where` and names the field, where a value is not of a type."""
    words, is_of_type = _TYPES[annotation]
    if not is_of_type(value):
        raise TaskError(f"{where}: '{name}' must be {words}, not {value!r:.100}")


def read_fields(kind: type, row: Mapping[str, Any], where: str, *, prefix: str = "") -> dict[str, Any]:
    """Check a JSON object against the fields of a dataclass; lists become tuples.

    Args:
        kind: The dataclass.
        prefix: Of field names in errors, such as "tests.".

    Raises `TaskError` for fields that are unknown, missing (or empty, where there is no default) or of another type.
    """
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for name in row:
        if name not in fields:
            near = difflib.get_close_matches(name, fields, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"the fields are {', '.join(fields)}"
            raise TaskError(f"{where}: unknown field '{prefix}{name}'; {hint}")
    for name, field in fields.items():
        if _is_required(field) and not row.get(name):
            raise TaskError(f"{where}: '{prefix}{name}' is missing or empty")
    annotations = get_type_hints(kind)
    for name, value in row.items():
        require_type(prefix + name, value, annotations[name], where)
    return {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
