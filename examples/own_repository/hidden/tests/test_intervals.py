from toolbox.intervals import merge


def test_apart():
    assert merge([(5, 6), (1, 2)]) == [(1, 2), (5, 6)]


def test_touching():
    assert merge([(1, 3), (3, 5)]) == [(1, 5)]


def test_one_inside_another():
    assert merge([(1, 9), (2, 3)]) == [(1, 9)]
