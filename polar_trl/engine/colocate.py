"""TRL's colocated vLLM, with the settings that TRL does not pass on and an engine thread that can be stepped.

`ColocatedVllm` takes the place of TRL's `VLLMGeneration` while the trainer is built. It refuses tensor parallelism:
all ranks of a tensor-parallel engine must see the same requests, and agents talk to one rank.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from trl.generation import vllm_generation
from trl.trainer import grpo_trainer

from polar_trl.engine.vllm import VllmEngine
from polar_trl.errors import ConfigError


def set_environment(*, cpu: bool) -> None:
    """Set what vLLM reads at import. Call before anything imports vLLM.

    The engine core has to live in this process, where its weights are, and not in a child of it.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if cpu:
        from polar_trl.engine import vllm_cpu

        vllm_cpu.set_environment()


class ColocatedVllm(vllm_generation.VLLMGeneration):
    """TRL's generation backend; `engine` samples from it and `sync_weights` keeps it at the trainer's weights.

    Args:
        llm_kwargs: Overrides for `vllm.LLM`.
    """

    def __init__(self, *args: Any, llm_kwargs: dict[str, Any], **kwargs: Any) -> None:
        self._llm_kwargs = llm_kwargs
        super().__init__(*args, **kwargs)
        # accelerate's own device may be "cuda" without an index, which no thread can select
        on_gpu = self.accelerator.device.type == "cuda"
        self.engine = VllmEngine(self.llm, device=torch.device(torch.cuda.current_device()) if on_gpu else None)

    def _init_vllm(self) -> None:
        if self.mode != "colocate":
            raise ConfigError(f"vllm_mode must be 'colocate', not {self.mode!r}: the engine has to share this process")
        if self.tensor_parallel_size != 1:
            raise ConfigError(
                f"vllm_tensor_parallel_size must be 1, not {self.tensor_parallel_size}: agents talk to one rank, and "
                "a tensor-parallel engine needs the same requests on all of them"
            )
        if self.accelerator.device.type == "cpu":
            from polar_trl.engine import vllm_cpu

            vllm_cpu.keep_weights_loadable()
            self._llm_kwargs = {**vllm_cpu.LLM_KWARGS, **self._llm_kwargs}
        make_llm = vllm_generation.LLM
        with _replaced(vllm_generation, "LLM", lambda **kwargs: make_llm(**{**kwargs, **self._llm_kwargs})):
            super()._init_vllm()

    def sync_weights(self) -> None:
        """Push the trainer's weights while the engine stands still. A collective: every rank calls it."""
        with self.engine.paused(new_policy=True):
            super().sync_weights()

    def wake(self) -> None:
        """Bring a sleeping key-value cache back before rollouts."""
        if self.enable_sleep_mode:
            with self.engine.paused():
                self.llm.wake_up(tags=["kv_cache"])

    def sleep(self) -> None:
        """Give the engine's memory to training. The weights are dropped: the next use has to push them again."""
        if self.enable_sleep_mode:
            with self.engine.paused():
                torch.cuda.empty_cache()
                self.llm.sleep(level=2)
            self._llm_weights_sleeping = True


@contextmanager
def colocated_vllm(**llm_kwargs: Any) -> Iterator[None]:
    """While the block runs, a `GRPOTrainer` that is built makes a `ColocatedVllm`. TRL has no argument for it."""

    def make(*args: Any, **kwargs: Any) -> ColocatedVllm:
        return ColocatedVllm(*args, llm_kwargs=llm_kwargs, **kwargs)

    with _replaced(grpo_trainer, "VLLMGeneration", make):
        yield


@contextmanager
def _replaced(module: Any, name: str, value: Callable[..., Any]) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)
