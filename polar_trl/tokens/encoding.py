"""Encode text with a fast tokenizer's own library: the same ids as `transformers` gives, in less time.

`transformers` asks for offsets, makes lists of masks and sets up padding at every call; prompts need the ids alone.
The library lets go of the interpreter's lock while it encodes.
"""

import copy
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from polar_trl.tokens.plain_text import SEAM

MAX_REMEMBERED_CHARACTERS = 64
"""Chat formats encode the same few words at every turn, such as the opening of a reply."""
_PROBE = " Naïve 🙂\n\n  x = {'a': [1, 2]}  # 12345\tend "


class PromptTokenizer:
    """A `transformers` tokenizer that encodes without offsets, and each piece between seams (`plain_text`) for itself.

    All else is the tokenizer's own.

    It cannot be called, so the package `renderers`, which would compute a text's offsets where it can, does not.

    Args:
        tokenizer: Where it has no fast one inside, or encodes otherwise than that, its own `encode` is used.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        encode_text = _find_encode(tokenizer)
        remembered = lru_cache(maxsize=1024)(lambda text: tuple(encode_text(text)))

        self._local = local = threading.local()

        def encode(text: str, *, add_special_tokens: bool = False) -> list[int]:
            if add_special_tokens:
                ids: list[int] = tokenizer.encode(text, add_special_tokens=True)
                return ids
            if len(text) <= MAX_REMEMBERED_CHARACTERS and SEAM not in text:
                return list(remembered(text))
            ids = [token_id for piece in text.split(SEAM) for token_id in encode_text(piece)]
            texts: list[list[int]] | None = getattr(local, "texts", None)
            if texts is None:
                return ids
            texts.append(ids)
            return [-len(texts)]

        self.encode = encode

    def render_quickly(self, render: Callable[[], Sequence[int] | None]) -> list[int] | None:
        """Have `render` put ids together with one negative id for each longer text, and put in that text's ids.

        For renderers that do not look at the ids of texts: `renderers` handles each token on its own, four times.
        """
        texts: list[list[int]] = []
        self._local.texts = texts
        try:
            rendered = render()
        finally:
            self._local.texts = None
        if rendered is None:
            return None
        ids: list[int] = []
        for token_id in rendered:
            if token_id < 0:
                ids += texts[-token_id - 1]
            else:
                ids.append(token_id)
        return ids

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # `__call__` among them
            raise AttributeError(name)
        return getattr(self._tokenizer, name)


def _find_encode(tokenizer: Any) -> Callable[[str], list[int]]:
    def encode_as_told(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if not hasattr(backend, "encode_batch_fast"):
        return encode_as_told
    backend = copy.deepcopy(backend)  # whoever pads or truncates with the tokenizer sets that in its own
    backend.no_padding()
    backend.no_truncation()

    def encode(text: str) -> list[int]:
        ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    specials: Sequence[str] = getattr(tokenizer, "all_special_tokens", ())
    probe = _PROBE.join(("", *specials, ""))
    return encode if encode(probe) == encode_as_told(probe) else encode_as_told
