"""Read JSON that models and agents write, in which half of a surrogate pair may stand.

Models sample "\\ud83d" alone, and JavaScript agents cut text between the halves of an emoji. A half has no UTF-8 form,
so it becomes U+FFFD, as browsers write it; everything else is read as orjson reads it.
"""

import json
import re
from typing import Any

import orjson

UNPARSED_ARGUMENTS = "unparsed_arguments"
"""Key under which arguments that are no JSON object travel in formats that carry objects only."""
_ESCAPES = re.compile(
    r"\\\\|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})"
)
"""An escaped backslash, a whole pair, or (the group) a half."""


def replace_half_surrogates(text: str) -> str:
    """Return text that has a UTF-8 form: halves are joined to pairs where they meet, and U+FFFD elsewhere."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def mend_json(text: str) -> str:
    """Return JSON text in which no half surrogate stands, escaped or not; all else is spelled as it was."""
    mended = _ESCAPES.sub(lambda found: r"\ufffd" if found[1] else found[0], text) if "\\u" in text else text
    return replace_half_surrogates(mended)


def load_json(text: str | bytes) -> Any:
    """Parse JSON, half surrogates as U+FFFD. Raises `orjson.JSONDecodeError`, a `ValueError`."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        try:
            if isinstance(text, bytes):
                text = text.decode(json.detect_encoding(text), "surrogatepass")
            return orjson.loads(mend_json(text))
        except ValueError:
            raise error from None


def is_json_object(text: str) -> bool:
    """Tell whether text, such as a tool call's arguments, is a JSON object that every dialect can carry."""
    try:
        return isinstance(load_json(text), dict)
    except ValueError:
        return False
