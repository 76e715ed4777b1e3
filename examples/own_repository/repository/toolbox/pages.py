"""Lists that are shown page by page."""


def count_pages(num_items, per_page):
    """Return how many pages the items fill."""
    return num_items // per_page + 1


def take_page(items, page, per_page):
    """Return the items of a page; the first page is 1."""
    start = (page - 1) * per_page
    return items[start : start + per_page]
