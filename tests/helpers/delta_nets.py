"""Tiny gated delta nets, layouts of every shape, and stand-ins for a GPU's kernels: for the law that packing keeps."""

import copy
import inspect
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional
from transformers.models.qwen3_5 import modeling_qwen3_5

from polar_trl.grpo.packing.fla_kernels import FlaKernels
from polar_trl.grpo.packing.layout import Layout, build_layout
from polar_trl.grpo.packing.linear_attention import wrap_linear_attention

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


MODELS = ["qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen3_5_with_vision"]


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


def build_net(kind: str = "qwen3_5", **settings: Any) -> Any:
    """The first gated delta net of a tiny model."""
    return build_model(kind, **settings).model.layers[0].linear_attn


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


def assert_rows_as_alone(net: Any, rows: list[list[int]], layout: Layout, tolerance: float = 1e-5) -> None:
    """Assert the law of layouts: rows of one call have the outputs and gradients that each has alone.

    The gradients are those of a loss that weighs every output of every row differently, by the net's original forward.
    """
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


class TorchFla:
    """Stand-ins for flash-linear-attention's kernels, sequence by sequence in torch, that log the sequences' lengths.

    They keep its conventions: sequences lie one after the other, heads of queries and keys may be fewer than of
    values, and the first column of a convolution's state [E, D, X + 1] is not read.
    """

    def __init__(self) -> None:
        self.rule_calls: list[list[int]] = []
        self.conv_calls: list[list[int]] = []

    @property
    def kernels(self) -> FlaKernels:
        return FlaKernels(rule=self.run_rule, convolve=self.convolve, norm=normalize)

    def run_rule(
        self, query: Tensor, key: Tensor, value: Tensor, *, initial_state: Tensor | None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        lengths = take_lengths(options)
        self.rule_calls.append(lengths)
        query, key = (x.repeat_interleave(value.shape[2] // x.shape[2], dim=2) for x in (query, key))
        inputs = (query, key, value, options.pop("g"), options.pop("beta"))
        parts = zip(*(x.split(lengths, dim=1) for x in inputs), strict=True)
        starts = [None] * len(lengths) if initial_state is None else initial_state.split(1)
        rule = inspect.unwrap(modeling_qwen3_5.torch_chunk_gated_delta_rule)
        done = [rule(*part, initial_state=start, **options) for part, start in zip(parts, starts, strict=True)]
        outs, states = zip(*done, strict=True)
        return torch.cat(outs, dim=1), torch.cat(states) if options["output_final_state"] else None

    def convolve(
        self, inputs: Tensor, weight: Tensor, bias: Tensor | None, *, initial_state: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        lengths = take_lengths(options)
        self.conv_calls.append(lengths)
        assert options == {"activation": "silu"}
        if initial_state is None:
            initial_state = torch.zeros(len(lengths), *weight.shape)
        parts = zip(initial_state[..., 1:], inputs[0].split(lengths), strict=True)
        padded = [torch.cat([before, part.T], dim=1)[None] for before, part in parts]
        outs = [functional.conv1d(part, weight[:, None], bias, groups=len(weight))[0].T for part in padded]
        return functional.silu(torch.cat(outs))[None], None


def take_lengths(options: dict[str, Any]) -> list[int]:
    """Take the offsets out of a call's options: those on the device, and their copy that spares it a wait."""
    offsets, on_host = options.pop("cu_seqlens"), options.pop("cu_seqlens_cpu")
    assert on_host.device.type == "cpu" and torch.equal(offsets.cpu(), on_host)
    return list(on_host.diff().tolist())


def normalize(x: Tensor, gate: Tensor, weight: Tensor, bias: None, *, eps: float) -> Tensor:
    """`rms_norm_gated`"""
    return (functional.rms_norm(x.float(), weight.shape, weight.float(), eps) * functional.silu(gate.float())).to(x)
