"""Merging an adapter for the engine: the merged weights are PEFT's, and what the layer holds is never written to."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen3Config, Qwen3ForCausalLM

from polar_trl.engine.lora import iter_merged, require_mergeable
from polar_trl.errors import ConfigError


def build(dtype: torch.dtype, *, tied: bool = False, **settings: Any) -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, tie_word_embeddings=tied, attention_bias=True,
    )  # fmt: skip
    base = Qwen3ForCausalLM(config).to(dtype)
    model = get_peft_model(base, LoraConfig(**{"r": 4, "target_modules": "all-linear", **settings}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.01)
    return model


def merge_all(model: Any) -> dict[str, tuple[torch.Tensor, bool]]:
    return {n: (w.clone(), is_merged) for n, w, is_merged in iter_merged(model, lambda _: nullcontext())}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_rslora": True, "lora_alpha": 32},
        {"use_dora": True},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": ["q_proj"], "lora_bias": True},
    ],
    ids=str,
)
def test_merged_weights_are_those_of_peft_in_float32(dtype: torch.dtype, settings: dict[str, Any]) -> None:
    model = build(dtype, **settings)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(3):
        merged = merge_all(model)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) and parameter.dtype == before[name].dtype, name
    assert not any(module.merged_adapters for module in model.modules() if hasattr(module, "merged_adapters"))
    wanted = model.float().merge_and_unload().state_dict()
    assert set(merged) == set(wanted)
    for name, (weight, is_merged) in merged.items():
        torch.testing.assert_close(weight.float(), wanted[name], atol=1e-7, rtol=1e-6)
        assert not is_merged or weight.dtype == torch.float32
    assert any(is_merged for _, is_merged in merged.values())


def test_whole_modules_beside_an_adapter_come_as_trained() -> None:
    model = build(torch.float32, target_modules=["q_proj"], modules_to_save=["lm_head"])
    with torch.no_grad():
        model.get_output_embeddings().modules_to_save["default"].weight.add_(1.0)
    merged = merge_all(model)
    assert torch.equal(merged["lm_head.weight"][0], model.get_output_embeddings().modules_to_save["default"].weight)
    assert set(merged) == set(model.merge_and_unload().state_dict())


def test_a_quantised_base_is_refused() -> None:
    model = build(torch.float32)
    for module in model.modules():
        if hasattr(module, "base_layer"):
            weight = module.base_layer.weight
            module.base_layer.weight = torch.nn.Parameter(weight.data.to(torch.uint8), requires_grad=False)
    with pytest.raises(ConfigError, match="is quantised: an adapter on it cannot be merged"):
        require_mergeable(model)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_modules": ["q_proj", "embed_tokens"]}, "are one weight .* leave embed_tokens and lm_head out"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}, "are one weight"),
        ({"target_modules": ["q_proj"], "trainable_token_indices": [1, 2]}, "rows that are trained alone"),
    ],
)
def test_what_an_engine_cannot_be_given_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        require_mergeable(build(torch.float32, tied="trainable_token_indices" not in settings, **settings))
    require_mergeable(build(torch.float32, tied=True))
