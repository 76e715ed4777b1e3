"""Gated delta nets over a layout keep the law of layouts (each row as alone), in torch, in models and checkpoints."""

import copy
import functools
import inspect
from typing import Any

import pytest
import torch
from delta_nets import CASES, MODELS, assert_rows_as_alone, build_model, build_net, build_rows, error, lay_out
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5

from polar_trl.grpo.packing import linear_attention
from polar_trl.grpo.packing.attention import ATTENTION, register_attention
from polar_trl.grpo.packing.layout import build_layout
from polar_trl.grpo.packing.linear_attention import wrap_linear_attention


@pytest.fixture(params=["qwen3_5", "qwen3_5_moe", "qwen3_next"])
def net(request: pytest.FixtureRequest) -> Any:
    return build_net(request.param)


@pytest.mark.parametrize("share", [False, True], ids=["packed", "tree"])
@pytest.mark.parametrize("case", CASES)
def test_layouts_give_outputs_and_gradients_of_each_row_alone(net: Any, case: str, share: bool) -> None:
    assert_rows_as_alone(net, *lay_out(CASES[case], share=share))


@pytest.mark.parametrize("kernel", [1, 2, 7])
def test_the_convolution_may_reach_any_number_of_tokens_back(kernel: int) -> None:
    net = build_net(linear_conv_kernel_dim=kernel)
    assert_rows_as_alone(net, *lay_out(CASES["shorter than the kernel"], share=True))


@pytest.mark.parametrize("share", [False, True], ids=["packed", "tree"])
def test_bfloat16_is_as_near_as_its_digits_allow(share: bool) -> None:
    net = build_net().to(torch.bfloat16)
    assert_rows_as_alone(net, *lay_out(CASES["group"], share=share), tolerance=0.05)


def test_on_a_cpu_a_gpus_kernel_that_transformers_found_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = modeling_qwen3_5.torch_chunk_gated_delta_rule

    @functools.wraps(inspect.unwrap(rule))
    def kernel(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("0 active drivers")

    net = build_net()
    wrap_linear_attention(net)
    monkeypatch.setattr(modeling_qwen3_5, "torch_chunk_gated_delta_rule", kernel)
    hidden = torch.randn(1, 3, net.hidden_size)
    out = net(hidden, layout=build_layout([[1, 2, 3]], share_prefixes=False))
    with pytest.raises(RuntimeError, match="0 active drivers"):
        net(hidden)
    with linear_attention.computed_in_torch(net):
        assert error(out, net(hidden)) < 1e-5
    with pytest.raises(RuntimeError, match="0 active drivers"):
        net(hidden)


def test_only_rows_of_equally_many_chunks_are_filled_up_to_one_length() -> None:
    lengths = [1, 64, 65, 700, 128, 129, 3, 192]
    assert linear_attention._group_by_length([7, 0, 1, 2, 3, 4, 5, 6], lengths) == [[0, 1, 6], [2, 4], [7, 5], [3]]


def build_hybrid(kind: str) -> Any:
    model = build_model(kind)
    register_attention()
    model.set_attn_implementation(ATTENTION)
    return model


@pytest.mark.parametrize("share", [False, True], ids=["packed", "tree"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_whole_hybrid_model_gives_the_logits_of_each_row_alone(kind: str, share: bool) -> None:
    model = build_hybrid(kind).eval()
    rows = [[t % 97 for t in row] for row in build_rows([40, (25, 30), (25, 2, 9), 90, (70, 60), (70, 3), 12])]
    layout = build_layout(rows, share_prefixes=share)
    ids = torch.from_numpy(layout.token_ids_L)[None]
    alone = [model(input_ids=ids[:, layout.positions_of(i)], use_cache=False).logits for i in range(len(rows))]
    assert wrap_linear_attention(model) == 2
    positions = torch.from_numpy(layout.position_ids_L)[None]
    flat = model(input_ids=ids, position_ids=positions, layout=layout, use_cache=False).logits
    errors = [error(flat[:, layout.positions_of(i)], alone[i]) for i in range(len(rows))]
    assert max(errors) < 1e-5


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_layers_give_the_same_gradients(use_reentrant: bool) -> None:
    model = build_hybrid("qwen3_5").train()
    wrap_linear_attention(model)
    rows = [[t % 97 for t in row] for row in build_rows([40, (25, 30), (25, 2, 9), 90, (70, 60)])]
    layout = build_layout(rows, share_prefixes=True)
    inputs = {
        "input_ids": torch.from_numpy(layout.token_ids_L)[None],
        "position_ids": torch.from_numpy(layout.position_ids_L)[None],
    }

    def run() -> dict[str, Tensor]:
        model.zero_grad()
        model(**inputs, layout=layout, use_cache=False).logits.logsumexp(-1).square().sum().backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    wanted = run()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    found = run()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_without_a_layout_a_net_is_as_before(net: Any) -> None:
    hidden = torch.randn(2, 70, net.hidden_size)
    mask = torch.ones(2, 70)
    mask[1, :9] = 0
    wanted = net(hidden, attention_mask=mask)
    assert wrap_linear_attention(net) == wrap_linear_attention(net) == 1
    assert torch.equal(net(hidden, attention_mask=mask), wanted)


def test_a_copy_of_a_wrapped_net_computes_with_its_own_weights(net: Any) -> None:
    wrap_linear_attention(net)
    layout = build_layout([[1, 2, 3]], share_prefixes=True)
    hidden = torch.randn(1, 3, net.hidden_size)
    twin = copy.deepcopy(net)
    with torch.no_grad():
        net.out_proj.weight.zero_()
    for arguments in ({}, {"layout": layout}):
        assert net(hidden, **arguments).abs().max() == 0
        assert twin(hidden, **arguments).abs().max() > 0


def test_hidden_states_that_do_not_fit_the_layout_are_refused(net: Any) -> None:
    wrap_linear_attention(net)
    layout = build_layout([[1, 2, 3]], share_prefixes=True)
    with pytest.raises(ValueError, match=r"\(1, 4, 48\) do not fit a layout of 3 tokens"):
        net(torch.randn(1, 4, net.hidden_size), layout=layout)


def test_a_layout_does_not_continue_a_cache() -> None:
    model = build_hybrid("qwen3_5").eval()
    wrap_linear_attention(model)
    layout = build_layout([[1, 2, 3]], share_prefixes=True)
    past = model(input_ids=torch.tensor([[4, 5]]), use_cache=True).past_key_values
    with pytest.raises(ValueError, match="cannot continue a cache"):
        model.model.layers[0].linear_attn(torch.randn(1, 3, 48), layout=layout, cache_params=past)
