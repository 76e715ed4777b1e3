import pytest
from toolbox.durations import parse_duration


def test_one_unit():
    assert parse_duration("2m") == 120


def test_several_units():
    assert parse_duration("1h30m") == 5400
    assert parse_duration("1m1s") == 61


def test_no_duration():
    with pytest.raises(ValueError):
        parse_duration("soon")
