"""Break tokens into lines of a page's width, so that the page fetches only the lines on its screen.

A line ends at a newline, where the next token has no room, and where a sampled span begins or ends. A token that is
wider than the page has a line of its own. No token is split.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polar_trl.tools.inspector.vocabulary import Pieces, count_columns


@dataclass(frozen=True, kw_only=True, slots=True)
class Lines:
    """L lines of T tokens."""

    starts_L: NDArray[np.int64]
    """First token of each."""
    num_tokens: int

    def find_line(self, position: int) -> int:
        """Find the line that a token is on."""
        return int(np.searchsorted(self.starts_L, position, side="right")) - 1

    def tokens_of(self, first: int, count: int) -> tuple[int, int]:
        """Return [start, end) of the tokens of some lines; lines that do not exist hold none."""
        bounds = [*self.starts_L[first : first + count + 1].tolist()]
        if not bounds:
            return self.num_tokens, self.num_tokens
        end = bounds[-1] if len(bounds) > count else self.num_tokens
        return bounds[0], end


def build_lines(pieces: Pieces, edges: Iterable[int], columns: int) -> Lines:
    """Break the tokens into lines.

    Args:
        edges: Positions that a line begins at whatever the width.
        columns: Of a monospaced font, at least 1.
    """
    widths = _measure(pieces.texts_T)
    breaks = set(edges)
    starts, used = [0] if widths else [], 0
    ended = False
    for position, (width, newline) in enumerate(zip(widths, pieces.newlines_T, strict=True)):
        if position and (ended or position in breaks or used + width > columns):
            starts.append(position)
            used = 0
        used += width
        ended = newline
    return Lines(starts_L=np.array(starts, dtype=np.int64), num_tokens=len(widths))


def _measure(texts: Sequence[str]) -> list[int]:
    known: dict[str, int] = {}
    widths = []
    for text in texts:
        width = known.get(text)
        if width is None:
            width = known[text] = count_columns(text)
        widths.append(width)
    return widths
