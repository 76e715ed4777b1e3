"""Graders: the reward of a finished session, in its sandbox or a fresh one."""
