"""Run TRL's colocated vLLM with settings that TRL does not pass on, on an engine thread that agents' calls can reach.

`ColocatedVllm` takes the place of TRL's `VLLMGeneration` while the trainer is built. Tensor parallelism is refused
(`ConfigError`): all ranks of a tensor-parallel engine must see the same requests, and agents talk to one rank.
"""

import atexit
import gc
import importlib.util
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from trl.generation import vllm_generation
from trl.trainer import grpo_trainer

from polar_trl.engine.cuda_graphs import require_safe_graphs
from polar_trl.engine.lora import iter_merged, require_mergeable
from polar_trl.engine.rounding import choose_compute_dtype, find_pass_dtype, round_weight
from polar_trl.engine.vllm import VllmEngine
from polar_trl.errors import ConfigError, EngineError

_SLEEPING_PARTS = frozenset({"weights", "kv_cache"})
"""What vLLM gives back when it sleeps, by the tags of `LLM.wake_up`."""
_RENDEZVOUS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables of the environment by which ranks find each other."""
_SOCKETS = "VLLM_RPC_BASE_PATH"
_LONGEST_FOLDER = 107 - len("/") - 36
"""Of a Unix socket that is named by a UUID."""


def set_environment(*, cpu: bool) -> None:
    """Set what vLLM reads at import. Call before anything imports vLLM.

    The engine core has to live in this process, where its weights are, and not in a child of it. vLLM leaves its
    sockets behind, so they get a folder that is removed when the process ends.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if _SOCKETS not in os.environ:
        folder = tempfile.mkdtemp(prefix="vllm-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        if len(folder) <= _LONGEST_FOLDER:
            os.environ[_SOCKETS] = folder
    if cpu:
        from polar_trl.engine import vllm_cpu

        vllm_cpu.set_environment()


class ColocatedVllm(vllm_generation.VLLMGeneration):
    """TRL's generation backend; `engine` samples from it and `sync_weights` keeps it at the trainer's weights.

    Args:
        llm_kwargs: Overrides for `vllm.LLM`.
        dtype: What the engine computes in ("bfloat16", "float16", "float32"); None: what the trainer's pass does, and
            on a CPU what vLLM's CPU build can.
        rounding_seed: Of the offsets with which merged adapters are rounded; None rounds to nearest.
    """

    def __init__(
        self,
        *args: Any,
        llm_kwargs: dict[str, Any],
        dtype: str | None = None,
        rounding_seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        self._llm_kwargs = llm_kwargs
        self._dtype = dtype
        self._rounding_seed = rounding_seed
        self.on_merged: Callable[[str, torch.Tensor, torch.Tensor], None] | None = None
        """Told of each weight that an adapter is merged into: its name, the merged weight, the engine's."""
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
        if _is_adapted(self.model):
            require_mergeable(self.model)
        on_cpu = self.accelerator.device.type == "cpu"
        self.pass_dtype = pass_dtype = find_pass_dtype(self.accelerator, self.model)
        self._llm_kwargs = {
            "dtype": str(pass_dtype).removeprefix("torch."),
            **prepare_vllm(self.model.config, cpu=on_cpu),
            **({"dtype": self._dtype} if self._dtype else {}),
            **self._llm_kwargs,
        }
        self.engine_dtype: torch.dtype = getattr(torch, self._llm_kwargs["dtype"])
        self.compute_dtype = choose_compute_dtype(pass_dtype, self.engine_dtype)
        make_llm = vllm_generation.LLM
        with (
            _rendezvous_variables(self.accelerator.num_processes),
            _replaced(vllm_generation, "LLM", lambda **kwargs: make_llm(**{**kwargs, **self._llm_kwargs})),
        ):
            super()._init_vllm()
        gc.unfreeze()  # vLLM has frozen what there is, the trainer among it, which then would never be garbage
        self.cudagraph_mode = require_safe_graphs(self.llm.llm_engine.vllm_config)
        self._asleep = set(_SLEEPING_PARTS) if self.enable_sleep_mode else set()

    def sync_weights(self, *, new_policy: bool = True) -> None:
        """Push the trainer's weights while the engine stands still. A collective: every rank calls it."""
        with self.engine.paused(new_policy=new_policy):
            super().sync_weights()
        self._asleep.discard("weights")

    def _iter_named_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        """TRL's, but for adapters: they are merged into copies, and the frozen base is never written to."""
        if not _is_adapted(self.model):
            yield from super()._iter_named_params()
            return
        for name, weight, is_merged in iter_merged(self.model, self._dist.gather_params):
            if not is_merged:
                yield name, weight
                continue
            dithered = self._rounding_seed is not None
            rounded = round_weight(weight, name, self.engine_dtype, seed=self._rounding_seed or 0, dithered=dithered)
            if self.on_merged is not None:
                self.on_merged(name, weight, rounded)
            yield name, rounded

    def wake(self) -> None:
        """Bring back what sleeps, before rollouts. The weights, which sleep drops, have to be pushed first.

        vLLM ignores a call to wake two parts of which one is awake, so the parts are counted here.
        """
        if not self._asleep:
            return
        if self._llm_weights_sleeping:
            raise EngineError("the engine's weights were dropped when it fell asleep; sync_weights has to come first")
        with self.engine.paused():
            self.llm.wake_up(tags=sorted(self._asleep))
        self._asleep.clear()

    def close(self) -> None:
        """End the engine for good, and let go of vLLM's memory."""
        self.engine.close()
        self.llm: Any = None

    def sleep(self) -> None:
        """Give the engine's memory to training. The next use has to push the weights again."""
        if not self.enable_sleep_mode:
            return
        with self.engine.paused():
            torch.cuda.empty_cache()
            self.llm.sleep(level=2)
        self._asleep |= _SLEEPING_PARTS
        self._llm_weights_sleeping = True  # TRL's own flag: the weights are gone


def prepare_vllm(config: Any, *, cpu: bool) -> dict[str, Any]:
    """Make vLLM fit for a model before it is built, and build the arguments that `vllm.LLM` needs for it.

    Args:
        config: Its transformers configuration.
        cpu: On a CPU, modules of vLLM are changed; see `vllm_cpu`.
    """
    if not cpu:
        return build_model_kwargs(config)
    from polar_trl.engine import vllm_cpu

    vllm_cpu.inspect_models_here()
    vllm_cpu.keep_weights_loadable()
    vllm_cpu.keep_temperatures_of_drafts()
    defaults = vllm_cpu.LLM_KWARGS
    if _is_qwen35(config):
        vllm_cpu.prepare_qwen35()
        defaults = vllm_cpu.QWEN35_LLM_KWARGS
    return {**defaults, **build_model_kwargs(config)}


def build_model_kwargs(config: Any) -> dict[str, Any]:
    """Build the arguments that `vllm.LLM` needs for a model.

    Args:
        config: Its transformers configuration.
    """
    kwargs: dict[str, Any] = {}
    text = config.get_text_config()
    if text is not config:
        # agents send text: without this, vLLM builds the vision tower and reserves memory for the largest images
        kwargs["limit_mm_per_prompt"] = {"image": 0, "video": 0}
    is_hybrid = "linear_attention" in (getattr(text, "layer_types", None) or ())
    if is_hybrid:
        kwargs["enable_prefix_caching"] = True  # vLLM 0.26 reads every prompt of such a model anew, unless it is told
    if is_hybrid and importlib.util.find_spec("flashinfer") is None:
        # on Hopper, vLLM 0.26 takes FlashInfer's delta rule whether or not that is installed
        kwargs["additional_config"] = {"gdn_prefill_backend": "triton"}
    return kwargs


def _is_adapted(model: Any) -> bool:
    """Tell whether PEFT has wrapped the model."""
    return hasattr(model, "merge_adapter")


def _is_qwen35(config: Any) -> bool:
    return str(config.model_type).startswith("qwen3_5")


@contextmanager
def _rendezvous_variables(num_processes: int) -> Iterator[None]:
    """Have a single process keep to itself what TRL puts into the environment for vLLM: by its rank there, accelerate
    would take the next trainer of the process for one of several ranks, and wrap its model."""
    if num_processes > 1:
        yield
        return
    before = {name: os.environ.get(name) for name in _RENDEZVOUS}
    # TRL would take the first of four ports that is free, and two runs that start together the same one
    os.environ.setdefault("MASTER_PORT", str(_find_free_port()))
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _find_free_port() -> int:
    with socket.create_server(("localhost", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def colocated_vllm(*, dtype: str | None = None, rounding_seed: int | None = None, **llm_kwargs: Any) -> Iterator[None]:
    """While the block runs, a `GRPOTrainer` that is built makes a `ColocatedVllm`. TRL has no argument for it."""
    ours: dict[str, Any] = {"dtype": dtype, "rounding_seed": rounding_seed}

    def make(*args: Any, **kwargs: Any) -> ColocatedVllm:
        return ColocatedVllm(*args, llm_kwargs=llm_kwargs, **ours, **kwargs)

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
