"""A few greedy tokens from the engine, scored again by the trainer: a mismatch stops the run before it starts.

An engine can be wrong without an error: a bad attention kernel, a graph mode that corrupts small batches, weights
that were pushed under other names. What it samples then reads like text and would be trained on.
"""

import asyncio
import logging

import torch
from torch import Tensor
from torch.nn import Module

from polar_trl.engine.base import Engine, GenerationParams
from polar_trl.errors import EngineError

logger = logging.getLogger(__name__)

NUM_TOKENS = 12
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.1}
"""Largest mean gap per token in nats. bfloat16's own noise is about 0.04; wrong kernels show gaps above 1."""


def check_engine(
    engine: Engine, model: Module, prompts: list[list[int]], *, engine_dtype: torch.dtype = torch.float32
) -> float:
    """Mean gap in nats between engine and model on greedy tokens, from small prompts and a cold cache.

    Args:
        model: A causal language model with the weights that the engine should have.
        prompts: Token ids, a few short ones.
        engine_dtype: What the engine computes in. On a GPU often bfloat16 where the trainer keeps float32.

    Raises:
        EngineError: the gap is above the tolerance of the coarser of both dtypes.
    """
    greedy = GenerationParams(max_tokens=NUM_TOKENS, temperature=0.0)

    async def sample() -> list[tuple[list[int], list[float]]]:
        completions = await asyncio.gather(*(engine.generate(tuple(prompt), greedy) for prompt in prompts))
        return [(list(c.token_ids), list(c.logprobs)) for c in completions]

    gaps = []
    for prompt, (token_ids, logprobs) in zip(prompts, asyncio.run(sample()), strict=True):
        gaps.append((_score(model, prompt, token_ids) - torch.tensor(logprobs)).abs())
    gap = torch.cat(gaps)
    dtypes = (next(model.parameters()).dtype, engine_dtype)
    tolerance, dtype = max((TOLERANCE.get(dtype, TOLERANCE[torch.bfloat16]), str(dtype)) for dtype in dtypes)
    logger.info("engine against trainer on %d greedy tokens: mean gap %.2g nats", gap.numel(), gap.mean())
    if not gap.mean() <= tolerance:
        raise EngineError(
            f"the engine does not compute what the trainer computes: mean gap {gap.mean():.3g} nats on "
            f"{gap.numel()} greedy tokens (at most {tolerance} is expected in {dtype}). Nothing was trained. Likely "
            "causes: an attention kernel or graph mode that is wrong on this device (try enforce_eager), or weights "
            "pushed under other names."
        )
    return float(gap.mean())


@torch.no_grad()
def _score(model: Module, prompt: list[int], token_ids: list[int]) -> Tensor:
    """Log-probabilities at temperature 1 of `token_ids` after `prompt`, on the CPU in float32."""
    device = next(model.parameters()).device
    ids = torch.tensor([prompt + token_ids], device=device)
    was_training = model.training
    model.eval()
    logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
    model.train(was_training)
    return logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0].cpu()
