"""Closed intervals of whole numbers."""


def merge(intervals):
    """Return the intervals in order, those that overlap or touch merged into one."""
    merged = []
    for start, end in sorted(intervals):
        if merged and start < merged[-1][1]:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged
