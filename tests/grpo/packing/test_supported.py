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
    "Phi3": {},
    "Gemma3": {},
    "Gemma2": {},
    "GptOss": {"num_local_experts": 4},
    "GptOss without windows": {"num_local_experts": 4, "layer_types": ["full_attention"] * 2},
    "Ministral": {"layer_types": ["sliding_attention", "full_attention"]},
    "Qwen3 with windows in some layers": {
        "layer_types": ["sliding_attention", "full_attention"],
        "use_sliding_window": True,
        "sliding_window": 64,
    },
}


def build_from_config(name: str, settings: dict[str, Any]) -> Any:
    name = name.split()[0]
    config = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
    sizes = SIZES | {"num_hidden_layers": 2, "pad_token_id": 0} | settings
    with torch.device("meta"):
        return getattr(transformers, f"{name}ForCausalLM")(config(**sizes))


@pytest.mark.parametrize("name", SUPPORTED)
def test_causal_attention_is_supported(name: str) -> None:
    assert find_unsupported(build_from_config(name, SUPPORTED[name])) is None


@pytest.mark.parametrize("kind", MODELS)
def test_gated_delta_nets_are_supported(kind: str) -> None:
    assert find_unsupported(build_model(kind)) is None


def test_lora_changes_nothing() -> None:
    model = get_peft_model(build_model("qwen3_5"), LoraConfig(target_modules="all-linear"))
    assert find_unsupported(model) is None
    assert wrap_linear_attention(model) == 2


UNSUPPORTED: list[tuple[str, dict[str, Any], str]] = [
    ("Olmoe", {"sliding_window": 64}, "it has a sliding window (64) that its masks do not have"),
    (
        "Exaone4",
        {"layer_types": ["full_attention"] * 2, "sliding_window": 64},
        "its layer 0 has self_attn, a Exaone4Attention whose sliding_window is not that of its layer's type, "
        "full_attention",
    ),
    (
        "Qwen3",
        {"attn_logit_softcapping": 30.0},
        "its layer 0 has self_attn, a Qwen3Attention that does not pass on its soft cap of 30.0",
    ),
    ("Gemma4", {}, "its layer 0 has act_fn, a GELUTanh, which is not known to treat each token alone"),
    (
        "Gemma3",
        {"use_bidirectional_attention": True},
        "it has bidirectional attention (use_bidirectional_attention=True)",
    ),
    (
        "Phi3",
        {
            "head_dim": 24,
            "original_max_position_embeddings": 2048,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0] * 12,
                "long_factor": [2.0] * 12,
                "original_max_position_embeddings": 2048,
            },
        },
        "its rotary frequencies depend on the longest row (rope_type=longrope)",
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
