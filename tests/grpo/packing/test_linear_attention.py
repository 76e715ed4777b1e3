"""Gated delta nets over a layout against each row alone, and which models are known to be forwarded so."""

import copy
import functools
import inspect
import sys
from dataclasses import replace
from itertools import chain
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5

from polar_trl.grpo.packing import fla_kernels, linear_attention
from polar_trl.grpo.packing.attention import ATTENTION, register_attention
from polar_trl.grpo.packing.fla_kernels import FlaKernels, Heads
from polar_trl.grpo.packing.layout import Layout, build_layout
from polar_trl.grpo.packing.linear_attention import wrap_linear_attention
from polar_trl.grpo.packing.supported import find_unsupported

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
DELTA_NET: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}


VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": SIZES["hidden_size"],
}


def build_model(kind: str, **settings: Any) -> Any:
    """A tiny hybrid model of random weights whose delta nets remember far more than a chunk of tokens.

    Faster decay hides leaks, and rounds worse: the rule subtracts sums of its logarithms.
    """
    torch.manual_seed(0)
    sizes = SIZES | DELTA_NET | settings
    if kind == "qwen3_5":
        model: Any = transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**sizes))
    elif kind == "qwen3_5_moe":
        model = transformers.Qwen3_5MoeForCausalLM(transformers.Qwen3_5MoeTextConfig(**sizes, **EXPERTS))
    elif kind == "qwen3_next":
        model = transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**sizes, **EXPERTS))
    else:
        config = transformers.Qwen3_5Config(text_config=sizes, vision_config=VISION)
        model = transformers.Qwen3_5ForConditionalGeneration(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(-5.0, -2.0)
            elif parameter.dim() > 1:
                parameter.normal_(std=0.3)
    return model


@pytest.fixture(params=["qwen3_5", "qwen3_5_moe", "qwen3_next"])
def net(request: pytest.FixtureRequest) -> Any:
    return build_model(request.param).model.layers[0].linear_attn


def build_rows(lengths: list[int | tuple[int, ...]]) -> list[list[int]]:
    """Rows of distinct tokens; a tuple is a chain of segments of which all but the last belong to earlier rows too.

    (3, 5, 7) begins with the first 3 + 5 tokens of the row before it and goes on with 7 of its own.
    """
    rows: list[list[int]] = []
    token = 0
    for length in lengths:
        *shared, own = length if isinstance(length, tuple) else (length,)
        row = rows[-1][: sum(shared)] if shared else []
        rows.append([*row, *range(token, token + own)])
        token += own
    return rows


CASES: dict[str, list[int | tuple[int, ...]]] = {
    "one": [70],
    "no family": [5, 1, 2, 3, 130, 4],
    "chunks": [63, 64, 65, 128, 127, 129, 1],
    "group": [90, (40, 50), (40, 1), (40, 64), (40, 66), (40, 65), (40, 200)],
    "shorter than the kernel": [12, (1, 11), (1, 1, 9), (1, 1, 1, 8), (1, 1, 1, 1), (2, 1)],
    "chain": [300, (200, 30), (100, 70), (64, 65), (63, 2), (1, 1)],
    "two families": [20, (10, 5), (10, 2), 150, (128, 1), (128, 2), (64, 3), 7],
    "ends at a fork": [10, (4, 6), (4, 1), 200, (64, 64), (64, 1)],
}


def lay_out(lengths: list[int | tuple[int, ...]], *, share: bool) -> tuple[list[list[int]], Layout]:
    rows = build_rows(lengths)
    if share:
        # a row that ends where others fork has a segment with children and no leaf
        rows += [row[: len(row) // 2] for row in rows if len(row) > 1]
    return rows, build_layout(rows, share_prefixes=share)


def weigh(weights: list[Tensor], outputs: list[Tensor]) -> Tensor:
    return torch.stack([(w * x).sum() for w, x in zip(weights, outputs, strict=True)]).sum()


def gradients(net: Any, inputs: Tensor, loss: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*net.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, [inputs, *parameters])
    return dict(zip(["inputs", *names], found, strict=True))


def error(found: Tensor, wanted: Tensor) -> float:
    """Largest difference, relative to the largest value."""
    assert found.shape == wanted.shape
    assert wanted.abs().max() > 0
    return ((found - wanted).abs().max() / wanted.abs().max()).item()


def compare(net: Any, rows: list[list[int]], layout: Layout, tolerance: float = 1e-5) -> None:
    """One call over the layout against the original forward on each row alone: outputs, and gradients of a loss that
    weighs every output of every row differently."""
    dtype = net.out_proj.weight.dtype
    original = copy.deepcopy(net)
    wrap_linear_attention(net)
    torch.manual_seed(1)
    vocabulary = torch.randn(max(map(max, rows)) + 1, net.hidden_size).to(dtype).requires_grad_()
    weights = [torch.randn(len(row), net.hidden_size).to(dtype) for row in rows]

    alone = [original(vocabulary[row][None])[0] for row in rows]
    wanted = gradients(original, vocabulary, weigh(weights, alone))

    hidden = vocabulary[torch.from_numpy(layout.token_ids_L)][None]
    flat = net(hidden, layout=layout)
    together = [flat[0, torch.from_numpy(layout.positions_of(i))] for i in range(len(rows))]
    found = gradients(net, vocabulary, weigh(weights, together))

    errors = {f"row {i}": error(x, y) for i, (x, y) in enumerate(zip(together, alone, strict=True))}
    errors |= {name: error(found[name], wanted[name]) for name in wanted}
    assert {name: value for name, value in errors.items() if value > tolerance} == {}


@pytest.mark.parametrize("share", [False, True], ids=["packed", "tree"])
@pytest.mark.parametrize("case", CASES)
def test_layouts_give_outputs_and_gradients_of_each_row_alone(net: Any, case: str, share: bool) -> None:
    compare(net, *lay_out(CASES[case], share=share))


@pytest.mark.parametrize("kernel", [1, 2, 7])
def test_the_convolution_may_reach_any_number_of_tokens_back(kernel: int) -> None:
    net = build_model("qwen3_5", linear_conv_kernel_dim=kernel).model.layers[0].linear_attn
    compare(net, *lay_out(CASES["shorter than the kernel"], share=True))


@pytest.mark.parametrize("share", [False, True], ids=["packed", "tree"])
def test_bfloat16_is_as_near_as_its_digits_allow(share: bool) -> None:
    net = build_model("qwen3_5").to(torch.bfloat16).model.layers[0].linear_attn
    compare(net, *lay_out(CASES["group"], share=share), tolerance=0.05)


class TorchFla:
    """Functions with the signatures and conventions of flash-linear-attention, computed in torch, that keep a log.

    Sequences lie one after the other; heads of queries and keys may be fewer than of values; of a convolution's state
    [S, C, W] the first column is never read, and its gradient is whatever was in memory.
    """

    def __init__(self) -> None:
        self.rule_calls: list[list[int]] = []
        self.conv_calls: list[list[int]] = []

    @property
    def kernels(self) -> FlaKernels:
        return FlaKernels(rule=self.run_rule, convolve=self.convolve, norm=self.norm)

    def run_rule(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None,
        output_final_state: bool,
        use_qk_l2norm_in_kernel: bool,
        cu_seqlens: Tensor,
        cu_seqlens_cpu: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        assert torch.equal(cu_seqlens.cpu(), cu_seqlens_cpu)
        assert cu_seqlens_cpu.device.type == "cpu"
        assert cu_seqlens_cpu[-1] == q.shape[1]
        assert use_qk_l2norm_in_kernel
        rule = inspect.unwrap(modeling_qwen3_5.torch_chunk_gated_delta_rule)
        sizes = cu_seqlens.diff().tolist()
        self.rule_calls.append(sizes)
        repeats = v.shape[2] // k.shape[2]
        q, k = (x.repeat_interleave(repeats, dim=2) for x in (q, k))
        parts = zip(*(x.split(sizes, dim=1) for x in (q, k, v, g, beta)), strict=True)
        starts = [None] * len(sizes) if initial_state is None else initial_state.split(1)
        done = [
            rule(
                *qkv,
                g=a,
                beta=b,
                initial_state=start,
                output_final_state=output_final_state,
                use_qk_l2norm_in_kernel=True,
            )
            for (*qkv, a, b), start in zip(parts, starts, strict=True)
        ]
        outs, states = zip(*done, strict=True)
        return torch.cat(outs, dim=1), torch.cat(states) if output_final_state else None

    def convolve(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *,
        initial_state: Tensor | None,
        activation: str,
        cu_seqlens: Tensor,
        cu_seqlens_cpu: Tensor,
    ) -> tuple[Tensor, None]:
        assert activation == "silu"
        sizes = cu_seqlens_cpu.diff().tolist()
        self.conv_calls.append(sizes)
        width = weight.shape[1]
        if initial_state is None:
            initial_state = torch.zeros(len(sizes), x.shape[2], width)
        assert initial_state.shape == (len(sizes), x.shape[2], width)
        first = torch.full_like(initial_state[..., :1], float("nan"))
        state = torch.cat([first, initial_state[..., 1:]], dim=-1)
        outs = []
        for part, before in zip(x[0].split(sizes), state, strict=True):
            inputs = torch.cat([before[:, 1:], part.T], dim=1)[None]
            outs.append(torch.nn.functional.conv1d(inputs, weight[:, None], bias, groups=len(weight))[0].T)
        return torch.nn.functional.silu(torch.cat(outs))[None], None

    def norm(self, x: Tensor, gate: Tensor, weight: Tensor, bias: None, *, eps: float) -> Tensor:
        normalised = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
        return (normalised * weight.float() * torch.nn.functional.silu(gate.float())).to(x.dtype)


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
    compare(net, rows, layout)
    lengths = [segment.end - segment.start for segment in layout.segments]
    assert fla.conv_calls == [lengths]
    assert sorted(chain(*fla.rule_calls)) == sorted(lengths)
    depths = [len(layout.context_of(i)) for i in range(len(layout.segments))]
    assert len(fla.rule_calls) == len(set(depths))


@pytest.mark.parametrize("kernel", [1, 2, 7])
def test_kernels_take_any_reach_of_the_convolution(fla: TorchFla, kernel: int) -> None:
    net = build_model("qwen3_5", linear_conv_kernel_dim=kernel).model.layers[0].linear_attn
    compare(net, *lay_out(CASES["shorter than the kernel"], share=True))


def test_another_activation_than_the_kernels_know_is_computed_in_torch(fla: TorchFla) -> None:
    net = build_model("qwen3_5", hidden_act="gelu").model.layers[0].linear_attn
    compare(net, *lay_out(CASES["group"], share=True))
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
        (None, "slower than with flash-linear-attention: No module named 'fla'"),
    ],
)
def test_kernels_that_cannot_be_used_are_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, found: str | None, sentence: str
) -> None:
    for name in ("fla", "fla.ops.gated_delta_rule", "fla.modules.causal_conv1d", "fla.modules.norm.fused_norm_gate"):
        if found is None:
            monkeypatch.setitem(sys.modules, name, None)
        else:
            module = ModuleType(name)
            module.__version__ = found  # type: ignore[attr-defined]
            monkeypatch.setitem(sys.modules, name, module)
    if found is None:
        monkeypatch.delitem(sys.modules, "fla")
        monkeypatch.setattr(sys, "path", [])
    fla_kernels._load.cache_clear()
    with caplog.at_level("WARNING"):
        assert fla_kernels.load_kernels(torch.device("cuda")) is None
        assert fla_kernels.load_kernels(torch.device("cuda")) is None
    fla_kernels._load.cache_clear()
    assert [sentence in record.getMessage() for record in caplog.records] == [True]


def test_on_a_cpu_a_gpus_kernel_that_transformers_found_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = modeling_qwen3_5.torch_chunk_gated_delta_rule

    @functools.wraps(inspect.unwrap(rule))
    def kernel(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("0 active drivers")

    net = build_model("qwen3_5").model.layers[0].linear_attn
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


MODELS = ["qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen3_5_with_vision"]


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
