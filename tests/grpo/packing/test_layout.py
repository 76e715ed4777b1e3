"""Rows come back out of a layout as they went in, and shared prefixes are there exactly once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_trl.grpo.packing.layout import build_layout

# few different tokens, so that prefixes are shared often
ROWS = st.lists(st.lists(st.integers(0, 2), max_size=7), max_size=9)


@given(ROWS, st.booleans())
def test_every_row_comes_back(rows: list[list[int]], share: bool) -> None:
    layout = build_layout(rows, share_prefixes=share)
    for index, row in enumerate(rows):
        positions = layout.positions_of(index)
        assert layout.token_ids_L[positions].tolist() == row
        assert layout.position_ids_L[positions].tolist() == list(range(len(row)))


@given(ROWS)
def test_each_prefix_is_there_once(rows: list[list[int]]) -> None:
    prefixes = {tuple(row[: end + 1]) for row in rows for end in range(len(row))}
    assert build_layout(rows, share_prefixes=True).num_tokens == len(prefixes)
    assert build_layout(rows, share_prefixes=False).num_tokens == sum(map(len, rows))


@given(ROWS, st.booleans())
def test_a_token_has_exactly_its_rows_tokens_in_its_context(rows: list[list[int]], share: bool) -> None:
    layout = build_layout(rows, share_prefixes=share)
    ends = layout.subtree_ends_L
    for row in range(len(rows)):
        positions = layout.positions_of(row)
        for at, q in enumerate(positions):
            context = [k for k in range(layout.num_tokens) if k <= q < ends[k]]
            assert context == positions[: at + 1].tolist()


@given(ROWS, st.booleans())
def test_segments_tile_the_sequence_in_depth_first_order(rows: list[list[int]], share: bool) -> None:
    layout = build_layout(rows, share_prefixes=share)
    edges = [0, *(segment.end for segment in layout.segments)]
    assert [segment.start for segment in layout.segments] == edges[:-1]
    assert edges[-1] == layout.num_tokens
    for index, segment in enumerate(layout.segments):
        context = layout.context_of(index)
        assert segment.depth == sum(part.end - part.start for part in context)
        assert segment.parent is None or segment.parent < index


def test_thousands_of_nested_prefixes_need_no_recursion() -> None:
    rows = [np.zeros(length, dtype=np.int64) for length in range(1, 2500)]
    layout = build_layout(rows, share_prefixes=True)
    assert layout.num_tokens == 2499
    assert len(layout.chains[-1]) == 2499


@pytest.mark.parametrize("share", [True, False])
def test_no_rows_and_empty_rows(share: bool) -> None:
    assert build_layout([], share_prefixes=share).num_tokens == 0
    assert build_layout([[], [5]], share_prefixes=share).positions_of(0).tolist() == []


@given(ROWS, st.booleans(), st.integers(1, 5))
def test_padding_belongs_to_no_row(rows: list[list[int]], share: bool, multiple: int) -> None:
    layout = build_layout(rows, share_prefixes=share)
    padded = layout.pad(multiple)
    assert padded.num_tokens % multiple == 0
    assert padded.num_tokens - layout.num_tokens < multiple
    assert padded.subtree_ends_L[: layout.num_tokens].tolist() == layout.subtree_ends_L.tolist()
    assert [padded.positions_of(i).tolist() for i in range(len(rows))] == [
        layout.positions_of(i).tolist() for i in range(len(rows))
    ]
