"""Tiny models of random weights with sliding windows, soft caps and attention sinks, and rows that go with them."""

from typing import Any

import torch
import transformers
from delta_nets import SIZES

WINDOW = 40
LAYERS: dict[str, Any] = {"num_hidden_layers": 3, "sliding_window": WINDOW}
MIXED: dict[str, Any] = LAYERS | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
MODELS: dict[str, dict[str, Any]] = {
    "Gemma2": MIXED | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
    "Gemma3": MIXED,
    "GptOss": MIXED | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
    "Mistral": LAYERS,
    "Qwen2": MIXED | {"use_sliding_window": True},
    "Qwen3": MIXED | {"use_sliding_window": True},
    "Olmo3": MIXED,
    "Cohere2": MIXED,
}
"""By transformers' name, settings; gpt-oss has sinks, whose gradient is checked too."""


def build_model(name: str, **settings: Any) -> Any:
    """Attention that is far from uniform, so that a key too many or too few is seen in the outputs."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
    model = getattr(transformers, f"{name}ForCausalLM")(
        config(**SIZES | {"pad_token_id": 0} | MODELS[name] | settings)
    )
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("sinks") or parameter.dim() > 1:
                parameter.normal_(std=0.2)
    return model
