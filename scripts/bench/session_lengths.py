"""Draw sessions of published lengths of agents' sessions, and rows of random token ids for them.

Three sets of published means, "swe", "20k/40" and "5k/30", and one for each agent, whose own prompt and tools were
measured. Sessions of a group share the system prompt, tools and task exactly, those of
other groups the system prompt and tools. Nobody published the lengths themselves: each session is drawn around the
published means, the same for the same seed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthSet:
    """Statistics that the sessions of a set have in common."""

    prompt_tokens: int
    """Of the first call: system prompt, tools and task."""
    mean_calls: float
    log_sigma: float
    """Standard deviation of the logarithm of the number of calls; 0: each session has `mean_calls`."""
    group_size: int = 4
    """Rollouts of a task, if the bench is not told."""


# SWE-bench (arXiv:2310.06770, table 1): an issue has 195 words on average, at 1.3 tokens each.
TASK_TOKENS = 250
SETS = {
    # Polar's offline set (arXiv:2605.24220), SWE tasks by Qwen3.5-122B-A10B in Pi: 104 messages on average, 51 of the
    # assistant, a tail over 200. Its spread is not given: 0.5 makes 6 % of sessions longer than 200 messages, and the
    # longest of 64 some ten times the shortest. Nor is its prompt: the smaller of the two below.
    "swe": LengthSet(prompt_tokens=5_000, mean_calls=51, log_sigma=0.5),
    # The two prompts by which a survey of trainers (late 2026) compares rows per call, merged rows and prefix trees.
    "20k/40": LengthSet(prompt_tokens=20_000, mean_calls=40, log_sigma=0.0),
    "5k/30": LengthSet(prompt_tokens=5_000, mean_calls=30, log_sigma=0.0),
}
# What agents send at their first call, prompt and tools, in SmolLM2's vocabulary (docs/paper.md), and an issue.
AGENT_TOKENS = {"qwen_code": 18_200, "claude_code": 12_800, "codex": 9_400, "pi": 1_800}
SETS |= {
    agent: LengthSet(prompt_tokens=tokens + TASK_TOKENS, mean_calls=30, log_sigma=0.0, group_size=16)
    for agent, tokens in AGENT_TOKENS.items()
}
# The same survey: 300 sampled and 700 observed tokens a turn. Their spread is not given: the exponential distribution
# is the one that supposes nothing but a mean.
SAMPLED_TOKENS = 300
OBSERVED_TOKENS = 700


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionLengths:
    """One session. The prompt of each call begins with the prompt and the sampled tokens of the one before."""

    group: int
    calls: tuple[tuple[int, int], ...]
    """Per call: tokens of its prompt, and sampled tokens."""

    @property
    def num_tokens(self) -> int:
        """Of the merged trajectory: the last prompt and the last sample."""
        return sum(self.calls[-1])

    @property
    def num_messages(self) -> int:
        """System prompt and task, then per call an assistant message and, but for the last, what it observed."""
        return 1 + 2 * len(self.calls)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRow:
    """One row of training."""

    session: int
    group: int
    token_ids: NDArray[np.int64]
    """[T]; rows of one session are views of one array."""
    spans: tuple[tuple[int, int], ...]
    """First and end positions of what was sampled and is trained."""

    @property
    def trainable(self) -> NDArray[np.bool_]:
        """[T]"""
        mask = np.zeros(len(self.token_ids), dtype=np.bool_)
        for first, end in self.spans:
            mask[first:end] = True
        return mask


def build_sessions(
    name: str, *, num_groups: int, group_size: int, scale: float = 1.0, seed: int = 0
) -> list[SessionLengths]:
    """Sessions group by group.

    Args:
        name: Key of `SETS`.
        scale: Factor of all token counts, for small machines; the numbers of calls stay.
    """
    lengths = SETS[name]
    rng = np.random.default_rng([seed, 0])
    sessions = []
    for index in range(num_groups * group_size):
        # the mean of a lognormal distribution is exp(mu + sigma^2 / 2)
        mu = np.log(lengths.mean_calls) - lengths.log_sigma**2 / 2
        num_calls = max(1, round(float(rng.lognormal(mu, lengths.log_sigma))))
        sampled = _shrink(rng.exponential(SAMPLED_TOKENS, num_calls), scale)
        observed = _shrink(rng.exponential(OBSERVED_TOKENS, num_calls), scale)
        prompt = sum(_prompt_parts(lengths.prompt_tokens, scale))
        calls = []
        for new, seen in zip(sampled, observed, strict=True):
            calls.append((prompt, new))
            prompt += new + seen
        sessions.append(SessionLengths(group=index // group_size, calls=tuple(calls)))
    return sessions


def build_rows(
    name: str,
    sessions: Sequence[SessionLengths],
    *,
    merged: bool,
    vocab_size: int,
    scale: float = 1.0,
    seed: int = 0,
) -> list[TokenRow]:
    """Random token ids for sessions, in their order.

    Args:
        name, scale: As given to `build_sessions`.
        merged: One row per session, in which all that was sampled is trained; else one per call, its prompt and what
            it sampled. Both have the same ids for the same seed.
    """
    rows = []
    for index, (session, token_ids) in enumerate(
        zip(sessions, _draw_token_ids(name, sessions, vocab_size, scale, seed), strict=True)
    ):
        spans = tuple((prompt, prompt + sampled) for prompt, sampled in session.calls)
        for part in [spans] if merged else [(span,) for span in spans]:
            end = part[-1][1]
            rows.append(TokenRow(session=index, group=session.group, token_ids=token_ids[:end], spans=part))
    return rows


def _draw_token_ids(
    name: str, sessions: Sequence[SessionLengths], vocab_size: int, scale: float, seed: int
) -> Iterator[NDArray[np.int64]]:
    """[T] of each session's merged trajectory."""
    num_shared, num_task = _prompt_parts(SETS[name].prompt_tokens, scale)
    shared = np.random.default_rng([seed, 1]).integers(vocab_size, size=num_shared)
    for index, session in enumerate(sessions):
        task = np.random.default_rng([seed, 2, session.group]).integers(vocab_size, size=num_task)
        num_own = session.num_tokens - num_shared - num_task
        own = np.random.default_rng([seed, 3, index]).integers(vocab_size, size=num_own)
        yield np.concatenate([shared, task, own])


def _prompt_parts(prompt_tokens: int, scale: float) -> tuple[int, int]:
    """Tokens of system prompt and tools, and of the task."""
    shared, task = _shrink(np.array([prompt_tokens - TASK_TOKENS, TASK_TOKENS]), scale)
    return shared, task


def _shrink(counts: NDArray[np.float64] | NDArray[np.int64], scale: float) -> list[int]:
    """None is left without a token."""
    return [max(1, round(float(count) * scale)) for count in counts]
