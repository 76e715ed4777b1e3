"""Durations as people write them."""

import re

SECONDS = {"h": 3600, "m": 60, "s": 1}


def parse_duration(text):
    """Return the seconds of a text such as "1h30m" or "45s"."""
    if not re.fullmatch(r"(\d+[hms])+", text):
        raise ValueError(f"{text!r} is no duration")
    number, unit = re.match(r"(\d+)([hms])", text).groups()
    return int(number) * SECONDS[unit]
