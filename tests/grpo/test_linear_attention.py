"""Gated delta nets over a layout against each row alone, and which models are known to be forwarded so."""

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_next import modeling_qwen3_next

from polar_trl.grpo import linear_attention
from polar_trl.grpo.attention import ATTENTION, register_attention
from polar_trl.grpo.layout import Layout, build_layout
from polar_trl.grpo.linear_attention import find_unsupported, wrap_linear_attention

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


def build_model(kind: str) -> Any:
    """A tiny hybrid model of random weights whose delta nets forget neither at once nor never."""
    torch.manual_seed(0)
    if kind == "qwen3_5":
        model: Any = transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**SIZES, **DELTA_NET))
    elif kind == "qwen3_5_moe":
        config = transformers.Qwen3_5MoeTextConfig(**SIZES, **DELTA_NET, **EXPERTS)
        model = transformers.Qwen3_5MoeForCausalLM(config)
    else:
        config = transformers.Qwen3NextConfig(**SIZES, **DELTA_NET, **EXPERTS)
        model = transformers.Qwen3NextForCausalLM(config)
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


def gradients(net: Any, inputs: Tensor, loss: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*net.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, [inputs, *parameters])
    return dict(zip(["inputs", *names], found, strict=True))


def error(found: Tensor, wanted: Tensor) -> float:
    """Largest difference, relative to the largest value."""
    assert found.shape == wanted.shape
    assert wanted.abs().max() > 0
    return float((found - wanted).abs().max() / wanted.abs().max())


def compare(
    net: Any, rows: list[list[int]], layout: Layout, run: Callable[[Any, Tensor], Tensor] | None = None
) -> None:
    """One call over the layout against the original forward on each row alone: outputs, and gradients of a loss that
    weighs every output of every row differently."""
    original = copy.deepcopy(net)
    wrap_linear_attention(net)
    torch.manual_seed(1)
    vocabulary = torch.randn(max(map(max, rows)) + 1, net.hidden_size, requires_grad=True)
    weights = [torch.randn(len(row), net.hidden_size) for row in rows]

    alone = [original(vocabulary[row][None])[0] for row in rows]
    wanted = gradients(original, vocabulary, sum((w * x).sum() for w, x in zip(weights, alone, strict=True)))  # type: ignore[arg-type]

    hidden = vocabulary[torch.from_numpy(layout.token_ids_N)][None]
    flat = run(net, hidden) if run else net(hidden, layout=layout)
    together = [flat[0, torch.from_numpy(layout.positions_of(i))] for i in range(len(rows))]
    found = gradients(net, vocabulary, sum((w * x).sum() for w, x in zip(weights, together, strict=True)))  # type: ignore[arg-type]

    errors = {f"row {i}": error(x, y) for i, (x, y) in enumerate(zip(together, alone, strict=True))}
    errors |= {name: error(found[name], wanted[name]) for name in wanted}
    assert {name: value for name, value in errors.items() if value > 1e-5} == {}


@pytest.mark.parametrize("share", [False, True], ids=["packed", "tree"])
@pytest.mark.parametrize("case", CASES)
def test_layouts_give_outputs_and_gradients_of_each_row_alone(net: Any, case: str, share: bool) -> None:
    compare(net, *lay_out(CASES[case], share=share))
