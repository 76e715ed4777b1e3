"""Provide the small pretrained model and a tiny random one, and group tests over processes."""

import os
import signal
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SMOLLM2 = ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of SmolLM2-135M-Instruct; its absence fails the test, since `scripts/test.sh` makes it."""
    assert (SMOLLM2 / "model.safetensors").exists(), "run scripts/dev/get_model.py first (scripts/test.sh does)"
    return SMOLLM2


@pytest.fixture(scope="session")
def tiny_model(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a two-layer Llama with random weights and SmolLM2's tokenizer."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        initializer_range=0.2,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group tests for `pytest -n 2 --dist loadgroup`.

    The tests of a file share an engine or a trained run, so they stay together. Files with containers follow each
    other: they share a container engine, in which whoever starts removes what the dead left behind.
    """
    with_containers = {item.path for item in items if item.get_closest_marker("containers")}
    for item in items:
        group = "containers" if item.path in with_containers else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))


def pytest_configure(config: pytest.Config) -> None:
    # Before anything imports torch or vLLM, here and in the processes that tests start: two threads that spin
    # against each other and against agents on two cores cost more than they give.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ["PYTHONPATH"] = os.pathsep.join(str(ROOT / path) for path in config.getini("pythonpath"))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    # A shell starts what it puts in the background with interrupts ignored, which our own children would inherit.
    signal.signal(signal.SIGINT, signal.default_int_handler)
