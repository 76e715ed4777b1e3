"""`prepare_model` computes PEFT's adapters inside the products of their layers, and changes no number."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM
from trl.trainer.utils import add_fused_lm_head

from polar_trl.grpo.packing.forward import pack_rows, prepare_model, score


def build_adapted_model(**options: Any) -> Any:
    """Weights in bfloat16, LoRA's in float32, as TRL has them for `dtype: bfloat16`."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads)).to(torch.bfloat16)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, **options))
    add_fused_lm_head(adapted.get_base_model(), outputs=("log_probs", "entropy"))
    return adapted


def run(model: Any, *, autocast: bool) -> tuple[Tensor, dict[str, Tensor], set[torch.dtype]]:
    """Log-probabilities, gradients of LoRA's weights, and what LoRA's first products are given."""
    seen = set()
    for name, module in model.named_modules():
        if name.endswith("lora_A.default"):
            module.register_forward_pre_hook(lambda _module, args: seen.add(args[0].dtype))
    row = torch.arange(40).numpy()
    scored = row >= 20
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logps = score(model, pack_rows([row], [scored], kind="packed", device=torch.device("cpu")))[0]
    logps.sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return logps.detach(), gradients, seen


@pytest.mark.parametrize("checkpointing", [False, True])
def test_adapters_in_the_products_change_no_number(monkeypatch: pytest.MonkeyPatch, checkpointing: bool) -> None:
    found = []
    for is_fused in (False, True):
        model = build_adapted_model().float()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.enable_input_require_grads()
        if not is_fused:
            monkeypatch.setattr("polar_trl.grpo.packing.forward.fuse_adapters", lambda model: None)
        prepare_model(model.get_base_model(), "packed")
        monkeypatch.undo()
        found.append(run(model.train(), autocast=False))
    (logps, gradients, by_peft), (fused_logps, fused_gradients, fused) = found
    assert by_peft == {torch.float32} and not fused  # the products of LoRA's own modules are not asked for
    torch.testing.assert_close(fused_logps, logps, rtol=1e-5, atol=1e-5)
    assert gradients.keys() == fused_gradients.keys()
    assert len(gradients) == 2 * 7 * 2
    for name, gradient in gradients.items():
        torch.testing.assert_close(fused_gradients[name], gradient, rtol=1e-5, atol=1e-5, msg=name)


def test_under_autocast_pefts_adapters_take_their_input_as_it_is() -> None:
    model = build_adapted_model(lora_dropout=0.1)
    prepare_model(model.get_base_model(), "packed")
    _, _, dtypes = run(model.train(), autocast=True)
    assert dtypes == {torch.bfloat16}


def test_without_autocast_adapters_still_raise_their_input() -> None:
    model = build_adapted_model()
    prepare_model(model.get_base_model(), "packed")
    _, _, dtypes = run(model, autocast=False)
    assert dtypes == {torch.float32}
