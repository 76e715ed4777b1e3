"""Parse the content of a message or a tool's result in OpenAI's two formats: text, reasoning and images.

Clients mix the names of the two formats and those of others; a part of any name is its text. Raises `WireError` for
content that would be lost: sound, files, and parts of unknown kinds without a text.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from polar_trl.errors import WireError
from polar_trl.wire.base import json_type, list_parts, read_reasoning, read_text

_IMAGE_PARTS = {"image_url", "input_image"}
_TEXT_PARTS = {"text", "input_text", "output_text"}
_REASONING_PARTS = {"thinking", "redacted_thinking", "reasoning", "reasoning_text", "summary_text"}


@dataclass(slots=True)
class Content:
    """The parts of a content, by kind and in order."""

    texts: list[str] = field(default_factory=list)
    reasonings: list[str] = field(default_factory=list)
    images: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self.texts)

    @property
    def reasoning(self) -> str | None:
        """The whole reasoning; None where there is none."""
        return "".join(self.reasonings) or None


def parse_content(holder: Mapping[str, Any], key: str, path: str, *, is_reply: bool = False) -> Content:
    """Parse the text, the part, or the array of parts at `holder[key]`; null is an empty one.

    Only a reply has reasoning; elsewhere it is a text like others.
    """
    content = Content()
    for index, part in enumerate(list_parts(holder.get(key), f"{path}.{key}")):
        if isinstance(part, str):
            content.texts.append(part)
        elif part:
            _parse_part(part, f"{path}.{key}[{index}]", content, is_reply=is_reply)
    return content


def _parse_part(part: Any, path: str, content: Content, *, is_reply: bool) -> None:
    if not isinstance(part, dict):
        raise WireError(f"{path}: must be an object, not {json_type(part)}")
    kind = part.get("type")
    kind = kind if isinstance(kind, str) else ""
    if kind in _IMAGE_PARTS:
        image = part.get("image_url")
        url = image.get("url") if isinstance(image, dict) else image
        if not isinstance(url, str):
            raise WireError(f"{path}.image_url: must be a string or an object with a url, not {json_type(image)}")
        content.images.append(url)
    elif kind in _REASONING_PARTS and is_reply:
        content.reasonings.append(read_reasoning(part))
    elif kind == "refusal":
        content.texts.append(read_text(part, "refusal", path))
    elif kind in _TEXT_PARTS or part.get("text") is not None:
        content.texts.append(read_text(part, "text", path))
    else:
        raise WireError(f"{path}.type: only text and images can be read")
