from toolbox.durations import parse_duration
from toolbox.intervals import merge
from toolbox.pages import count_pages, take_page
from toolbox.slugs import slugify


def test_durations():
    assert parse_duration("45s") == 45


def test_intervals():
    assert merge([(5, 6), (1, 2)]) == [(1, 2), (5, 6)]


def test_pages():
    assert count_pages(5, 2) == 3
    assert take_page(["a", "b", "c"], 2, 2) == ["c"]


def test_slugs():
    assert slugify("Two words") == "two-words"
