"""A prefix that layers keep from pass to pass changes no output and no gradient: each row is as alone."""

import math
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import attention_models
import numpy as np
import pytest
import torch
from delta_nets import SIZES, TorchFla, build_model, error
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.attention import flex_attention as flex
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from trl.trainer.utils import add_fused_lm_head

from polar_trl.grpo.memory.memory import count_prefix
from polar_trl.grpo.packing import attention, fla_kernels, prefix
from polar_trl.grpo.packing.attention import BLOCK_SIZE, Scoring, build_block_mask
from polar_trl.grpo.packing.forward import pack_rows, prepare_model, score
from polar_trl.grpo.packing.layout import Layout, build_layout, build_layout_after
from polar_trl.grpo.packing.linear_attention import computed_in_torch
from polar_trl.grpo.packing.packer import Packer
from polar_trl.grpo.packing.prefix import SharedPrefix, apply_prefix, choose_prefix, keep_prefix
from polar_trl.grpo.rows import Row

CPU = torch.device("cpu")
NUM_PREFIX = 70  # more than a chunk of the delta rule and less than two, and longer than a window
PASSES = (range(3), range(3, 6), range(6, 9))
TOLERANCE = 1e-5


def build_rows() -> list[Any]:
    """Rows of three passes. Each pass has some that go on after the prefix, together and apart, and the first two have
    a row that begins with half of it, or with nothing of it."""
    rng = np.random.default_rng(0)
    common, more = rng.integers(SIZES["vocab_size"], size=NUM_PREFIX), rng.integers(SIZES["vocab_size"], size=40)
    parts = [
        *([common, more, 30], [common[:35], 50], [common, more[:20], 1]),
        *([common, 2], [25], [common, 130]),
        *([common, more, 3], [common, 64], [common, more, 5]),
    ]
    parts = [[rng.integers(SIZES["vocab_size"], size=x) if isinstance(x, int) else x for x in row] for row in parts]
    return [np.concatenate(row) for row in parts]


def build_scored(rows: list[Any]) -> list[Any]:
    """The first scored token is predicted by the first that is not of the prefix."""
    return [np.arange(len(row)) > (NUM_PREFIX if len(row) > NUM_PREFIX + 1 else len(row) - 2) for row in rows]


def build(name: str) -> Any:
    sizes = SIZES | {"num_hidden_layers": 3}
    torch.manual_seed(0)
    if name == "llama":
        return LlamaForCausalLM(LlamaConfig(**sizes))
    if name == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**sizes))
    return attention_models.build_model(name) if name in attention_models.MODELS else build_model(name)


def build_gradients(model: Any) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def draw_weights(scored: list[Any]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(int(mask.sum()), generator=generator) for mask in scored]


def train_alone(model: Any, rows: list[Any], scored: list[Any]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """By transformers' own code."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    base.set_attn_implementation("eager")
    outputs = []
    for row, mask, weights in zip(rows, scored, draw_weights(scored), strict=True):
        with computed_in_torch(model):
            logits = model(input_ids=torch.from_numpy(row)[None], use_cache=False).logits[0].float()
        at = torch.from_numpy(np.flatnonzero(mask))
        logps = logits.log_softmax(-1)[at - 1].gather(-1, torch.from_numpy(row)[at, None])[:, 0]
        (logps * weights).sum().backward()
        outputs.append(logps.detach())
    gradients = build_gradients(model)
    model.zero_grad()
    return outputs, gradients


def train_keeping(model: Any, rows: list[Any], scored: list[Any]) -> tuple[list[Tensor], dict[str, Tensor]]:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    add_fused_lm_head(base, outputs=("log_probs", "entropy"))
    prepare_model(base, "tree")
    model.train()
    shared, weights, outputs = SharedPrefix(rows[0][:NUM_PREFIX]), draw_weights(scored), []
    accelerator = SimpleNamespace(autocast=nullcontext, device=CPU)
    for number, of_pass in enumerate(PASSES):
        some = [rows[i] for i in of_pass], [scored[i] for i in of_pass]
        packed = pack_rows(*some, kind="tree", device=CPU, prefix=shared, is_read=number + 1 < len(PASSES))
        with keep_prefix(packed.layout, base, accelerator):
            logps = score(model, packed)[0]
            (logps * torch.cat([weights[i] for i in of_pass])).sum().backward()
        outputs += logps.detach().split([len(weights[i]) for i in of_pass])
    assert not shared.kept
    return outputs, build_gradients(model)


def assert_alike(
    found: tuple[list[Tensor], dict[str, Tensor]], wanted: tuple[list[Tensor], dict[str, Tensor]]
) -> None:
    assert found[1].keys() == wanted[1].keys() and len(found[0]) == len(wanted[0])
    errors = {f"row {i}": error(x, y) for i, (x, y) in enumerate(zip(found[0], wanted[0], strict=True))}
    errors |= {name: error(found[1][name], wanted[1][name]) for name in wanted[1]}
    assert {name: value for name, value in errors.items() if value > TOLERANCE} == {}


@pytest.mark.parametrize("checkpointing", [None, "plain", "reentrant"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_5", "qwen3_next", "Gemma3", "GptOss"])
def test_rows_of_several_passes_are_as_alone(name: str, checkpointing: str | None) -> None:
    model, rows = build(name), build_rows()
    scored = build_scored(rows)
    wanted = train_alone(model, rows, scored)
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
        model.enable_input_require_grads()
    assert_alike(train_keeping(model, rows, scored), wanted)


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj"], ["v_proj"]])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
def test_lora_s_gradients_are_those_of_rows_alone(name: str, targets: Any) -> None:
    config = LoraConfig(r=4, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")
    model, rows = get_peft_model(build(name), config), build_rows()
    scored = build_scored(rows)
    wanted = train_alone(model, rows, scored)
    assert_alike(train_keeping(model, rows, scored), wanted)


def test_with_the_kernels_of_a_gpu_rows_are_as_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = build("qwen3_5"), build_rows()
    scored = build_scored(rows)
    wanted = train_alone(model, rows, scored)
    fla = TorchFla()
    monkeypatch.setattr(fla_kernels, "load_kernels", lambda device: fla.kernels)
    monkeypatch.setattr(fla_kernels, "_is_right", lambda *_: True)
    assert_alike(train_keeping(model, rows, scored), wanted)
    assert fla.rule_calls[0] == [NUM_PREFIX]


def test_gradients_of_what_is_kept_are_summed_in_float32() -> None:
    shared = SharedPrefix(np.arange(2))
    module = torch.nn.Identity()
    whole, rest = (build_layout_after([np.arange(4)], shared, is_read=is_read) for is_read in (False, True))

    class Decoder(torch.nn.Module):
        def forward(self, layout: Layout, **_: Any) -> None:
            apply_prefix(layout, module, 0, torch.ones(2, 3, dtype=torch.bfloat16), dim=1)

    shared.fill(SimpleNamespace(base_model=Decoder()), CPU)
    for size in (256.0, 1.0, 1.0, 1.0):
        read = apply_prefix(rest, module, 0, torch.zeros(2, 1, dtype=torch.bfloat16), dim=1)
        (read * size).sum().backward()
    closing = torch.zeros(2, 3, requires_grad=True)
    apply_prefix(whole, module, 0, closing, dim=1).sum().backward()
    # in bfloat16, 256 + 1 is 256
    assert closing.grad is not None and closing.grad.tolist() == [[260.0, 260.0, 1.0]] * 2


@pytest.mark.parametrize("name", ["llama", "qwen3_5", "Gemma3"])
def test_what_is_kept_takes_the_bytes_that_are_counted(name: str) -> None:
    model, shared = build(name), SharedPrefix(build_rows()[0][:NUM_PREFIX])
    prepare_model(model, "tree")
    shared.fill(model, CPU)
    kept = sum(leaf.nbytes + leaf.grad.nbytes for leaf in shared.kept.values() if leaf.grad is not None)
    assert kept == count_prefix(model.config, NUM_PREFIX, 4)


def test_a_row_lies_after_the_prefix_or_whole() -> None:
    shared = SharedPrefix(np.array([7, 8]))
    rows = [np.array(row) for row in ([1, 2], [7, 8, 3, 4], [7, 8], [7, 8, 3])]
    reading, closing = (build_layout_after(rows, shared, is_read=is_read) for is_read in (True, False))
    assert reading.token_ids_L.tolist() == [3, 4, 1, 2, 7, 8]
    assert reading.position_ids_L.tolist() == [2, 3, 0, 1, 0, 1]
    assert [reading.positions_of(i).tolist() for i in range(4)] == [[2, 3], [0, 1], [4, 5], [0]]
    assert (reading.num_before, reading.num_continuing) == (2, 2)
    assert closing.token_ids_L.tolist() == [7, 8, 3, 4, 1, 2, 7, 8]
    assert [closing.positions_of(i).tolist() for i in range(4)] == [[4, 5], [0, 1, 2, 3], [6, 7], [0, 1, 2]]
    assert closing.num_before == 0


# ---- FlexAttention, which a GPU uses.


def build_reading_layout() -> tuple[Layout, int]:
    shared = SharedPrefix(np.arange(2 * BLOCK_SIZE))
    rows = [
        np.concatenate([shared.token_ids, np.full(length, 5), [own]]) for length, own in ((300, 1), (300, 2), (90, 3))
    ]
    return build_layout_after([*rows, np.full(200, 9)], shared, is_read=True).pad(BLOCK_SIZE), len(shared.token_ids)


@pytest.mark.parametrize("window", [None, 40, 200])
def test_on_a_gpu_the_prefix_is_read_as_on_a_cpu(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)  # it refuses gradients on a CPU
    monkeypatch.setattr(attention, "_compiled_flex_attention", lambda: flex.flex_attention)
    layout, before = build_reading_layout()
    torch.manual_seed(0)
    lengths = (layout.num_tokens, before + layout.num_tokens, before + layout.num_tokens)
    inputs = [torch.randn(1, h, n, 16, requires_grad=True) for h, n in zip((4, 2, 2), lengths, strict=True)]
    weights = torch.randn(1, 4, layout.num_tokens, 16)
    results = []
    for path in (attention._attend_by_segment, attention._attend_in_blocks):
        out = path(*inputs, layout, Scoring(sliding_window=window))
        results.append([out, *torch.autograd.grad((out * weights).sum(), inputs)])
    assert max(error(found, wanted) for found, wanted in zip(*results, strict=True)) <= TOLERANCE


def test_the_mask_of_a_prefix_compiles() -> None:
    layout, before = build_reading_layout()
    lengths = (layout.num_tokens, before + layout.num_tokens, before + layout.num_tokens)
    inputs = [torch.randn(1, h, n, 16) for h, n in zip((4, 2, 2), lengths, strict=True)]
    wanted = attention._attend_by_segment(*inputs, layout, Scoring())
    assert error(attention._attend_in_blocks(*inputs, layout, Scoring()), wanted) <= TOLERANCE


def test_other_lengths_of_prefixes_and_rows_compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)  # it refuses gradients on a CPU
    compiled = torch.compile(flex.flex_attention, dynamic=True, backend="eager")
    monkeypatch.setattr(attention, "_compiled_flex_attention", lambda: compiled)
    monkeypatch.setattr(attention, "_attend_by_segment", attention._attend_in_blocks)
    found, layer = [], torch.nn.Identity()

    def attend(layout: Layout, with_gradient: bool = True) -> None:
        before = counters["stats"]["unique_graphs"]
        query, key, value = (
            torch.randn(1, layout.num_tokens, heads, 16, requires_grad=with_gradient).transpose(1, 2)
            for heads in (3, 1, 1)
        )
        with torch.set_grad_enabled(with_gradient):
            attention.attend(layer, query, key, value, None, layout=layout)
        found.append(counters["stats"]["unique_graphs"] - before)

    # blocks of 128: never one alone, nor as many as there are heads or channels
    for num_shared, lengths in ((640, (400, 900)), (640, (300, 1200)), (896, (800, 300))):
        shared = SharedPrefix(np.arange(num_shared))
        attend(replace(build_layout([shared.token_ids], share_prefixes=False), prefix=shared), with_gradient=False)
        for is_read, own in zip((True, False), lengths, strict=True):
            rows = [np.concatenate([shared.token_ids, np.full(own, 5)])]
            attend(build_layout_after(rows, shared, is_read=is_read).pad(BLOCK_SIZE))
    # once without gradients and once with: passes that read and those that do not share it
    assert found == [1, 1, 0, *[0, 0, 0] * 2]


def test_a_prefix_that_ends_within_a_block_is_refused() -> None:
    layout = build_layout_after([np.arange(300)], SharedPrefix(np.arange(100)), is_read=True).pad(BLOCK_SIZE)
    with pytest.raises(ValueError, match=r"100 \+ 256 tokens is not one of multiples of 128"):
        build_block_mask(layout, CPU)


# ---- Which prefix, and which layout.


def choose(passes: list[list[tuple[list[int], int]]], **limits: int) -> list[int] | None:
    arrays = [[(np.array(ids), first) for ids, first in of_pass] for of_pass in passes]
    found = choose_prefix(arrays, **{"multiple": 1, **limits})
    return None if found is None else found.tolist()


def test_the_prefix_that_saves_most_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "LEAST_TOKENS", 2)
    a, b = [1, 2, 3, 4, 5], [1, 2, 3, 4, 6]
    assert choose([[(a, 4)], [(b, 4)]]) == [1, 2, 3]
    assert choose([[(a, 4)], [(b, 3)]]) == [1, 2]  # token 2 predicts a scored one
    assert choose([[(a, 4)], [(b, 4)]], multiple=2) == [1, 2]
    assert choose([[(a, 4)], [(b, 4)]], most_tokens=2) == [1, 2]
    assert choose([[(a, 4)], [(b, 4)]], most_tokens=0) is None
    assert choose([[(a, 2)], [(b, 2)]]) is None
    assert choose([[(a, 4), (b, 4)]]) is None  # one pass shares it anyway
    assert choose([[(a, 4)], [([9, 2], 1)]]) is None
    # four passes with two tokens save (4 * 4 - 5) * 2 forwards, two of them with three (4 * 2 - 5) * 3
    assert choose([[(a, 4)], [(b, 4)], [([1, 2, 7], 3)], [([1, 2, 8], 3)]]) == [1, 2]
    assert choose([[(a, 4)], [(b, 4)], [([8, 2, 7], 3)], [([9, 2, 8], 3)]]) == [1, 2, 3]


def build_packer(monkeypatch: pytest.MonkeyPatch, *, layout: str | None = None, **settings: Any) -> Packer:
    monkeypatch.setattr("polar_trl.grpo.packing.packer.gather_object", lambda rows: rows)
    args = {"steps_per_generation": 1, "gradient_accumulation_steps": 1, "loss_type": "dapo", "seed": 0}
    args |= {"max_completion_length": 64, "max_tokens_per_device": 60, "sequence_layout": layout}
    accelerator = {"num_processes": 1, "process_index": 0, "device": CPU, "distributed_type": "NO", "state": None}
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES, num_hidden_layers=1, **settings))
    return Packer(SimpleNamespace(**args), SimpleNamespace(**accelerator), model, layout or "tree")


def build_trained_rows(num_shared: int, num_own: int) -> list[Row]:
    rng = np.random.default_rng(0)
    shared, rows = rng.integers(90, size=num_shared), []
    for number in range(4):
        ids = np.concatenate([shared, [number], rng.integers(90, size=num_own)])
        trainable = np.arange(len(ids)) > num_shared + 1
        logprobs, versions = np.where(trainable, -math.log(90), 0).astype(np.float32), np.where(trainable, 0, -1)
        rows.append(
            Row(
                rollout_id=f"r{number}",
                advantage=1.0,
                token_ids_T=ids,
                trainable_T=trainable,
                logprobs_T=logprobs,
                policy_versions_T=versions,
            )
        )
    return rows


def test_passes_of_a_rank_keep_their_prefix_and_say_what_is_forwarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "LEAST_TOKENS", 2)
    rows = build_trained_rows(30, 25)  # one row a pass
    ([window], figures) = build_packer(monkeypatch).plan(rows, "train", step=0)
    layouts = [batch["packed"].layout for batch in window]
    assert [layout.num_before for layout in layouts] == [30, 30, 30, 0]
    assert len({id(layout.prefix) for layout in layouts}) == 1
    assert figures["polar/forwarded_tokens"] == 30 + sum(layout.num_tokens for layout in layouts)
    ([window], figures) = build_packer(monkeypatch).plan(rows, "eval", step=0)
    assert not any(batch["packed"].layout.prefix for batch in window)
    assert figures["polar/forwarded_tokens"] == 4 * 56


@pytest.mark.parametrize("reason", ["dropout", "short", "packed"])
def test_a_prefix_is_not_kept_where_that_is_not_exact_or_not_worth_it(
    monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    monkeypatch.setattr(prefix, "LEAST_TOKENS", 31 if reason == "short" else 2)
    settings: dict[str, Any] = {"attention_dropout": 0.1} if reason == "dropout" else {}
    packer = build_packer(monkeypatch, layout="packed" if reason == "packed" else None, **settings)
    ([window], _) = packer.plan(build_trained_rows(30, 25), "train", step=0)
    assert len(window) == 4 and not any(batch["packed"].layout.prefix for batch in window)


def test_ranks_that_gather_weights_at_each_forward_keep_no_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "LEAST_TOKENS", 2)
    monkeypatch.setattr("polar_trl.grpo.packing.packer._gathers_weights", lambda accelerator: True)
    ([window], _) = build_packer(monkeypatch).plan(build_trained_rows(30, 25), "train", step=0)
    assert not any(batch["packed"].layout.prefix for batch in window)


@pytest.mark.parametrize(
    ("num_shared", "asked", "kind"), [(1, None, "packed"), (12, None, "tree"), (1, "tree", "tree")]
)
def test_a_step_is_packed_where_a_tree_saves_too_little(
    monkeypatch: pytest.MonkeyPatch, num_shared: int, asked: str | None, kind: str
) -> None:
    packer = build_packer(monkeypatch, layout=asked)
    ([window], figures) = packer.plan(build_trained_rows(num_shared, 27 - num_shared), "train", step=0)
    assert {batch["packed"].kind for batch in window} == {kind}
    assert figures["polar/tree"] == (kind == "tree")
