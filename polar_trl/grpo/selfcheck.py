"""Score a few sampled tokens of the engine again by the trainer: a mismatch stops the run before it starts.

An engine can be wrong without an error: a bad attention kernel, a graph mode that corrupts small batches, weights
that were pushed under other names. What it samples then reads like text and would be trained on.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from polar_trl.engine.base import GenerationParams, TokenEngine
from polar_trl.errors import EngineError

logger = logging.getLogger(__name__)

NUM_TOKENS = 12
TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 0.3, torch.float16: 0.1}
"""Largest mean gap per token in nats. bfloat16's own noise is about 0.04; wrong kernels show gaps above 1."""


def check_engine(
    engine: TokenEngine,
    score: Callable[[list[int], list[int]], Tensor],
    prompts: list[list[int]],
    *,
    temperature: float,
    dtypes: Sequence[torch.dtype],
) -> float:
    """Return the mean gap in nats between engine and trainer on sampled tokens, from small prompts and a cold cache.

    Args:
        score: The trainer's log-probabilities [C] of C sampled tokens after a prompt, under `temperature`.
        prompts: Token ids, a few short ones.
        dtypes: What engine and trainer compute in. On a GPU often bfloat16 where the trainer keeps float32.

    Raises:
        EngineError: the gap is above the tolerance of the coarsest dtype.
    """
    params = GenerationParams(max_tokens=NUM_TOKENS, temperature=temperature)

    async def sample() -> list[tuple[list[int], list[float]]]:
        completions = await asyncio.gather(*(engine.generate(tuple(prompt), params) for prompt in prompts))
        return [(list(c.token_ids), list(c.logprobs)) for c in completions]

    # on a thread of its own: the caller's may have an event loop that runs, as in a notebook
    with ThreadPoolExecutor(1) as thread:
        answers = thread.submit(lambda: asyncio.run(sample())).result()
    gaps = []
    for prompt, (token_ids, logprobs) in zip(prompts, answers, strict=True):
        gaps.append((score(prompt, token_ids).cpu().float() - torch.tensor(logprobs)).abs())
    gap = torch.cat(gaps)
    tolerance, dtype = find_tolerance(dtypes)
    logger.info("engine against trainer on %d tokens: mean gap %.2g nats", gap.numel(), gap.mean())
    if not gap.mean() <= tolerance:
        raise EngineError(
            f"the engine does not compute what the trainer computes: mean gap {gap.mean():.3g} nats on "
            f"{gap.numel()} tokens (at most {tolerance} is expected in {dtype}). Nothing was trained. Likely "
            "causes: an attention kernel or graph mode that is wrong on this device (try engine_cuda_graphs='none'), "
            "or weights pushed under other names."
        )
    return float(gap.mean())


def find_tolerance(dtypes: Sequence[torch.dtype]) -> tuple[float, str]:
    """Return the allowed mean gap in nats between computations in these dtypes, and the dtype that it is due to."""
    return max((TOLERANCE.get(dtype, TOLERANCE[torch.bfloat16]), str(dtype)) for dtype in dtypes)
