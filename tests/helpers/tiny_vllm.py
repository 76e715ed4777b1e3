"""vLLM's real CPU build, made the way the trainer makes it."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from polar_trl.engine.colocate import set_environment


@contextmanager
def tiny_vllm(model: Path, **llm_kwargs: Any) -> Iterator[Any]:
    """Build `vllm.LLM` of a small model."""
    set_environment(cpu=True)
    from polar_trl.engine import vllm_cpu

    vllm_cpu.keep_weights_loadable()
    vllm_cpu.keep_temperatures_of_drafts()
    from vllm import LLM

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    # taken back afterwards: the processes that later tests start would join this process group
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ranks.items():
            patch.setenv(name, value)
        yield LLM(
            model=str(model),
            max_model_len=256,
            max_num_seqs=8,
            max_num_batched_tokens=512,
            seed=0,
            logprobs_mode="processed_logprobs",
            distributed_executor_backend="external_launcher",
            **{**vllm_cpu.LLM_KWARGS, **llm_kwargs},
        )
