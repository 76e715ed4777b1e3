"""Names that can stand in a URL."""

import re


def slugify(title):
    """Return the title in lower case, with one hyphen between words and none at the ends."""
    return re.sub(r"[^a-z0-9]", "-", title.lower())
