"""Provide the small pretrained model and a tiny random one, and group tests over processes."""

import functools
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

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


@functools.cache
def rank_file(file: str) -> int:
    """Rank a file of tests: 0 with containers, 1 with processes or engines of its own, which takes long, 2 others."""
    text = (ROOT / file).read_text()
    if "mark.containers" in text:
        return 0
    return (
        1
        if re.search(r"\b(from launch|from \w*_runs|from ray_nodes|from tiny_vllm|from vllm_server) import", text)
        else 2
    )


class _ByFile(LoadFileScheduling):
    """Keep the tests of a file together, since they share an engine or a trained run.

    Files with containers follow each other: they share a container engine, in which whoever starts removes what the
    dead left behind. (xdist's groups would say so, but do nothing with pytest 9.2: its node ids cannot be changed.)
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "containers" if rank_file(file) == 0 else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling:
    """Spread tests over the processes of `pytest -n 2`, in the order of `pytest_collection_modifyitems`."""
    config.option.loadscopereorder = False
    return _ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest: at the end, no process waits long for the other."""
    items.sort(key=lambda item: rank_file(item.nodeid.partition("::")[0]))


def pytest_configure(config: pytest.Config) -> None:
    # Before anything imports torch or vLLM, here and in the processes that tests start: two threads that spin
    # against each other and against agents on two cores cost more than they give.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ["PYTHONPATH"] = os.pathsep.join(str(ROOT / path) for path in config.getini("pythonpath"))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    # of tests/helpers/ray_nodes.py: Ray reads them when it is imported, which vLLM does
    os.environ.update(RAY_AUTH_MODE="token", RAY_memory_monitor_refresh_ms="0", RAY_health_check_period_ms="1000")
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"  # docs/cluster.md says why
    # A shell starts what it puts in the background with interrupts ignored, which our own children would inherit.
    signal.signal(signal.SIGINT, signal.default_int_handler)
