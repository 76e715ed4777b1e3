"""A reward function that is found by its dotted path."""

from typing import Any


def constant(completions: list[Any], **_: Any) -> list[float]:
    return [1.0] * len(completions)


NOT_A_FUNCTION = 3
