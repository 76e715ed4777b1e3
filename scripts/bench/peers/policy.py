"""Sample the scripted policy's replies as tokens of a real tokenizer, and keep what was sampled on which prompt."""

import json
import re
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peers.sessions import Sample, write_reply

CONSTANT_ARGUMENTS = json.dumps({"command": "sed -n 1,40p module.py"})
CONSTANT_TEXT = "I will look at the next part of the file."
_MARK = re.compile(r"\[(\w+) (\d+)\]")
_TAIL = 400
"""Tokens at a prompt's end that hold its last mark."""


def encode_constant_reply(tokenizer: Any) -> list[int]:
    """Encode the one reply of the sessions that measure cost."""
    text = (
        f'{CONSTANT_TEXT}\n<tool_call>\n{{"name": "bash", "arguments": {CONSTANT_ARGUMENTS}}}\n</tool_call><|im_end|>'
    )
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def load_tokenizer(folder: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def save_tokenizer(base: Path, folder: Path) -> None:
    """Save a tokenizer of `base`'s vocabulary with Qwen3's chat template, from the installed trl, and its marks."""
    import importlib.util

    from tokenizers import AddedToken

    tokenizer = load_tokenizer(str(base))
    marks = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
    tokenizer.unk_token = None  # as Qwen3's; the renderers take an unknown token's id for a missing one
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in marks])
    found = importlib.util.find_spec("trl")
    assert found is not None and found.origin is not None
    tokenizer.chat_template = (Path(found.origin).parent / "chat_templates" / "qwen3.jinja").read_text()
    tokenizer.save_pretrained(folder)


class Policy:
    """Answers prompts of one session after the other."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.samples: list[Sample] = []
        """Of the session, in order."""
        self._lock = threading.Lock()

    def begin(self, kind: str, turns: int) -> None:
        """Forget the session before, and play this one."""
        self._kind, self._turns = kind, turns
        self._attempts: Counter[tuple[str, int]] = Counter()
        self.samples = []

    def sample(self, prompt_ids: Sequence[int]) -> tuple[Sample, str]:
        """Sample the reply to a prompt's last mark; returns it with its finish reason, "stop" or "length"."""
        with self._lock:
            marks = _MARK.findall(self.tokenizer.decode(prompt_ids[-_TAIL:]))
            name, number = marks[-1][0], int(marks[-1][1])
            reply = write_reply(self._kind, self._turns, name, number, self._attempts[name, number])
            self._attempts[name, number] += 1
            ids = self._encode(reply.text, reply.is_odd)
            if not reply.is_cut:
                ids.append(self.tokenizer.convert_tokens_to_ids("<|im_end|>"))
            start = sum(len(sample.token_ids) for sample in self.samples) + 1
            # exact in 32 bits too
            taken = Sample(list(prompt_ids), ids, [-(start + i) / (1 << 20) for i in range(len(ids))])
            self.samples.append(taken)
        return taken, "length" if reply.is_cut else "stop"

    def _encode(self, text: str, is_odd: bool) -> list[int]:
        pieces = re.split(r"(<[^<>]+>)", text) if is_odd else [text]
        ids: list[int] = []
        for piece in pieces:
            whole = not is_odd or piece.startswith("<")
            for part in [piece] if whole else [piece[i : i + 3] for i in range(0, len(piece), 3)]:
                ids += self.tokenizer.encode(part, add_special_tokens=False)
        return ids
