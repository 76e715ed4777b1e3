"""Sequences that share their beginning: they are as tuples are, and a session holds each of its tokens once."""

import pickle
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_trl.types import SharedSequence, begins_with, count_shared, share_ids

PARTS = st.lists(st.lists(st.integers(0, 3), max_size=4), min_size=1, max_size=6)


def grow(parts: list[list[int]], base: SharedSequence[int] | None = None) -> SharedSequence[int]:
    for part in parts:
        base = SharedSequence(array("q", part), base)
    assert base is not None
    return base


@given(parts=PARTS, start=st.integers(-30, 30), stop=st.integers(-30, 30), step=st.sampled_from([None, 1, 2, -1]))
def test_it_is_as_the_tuple_of_its_values(parts: list[list[int]], start: int, stop: int, step: int | None) -> None:
    ids, plain = grow(parts), tuple(value for part in parts for value in part)
    assert (ids == plain) and (plain == ids) and hash(ids) == hash(plain) and repr(ids) == repr(plain)
    assert (len(ids), list(ids), ids[start:stop:step]) == (len(plain), list(plain), plain[start:stop:step])
    assert [ids[i] for i in range(-len(plain), len(plain))] == [plain[i] for i in range(-len(plain), len(plain))]
    assert ids + (7,) == (*plain, 7) and pickle.loads(pickle.dumps(ids)) == plain  # noqa: RUF005 - adding is tested
    assert np.array(ids, dtype=np.int64).tolist() == list(plain)
    with pytest.raises(IndexError):
        ids[len(plain)]


@given(shared=PARTS, left=PARTS, right=PARTS)
def test_two_that_share_compare_as_tuples_do(
    shared: list[list[int]], left: list[list[int]], right: list[list[int]]
) -> None:
    base = grow(shared)
    one, other = grow(left, base), grow(right, base)
    for whole in (one, tuple(one), SharedSequence(tuple(one))):
        for prefix in (other, base, tuple(other), SharedSequence(tuple(other))):
            assert begins_with(whole, prefix) == (tuple(whole)[: len(prefix)] == tuple(prefix))
            assert (whole == prefix) == (tuple(whole) == tuple(prefix))
    assert count_shared(one, other) >= len(base)
    assert tuple(one)[: count_shared(one, other)] == tuple(other)[: count_shared(one, other)]


def test_a_chain_of_many_thousands_is_read_compared_and_pickled() -> None:
    ids = grow([[number] for number in range(20_000)])
    assert ids == tuple(range(20_000)) and ids[10] == 10
    assert pickle.loads(pickle.dumps(ids))[19_999] == 19_999


def test_the_ids_of_the_base_are_not_held_again() -> None:
    base = share_ids((1, 2, 3))
    assert share_ids((1, 2, 3, 4), base).own == array("q", [4])
    assert share_ids((1, 2, 3, 4), (1, 2, 3)) == (1, 2, 3, 4)
