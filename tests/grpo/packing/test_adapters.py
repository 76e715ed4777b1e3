"""LoRA layers whose sum is made inside the products give what PEFT's give, and all other layers stay PEFT's."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from polar_trl.grpo.packing import adapters
from polar_trl.grpo.packing.adapters import fuse_adapters


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 20)
        self.second = nn.Linear(20, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x).tanh())
        return out


def build(*, fused: bool, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    torch.manual_seed(0)
    config = LoraConfig(r=3, lora_alpha=7, target_modules=["first", "second"], init_lora_weights=False, **options)
    model = get_peft_model(TwoLayers().to(dtype), config)
    if fused:
        fuse_adapters(model)
    return model.train()


def run(model: Any, x: Tensor, *, autocast: bool = False) -> list[Tensor]:
    """Output, and gradients of the input and of the adapters."""
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = model(x)
    out.float().square().sum().backward()
    assert x.grad is not None
    return [out.detach(), x.grad, *(weight.grad for weight in model.parameters() if weight.requires_grad)]


@pytest.fixture
def num_fused(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each layer that was computed in the products."""
    calls: list[int] = []
    apply = adapters._AdaptedLinear.apply

    def count(*args: Any) -> Any:
        calls.append(1)
        return apply(*args)

    monkeypatch.setattr(adapters._AdaptedLinear, "apply", count)
    return calls


@pytest.mark.parametrize("shape", [(12,), (5, 12), (2, 5, 12)])
def test_outputs_and_gradients_are_pefts(shape: tuple[int, ...], num_fused: list[int]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    found, wanted = run(build(fused=True), x), run(build(fused=False), x)
    assert len(num_fused) == 2
    assert len(found) == 2 + 4
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_under_autocast_results_are_nearer_to_float32_than_pefts(num_fused: list[int]) -> None:
    x = torch.randn(64, 12, generator=torch.Generator().manual_seed(1))
    options: Any = {"dtype": torch.bfloat16}
    exact = run(build(fused=False, dtype=torch.bfloat16).float(), x.bfloat16().float())
    ours = run(build(fused=True, **options), x.bfloat16(), autocast=True)
    theirs = run(build(fused=False, **options), x.bfloat16(), autocast=True)
    assert len(num_fused) == 2
    assert [tensor.dtype for tensor in ours] == [tensor.dtype for tensor in theirs]

    def measure(found: list[Tensor]) -> float:
        pairs = zip(found, exact, strict=True)
        return max(float((a.float() - b).norm() / b.norm()) for a, b in pairs)

    assert measure(ours) <= 1.05 * measure(theirs)


def test_layers_that_are_not_plain_lora_stay_pefts(num_fused: list[int]) -> None:
    x = torch.randn(5, 12)
    for options in ({"lora_dropout": 0.5}, {"use_dora": True}, {"lora_bias": True}):
        run(build(fused=True, **options), x)
    run(build(fused=True, dtype=torch.bfloat16), x.bfloat16())  # adapters in float32, and no autocast
    model = build(fused=True)
    with model.disable_adapter():
        base = model(x)
    model.merge_adapter()
    merged = model(x)
    assert not num_fused
    model.unmerge_adapter()
    torch.testing.assert_close(model(x), merged, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(base, merged)
    assert len(num_fused) == 2
