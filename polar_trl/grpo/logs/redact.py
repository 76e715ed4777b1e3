"""Take secrets out of settings and texts before they are written: by the names they go by, and by their values.

A secret's name has the word token, secret, password or credential, or ends in key: HF_TOKEN, api_key.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

REDACTED = "(secret)"
_WORDS = r"(?:token|secret|passw(?:or)?d|credentials?|(?:(?<=[_-])|api|access|private|auth)key)"
_NAME = re.compile(rf"(?i)(?:^|[_-]){_WORDS}(?:$|[_-])")
_NAMED = rf"(?i)\b((?:[\w-]*[_-])?{_WORDS}[\"']?)"
_VALUE = r"(?![{$])[^\s\"',}\]]+"
"""Not a place to be filled in, such as {api_key} or $API_KEY."""
_ASSIGNED = re.compile(rf"{_NAMED}(\s*[=:]\s*[\"']?){_VALUE}")
_FLAG = re.compile(rf"(?i)(--(?:[\w-]*[_-])?{_WORDS})(\s+[\"']?){_VALUE}")
_OF_A_KIND = re.compile(r"\b(?:hf_|sk-|ghp_|github_pat_|AKIA)[\w-]{12,}")
_IN_ADDRESS = re.compile(r"(?<=://)[^/\s@\"']+@")
_SHORTEST = 8
"""Characters of a value that is looked for in other texts: a shorter one would be found by chance."""


class Redactor:
    """Replaces secrets by "(secret)".

    Args:
        settings: What may hold them: their values are taken out of other texts, too. So are those of the environment.
    """

    def __init__(self, settings: Any) -> None:
        found = {*_find_secrets(settings), *_find_secrets(dict(os.environ))}
        self._values = sorted((value for value in found if len(value) >= _SHORTEST), key=len, reverse=True)

    def redact(self, value: Any) -> Any:
        """Return JSON values without secrets."""
        if isinstance(value, str):
            return self.redact_text(value)
        if isinstance(value, Mapping):
            return {
                name: REDACTED if isinstance(item, str) and item and is_secret(str(name)) else self.redact(item)
                for name, item in value.items()
            }
        return [self.redact(item) for item in value] if isinstance(value, list | tuple) else value

    def redact_text(self, text: str) -> str:
        """Return a text without secrets: known values, `name: value`, `NAME=value`, `--name value`, known forms."""
        for value in self._values:
            text = text.replace(value, REDACTED)
        for pattern in (_ASSIGNED, _FLAG):
            text = pattern.sub(rf"\1\2{REDACTED}", text)
        return _IN_ADDRESS.sub(f"{REDACTED}@", _OF_A_KIND.sub(REDACTED, text))


def is_secret(name: str) -> bool:
    """Tell whether a value of this name is a secret."""
    return _NAME.search(name) is not None


def _find_secrets(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            if isinstance(item, str) and is_secret(str(name)):
                yield item
            yield from _find_secrets(item)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for item in value:
            yield from _find_secrets(item)
