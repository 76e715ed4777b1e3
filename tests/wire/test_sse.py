"""Server-sent events as bytes."""

import pytest

from polar_trl.wire.sse import render_comment, render_event


def test_events_and_comments() -> None:
    assert render_event(b"{}") == b"data: {}\n\n"
    assert render_event(b"{}", event="ping") == b"event: ping\ndata: {}\n\n"
    assert render_comment("ping") == b": ping\n\n"


@pytest.mark.parametrize("data", [b"a\nb", b"a\rb"])
def test_a_payload_of_two_lines_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="one line"):
        render_event(data)
