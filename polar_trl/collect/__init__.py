"""Graded sessions -> a data set for supervised fine-tuning: chosen (`accept`), made rows (`rows`), split by task
(`split`), written with a card (`data_set`, `card`).

It takes what the grader accepted as it was sampled, and refuses to repair, shorten or tokenise anything.
"""
