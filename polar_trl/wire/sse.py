"""Render server-sent events (WHATWG HTML, section 9.2).

A payload with a line break raises `ValueError`, since clients would read it as two.
"""


def render_event(data: bytes, *, event: str | None = None) -> bytes:
    """Render one event. `data` is JSON as orjson writes it, on one line."""
    if b"\n" in data or b"\r" in data:
        raise ValueError("the data of an event must be one line")
    if event is None:
        return b"data: " + data + b"\n\n"
    return b"event: " + event.encode() + b"\ndata: " + data + b"\n\n"


def render_comment(text: str) -> bytes:
    """Render a comment line, which clients skip."""
    return b": " + text.encode() + b"\n\n"
