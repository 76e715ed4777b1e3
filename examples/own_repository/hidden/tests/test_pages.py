from toolbox.pages import count_pages, take_page


def test_a_last_page_that_is_not_full():
    assert count_pages(5, 2) == 3


def test_full_pages():
    assert count_pages(4, 2) == 2


def test_no_items():
    assert count_pages(0, 2) == 0


def test_take():
    assert take_page(["a", "b", "c"], 2, 2) == ["c"]
