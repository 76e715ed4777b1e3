"""A digest is equal for equal rows in any order, and differs where anything that is trained differs."""

from dataclasses import replace
from math import nextafter

from reconstruct_sessions import build_rollout

from polar_trl.reconstruct import build_prefix_merged, digest

ROWS = build_prefix_merged(build_rollout(([1], [10, 11]), ([7], [20]), ([1, 10, 11, 2], [12]))).trajectories


def test_pinned() -> None:
    # Stored in session files: a change of this value makes every record of the past look altered.
    assert digest(ROWS) == "25921b2c73ca8a1cef949d1842cb8c9493acbe7085ae9050983848d9ed784f28"
    assert digest(()) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def test_the_order_of_rows_does_not_matter() -> None:
    assert digest(ROWS[::-1]) == digest(ROWS)


def test_every_trained_value_matters() -> None:
    first, second = ROWS
    last = len(first.token_ids) - 1
    others = [
        (first,),
        (first, second, second),
        (replace(first, token_ids=(*first.token_ids[:last], 13)), second),
        (replace(first, trainable=(*first.trainable[:last], False)), second),
        (replace(first, logprobs=(*first.logprobs[:last], nextafter(first.logprobs[last], 0.0))), second),
        (replace(first, token_ids=(11, *first.token_ids[1:])), second),
    ]
    assert len({digest(ROWS), *map(digest, others)}) == 7
