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


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"kv_cache_dtype": "fp8", "kv_cache_memory_bytes": 1 << 30},
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
        ({"kv_offloading_size": 8}, "kv_offloading_size is not passed on: copies of the cache in host memory end"),
        ({"kv_cache_memory_bytes": "8G"}, "kv_cache_memory_bytes must be a whole number above 0 (it is '8G')"),
        ({"kv_cache_memory_bytes": 0}, "kv_cache_memory_bytes must be a whole number above 0 (it is 0)"),
        ({"speculative_config": "ngram"}, "speculative_config must be a mapping (it is 'ngram')"),
        (
            {"speculative_config": {"method": "mtp"}},
            "must have method 'ngram', not 'mtp': no push reaches the weights",
        ),
        ({"speculative_config": {**DRAFTS, "model": "small"}}, "must have method 'ngram', not 'small'"),
        ({"speculative_config": {"method": "ngram"}}, "num_speculative_tokens must be at least 1 (it is None)"),
    ],
)
def test_what_would_not_be_exact_or_not_work_is_refused(given: Any, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_engine_kwargs(given)
    assert said in str(refused.value)


def test_a_run_file_and_the_command_line_name_them() -> None:
    from polar_trl.grpo.config import PolarGRPOConfig

    assert PolarGRPOConfig(use_cpu=True, engine_kwargs='{"kv_cache_dtype": "fp8"}').engine_kwargs == {
        "kv_cache_dtype": "fp8"
    }
    with pytest.raises(ConfigError, match="'block_size' is not passed on"):
        PolarGRPOConfig(use_cpu=True, engine_kwargs={"block_size": 16})


@pytest.fixture()
def twelve_words(tmp_path: Path) -> Path:
    """Folder of a random model of 12 tokens, which repeat themselves in any text, so that there are drafts."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    LlamaForCausalLM(LlamaConfig(vocab_size=12, num_key_value_heads=1, **sizes, **ends)).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("temperature", [0.1, 1.0])
def test_drafts_change_neither_the_distribution_nor_its_logprobs(twelve_words: Path, temperature: float) -> None:
    """If a draft was taken for its own sake, sampled tokens would not be as likely as their entropy says."""
    import torch
    from transformers import AutoModelForCausalLM

    from polar_trl.engine.vllm import VllmEngine

    prompts = [tuple(j * (i + 3) % 12 for j in range(30)) for i in range(8)]
    params = GenerationParams(max_tokens=200, temperature=temperature)
    with tiny_vllm(twelve_words, speculative_config=DRAFTS, skip_tokenizer_init=True) as llm:
        num_steps, step = 0, llm.llm_engine.step

        def counting() -> Any:
            nonlocal num_steps
            num_steps += 1
            return step()

        llm.llm_engine.step = counting
        engine = VllmEngine(llm)

        async def sample() -> list[Completion]:
            return list(await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts)))

        completions = asyncio.run(sample())
        engine.close()
    assert num_steps < 190, "hardly a draft was accepted"
    reference = AutoModelForCausalLM.from_pretrained(twelve_words).eval()
    surprise, variance = 0.0, 0.0
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = torch.tensor([prompt + completion.token_ids])
        with torch.no_grad():
            logps = (reference(ids).logits[0, len(prompt) - 1 : -1] / temperature).log_softmax(-1)
        sampled = logps.gather(-1, ids[0, len(prompt) :, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.logprobs), sampled, atol=1e-3, rtol=0)
        entropy = -(logps.exp() * logps).sum(-1)
        surprise += float((-sampled - entropy).sum())
        variance += float(((logps.exp() * logps**2).sum(-1) - entropy**2).sum())
    assert abs(surprise) < 4.5 * variance**0.5
