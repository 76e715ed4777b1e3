from toolbox.slugs import slugify


def test_two_words():
    assert slugify("Two words") == "two-words"


def test_separators_in_a_row():
    assert slugify("Salt & pepper") == "salt-pepper"


def test_ends():
    assert slugify("(What now?)") == "what-now"
