"""What `engine_kwargs` passes on to vLLM: refusals, and drafts on the real CPU engine."""

import json
from pathlib import Path
from typing import Any

import pytest
from launch import run_worker

from polar_trl.engine.llm_kwargs import check_engine_kwargs
from polar_trl.errors import ConfigError

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
def twelve_words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random model of 12 tokens, which repeat themselves in any text, so that there are drafts."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("twelve-words")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    LlamaForCausalLM(LlamaConfig(vocab_size=12, num_key_value_heads=1, **sizes, **ends)).save_pretrained(folder)
    return folder


def test_drafts_change_neither_the_distribution_nor_its_logprobs(twelve_words: Path, tmp_path: Path) -> None:
    """If a draft was taken for its own sake, sampled tokens would not be as likely as their entropy says."""
    import torch
    from transformers import AutoModelForCausalLM

    # a process of its own: after an engine with drafts, vLLM 0.31 cannot build another one on a CPU
    run_worker("drafts_worker.py", str(twelve_words), str(tmp_path / "sampled.json"))
    sampled = json.loads((tmp_path / "sampled.json").read_text())
    reference = AutoModelForCausalLM.from_pretrained(twelve_words).eval()
    for run in sampled:
        assert run["num_steps"] < 190, "hardly a draft was accepted"
        surprise, variance = 0.0, 0.0
        for prompt, token_ids, logprobs in run["answers"]:
            ids = torch.tensor([prompt + token_ids])
            with torch.no_grad():
                logps = (reference(ids).logits[0, len(prompt) - 1 : -1] / run["temperature"]).log_softmax(-1)
            expected = logps.gather(-1, ids[0, len(prompt) :, None])[:, 0]
            torch.testing.assert_close(torch.tensor(logprobs), expected, atol=1e-3, rtol=0)
            entropy = -(logps.exp() * logps).sum(-1)
            surprise += float((-expected - entropy).sum())
            variance += float(((logps.exp() * logps**2).sum(-1) - entropy**2).sum())
        assert abs(surprise) < 4.5 * variance**0.5
