"""Models that can be forwarded over a layout are known, and the reason is named for the others."""

from typing import Any

import pytest
import torch
import transformers
from delta_nets import MODELS, SIZES, build_model
from peft import LoraConfig, get_peft_model

from polar_trl.grpo.packing.linear_attention import wrap_linear_attention
from polar_trl.grpo.packing.supported import find_unsupported

SUPPORTED: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "Mistral": {"sliding_window": None},
    "SmolLM3": {},
}


def build_from_config(name: str, settings: dict[str, Any]) -> Any:
    config = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
    sizes = SIZES | {"num_hidden_layers": 2, "pad_token_id": 0} | settings
    with torch.device("meta"):
        return getattr(transformers, f"{name}ForCausalLM")(config(**sizes))


@pytest.mark.parametrize("name", SUPPORTED)
def test_full_attention_is_supported(name: str) -> None:
    assert find_unsupported(build_from_config(name, SUPPORTED[name])) is None


@pytest.mark.parametrize("kind", MODELS)
def test_gated_delta_nets_are_supported(kind: str) -> None:
    assert find_unsupported(build_model(kind)) is None


def test_lora_changes_nothing() -> None:
    model = get_peft_model(build_model("qwen3_5"), LoraConfig(target_modules="all-linear"))
    assert find_unsupported(model) is None
    assert wrap_linear_attention(model) == 2


UNSUPPORTED: list[tuple[str, dict[str, Any], str]] = [
    ("Mistral", {"sliding_window": 64}, "it has attention with a sliding window (sliding_window=64)"),
    ("Gemma3", {}, "it has attention with a sliding window (sliding_window=4096)"),
    ("Gemma2", {"sliding_window": None}, "it has soft-capped attention scores (attn_logit_softcapping=50.0)"),
    ("GptOss", {"num_local_experts": 4}, "it has attention with a sliding window (sliding_window=128)"),
    (
        "GptOss",
        {"num_local_experts": 4, "sliding_window": None, "layer_types": ["full_attention"] * 2},
        "its layer 0 has self_attn, a GptOssAttention with parameters of its own (sinks), as attention sinks are",
    ),
    ("Llama4", {}, "it has chunked attention (attention_chunk_size=8192)"),
    ("Lfm2", {"layer_types": ["conv", "full_attention"]}, "it has layers of the types conv"),
    ("FalconH1", {}, "it has layers of the types hybrid"),
    (
        "Jamba",
        {"num_experts": 2},
        "its layer 0 has mamba, a JambaMambaMixer, which is not known to treat each token alone",
    ),
    ("Mamba", {}, "its layer 0 has mixer, a MambaMixer, which is not known to treat each token alone"),
    (
        "OlmoHybrid",
        {"layer_types": ["linear_attention", "full_attention"]},
        "its layer 0 has linear_attn, a OlmoHybridGatedDeltaNet, which is not known to treat each token alone",
    ),
    ("Rwkv", {}, "RwkvForCausalLM has no list of decoder layers under a known name"),
    ("Bloom", {}, "BloomForCausalLM has no list of decoder layers under a known name"),
]


@pytest.mark.parametrize(("name", "settings", "sentence"), UNSUPPORTED)
def test_what_cannot_follow_segments_is_named(name: str, settings: dict[str, Any], sentence: str) -> None:
    model = build_from_config(name, settings)
    assert find_unsupported(model) == sentence
    assert wrap_linear_attention(model) == 0
