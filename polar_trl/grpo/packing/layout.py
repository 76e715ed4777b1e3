"""Lay rows out as one flat sequence without padding, in which rows may share prefixes (a radix tree).

A segment is a run of tokens whose context is the segment that it continues, back to a root: the edges of a radix tree.
Unshared, each row is one root; shared, a prefix that several rows begin with is there once. Segments lie in
depth-first order, so that all that continues a segment follows it directly. Rows abcd, abe and ab, shared:

    flat sequence         a b c d e      5 tokens of 9; the position of e in its row is 2
    segment               0 0 1 1 2      1 and 2 continue 0; the rows are the chains (0, 1), (0, 2) and (0,)
    end of the subtree    5 5 4 4 5      token q has token k in its context where k <= q < end of k's subtree

No token of a row is dropped or reordered: `Layout.positions_of` gives each row back.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from polar_trl.grpo.packing.prefix import SharedPrefix

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens: `start` to `end` (excluded) of the flat sequence."""

    start: int
    end: int
    parent: int | None
    """Index of the segment whose end this one continues; None at the beginning of a row."""
    depth: int
    """Position of its first token within its rows, or the number of tokens in its context."""


@dataclass(frozen=True)
class Layout:
    """B rows in a flat sequence of L tokens, which is E segments."""

    token_ids_L: Ids
    position_ids_L: Ids
    """Position of each token within its rows, from 0."""
    segments: tuple[Segment, ...]
    """In depth-first order; they tile the flat sequence."""
    chains: tuple[tuple[int, ...], ...]
    """[B]: the segments that each row is made of, from its root."""
    prefix: "SharedPrefix | None" = None
    """A prefix of rows of several passes: it is the first segment, or, where that begins at a depth, before them all
    and read from memory."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids_L)

    @property
    def num_before(self) -> int:
        """Tokens of a prefix that is read, and so is not in the flat sequence."""
        return self.segments[0].depth if self.segments else 0

    @property
    def num_continuing(self) -> int:
        """Tokens that continue a prefix that is read; they come first."""
        return next((s.start for s in self.segments if s.depth == 0), self.num_tokens)

    def positions_of(self, row: int) -> Ids:
        """[T]: positions of a row's tokens in the flat sequence, without those of a prefix that is read."""
        parts = [np.arange(self.segments[i].start, self.segments[i].end) for i in self.chains[row]]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def context_of(self, segment: int) -> list[Segment]:
        """List the segments before this one in its rows, from the root.

        A prefix that is read is the first of them, and ends where the flat sequence begins.
        """
        context = []
        root = self.segments[segment]
        while root.parent is not None:
            root = self.segments[root.parent]
            context.append(root)
        if root.depth:
            context.append(Segment(start=-root.depth, end=0, parent=None, depth=0))
        return context[::-1]

    def pad(self, multiple: int) -> "Layout":
        """Return the same rows with tokens of no row at the end, so that L is a multiple of `multiple`."""
        rest = -self.num_tokens % multiple
        if rest == 0:
            return self
        filler = Segment(start=self.num_tokens, end=self.num_tokens + rest, parent=None, depth=0)
        return replace(
            self,
            token_ids_L=np.pad(self.token_ids_L, (0, rest)),
            position_ids_L=np.concatenate([self.position_ids_L, np.arange(rest)]),
            segments=(*self.segments, filler),
        )

    @cached_property
    def subtree_ends_L(self) -> Ids:
        """[L]: the end of all that continues each token.

        Token q has token k in its context, or is it, exactly where k <= q < subtree_ends_L[k]. So causal attention
        over a tree needs this one number per token, and no mask of L x L.
        """
        ends = [segment.end for segment in self.segments]
        # children come after their parent, so that backwards each is complete before it is passed on
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


def build_layout_after(rows: Sequence[Ids], prefix: "SharedPrefix", *, is_read: bool) -> Layout:
    """Lay rows out as a forest whose first tree is that of the rows that begin with a prefix and go on.

    Args:
        is_read: The prefix is left out, to be read from memory; else it is the first segment.
    """
    ids = prefix.token_ids
    members = [i for i, row in enumerate(rows) if begins_with(row, ids)]
    others = sorted(set(range(len(rows))) - set(members))
    # the prefix is a row of the tree, which ends where the others go on: so it is its first segment
    tree, rest = _build_forest([ids, *(rows[i] for i in members)]), _build_forest([rows[i] for i in others])
    skipped = 1 if is_read else 0  # segments
    segments = [
        *_shift(tree.segments, -skipped * len(ids), -skipped)[skipped:],
        *_shift(rest.segments, tree.num_tokens - skipped * len(ids), len(tree.segments) - skipped),
    ]
    chains: list[tuple[int, ...]] = [()] * len(rows)
    for row, chain in zip(members, tree.chains[1:], strict=True):
        chains[row] = tuple(i - skipped for i in chain[skipped:])
    for row, chain in zip(others, rest.chains, strict=True):
        chains[row] = tuple(i + len(tree.segments) - skipped for i in chain)
    parts = [tree.token_ids_L[skipped * len(ids) :], rest.token_ids_L]
    return replace(_build(segments, chains, parts), prefix=prefix)


def begins_with(row: Ids, prefix: Ids) -> bool:
    """Tell whether a row begins with the prefix and goes on."""
    return len(row) > len(prefix) and common_prefix(row, prefix) == len(prefix)


def _shift(segments: Sequence[Segment], tokens: int, places: int) -> list[Segment]:
    """Move segments by so many tokens and places; those that continue the first one, if it leaves, become roots."""
    shifted = []
    for s in segments:
        parent = None if s.parent is None or s.parent + places < 0 else s.parent + places
        shifted.append(replace(s, start=s.start + tokens, end=s.end + tokens, parent=parent))
    return shifted


def sort_by_prefix(rows: Sequence[Ids]) -> tuple[list[int], list[int]]:
    """Sort rows lexicographically, so that those that share prefixes are neighbours.

    Returns:
        order: [B] indices of rows.
        lcps: [B] longest common prefix (tokens) of each with the one before it in that order, 0 for the first. That
            of two rows farther apart is the minimum of those on the way.
    """
    # big-endian bytes compare like the numbers (ids are not negative)
    keys = [row.astype(">u4").tobytes() for row in rows]
    order = sorted(range(len(rows)), key=keys.__getitem__)
    return order, [0] * (len(order) > 0) + [common_prefix(rows[a], rows[b]) for a, b in pairwise(order)]


def common_prefix(a: Ids, b: Ids) -> int:
    """Count the tokens that two rows begin with in common."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(differs.argmax()) if differs.any() else length


def _build_forest(arrays: list[Ids]) -> Layout:
    order, lcps = sort_by_prefix(arrays)
    segments: list[Segment] = []
    parts: list[Ids] = []
    chains: list[tuple[int, ...]] = [()] * len(arrays)
    # Subtrees to place, as runs of neighbours: (first, end, tokens placed already, the segments that hold those). A
    # stack of our own: thousands of rows may be nested, one in the other.
    todo: list[tuple[int, int, int, tuple[int, ...]]] = [(0, len(order), 0, ())]
    while todo:
        first, end, depth, chain = todo.pop()
        if first == end:
            continue
        shortest = len(arrays[order[first]])  # sorted: where one row begins all others, it is the first
        shared = min([shortest, *lcps[first + 1 : end]])
        if shared > depth:
            start = segments[-1].end if segments else 0
            parent = chain[-1] if chain else None
            chain = (*chain, len(segments))
            segments.append(Segment(start=start, end=start + shared - depth, parent=parent, depth=depth))
            parts.append(arrays[order[first]][depth:shared])
        # rows that end at this fork are complete; the others fall apart where neighbours share no more than this
        while first < end and len(arrays[order[first]]) == shared:
            chains[order[first]] = chain
            first += 1
        edges = [first, *(i for i in range(first + 1, end) if lcps[i] == shared), end]
        todo.extend((a, b, shared, chain) for a, b in reversed(list(pairwise(edges))))  # the first is popped first
    return _build(segments, chains, parts)


def _build(segments: list[Segment], chains: list[tuple[int, ...]], parts: list[Ids]) -> Layout:
    nothing = np.empty(0, dtype=np.int64)
    positions = [np.arange(s.depth, s.depth + s.end - s.start) for s in segments]
    return Layout(
        token_ids_L=np.concatenate(parts) if parts else nothing,
        position_ids_L=np.concatenate(positions) if positions else nothing,
        segments=tuple(segments),
        chains=tuple(chains),
    )
