"""Spell token ids as texts for a page, one text per token, also where a character spans several tokens.

A token may hold a part of a character only: it shows its bytes, and the token that completes the character shows the
character. Control characters, and those that turn or hide text, show as names. Without a tokenizer a token shows as
its number.
"""

import codecs
import json
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from polar_trl.errors import ConfigError

TEXT, SPECIAL, PART, NUMBER = range(4)
"""Kinds of pieces: text, a mark of the chat format, bytes of an unfinished character, an id without a text."""

_PICTURES = {"\n": "↵", "\t": "⇥", "\r": "␍", "\x7f": "␡"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Pieces:
    """T tokens as they are shown."""

    texts_T: list[str]
    kinds_T: list[int]
    newlines_T: list[bool]
    """Whether a line is to end after the token: it holds a newline, and may hold the next line's indent."""


class Vocabulary:
    """Token texts of one tokenizer.

    Args:
        tokenizer: None shows ids as numbers.
        note: Where the texts come from, or why there are none and how to get them.
    """

    def __init__(self, tokenizer: Tokenizer | None, note: str) -> None:
        self.note = note
        self.is_known = tokenizer is not None
        self._tokenizer = tokenizer
        self._special: Mapping[int, str] = {}
        self._is_byte_level = False
        self._bytes: dict[int, bytes | None] = {}
        if tokenizer is not None:
            self._special = {
                token_id: token.content for token_id, token in tokenizer.get_added_tokens_decoder().items()
            }
            spec = json.loads(tokenizer.to_str())
            self._is_byte_level = "ByteLevel" in json.dumps([spec.get("decoder"), spec.get("pre_tokenizer")])

    def spell(self, ids: Iterable[int]) -> Pieces:
        """Spell a sequence, from its beginning."""
        texts: list[str] = []
        kinds: list[int] = []
        newlines: list[bool] = []
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token_id in ids:
            raw = self._find_bytes(token_id)
            if token_id in self._special or raw is None:
                decoder.reset()
                texts.append(show(self._special.get(token_id, f"{token_id} ")))
                kinds.append(SPECIAL if token_id in self._special else NUMBER)
                newlines.append(False)
                continue
            text = decoder.decode(raw)
            texts.append(show(text) if text else "⟨" + raw.hex(" ").upper() + "⟩")
            kinds.append(TEXT if text or not raw else PART)
            newlines.append("\n" in text)
        return Pieces(texts_T=texts, kinds_T=kinds, newlines_T=newlines)

    def describe(self, token_id: int) -> str:
        """Describe the bytes of one token, as a Python literal; "" where unknown."""
        raw = self._find_bytes(token_id)
        return repr(raw)[1:] if raw is not None else ""

    def _find_bytes(self, token_id: int) -> bytes | None:
        if token_id not in self._bytes:
            self._bytes[token_id] = self._work_out_bytes(token_id)
        return self._bytes[token_id]

    def _work_out_bytes(self, token_id: int) -> bytes | None:
        token = None if self._tokenizer is None or token_id < 0 else self._tokenizer.id_to_token(token_id)
        if token is None:
            return None
        if token_id in self._special:
            return self._special[token_id].encode()
        if self._is_byte_level:
            return b"".join(_BYTES_OF[char] if char in _BYTES_OF else char.encode() for char in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])  # a byte that has no piece of its own
        return token.replace("▁", " ").encode()


def load_vocabulary(name: str | None, *, flag: str | None = None, unnamed: str | None = None) -> Vocabulary:
    """Load the tokenizer of a model's folder, or of a hub id in the local cache.

    Args:
        name: The run's model; None where its settings name none.
        flag: The user's choice instead; raises `ConfigError` if there is no tokenizer.
        unnamed: Why there is no name, where the settings could not be read.
    """
    path = _find_file(flag or name or "")
    if path is None and flag is not None:
        raise ConfigError(
            f"--tokenizer {flag}: no tokenizer.json there; give a model's folder, or a hub id that is in the cache"
        )
    hint = "Give the model's folder: polar-trl inspect RUN --tokenizer PATH"
    if path is None:
        unnamed = unnamed or "the run does not say its model"
        why = f"the tokenizer of {name!r} is not on this machine" if name else unnamed
        return Vocabulary(None, f"Tokens are shown as numbers: {why}. {hint}")
    try:
        return Vocabulary(Tokenizer.from_file(str(path)), f"Token texts from {path}")
    except Exception as error:
        if flag is not None:
            raise ConfigError(f"--tokenizer {flag}: {path} cannot be read ({error})") from error
        return Vocabulary(None, f"Tokens are shown as numbers: {path} cannot be read. {hint}")


def show(text: str) -> str:
    """Replace every character that has no picture, or would change how others look, by one that has."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_show_char(char) for char in text)


def count_columns(text: str) -> int:
    """Count the columns of a text in a monospaced font."""
    if text.isascii():
        return len(text)
    return sum(_count_char(char) for char in text)


def _show_char(char: str) -> str:
    if char in _PICTURES:
        return _PICTURES[char]
    if char < " ":
        return chr(0x2400 + ord(char))
    if char != " " and unicodedata.category(char) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"):
        return f"⟨U+{ord(char):04X}⟩"
    return char


def _count_char(char: str) -> int:
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def _find_file(name: str) -> Path | None:
    if not name:
        return None
    path = Path(name).expanduser()
    for candidate in (path, path / "tokenizer.json"):
        if candidate.is_file():
            return candidate
    if path.exists() or name.count("/") > 1 or name.startswith((".", "/", "~")):
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached: Any = try_to_load_from_cache(name, "tokenizer.json")
    except HFValidationError:
        return None
    return Path(cached) if isinstance(cached, str) else None


def _build_bytes_of() -> dict[str, bytes]:
    """Map characters of byte-level vocabularies to bytes: printable Latin-1 is itself, others are from U+0100 on.

    The mapping of GPT-2's published `encoder.py`.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in printable]
    names = [*map(chr, printable), *(chr(256 + number) for number in range(len(others)))]
    return {name: bytes([value]) for name, value in zip(names, printable + others, strict=True)}


_BYTES_OF = _build_bytes_of()
