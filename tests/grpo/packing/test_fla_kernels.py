"""With flash-linear-attention gated delta nets keep the law of layouts too, and wrong kernels are found out."""

import sys
from dataclasses import replace
from itertools import chain
from types import ModuleType
from typing import Any

import pytest
import torch
from delta_nets import CASES, TorchFla, assert_rows_as_alone, build_net, lay_out
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5

from polar_trl.grpo.packing import fla_kernels
from polar_trl.grpo.packing.fla_kernels import Heads


@pytest.fixture(params=["qwen3_5", "qwen3_5_moe", "qwen3_next"])
def net(request: pytest.FixtureRequest) -> Any:
    return build_net(request.param)


@pytest.fixture
def fla(monkeypatch: pytest.MonkeyPatch) -> TorchFla:
    """Layouts are computed as on a GPU with flash-linear-attention."""
    found = TorchFla()
    monkeypatch.setattr(fla_kernels, "load_kernels", lambda device: found.kernels)
    monkeypatch.setattr(fla_kernels, "_is_right", lambda *_: True)
    return found


@pytest.mark.parametrize("share", [False, True], ids=["packed", "tree"])
@pytest.mark.parametrize("case", CASES)
def test_kernels_over_many_sequences_give_outputs_and_gradients_of_each_row_alone(
    net: Any, fla: TorchFla, case: str, share: bool
) -> None:
    rows, layout = lay_out(CASES[case], share=share)
    assert_rows_as_alone(net, rows, layout)
    lengths = [segment.end - segment.start for segment in layout.segments]
    assert fla.conv_calls == [lengths]
    assert sorted(chain(*fla.rule_calls)) == sorted(lengths)
    depths = [len(layout.context_of(i)) for i in range(len(layout.segments))]
    assert len(fla.rule_calls) == len(set(depths))


@pytest.mark.parametrize("kernel", [1, 2, 7])
def test_kernels_take_any_reach_of_the_convolution(fla: TorchFla, kernel: int) -> None:
    net = build_net(linear_conv_kernel_dim=kernel)
    assert_rows_as_alone(net, *lay_out(CASES["shorter than the kernel"], share=True))


def test_another_activation_than_the_kernels_know_is_computed_in_torch(fla: TorchFla) -> None:
    net = build_net(hidden_act="gelu")
    assert_rows_as_alone(net, *lay_out(CASES["group"], share=True))
    assert fla.rule_calls == []


class _HalvedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / 2


def test_the_recurrence_that_kernels_are_held_against_is_that_of_transformers() -> None:
    generator = torch.Generator().manual_seed(1)
    query, key = (torch.randn(90, 2, 16, generator=generator) for _ in range(2))
    value = torch.randn(90, 4, 8, generator=generator)
    decay, beta = -torch.rand(90, 4, generator=generator), torch.rand(90, 4, generator=generator)
    repeated = (x.repeat_interleave(2, dim=1)[None] for x in (query, key))
    wanted, _ = modeling_qwen3_5.torch_recurrent_gated_delta_rule(
        *repeated, value[None], decay[None], beta[None], None, output_final_state=False, use_qk_l2norm_in_kernel=True
    )
    torch.testing.assert_close(fla_kernels.recur(query, key, value, decay, beta), wanted[0], rtol=1e-5, atol=1e-5)


def forbid(tensor: Tensor) -> Tensor:
    raise AssertionError("the forward pass around it would count this tensor")


def test_kernels_are_trusted_only_if_their_gradients_are_right(caplog: pytest.LogCaptureFixture) -> None:
    fla, cpu = TorchFla(), torch.device("cpu")
    heads = Heads(groups=2, heads=4, key_dim=16, value_dim=8)
    assert 1e-4 < fla_kernels._measure_error(fla.kernels, cpu, heads) < 0.03  # bfloat16's own
    with torch.no_grad(), torch.autograd.graph.saved_tensors_hooks(forbid, forbid):  # as inside a checkpoint
        assert fla_kernels._is_right(fla.kernels, cpu, heads)

    def halve(query: Tensor, key: Tensor, *rest: Tensor, **kwargs: Any) -> Any:
        return fla.kernels.rule(query, _HalvedGradient.apply(key), *rest, **kwargs)

    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("this Triton is not for this card\nand more")

    with caplog.at_level("WARNING"):
        assert not fla_kernels._is_right(replace(fla.kernels, rule=halve), cpu, heads)
        assert not fla_kernels._is_right(replace(fla.kernels, rule=refuse), cpu, heads)
    wrong, refused = (record.getMessage() for record in caplog.records)
    assert "wrong on this card with this Triton (relative error 0.5" in wrong
    assert refused.endswith("many times slower: this Triton is not for this card")


def test_kernels_are_for_gpus() -> None:
    assert fla_kernels.load_kernels(torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        ("0.5.1", "flash-linear-attention 0.5.1 is too old"),
        ("0.6.1", "tunes its kernels during the first step"),
        (None, "slower than with flash-linear-attention: No module named 'fla'"),
    ],
)
def test_kernels_are_named_once_whether_or_not_they_can_be_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, found: str | None, sentence: str
) -> None:
    for name in ("fla", "fla.ops.gated_delta_rule", "fla.modules.causal_conv1d", "fla.modules.norm.fused_norm_gate"):
        if found is None:
            monkeypatch.setitem(sys.modules, name, None)
        else:
            module = ModuleType(name)
            module.__version__ = found  # type: ignore[attr-defined]
            module.chunk_gated_delta_rule = module.causal_conv1d = module.rms_norm_gated = None  # type: ignore[attr-defined]
            monkeypatch.setitem(sys.modules, name, module)
    if found is None:
        monkeypatch.delitem(sys.modules, "fla")
        monkeypatch.setattr(sys, "path", [])
    fla_kernels._load.cache_clear()
    with caplog.at_level("WARNING"):
        for _ in range(2):
            assert (fla_kernels.load_kernels(torch.device("cuda")) is not None) == (found == "0.6.1")
    fla_kernels._load.cache_clear()
    assert [sentence in record.getMessage() for record in caplog.records] == [True]
