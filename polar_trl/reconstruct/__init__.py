"""Merge a session's calls into trajectories, the rows that are trained, by token prefix; no tokenizer and no text.

Write p for a prompt, a for what was sampled on it, u for what the agent added. A conversation of three turns is three
calls, and each prompt begins with the one before and its answer:

    p1             -> a1
    p1 a1 u1       -> a2
    p1 a1 u1 a2 u2 -> a3

so the three are one trajectory with a mask, and the tokens of p1, u1 and u2 are computed once instead of up to three
times:

    p1 a1 u1 a2 u2 a3
    .. ** .. ** .. **

A call extends the trajectory whose ids so far are the longest strict prefix of its prompt. Where there is none (a
sub-agent, a compaction, a history that the agent rewrote) it starts a trajectory of its own: a fork. If u1' is a
second thing that the agent said after a1, then p1 a1 u1' -> b2 becomes a second trajectory in which only b2 is
trained, since a1 is trained already.

Two kinds of samples are dropped, and counted: calls of purpose "auxiliary" (unless a run wants them: see
`count_as_policy`), and "superseded" copies of a retried request, which are those that the agent did not go on from.
Everything else is trained exactly once, which `check_laws` establishes without trusting the builder.
"""

from polar_trl.reconstruct.laws import check_laws
from polar_trl.reconstruct.merge import (
    BUILDERS,
    Reconstruction,
    build_per_request,
    build_prefix_merged,
    count_as_policy,
    count_calls,
    digest,
)

__all__ = [
    "BUILDERS",
    "Reconstruction",
    "build_per_request",
    "build_prefix_merged",
    "check_laws",
    "count_as_policy",
    "count_calls",
    "digest",
]
