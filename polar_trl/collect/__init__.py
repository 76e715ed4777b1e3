"""Collect graded sessions into a data set for supervised fine-tuning (rejection sampling).

Accepted sessions are chosen (`accept`), made examples (`examples`), split by task (`split`) and written with a card
(`data_set`, `card`), as they were sampled: nothing is repaired, truncated or tokenized again.
"""
