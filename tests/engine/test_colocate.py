"""The colocated engine wakes with the trainer's weights or not at all."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from polar_trl.errors import EngineError


class SleepyLlm:
    """The parts of `vllm.LLM` that sleep: what is asleep cannot be used, and the weights are lost."""

    def __init__(self, **_: Any) -> None:
        self.weights: dict[str, float] | None = {"w": 0.0}
        self.asleep: set[str] = set()
        self.llm_engine = self
        self.model_executor = self.driver_worker = self.model_runner = self.model = self
        self.model_config = self.vllm_config = self.compilation_config = self
        self.cache_config, self.cudagraph_mode, self.kv_cache_size_tokens = self, None, 64
        self.max_model_len, self.dtype = 8, torch.float32

    def get_vocab_size(self) -> int:
        return 8

    def sleep(self, level: int) -> None:
        assert not self.asleep and level == 2
        self.weights, self.asleep = None, {"weights", "kv_cache"}

    def wake_up(self, tags: list[str]) -> None:
        if not set(tags) <= self.asleep:
            return  # vLLM warns, and does nothing
        self.asleep -= set(tags)
        if "weights" in tags:
            self.weights = {"w": float("nan")}

    def load_weights(self, pairs: list[tuple[str, Tensor]]) -> None:
        assert "weights" not in self.asleep and self.weights is not None
        self.weights |= {name: value.item() for name, value in pairs}

    def reset_prefix_cache(self) -> bool:
        return True


@pytest.fixture()
def colocated(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Builds a `ColocatedVllm` of a trainer with one weight, which sleeps."""
    from accelerate import Accelerator
    from trl.generation import vllm_generation

    from polar_trl.engine import colocate, vllm_cpu

    monkeypatch.setattr(vllm_generation, "LLM", SleepyLlm, raising=False)
    monkeypatch.setattr(vllm_cpu, "keep_weights_loadable", lambda: None)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
        monkeypatch.delenv(name)
    policy = nn.Module()
    policy.w, policy.name_or_path = nn.Parameter(torch.tensor(1.0)), "policy"
    policy.config = LlamaConfig()
    backend = colocate.ColocatedVllm(policy, Accelerator(cpu=True), None, llm_kwargs={}, enable_sleep_mode=True)
    yield backend, policy
    backend.engine.close()


def test_a_push_wakes_the_weights_and_the_cache_follows(colocated: Any) -> None:
    backend, policy = colocated
    assert backend.llm.asleep == {"weights", "kv_cache"} and backend._llm_weights_sleeping
    for value in (1.0, 2.0):
        policy.w.data.fill_(value)
        backend.sync_weights()
        assert backend.llm.asleep == {"kv_cache"}
        backend.wake()
        assert backend.llm.asleep == set() and backend.llm.weights == {"w": value}
        backend.sleep()
        assert backend.llm.asleep == {"weights", "kv_cache"}


def test_waking_without_weights_is_refused(colocated: Any) -> None:
    backend, _ = colocated
    with pytest.raises(EngineError, match="sync_weights has to come first"):
        backend.wake()
    backend.sync_weights()
    backend.wake()
    backend.sleep()
    with pytest.raises(EngineError, match="sync_weights has to come first"):
        backend.wake()
