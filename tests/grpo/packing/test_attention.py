"""Windows, soft caps and sinks over a layout: each row as alone by transformers' eager attention, on both paths."""

import copy
import warnings
from typing import Any

import pytest
import torch
from attention_models import MODELS, WINDOW, build_model
from delta_nets import SIZES, build_rows, error
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from polar_trl.grpo.packing import attention
from polar_trl.grpo.packing.attention import ATTENTION, BLOCK_SIZE, Scoring, build_block_mask, register_attention
from polar_trl.grpo.packing.layout import Layout, build_layout
from polar_trl.grpo.packing.supported import find_unsupported

# shared prefixes and what follows: shorter than the window of 40, as long, longer; and more than one block of queries
LENGTHS: list[int | tuple[int, ...]] = [90, (40, 50), (40, 1), (38, 64), (38, 2, 400), (3, 5), 1, (1, 30), 7]
TOLERANCE = 1e-5


def lay_out(share: bool) -> tuple[list[list[int]], Layout]:
    rows = [[token % SIZES["vocab_size"] for token in row] for row in build_rows(LENGTHS)]
    return rows, build_layout(rows, share_prefixes=share)


def train_alone(model: Any, rows: list[list[int]], weights: list[Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Logits of each row and the gradients of their weighted sum, by transformers' eager attention."""
    model = copy.deepcopy(model)
    model.set_attn_implementation("eager")
    outputs = [model(input_ids=torch.tensor([row])).logits[0] for row in rows]
    torch.stack([(w * x).sum() for w, x in zip(weights, outputs, strict=True)]).sum().backward()
    return outputs, {name: parameter.grad for name, parameter in model.named_parameters()}


def train_together(model: Any, layout: Layout, weights: list[Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
    register_attention()
    model.set_attn_implementation(ATTENTION)
    ids, positions = (torch.from_numpy(x)[None] for x in (layout.token_ids_L, layout.position_ids_L))
    logits = model(input_ids=ids, position_ids=positions, layout=layout).logits[0]
    outputs = [logits[torch.from_numpy(layout.positions_of(row))] for row in range(len(weights))]
    torch.stack([(w * x).sum() for w, x in zip(weights, outputs, strict=True)]).sum().backward()
    return outputs, {name: parameter.grad for name, parameter in model.named_parameters()}


def build_weights(rows: list[list[int]]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(len(row), SIZES["vocab_size"], generator=generator) for row in rows]


@pytest.mark.parametrize("share", [False, True], ids=["packed", "tree"])
@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients_are_those_of_each_row_alone(name: str, share: bool) -> None:
    model = build_model(name)
    assert find_unsupported(model) is None
    rows, layout = lay_out(share)
    weights = build_weights(rows)
    wanted, wanted_gradients = train_alone(model, rows, weights)
    found, gradients = train_together(model, layout, weights)
    errors = {f"row {i}": error(x, y) for i, (x, y) in enumerate(zip(found, wanted, strict=True))}
    errors |= {name: error(gradients[name], wanted_gradients[name]) for name in wanted_gradients}
    assert {name: value for name, value in errors.items() if value > TOLERANCE} == {}
    assert any(name.endswith("sinks") for name in errors) == (name == "GptOss")


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("Mistral", {"sliding_window": WINDOW + 1}),
        ("Gemma3", {"sliding_window": WINDOW - 1}),
        ("Gemma2", {"attn_logit_softcapping": 2.1}),
    ],
)
def test_a_key_more_or_another_cap_would_be_noticed(name: str, settings: dict[str, Any]) -> None:
    rows, layout = lay_out(share=True)
    weights = build_weights(rows)
    wanted, _ = train_alone(build_model(name, **settings), rows, weights)
    found, _ = train_together(build_model(name), layout, weights)
    assert max(error(x, y) for x, y in zip(found, wanted, strict=True)) > 100 * TOLERANCE


@pytest.mark.parametrize("padding", [0, 20])
@pytest.mark.parametrize("name", ["Gemma2", "GptOss", "Mistral"])
def test_without_a_layout_a_batch_of_sequences_is_answered(name: str, padding: int) -> None:
    model = build_model(name).eval()
    ids = torch.arange(2 * 90).reshape(2, 90) % SIZES["vocab_size"]
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    batch = {"input_ids": ids, "attention_mask": mask}
    outputs = []
    for implementation in ("eager", ATTENTION):
        register_attention()
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            answers = model.generate(**batch, max_new_tokens=3, min_new_tokens=3, do_sample=False)  # by cached keys
            outputs.append((model(**batch).logits[mask.bool()], answers))
    (wanted, wanted_answers), (found, answers) = outputs
    assert error(found, wanted) <= TOLERANCE
    assert torch.equal(answers, wanted_answers)


# ---- FlexAttention, which a GPU uses. On a CPU it has no compiled backward pass: it runs uncompiled here.


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)  # it refuses gradients on a CPU
    monkeypatch.setattr(attention, "_compiled_flex_attention", lambda: flex.flex_attention)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 2, WINDOW, 200])
def test_a_gpu_s_path_computes_what_a_cpu_s_does(window: int | None, softcap: float | None, has_sinks: bool) -> None:
    layout = lay_out(share=True)[1].pad(BLOCK_SIZE)
    torch.manual_seed(0)
    inputs = [torch.randn(1, heads, layout.num_tokens, 16, requires_grad=True) for heads in (4, 2, 2)]
    sinks = [torch.randn(4, requires_grad=True)] if has_sinks else []
    scoring = Scoring(None, window, softcap, *sinks)
    weights = torch.randn(1, 4, layout.num_tokens, 16)
    results = []
    for path in (attention._attend_by_segment, attention._attend_in_blocks):
        with warnings.catch_warnings(action="ignore"):  # that it is not compiled
            out = path(*inputs, layout, scoring)
        results.append([out, *torch.autograd.grad((out * weights).sum(), [*inputs, *sinks])])
    assert max(error(found, wanted) for found, wanted in zip(*results, strict=True)) <= TOLERANCE


def test_caps_and_windows_compile() -> None:
    """Torch's compiler fails on numbers in such functions that it accepts uncompiled."""
    layout = lay_out(share=True)[1].pad(BLOCK_SIZE)
    inputs = [torch.randn(1, heads, layout.num_tokens, 16) for heads in (4, 2, 2)]
    for softcap in (2.0, 3.0):
        scoring = Scoring(sliding_window=WINDOW, softcap=softcap)
        wanted = attention._attend_by_segment(*inputs, layout, scoring)
        assert error(attention._attend_in_blocks(*inputs, layout, scoring), wanted) <= TOLERANCE


@pytest.mark.parametrize("window", [None, 1, 40, 128, 200])
@pytest.mark.parametrize("share", [False, True], ids=["packed", "tree"])
def test_blocks_left_out_hold_nothing_and_full_ones_everything(share: bool, window: int | None) -> None:
    layout = lay_out(share)[1].pad(BLOCK_SIZE)
    mask = build_block_mask(layout, torch.device("cpu"), window)
    assert build_block_mask(layout, torch.device("cpu"), window) is mask
    every = torch.arange(layout.num_tokens)
    seen = mask.mask_mod(None, None, every[:, None], every[None, :])
    blocks = seen.unfold(0, BLOCK_SIZE, BLOCK_SIZE).unfold(1, BLOCK_SIZE, BLOCK_SIZE)
    listed = {}
    for kind, counts, indices in (
        ("partial", mask.kv_num_blocks, mask.kv_indices),
        ("full", mask.full_kv_num_blocks, mask.full_kv_indices),
    ):
        listed[kind] = torch.zeros(blocks.shape[:2], dtype=torch.bool)
        for row, count in enumerate(counts[0, 0]):
            listed[kind][row, indices[0, 0, row, :count].long()] = True
    assert not (listed["partial"] & listed["full"]).any()
    assert blocks[listed["full"]].all()
    assert not blocks[~listed["partial"] & ~listed["full"]].any()


def test_blocks_outside_of_a_window_are_skipped() -> None:
    layout = build_layout([range(20 * BLOCK_SIZE)], share_prefixes=False)
    masks = [build_block_mask(layout, torch.device("cpu"), window) for window in (None, BLOCK_SIZE)]
    counts = [int((mask.kv_num_blocks + mask.full_kv_num_blocks).sum()) for mask in masks]
    assert counts == [20 * 21 // 2, 20 + 19]


def test_a_window_as_wide_as_the_longest_row_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, layout = lay_out(share=False)
    longest = max(map(len, rows))
    windows = []

    def attend_by_segment(query: Tensor, key: Tensor, value: Tensor, layout: Layout, scoring: Scoring) -> Tensor:
        windows.append(scoring.sliding_window)
        return query

    monkeypatch.setattr(attention, "_attend_by_segment", attend_by_segment)
    query = torch.randn(1, 1, layout.num_tokens, 8)
    for window in (longest - 1, longest):
        attention.attend(torch.nn.Identity(), query, query, query, None, layout=layout, sliding_window=window)
    assert windows == [longest - 1, None]
