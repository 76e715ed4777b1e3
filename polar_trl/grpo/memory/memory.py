"""Count the memory of one GPU of a run, phase by phase, in bytes.

Weights, gradients and optimizer states are counted from the model's own parameters, activations from its own code
(`activations`), the engine's share from its settings. What cannot be counted (an unknown optimizer, a key-value cache
of an unknown shape) raises `ConfigError` instead of being left out.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import torch

from polar_trl.errors import ConfigError
from polar_trl.grpo.memory.kernel_shapes import Kernels
from polar_trl.grpo.memory.setup import QUANTIZED, Setup, Weight

GIB = 1 << 30

ALLOWANCE = GIB * 3 // 2
"""CUDA context, libraries, CUDA graphs and what the allocator cannot use. A sleeping engine and its context were
measured at 1.1 GiB; the rest is an allowance for fragments."""
SPARE = 0.05
"""Share of a GPU's memory that layers which keep their activations do not fill: for fragments, and for what a count is
below the peak (3% at most where it was measured)."""
ENGINE_BATCH_TOKENS = 4096
"""`max_num_batched_tokens` that TRL gives the engine."""
HEAD_TILE = (4096, 32768)
"""Tokens and vocabulary of TRL's tile of logits (`trl.kernels.chunked_logprob`, `trl.trainer.utils`)."""
DEEPSPEED_BUCKET = 500_000_000
"""Elements of DeepSpeed's reduce and all-gather buckets (`reduce_bucket_size`, `allgather_bucket_size`)."""
DEEPSPEED_LIVE = 1_000_000_000
"""Elements that ZeRO-3 may hold gathered (`stage3_max_live_parameters`)."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """The memory of one GPU, by phase and use."""

    phases: Mapping[str, Mapping[str, int]]
    """Bytes by phase, and in it by use."""
    gpu_bytes: int
    kv_bytes: int
    """Of the engine's share, what is left for the key-value cache; negative where its weights fill the share."""
    kv_bytes_per_token: int
    state_bytes_per_session: int
    """Of recurrent layers, whatever a session's length."""
    max_model_len: int
    kernels: Kernels
    """That the passes were counted with."""
    checkpointed_layers: int
    """Decoder layers whose activations the largest pass computes again, of `num_layers`."""
    num_layers: int

    def total(self, phase: str) -> int:
        return sum(self.phases[phase].values())

    @property
    def peak(self) -> int:
        return max(map(self.total, self.phases))

    @property
    def kv_tokens(self) -> int:
        """Tokens of sessions that the cache holds, beside the states of as many full-length sessions."""
        return self.kv_sessions * self.max_model_len if self.is_hybrid else self._tokens(self.kv_bytes)

    @property
    def kv_sessions(self) -> int:
        """Sessions of `max_model_len` tokens that the cache holds at the same time."""
        per_session = self.kv_bytes_per_token * self.max_model_len + self.state_bytes_per_session
        return max(0, self.kv_bytes) // per_session if per_session else 0

    @property
    def fits(self) -> bool:
        """Tell whether every phase fits and the engine can hold one session, without which it does not start."""
        return self.peak <= self.gpu_bytes and self.kv_sessions >= 1

    @property
    def is_hybrid(self) -> bool:
        """Tell whether some layers are recurrent."""
        return self.state_bytes_per_session > 0

    def _tokens(self, num_bytes: int) -> int:
        return max(0, num_bytes) // self.kv_bytes_per_token if self.kv_bytes_per_token else 0


def build_plan(setup: Setup) -> MemoryPlan:
    """Count every phase of a run. Raises `ConfigError` where something cannot be counted."""
    engine_weights = sum(w.numel for w in setup.weights if not w.is_adapter) * setup.engine_bytes
    share = int(setup.engine_share * setup.gpu_bytes)
    kv_bytes = share - engine_weights - count_engine_work(setup)
    kv_per_token, state = count_kv(setup.model_config, setup.engine_bytes)
    kept = count_kept(setup)
    trainer = {"trainer: weights": kept["trainer: weights"]} | _only(kept, "reference model")
    asleep_or_share = 0 if setup.sleeps else share
    allowance = {"context and allowance": ALLOWANCE}
    engine_awake = {"engine: weights": engine_weights, "engine: key-value cache and work": share - engine_weights}
    # FSDP and ZeRO-2 bring the trainer's weights to the GPU when training begins, after the engine has started
    at_start = {} if setup.sharding in ("fsdp2", "zero2") else trainer
    syncing = {"engine: weights": engine_weights} if setup.sleeps else engine_awake
    training_engine = {"engine, awake": asleep_or_share} if asleep_or_share else {}
    taken = sum(kept.values()) + count_gradients(setup) + asleep_or_share + ALLOWANCE
    checkpointed = choose_checkpointed(setup, taken)
    phases = {
        "load": at_start | engine_awake,
        "weight sync": kept | {"one weight, gathered or merged": count_synced(setup)} | syncing,
        "rollouts": kept | engine_awake,
        "training": kept | count_training(setup, checkpointed) | training_engine,
        "save": kept | {"one weight, gathered": _largest(setup.weights) if setup.is_sharded else 0} | training_engine,
    }
    return MemoryPlan(
        phases={name: {k: v for k, v in (parts | allowance).items() if v} for name, parts in phases.items()},
        gpu_bytes=setup.gpu_bytes,
        kv_bytes=kv_bytes,
        kv_bytes_per_token=kv_per_token,
        state_bytes_per_session=state,
        max_model_len=setup.max_model_len,
        kernels=setup.kernels,
        checkpointed_layers=checkpointed,
        num_layers=setup.num_layers,
    )


# The trainer.


def count_kept(setup: Setup) -> dict[str, int]:
    """Bytes that the trainer has all the time from its second step on."""
    kept = {
        "trainer: weights": count_weights(setup),
        "trainer: low halves of the masters": count_low_halves(setup),
        "trainer: optimizer": count_states(setup),
        "gradient buckets": count_buckets(setup),
    }
    if setup.has_reference and setup.peft_config is None:
        kept["reference model"] = count_reference(setup)
    return kept


def count_weights(setup: Setup) -> int:
    """Bytes of the trainer's weights on one GPU. ZeRO holds them in the dtype of the pass, whatever it steps."""
    if setup.is_zero:
        return ceil(sum(w.numel for w in setup.weights) * setup.compute_bytes / setup.num_shards)
    return ceil(sum(w.nbytes for w in _list_stepped(setup)) / setup.num_shards)


def count_states(setup: Setup) -> int:
    """Bytes of the optimizer's states on one GPU; of ZeRO with its float32 master weights.

    Both are sharded at every stage (Rajbhandari et al. 2020, section 3.1: 2 + 2 + K bytes per parameter, K = 12).
    """
    stepped = [w for w in _list_stepped(setup) if w.is_trained]
    states = sum(count_optimizer(w, setup.optim) + (w.nbytes if setup.is_zero else 0) for w in stepped)
    return states if setup.is_whole else ceil(states / setup.num_gpus)


def count_buckets(setup: Setup) -> int:
    """Bytes of the buckets through which gradients are exchanged; FSDP has none that stay."""
    if setup.sharding == "ddp":
        return sum(w.nbytes for w in setup.weights if w.is_trained)  # DDP copies gradients into buckets of its own
    return 2 * min(setup.num_trained, DEEPSPEED_BUCKET) * setup.compute_bytes if setup.is_zero else 0


def count_reference(setup: Setup) -> int:
    """Bytes of the reference model on one GPU, sharded as the trainer's."""
    return count_weights(setup) if setup.is_zero else ceil(sum(w.nbytes for w in setup.weights) / setup.num_shards)


def _list_stepped(setup: Setup) -> list[Weight]:
    """List the weights in the dtypes that the optimizer steps.

    Trained ones are float32 under ZeRO, and under FSDP2 with a half-precision pass (`fsdp2_prepare_model`).
    """
    in_float32 = setup.is_zero or (setup.sharding == "fsdp2" and setup.bf16)
    return [replace(w, itemsize=4) if w.is_trained and in_float32 else w for w in setup.weights]


def count_low_halves(setup: Setup) -> int:
    """Bytes of the low halves of float32 weights (int16) that rounding to half precision cuts off (`rounded_weights`).

    Where pass and engine are float32 nothing is rounded. An adapter is merged in float32 and rounded where it is
    pushed, and DeepSpeed has masters of its own.
    """
    in_float32 = setup.dtype == torch.float32 or (setup.sharding == "fsdp2" and setup.bf16)
    is_rounded = in_float32 and (setup.bf16 or setup.engine_bytes == 2)
    if setup.peft_config is not None or setup.is_zero or not is_rounded:
        return 0
    return ceil(setup.num_trained * 2 / setup.num_shards)


def count_optimizer(weight: Weight, optim: str) -> int:
    """Bytes of an optimizer's state of one parameter.

    torch's AdamW keeps two averages in the parameter's own dtype. bitsandbytes keeps two bytes per element and a
    float32 scale for each block of 256 of both; parameters under 4,096 elements, and embeddings (transformers'
    `Trainer.create_optimizer`), stay in float32.
    """
    if not weight.is_trained or optim == "sgd":
        return 0
    if optim not in QUANTIZED:
        return 2 * weight.nbytes
    if weight.is_embedding or weight.numel < 4096:
        return 8 * weight.numel
    return 2 * weight.numel + 2 * 4 * ceil(weight.numel / 256)


def count_gradients(setup: Setup) -> int:
    """Bytes of accumulated gradients just before the optimizer steps."""
    if setup.is_whole:
        return sum(w.nbytes for w in setup.weights if w.is_trained)
    if setup.sharding == "fsdp2":
        # passes before the last of a step add up whole in float32, since nothing is exchanged; then shards
        return setup.num_trained * 4 + ceil(setup.num_trained * 4 / setup.num_gpus)
    return ceil(setup.num_trained * setup.compute_bytes / setup.num_gpus)


@dataclass(frozen=True, kw_only=True, slots=True)
class PassMemory:
    """Bytes that a forward and backward pass adds, by how many decoder layers are checkpointed.

    A checkpointed layer keeps its input only, and is computed again in the backward pass (Chen et al. 2016,
    arXiv:1604.06174). It is the first layers that are: the backward pass comes to them last, when all that the others
    kept is freed, so that computing them again adds nothing to the peak.
    """

    num_layers: int
    every_peak: int
    """At the worst moment, with every layer checkpointed."""
    none_peak: int
    every_saved: int
    """Kept for the backward pass, with every layer checkpointed."""
    none_saved: int

    def saved(self, checkpointed: int) -> int:
        """Bytes that are kept for the backward pass."""
        return self.none_saved - (self.none_saved - self.every_saved) * checkpointed // self.num_layers

    def peak(self, checkpointed: int) -> int:
        """Bytes at the worst moment."""
        if checkpointed >= self.num_layers:
            return self.every_peak
        return max(self.every_peak, self.none_peak - self.none_saved + self.saved(checkpointed))

    def choose(self, room: float) -> int:
        """Return the fewest layers with which the peak is within `room` bytes; all of them where none is enough."""
        return next((n for n in range(self.num_layers) if self.peak(n) <= room), self.num_layers)


def count_pass(setup: Setup) -> PassMemory:
    """Count a pass of `setup.num_tokens` tokens."""
    sides = [replace(setup, gradient_checkpointing=every) for every in (True, False)]
    every, none = (side.activations.saved for side in sides)
    every_peak, none_peak = (_find_peak(side) + count_gathered(setup) for side in sides)
    return PassMemory(
        num_layers=setup.num_layers,
        every_peak=every_peak,
        none_peak=none_peak,
        every_saved=every,
        none_saved=none,
    )


def _find_peak(setup: Setup) -> int:
    found = setup.activations
    head_forward, head_backward = count_head(setup)
    return max(
        found.forward_peak,
        found.saved + found.copies + head_forward,
        found.saved + head_backward,
        found.backward_peak,
    )


def count_training(setup: Setup, checkpointed: int) -> dict[str, int]:
    """Bytes that a step's passes add to what is kept, with so many layers checkpointed."""
    found, gathered = count_pass(setup), count_gathered(setup)
    return {
        "gradients": count_gradients(setup),
        "gathered weights": gathered,
        "saved activations": found.saved(checkpointed),
        "worst moment of a pass": found.peak(checkpointed) - gathered - found.saved(checkpointed),
    }


def choose_checkpointed(setup: Setup, taken: int) -> int:
    """Choose the decoder layers to checkpoint: as the run says, or as few as the GPU has memory for.

    Args:
        taken: Bytes of the training phase but for its passes.
    """
    if not setup.gradient_checkpointing:
        return 0
    if setup.checkpointed_layers is not None:
        return min(setup.checkpointed_layers, setup.num_layers)
    return count_pass(setup).choose(setup.gpu_bytes * (1 - SPARE) - taken)


def count_head(setup: Setup) -> tuple[int, int]:
    """Bytes of TRL's fused LM head beside the hidden states, in its forward and its backward pass.

    A tile of logits in the pass's dtype, a part of the head's weights in it, the scored hidden states and, backward,
    float32 sums for their gradient and for the head's own (`trl.kernels.chunked_logprob`). Every token counts as
    scored, which is the worst case.
    """
    config = setup.model_config.get_text_config()
    tokens, hidden, vocabulary = setup.num_tokens, config.hidden_size, config.vocab_size
    rows, columns = HEAD_TILE
    stream_bytes = setup.dtype.itemsize if setup.is_whole else setup.compute_bytes
    tile = (min(tokens, rows) * columns + min(columns, vocabulary) * hidden) * setup.compute_bytes
    forward = tile + tokens * hidden * stream_bytes
    backward = tile + tokens * hidden * (4 + 2 * stream_bytes)
    if setup.peft_config is None:
        backward += vocabulary * hidden * (4 + (2 if stream_bytes == 2 else 0))
    return forward, backward


def count_gathered(setup: Setup) -> int:
    """Bytes of whole weights that a sharded forward or backward pass holds at a time."""
    total = sum(w.numel for w in setup.weights)
    if setup.sharding == "zero3":
        return min(total, DEEPSPEED_LIVE) * setup.compute_bytes
    if setup.sharding == "fsdp2":
        # the layer that computes and the next; embedding and head stay
        embeddings = sum(w.numel for w in setup.weights if w.is_embedding)
        tied = getattr(setup.model_config.get_text_config(), "tie_word_embeddings", False)
        outside = embeddings if tied else 2 * embeddings
        layers = setup.model_config.get_text_config().num_hidden_layers
        return (min(outside, total) + 2 * ceil(max(0, total - outside) / layers)) * setup.compute_bytes
    return 0


def count_synced(setup: Setup) -> int:
    """Bytes that a weight sync needs beside both models, one weight at a time.

    A sharded weight is gathered. Where an adapter is on it, it is copied in float32 for the sum, which is made of the
    adapter's product, in float32 too; the rounded copy, half as large, comes after that product has gone.
    """
    gathered = _largest(setup.weights) if setup.is_sharded else 0
    adapted = max((w for w in setup.weights if w.is_adapted), key=lambda w: w.numel, default=None)
    if adapted is None:
        return gathered
    return max(gathered, adapted.numel * 2 * 4 + (adapted.nbytes if setup.is_sharded else 0))


# The engine.


def count_engine_work(setup: Setup) -> int:
    """Estimate the bytes that vLLM, when it starts, finds itself to need for a forward pass.

    The inputs and outputs of a feed-forward and an attention block for the tokens of a batch, and logits of every
    sequence in float32 with their log-softmax and a sorted copy.
    """
    config = setup.model_config.get_text_config()
    wide = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    per_token = (3 * wide + 6 * config.hidden_size) * setup.engine_bytes
    return ENGINE_BATCH_TOKENS * per_token + 3 * 4 * setup.engine_num_seqs * config.vocab_size


def count_kv(model_config: Any, itemsize: int = 2) -> tuple[int, int]:
    """Bytes of the engine's cache per token, and per session whatever its length.

    A full-attention layer keeps a key and a value of `head_dim` for each key-value head; sliding windows count as
    full. A gated delta net keeps, per session, its matrix per value head and the last inputs of its convolution.
    """
    config = model_config.get_text_config()
    if getattr(config, "kv_lora_rank", None):
        raise ConfigError("this model compresses its key-value cache (kv_lora_rank), which plan does not count")
    kinds = list(getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    recurrent = kinds.count("linear_attention")
    per_token = (len(kinds) - recurrent) * 2 * heads * head_dim * itemsize
    if not recurrent:
        return per_token, 0
    try:
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        values = config.linear_num_value_heads * config.linear_value_head_dim
        inputs = (2 * keys + values) * (config.linear_conv_kernel_dim - 1)
        matrix = config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim
    except AttributeError as error:
        raise ConfigError(f"its recurrent layers are of a kind that plan does not count ({error})") from error
    return per_token, recurrent * (inputs * itemsize + matrix * 4)


def count_prefix(model_config: Any, num_tokens: int, itemsize: int) -> int:
    """Bytes of a prefix that the trainer's layers keep from pass to pass, and of its gradients in float32.

    Per token, layers x 2 x key-value heads x head size x (itemsize + 4), of layers with full attention or a window.

    Args:
        itemsize: Bytes per element of keys and values.
    """
    kept, gradients = count_kv(model_config, itemsize), count_kv(model_config, 4)
    return (kept[0] + gradients[0]) * num_tokens + kept[1] + gradients[1]


def _largest(weights: Iterable[Weight]) -> int:
    return max(w.nbytes for w in weights)


def _only(parts: Mapping[str, int], name: str) -> dict[str, int]:
    return {name: parts[name]} if name in parts else {}
