"""Describe what the memory of one GPU depends on: the model's weights, their sharding, and the engine's share."""

from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from typing import Any, Literal

import torch

from polar_trl.errors import ConfigError
from polar_trl.grpo.memory.activations import Activations, count_activations
from polar_trl.grpo.memory.kernel_shapes import IN_TORCH, Kernels
from polar_trl.grpo.meta_model import build_meta_model

Sharding = Literal["none", "ddp", "fsdp2", "zero2", "zero3"]
QUANTIZED = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit")
OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", *QUANTIZED, "sgd")
_IDLE = ("visual", "vision_tower", "vision_model")
"""Modules of multimodal models that text does not reach: their weights get no gradient, so no optimizer state."""


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter of the trainer's model."""

    numel: int
    itemsize: int
    """Bytes per element."""
    is_trained: bool
    is_embedding: bool
    is_adapter: bool
    is_adapted: bool
    """A frozen one that an adapter is added to."""

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The settings that the memory of one GPU depends on."""

    model_config: Any
    """transformers' configuration of the model."""
    dtype: torch.dtype
    """Of the trainer's weights; TRL loads float32 unless `model_init_kwargs` names another."""
    bf16: bool
    """Autocast to bfloat16 (or float16, which takes as much); under FSDP2 and DeepSpeed the dtype of the pass."""
    optim: str
    gradient_checkpointing: bool
    checkpointed_layers: int | None = None
    """Of the decoder, with gradient checkpointing; None: as many as the GPU's memory needs."""
    num_tokens: int
    """Tokens of the largest forward pass."""
    peft_config: Any
    """Of LoRA, or None."""
    has_reference: bool
    """A KL term is wanted: with `beta` above 0."""
    sharding: Sharding
    num_gpus: int
    gpu_bytes: int
    """That the device reports, which is what vLLM's share is a share of."""
    engine_share: float
    """`vllm_gpu_memory_utilization`."""
    engine_num_seqs: int
    engine_bytes: int = 2
    """Per element of the engine's weights and cache."""
    sleeps: bool
    """Whether the engine gives its memory to training."""
    max_model_len: int
    """Tokens of the longest session: `vllm_max_model_length`."""
    kernels: Kernels = IN_TORCH
    """Of the trainer's passes."""
    traces: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    """Models and passes that were counted already, shared between the variants of a setup."""

    def __post_init__(self) -> None:
        if self.optim not in OPTIMIZERS:
            raise ConfigError(f"optim {self.optim!r} cannot be planned; known are {', '.join(OPTIMIZERS)}")

    @property
    def compute_bytes(self) -> int:
        """Per element of the weights that a sharded forward pass gathers."""
        return 2 if self.bf16 else 4

    @property
    def is_whole(self) -> bool:
        """Tell whether each GPU keeps weights, gradients and optimizer states whole."""
        return self.sharding in ("none", "ddp")

    @property
    def is_zero(self) -> bool:
        """Tell whether DeepSpeed shards."""
        return self.sharding in ("zero2", "zero3")

    @property
    def is_sharded(self) -> bool:
        """Tell whether each GPU keeps a part of the weights only."""
        return self.sharding in ("fsdp2", "zero3")

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return int(self.model_config.get_text_config().num_hidden_layers)

    @property
    def num_shards(self) -> int:
        return self.num_gpus if self.is_sharded else 1

    @cached_property
    def model(self) -> Any:
        """The trainer's model on the meta device."""
        key = ("model", self.dtype, id(self.peft_config))
        if key not in self.traces:
            self.traces[key] = build_meta_model(self.model_config, dtype=self.dtype, peft_config=self.peft_config)
        return self.traces[key]

    @cached_property
    def weights(self) -> tuple[Weight, ...]:
        return read_weights(self.model)

    @property
    def num_trained(self) -> int:
        return sum(w.numel for w in self.weights if w.is_trained)

    @cached_property
    def activations(self) -> Activations:
        """Activation bytes of the trainer's largest forward and backward pass."""
        # sharded models are gathered in the dtype of the pass; all others are lowered operation by operation
        as_held = self.is_whole
        dtype = self.dtype if as_held or not self.bf16 else torch.bfloat16
        key = (dtype, self.bf16, self.gradient_checkpointing, self.num_tokens, id(self.peft_config), self.kernels)
        if key not in self.traces:

            def build(config: Any) -> Any:
                model = build_meta_model(config, dtype=dtype, peft_config=self.peft_config)
                return model if as_held or not self.bf16 else model.to(dtype)

            self.traces[key] = count_activations(
                build,
                self.model_config,
                num_tokens=self.num_tokens,
                autocast=self.bf16,
                checkpointing=self.gradient_checkpointing,
                kernels=self.kernels,
            )
        return self.traces[key]


def choose_kernels(args: Any, model_config: Any) -> Kernels:
    """Choose the kernels that the run would compute with on its GPU.

    A machine with a GPU is taken for the one that trains, so that what is installed decides. Any other plans for a
    machine that has the extra `kernels`, as docs/packing.md asks for.
    """
    is_hybrid = "linear_attention" in (getattr(model_config.get_text_config(), "layer_types", None) or ())
    has_fla = find_spec("fla") is not None or not torch.cuda.is_available()
    return Kernels(fla=is_hybrid and has_fla, liger=bool(args.use_liger_kernel))


def read_weights(model: Any) -> tuple[Weight, ...]:
    """Read the parameters of a model; tied ones count once."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    return tuple(
        Weight(
            numel=weight.numel(),
            itemsize=weight.itemsize,
            is_trained=weight.requires_grad and not any(part in _IDLE for part in name.split(".")),
            is_embedding=id(weight) in embeddings,
            is_adapter=".lora_" in name,
            is_adapted=".base_layer." in name,
        )
        for name, weight in model.named_parameters()
    )
