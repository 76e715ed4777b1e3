"""Test that throughput.py's steady ratio leaves out both ends, and that both of its sides sample the same ids."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from engine_watch import Side, Step
from word_chain import chain_words, find_words


def test_steady_figures_leave_out_both_ends() -> None:
    steps = [
        Step(1.0, 1.5, 0.4, 10, True, 0.3, 9, True, 0.2, 3, 5),
        Step(1.6, 2.0, 0.2, 6, False, 0.1, 6, True, 0.1, 2, 40),
        Step(2.4, 3.0, 0.3, 8, True, 0.0, 8, False, 0.0, 4, 60),
        Step(3.0, 5.0, 0.1, 1, False, 0.0, 1, False, 0.0, 1, 1),
    ]
    side = Side(
        begun_s=0.0,
        ended_s=5.0,
        busy_s=(1.5, 3.0),
        process_cpu_s=2.0,
        steps=steps,
        num_cached_tokens=30,
        num_prompt_tokens=40,
    )
    figures = side.describe("x")
    assert figures["x_tokens_per_s"] == pytest.approx(25 / 5)
    assert figures["x_steady_tokens_per_s"] == pytest.approx(14 / 1.5)
    assert figures["x_step_ms"] == pytest.approx(500)
    assert figures["x_between_share"] == 0.0
    assert figures["x_idle_share"] == pytest.approx(0.4 / 1.5)
    assert figures["x_other_cpu_share"] == pytest.approx((2.0 - 1.0) / 5)
    assert figures["x_hit"] == 0.75
    assert figures["x_gc_share"] == pytest.approx(0.1 / 0.5)
    assert figures["x_gc_max_ms"] == pytest.approx(100)
    assert figures["x_mixed_share"] == 0.5
    assert figures["x_mixed_cpu_ms"] == pytest.approx(200)
    assert figures["x_plain_cpu_ms"] == pytest.approx(300)
    assert figures["x_step_requests"] == 7
    assert figures["x_step_system_ms"] == pytest.approx(50)
    assert figures["x_step_waits"] == 3
    assert figures["x_step_faults"] == 50


def test_every_word_is_followed_by_the_next_one(smollm2: Path) -> None:
    """Weights of `chain_words` in a transformers model: sampling at temperature 1 is certain."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    words = list(find_words(tokenizer).values())
    assert tokenizer.encode("".join(tokenizer.decode([word]) for word in words)) == words
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=1e-3,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    loadable = SimpleNamespace(
        parameters=model.parameters, load_weights=lambda pairs: model.load_state_dict(dict(pairs), strict=False)
    )
    runner = SimpleNamespace(model_runner=SimpleNamespace(model=loadable))
    llm = SimpleNamespace(llm_engine=SimpleNamespace(model_executor=SimpleNamespace(driver_worker=runner)))
    chain_words(llm, words, len(tokenizer), 64)
    prompt = torch.tensor([[1, words[5], words[17], words[-1], 2]])
    with torch.no_grad():
        logprobs = model(prompt).logits[0].log_softmax(-1)
    best = logprobs.max(-1)
    assert best.indices[1:4].tolist() == [words[6], words[18], words[0]]
    assert set(best.indices.tolist()) <= set(words)
    assert best.values.min() > -1e-6
