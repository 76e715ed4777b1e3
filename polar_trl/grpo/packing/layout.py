"""Rows of token ids -> one flat sequence without padding, in which rows may share what they begin with.

The rows form a forest of segments: a segment is a run of tokens whose context is the segment that it continues, back
to a root. Unshared, each row is one root; shared, a prefix that several rows begin with is there once. Segments lie in
depth-first order, so all that continues a segment follows it directly. It refuses to drop or reorder a row's tokens:
`Layout.positions_of` gives each row back.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens `start` to `end` (excluded) of the flat sequence."""

    start: int
    end: int
    parent: int | None
    """Index of the segment whose end this one continues; None at the beginning of a row."""
    depth: int
    """Position of its first token within the rows that it is part of: what comes before it in its context."""


@dataclass(frozen=True)
class Layout:
    """B rows in a flat sequence of N tokens."""

    token_ids_N: Ids
    position_ids_N: Ids
    """Position of each token within its rows, from 0."""
    segments: tuple[Segment, ...]
    """In depth-first order; they tile the flat sequence."""
    chains: tuple[tuple[int, ...], ...]
    """Per row: the segments that it is made of, from its root."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids_N)

    def positions_of(self, row: int) -> Ids:
        """[T]: where the tokens of a row are in the flat sequence."""
        parts = [np.arange(self.segments[i].start, self.segments[i].end) for i in self.chains[row]]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def context_of(self, segment: int) -> list[Segment]:
        """The segments before this one in its rows, from the root."""
        context = []
        parent = self.segments[segment].parent
        while parent is not None:
            context.append(self.segments[parent])
            parent = self.segments[parent].parent
        return context[::-1]

    def pad(self, multiple: int) -> "Layout":
        """The same rows, with tokens of no row at the end so that N is a multiple of `multiple`."""
        rest = -self.num_tokens % multiple
        if rest == 0:
            return self
        filler = Segment(start=self.num_tokens, end=self.num_tokens + rest, parent=None, depth=0)
        return Layout(
            token_ids_N=np.pad(self.token_ids_N, (0, rest)),
            position_ids_N=np.concatenate([self.position_ids_N, np.arange(rest)]),
            segments=(*self.segments, filler),
            chains=self.chains,
        )

    @cached_property
    def subtree_ends_N(self) -> Ids:
        """[N]: for each token, the end of all that continues it: token q has token k in its context, or is it, exactly
        where k <= q < subtree_ends_N[k]."""
        ends = [segment.end for segment in self.segments]
        for index in range(len(self.segments) - 1, -1, -1):
            parent = self.segments[index].parent
            if parent is not None:
                ends[parent] = max(ends[parent], ends[index])
        lengths = [segment.end - segment.start for segment in self.segments]
        return np.repeat(np.array(ends, dtype=np.int64), lengths)


def build_layout(rows: Sequence[Sequence[int] | Ids], *, share_prefixes: bool) -> Layout:
    """Lay rows out one after the other, or as a forest in which each shared prefix is there once.

    Args:
        rows: Token ids of each row; empty rows are allowed and have no tokens.
    """
    arrays = [np.asarray(row, dtype=np.int64) for row in rows]
    if share_prefixes:
        return _build_forest(arrays)
    segments: list[Segment] = []
    chains: list[tuple[int, ...]] = []
    end = 0
    for array in arrays:
        chains.append((len(segments),) if len(array) else ())
        if len(array):
            segments.append(Segment(start=end, end=end + len(array), parent=None, depth=0))
            end += len(array)
    return _build(segments, chains, [array for array in arrays if len(array)])


def count_unique_tokens(rows: Sequence[Sequence[int] | Ids]) -> int:
    """Tokens of the forest of all rows: what is left to forward if every shared prefix is forwarded once."""
    arrays = [np.asarray(row, dtype=np.int64) for row in rows]
    order, common = sort_by_prefix(arrays)
    return sum(len(arrays[row]) for row in order) - sum(common)


def sort_by_prefix(rows: Sequence[Ids]) -> tuple[list[int], list[int]]:
    """The rows' lexicographic order, in which those that share prefixes are neighbours.

    Returns:
        order: [B] indices of rows.
        common: [B] how many tokens each shares with the one before it in that order; 0 for the first.
    """
    # big-endian bytes compare like the numbers (ids are not negative)
    keys = [row.astype(">u4").tobytes() for row in rows]
    order = sorted(range(len(rows)), key=keys.__getitem__)
    return order, [0] * (len(order) > 0) + [common_prefix(rows[a], rows[b]) for a, b in pairwise(order)]


def common_prefix(a: Ids, b: Ids) -> int:
    """How many tokens two rows begin with in common."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(differs.argmax()) if differs.any() else length


def _build_forest(arrays: list[Ids]) -> Layout:
    order, common = sort_by_prefix(arrays)
    segments: list[Segment] = []
    parts: list[Ids] = []
    chains: list[tuple[int, ...]] = [()] * len(arrays)
    # Runs of neighbours to place: (first, end, tokens already placed, the segments that hold those).
    todo: list[tuple[int, int, int, tuple[int, ...]]] = [(0, len(order), 0, ())]
    while todo:
        first, end, depth, chain = todo.pop()
        if first == end:
            continue
        shortest = len(arrays[order[first]])  # sorted: where one row begins all others, it is the first
        shared = min([shortest, *common[first + 1 : end]])
        if shared > depth:
            start = segments[-1].end if segments else 0
            parent = chain[-1] if chain else None
            chain = (*chain, len(segments))
            segments.append(Segment(start=start, end=start + shared - depth, parent=parent, depth=depth))
            parts.append(arrays[order[first]][depth:shared])
        while first < end and len(arrays[order[first]]) == shared:
            chains[order[first]] = chain
            first += 1
        edges = [first, *(i for i in range(first + 1, end) if common[i] == shared), end]
        todo.extend((a, b, shared, chain) for a, b in reversed(list(pairwise(edges))))
    return _build(segments, chains, parts)


def _build(segments: list[Segment], chains: list[tuple[int, ...]], parts: list[Ids]) -> Layout:
    nothing = np.empty(0, dtype=np.int64)
    positions = [np.arange(s.depth, s.depth + s.end - s.start) for s in segments]
    return Layout(
        token_ids_N=np.concatenate(parts) if parts else nothing,
        position_ids_N=np.concatenate(positions) if positions else nothing,
        segments=tuple(segments),
        chains=tuple(chains),
    )
