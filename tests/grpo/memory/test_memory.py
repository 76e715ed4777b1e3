"""Bytes that `memory` counts without allocating them, against real models, optimizers and passes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, Qwen3_5TextConfig, Qwen3Config
from trl import ModelConfig, get_peft_config

from polar_trl.errors import ConfigError
from polar_trl.grpo.memory.activations import count_activations
from polar_trl.grpo.memory.kernel_shapes import IN_TORCH, Kernels
from polar_trl.grpo.memory.memory import (
    GIB,
    PassMemory,
    build_plan,
    count_gradients,
    count_kept,
    count_kv,
    count_low_halves,
    count_optimizer,
    count_synced,
)
from polar_trl.grpo.memory.setup import Setup, read_weights
from polar_trl.grpo.meta_model import build_meta_model

ROOT = Path(__file__).resolve().parents[3]

import train_cost  # noqa: E402

MEASURED = {
    # peak GB, torch.cuda.max_memory_allocated over whole training steps of scripts/gpu/train_cost.py: NVIDIA H200,
    # torch 2.11.0, transformers 5.17.0, peft 0.21.0, trl 1.16.0, fla-core 0.6.0, liger-kernel 0.8.5. From
    # docs/performance.md and docs/results/train_cost.json, 2026-11-28; those that keep activations from a later run
    "qwen3.5-4b:lora:16384": 15.4,
    "qwen3.5-4b:lora:16384:liger": 14.814,
    "qwen3.5-4b:lora:32768": 21.606,
    "qwen3.5-4b:lora:65536": 33.950,
    "qwen3-4b:lora:16384": 15.121,
    "qwen3-4b:lora:16384:liger": 14.383,
    "qwen3-4b:lora:32768": 21.333,
    "qwen3-4b:lora:65536": 33.758,
    "qwen3-0.6b:full:16384": 6.322,
    "qwen3-0.6b:full:32768": 8.683,
    "qwen3-0.6b:full:65536": 13.408,
    "qwen3-0.6b:lora:16384": 3.703,
    "qwen3-0.6b:lora:32768": 5.903,
    "qwen3-0.6b:lora:65536": 10.304,
    "qwen3-4b:lora:16384:keep": 98.0,
    "qwen3-4b:lora:16384:keep:liger": 75.0,
    "qwen3.5-4b:lora:16384:keep:liger": 82.0,
}
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
CONFIGS = {"llama": LlamaConfig, "qwen3": Qwen3Config}
QWEN3_4B = {
    "vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
    "architectures": ["Qwen3ForCausalLM"],
}  # fmt: skip


def config_of(architecture: str, **changes: Any) -> Any:
    name = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[architecture]
    return CONFIGS[architecture](**{**SIZES, "architectures": [name], **changes})


def lora() -> Any:
    return get_peft_config(ModelConfig(use_peft=True, lora_r=4, lora_target_modules="all-linear"))


def setup_of(config: Any, **changes: Any) -> Setup:
    return Setup(
        **{
            "model_config": config,
            "dtype": torch.float32,
            "bf16": False,
            "optim": "adamw_torch_fused",
            "gradient_checkpointing": True,
            "num_tokens": 256,
            "peft_config": None,
            "has_reference": False,
            "sharding": "none",
            "num_gpus": 1,
            "gpu_bytes": 80 * GIB,
            "engine_share": 0.3,
            "engine_num_seqs": 16,
            "sleeps": True,
            "max_model_len": 256,
            **changes,
        }
    )


def build_real(config: Any, dtype: torch.dtype, peft_config: Any = None) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    if peft_config is not None:
        from peft import get_peft_model

        model = get_peft_model(model, peft_config)
    return model


def nbytes(tensors: Any) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_weights_gradients_and_optimizer_to_the_byte(
    architecture: str, dtype: torch.dtype, adapted: bool, tied: bool
) -> None:
    config = config_of(architecture, tie_word_embeddings=tied)
    setup = setup_of(config, dtype=dtype, peft_config=lora() if adapted else None)
    model = build_real(config, dtype, lora() if adapted else None)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True)
    model(input_ids=torch.arange(12)[None]).logits.float().sum().backward()
    optimizer.step()
    # "step" is one number per parameter and stays out of the plan
    states = [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
    kept = count_kept(setup)
    assert kept["trainer: weights"] == nbytes(model.parameters())
    assert count_gradients(setup) == nbytes(p.grad for p in trained) > 0
    assert kept["trainer: optimizer"] == nbytes(states) > 0


def test_eight_bit_states_to_the_byte(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    # wide enough for parameters on both sides of 4,096 elements
    config = config_of("qwen3", tie_word_embeddings=False)
    model = build_real(config, torch.float32)
    trainer = Trainer(model, TrainingArguments(str(tmp_path), optim="adamw_8bit", use_cpu=True, report_to="none"))
    optimizer = trainer.create_optimizer()
    assert type(optimizer).__module__.startswith("bitsandbytes")
    model(input_ids=torch.arange(12)[None]).logits.sum().backward()
    optimizer.step()
    # the tables that bytes are looked up in are the optimizer's, a KiB each
    tables = {"step", "qmap1", "qmap2"}
    states = [value for state in optimizer.state.values() for name, value in state.items() if name not in tables]
    assert {state.dtype for state in states} == {torch.uint8, torch.float32}
    kept = count_kept(setup_of(config, optim="adamw_8bit"))
    assert kept["trainer: optimizer"] == nbytes(states)


def measure_saved(model: Any, num_tokens: int) -> int:
    """Bytes that a real forward pass of the model without its head keeps for the backward pass, weights left out."""
    weights = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}
    alive = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)  # so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        ids, positions = torch.arange(num_tokens)[None] % 512, torch.arange(num_tokens)[None]
        hidden = model.base_model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
    assert hidden.requires_grad
    return sum(kept.values())


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_saved_activations_with_checkpointing_to_the_byte(architecture: str) -> None:
    predicted, measured = count_per_token(architecture, checkpointing=True)
    # what is alive without being saved for the backward pass: the output, the rotary sine and cosine, the ids
    assert predicted == measured + 4 * 64 + 2 * 4 * 16 + 8


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_saved_activations_without_checkpointing(architecture: str) -> None:
    predicted, measured = count_per_token(architecture, checkpointing=False)
    # a GPU's attention kernel has its output in another order than the next layer reads, which costs a copy
    assert measured < predicted < 1.07 * measured


def count_per_token(architecture: str, *, checkpointing: bool) -> tuple[float, float]:
    """Bytes that a forward pass keeps per token, as planned and as a real one has it."""
    config = config_of(architecture)
    real = build_real(config, torch.float32).train()
    if checkpointing:
        real.gradient_checkpointing_enable()
    planned, measured = [], []
    for tokens in (128, 256):
        found = count_activations(
            lambda c: build_meta_model(c, dtype=torch.float32),
            config,
            num_tokens=tokens,
            autocast=False,
            checkpointing=checkpointing,
        )
        planned.append(found.saved)
        measured.append(measure_saved(real, tokens))
    return (planned[1] - planned[0]) / 128, (measured[1] - measured[0]) / 128


def measure_peak(model: Any, num_tokens: int) -> int:
    """Most bytes that torch's CPU allocator handed out at a time in a real forward and backward pass."""
    from torch.profiler import ProfilerActivity, profile

    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(lambda w: setattr(w, "grad", None))
    ids, positions = torch.arange(num_tokens)[None] % 512, torch.arange(num_tokens)[None]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        hidden = model.base_model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
        hidden.backward(torch.ones_like(hidden))
    changes = sorted(
        (event.start_ns(), event.nbytes())
        for event in profiled.profiler.kineto_results.events()
        if event.name() == "[memory]"
    )
    now = peak = 0
    for _, change in changes:
        now += change
        peak = max(peak, now)
    return peak


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_peak_of_a_pass_against_the_allocator(architecture: str, checkpointing: bool) -> None:
    config = config_of(architecture)
    real = build_real(config, torch.float32).train()
    if checkpointing:
        real.gradient_checkpointing_enable()
    predicted = count_activations(
        lambda c: build_meta_model(c, dtype=torch.float32),
        config,
        num_tokens=1024,
        autocast=False,
        checkpointing=checkpointing,
    )
    measured = measure_peak(real, 1024)
    assert measured < max(predicted.forward_peak, predicted.backward_peak) < 1.06 * measured


@pytest.mark.parametrize("checkpointed", range(4))
def test_peak_with_the_first_layers_checkpointed_against_the_allocator(checkpointed: int) -> None:
    config = config_of("qwen3")
    real = build_real(config, torch.float32).train()
    real.gradient_checkpointing_enable()
    for index, layer in enumerate(real.model.layers):
        layer.gradient_checkpointing = index < checkpointed
    every, none = (
        count_activations(
            lambda c: build_meta_model(c, dtype=torch.float32),
            config,
            num_tokens=1024,
            autocast=False,
            checkpointing=side,
        )
        for side in (True, False)
    )
    predicted = PassMemory(
        num_layers=3,
        every_peak=max(every.forward_peak, every.backward_peak),
        none_peak=max(none.forward_peak, none.backward_peak),
        every_saved=every.saved,
        none_saved=none.saved,
    )
    measured = measure_peak(real, 1024)
    assert 0.99 * measured < predicted.peak(checkpointed) < 1.08 * measured


@pytest.mark.parametrize("case", MEASURED)
def test_the_peak_of_training_is_within_15_percent_of_the_cards(case: str) -> None:
    setup = train_cost.build_setup(train_cost.Case.parse(case), tiny=False)
    # a step was one pass then, and weights were bfloat16 also where all were trained
    setup = replace(setup, dtype=torch.bfloat16, kernels=replace(setup.kernels, fla=case.startswith("qwen3.5")))
    assert train_cost.predict_bytes(setup) / 1e9 == pytest.approx(MEASURED[case], rel=0.15)


def test_a_few_of_many_layers_give_what_all_give() -> None:
    from polar_trl.grpo.memory import activations

    config = config_of("qwen3", num_hidden_layers=7)
    for checkpointing in (True, False):
        options: Any = {"autocast": True, "checkpointing": checkpointing}
        whole = activations._trace(build_meta_model(config, dtype=torch.float32), 512, **options)
        found = count_activations(
            lambda c: build_meta_model(c, dtype=torch.float32), config, num_tokens=512, **options
        )
        assert found == whole


def test_layers_that_are_not_alike_are_all_traced() -> None:
    from polar_trl.grpo.memory import activations

    def choose(num_layers: int, **options: Any) -> tuple[int, ...]:
        adapter = lora()
        adapter.layers_to_transform = options.get("adapted")
        model = build_meta_model(
            config_of("qwen3", num_hidden_layers=num_layers), dtype=torch.float32, peft_config=adapter
        )
        return activations._choose_layers(model, num_layers)

    assert choose(9) == (2, 4)
    assert choose(4) == (4,)
    assert choose(9, adapted=[1, 4, 7]) == (3, 6)
    assert choose(9, adapted=[0, 1]) == (9,)


def test_recurrent_models_are_extrapolated_to_what_they_are() -> None:
    kinds = ["linear_attention", "full_attention"] * 3
    config = Qwen3_5TextConfig(
        **{**SIZES, "num_hidden_layers": 6}, architectures=["Qwen3_5ForCausalLM"], layer_types=kinds,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
    )  # fmt: skip

    def count(tokens: int) -> Any:
        return count_activations(
            lambda c: build_meta_model(c, dtype=torch.float32),
            config,
            num_tokens=tokens,
            autocast=False,
            checkpointing=True,
        )

    from polar_trl.grpo.memory import activations

    whole = activations._trace(build_meta_model(config, dtype=torch.float32), 3072, autocast=False, checkpointing=True)
    assert count(3072).saved == pytest.approx(whole.saved, rel=0.01)
    assert count(3072).backward_peak == pytest.approx(whole.backward_peak, rel=0.05)


def test_kernels_take_less_than_torch() -> None:
    case = train_cost.Case.parse("qwen3.5-4b:lora:16384:keep")
    setup = train_cost.build_setup(case, tiny=True)
    in_torch, with_fla, with_both = (
        train_cost.predict_bytes(replace(setup, num_tokens=1024, kernels=kernels))
        for kernels in (IN_TORCH, Kernels(fla=True), Kernels(fla=True, liger=True))
    )
    assert in_torch > with_fla > with_both


def test_key_value_cache_of_known_sizes() -> None:
    # 36 layers x (key and value) x 8 heads x 128 x 2 bytes
    assert count_kv(Qwen3Config(**QWEN3_4B)) == (147456, 0)
    hybrid = Qwen3_5TextConfig(
        num_hidden_layers=8, num_key_value_heads=4, head_dim=256, linear_num_key_heads=16, linear_num_value_heads=32,
        linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4,
    )  # fmt: skip
    assert count_kv(Qwen3Config(**QWEN3_4B), 4) == (2 * 147456, 0)
    # 2 of 8 layers have a cache; 6 have 32 x 128 x 128 float32 and 3 inputs of 8,192 channels
    assert count_kv(hybrid) == (2 * 2 * 4 * 256 * 2, 6 * (32 * 128 * 128 * 4 + 3 * 8192 * 2))


def test_eight_bit_states_of_a_qwen3_4b() -> None:
    weights = read_weights(build_meta_model(Qwen3Config(**QWEN3_4B), dtype=torch.float32))
    total = sum(w.numel for w in weights)
    assert total == 4_022_468_096
    states = sum(count_optimizer(w, "adamw_8bit") for w in weights)
    embedding = 151936 * 2560  # tied: in float32, as transformers asks for
    small = sum(w.numel for w in weights if w.numel < 4096)
    assert states == 8 * (embedding + small) + (total - embedding - small) * 2 * (1 + 4 / 256)


def test_what_sharding_divides() -> None:
    config = Qwen3Config(**QWEN3_4B)
    params = 4_022_468_096
    kept = {
        kind: count_kept(setup_of(config, sharding=kind, num_gpus=8, bf16=True))
        for kind in ("ddp", "fsdp2", "zero2", "zero3")
    }
    assert kept["ddp"]["trainer: weights"] == kept["ddp"]["gradient buckets"] == 4 * params
    assert kept["ddp"]["trainer: optimizer"] == 8 * params
    assert kept["fsdp2"]["trainer: weights"] == 4 * params // 8
    assert kept["fsdp2"]["trainer: optimizer"] == params
    assert kept["zero2"]["trainer: weights"] == 2 * params
    assert kept["zero3"]["trainer: weights"] == 2 * params // 8
    # 2 bytes of each master that rounding took from the weight; DeepSpeed's masters are its own
    low = {kind: parts["trainer: low halves of the masters"] for kind, parts in kept.items()}
    assert low == {"ddp": 2 * params, "fsdp2": 2 * params // 8, "zero2": 0, "zero3": 0}
    assert kept["zero2"]["trainer: optimizer"] == kept["zero3"]["trainer: optimizer"] == 12 * params // 8


def test_only_trained_float32_weights_have_low_halves() -> None:
    config = config_of("qwen3")
    weights = read_weights(build_meta_model(config, dtype=torch.float32))
    assert count_low_halves(setup_of(config, bf16=True)) == 2 * sum(w.numel for w in weights)
    assert count_low_halves(setup_of(config, bf16=True, peft_config=lora())) == 0
    assert count_low_halves(setup_of(config, bf16=True, dtype=torch.bfloat16)) == 0
    assert count_low_halves(setup_of(config, engine_bytes=2)) > 0 == count_low_halves(setup_of(config, engine_bytes=4))


def test_fsdp2_sums_gradients_in_float32() -> None:
    setup = setup_of(config_of("qwen3"), bf16=True, sharding="fsdp2", num_gpus=8)
    assert count_gradients(setup) == setup.num_trained * 4 + setup.num_trained * 4 // 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_merged_copy_and_its_rounding_have_room(dtype: torch.dtype) -> None:
    config = config_of("qwen3", tie_word_embeddings=False)
    largest = 160 * 64  # of the feed-forward; embedding and head are larger and not adapted
    setup = setup_of(config, dtype=dtype, peft_config=lora())
    assert count_synced(setup) == 8 * largest >= (4 + 2) * largest
    # gathered for it
    sharded = count_synced(replace(setup, sharding="fsdp2", num_gpus=2))
    assert sharded == max((8 + dtype.itemsize) * largest, dtype.itemsize * 512 * 64)
    assert count_synced(setup_of(config, dtype=dtype)) == 0


def test_a_reference_costs_a_second_model_only_without_lora() -> None:
    config = config_of("qwen3")
    plain = count_kept(setup_of(config, has_reference=True))
    assert plain["reference model"] == plain["trainer: weights"]
    assert "reference model" not in count_kept(setup_of(config, has_reference=True, peft_config=lora()))


def test_a_sleeping_engine_gives_its_share_to_training() -> None:
    config = config_of("qwen3")
    awake, asleep = (build_plan(setup_of(config, sleeps=sleeps)) for sleeps in (False, True))
    assert awake.total("training") - asleep.total("training") == int(0.3 * 80 * GIB)


def test_an_unknown_optimizer_is_refused() -> None:
    with pytest.raises(ConfigError, match="optim 'lomo' cannot be planned; known are adamw_torch, "):
        setup_of(config_of("qwen3"), optim="lomo")
