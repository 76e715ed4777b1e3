"""vLLM's real CPU build, made the way the trainer makes it."""

import socket
from pathlib import Path
from typing import Any

import pytest

from polar_trl.engine.colocate import prepare_vllm, set_environment


def build_tiny_vllm(model: Path, **llm_kwargs: Any) -> Any:
    """Build `vllm.LLM` of a small model."""
    set_environment(cpu=True)
    from transformers import AutoConfig

    known = prepare_vllm(AutoConfig.from_pretrained(model), cpu=True)
    from vllm import LLM

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    # taken back at once: processes that tests start would join this process group
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ranks.items():
            patch.setenv(name, value)
        return LLM(
            **{
                "model": str(model),
                "max_model_len": 256,
                "max_num_seqs": 8,
                "max_num_batched_tokens": 512,
                "seed": 0,
                "logprobs_mode": "processed_logprobs",
                "distributed_executor_backend": "external_launcher",
                **known,
                **llm_kwargs,
            }
        )
