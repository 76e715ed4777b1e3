"""What `engine_kwargs` passes on to vLLM: refusals, and drafts on the real CPU engine."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tiny_vllm import tiny_vllm

from polar_trl.engine.base import GenerationParams
from polar_trl.engine.llm_kwargs import check_engine_kwargs
from polar_trl.errors import ConfigError
from polar_trl.types import Completion

DRAFTS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
TEMPERATURE = 0.02
"""At which the random model has few likely tokens, so that some drafts are accepted and some are not."""


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"kv_cache_dtype": "fp8", "kv_offloading_size": 32, "kv_cache_memory_bytes": 1 << 30},
        {"speculative_config": DRAFTS},
    ],
)
def test_what_keeps_samples_exact_is_passed_on(given: dict[str, Any]) -> None:
    check_engine_kwargs(given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("fp8", "engine_kwargs must be a mapping"),
        ({"block_size": 16}, "'block_size' is not passed on to vLLM, only kv_cache_dtype, "),
        ({"kv_cache_dtype": 8}, "kv_cache_dtype must be a name, such as 'fp8' (it is 8)"),
        ({"kv_offloading_size": 0}, "kv_offloading_size must be above 0, in GiB (it is 0)"),
        ({"kv_offloading_size": True}, "kv_offloading_size must be above 0, in GiB (it is True)"),
        ({"kv_cache_memory_bytes": "8G"}, "kv_cache_memory_bytes must be above 0, in bytes (it is '8G')"),
        ({"speculative_config": "ngram"}, "speculative_config must be a mapping (it is 'ngram')"),
        ({"speculative_config": {"method": "mtp"}}, "must have method 'ngram', not 'mtp': no push reaches the weights"),
        ({"speculative_config": {**DRAFTS, "model": "small"}}, "must have method 'ngram', not 'small'"),
        ({"speculative_config": {"method": "ngram"}}, "num_speculative_tokens must be at least 1 (it is None)"),
    ],
)
def test_what_would_not_be_exact_or_not_work_is_refused(given: Any, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_engine_kwargs(given)
    assert said in str(refused.value)


def test_drafts_change_neither_the_distribution_nor_its_logprobs(tiny_model: Path) -> None:
    """Where a draft was taken for its own sake, sampled tokens would be likelier than their entropy says."""
    import torch
    from transformers import AutoModelForCausalLM

    from polar_trl.engine.vllm import VllmEngine

    prompts = [tuple(range(10 + 7 * i, 22 + 7 * i)) * 3 for i in range(8)]
    with tiny_vllm(tiny_model, speculative_config=DRAFTS) as llm:
        engine = VllmEngine(llm)
        num_steps, step = 0, llm.llm_engine.step

        def counting() -> Any:
            nonlocal num_steps
            num_steps += 1
            return step()

        llm.llm_engine.step = counting
        completions: list[tuple[tuple[int, ...], Completion]] = []

        async def sample(params: GenerationParams) -> list[Completion]:
            return list(await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts)))

        for _ in range(4):
            params = GenerationParams(max_tokens=100, temperature=TEMPERATURE)
            completions += zip(prompts, asyncio.run(sample(params)), strict=True)
        engine.close()
    assert num_steps < 4 * 80, "hardly a draft was accepted"
    reference = AutoModelForCausalLM.from_pretrained(tiny_model).eval()
    surprise, variance, num_tokens = 0.0, 0.0, 0
    for prompt, completion in completions:
        ids = torch.tensor([prompt + completion.token_ids])
        with torch.no_grad():
            logits = reference(ids).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
        logps = logits.log_softmax(-1)
        sampled = logps.gather(-1, ids[0, len(prompt) :, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.logprobs), sampled, atol=5e-3, rtol=0)
        entropy = -(logps.exp() * logps).sum(-1)
        surprise += float((-sampled - entropy).sum())
        variance += float((logps.exp() * logps**2).sum(-1).sub(entropy**2).sum())
        num_tokens += len(completion.token_ids)
    assert variance > 100  # else the model would be as good as greedy, and the test would see nothing
    assert abs(surprise) < 4.5 * variance**0.5
