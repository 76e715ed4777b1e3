"""Server-sent events (WHATWG HTML, section 9.2): payloads to the bytes of one event.

Writes only payloads of one line: a payload with a line break is refused, since it would be cut in two.
"""


def render_event(data: bytes, *, event: str | None = None) -> bytes:
    """One event. `data` is JSON as orjson writes it, on one line."""
    if b"\n" in data or b"\r" in data:
        raise ValueError("the data of an event must be one line")
    if event is None:
        return b"data: " + data + b"\n\n"
    return b"event: " + event.encode() + b"\ndata: " + data + b"\n\n"


def render_comment(text: str) -> bytes:
    """A comment line, which clients skip."""
    return b": " + text.encode() + b"\n\n"
