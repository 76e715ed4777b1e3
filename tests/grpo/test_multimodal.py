"""Qwen3.5's published class, which is multimodal, as a policy for text: its rows, its parts, and whole steps."""

import copy
import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from launch import run_worker
from peft import LoraConfig
from tiny_hybrid import build_tiny_hybrid
from torch import Tensor
from trl.trainer.utils import add_fused_lm_head

from polar_trl.engine import colocate
from polar_trl.grpo.multimodal import exclude_unreached, find_unreached, freeze_unreached
from polar_trl.grpo.packing.forward import PackedRows, choose_layout, pack_rows, prepare_model, score
from polar_trl.grpo.packing.prefix import SharedPrefix, keep_prefix

VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 48}
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
ROPE = {
    "rope_type": "default",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.5,
    "mrope_section": [4, 2, 2],
    "mrope_interleaved": True,
}
CPU = torch.device("cpu")


def build_config() -> Any:
    config = transformers.Qwen3_5Config(
        text_config={**SIZES, "rope_parameters": ROPE, "tie_word_embeddings": True},
        vision_config=VISION,
        tie_word_embeddings=True,
    )
    config.architectures = ["Qwen3_5ForConditionalGeneration"]
    return config


def build_model() -> Any:
    torch.manual_seed(0)
    model = transformers.Qwen3_5ForConditionalGeneration(build_config())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(-5.0, -2.0)  # slow decay, which shows leaks and rounds less
            elif parameter.dim() > 1:
                parameter.normal_(std=0.3)
    return model


def build_rows() -> tuple[list[Any], list[Any]]:
    """Three rows that begin alike and one that does not, and which of their tokens are scored."""
    rng = np.random.default_rng(0)
    shared = rng.integers(3, 97, 20)
    rows = [np.concatenate([shared, rng.integers(3, 97, n)]) for n in (5, 70, 33)] + [rng.integers(3, 97, 40)]
    scored = []
    for row in rows:
        wanted = np.zeros(len(row), dtype=bool)
        wanted[10:14] = wanted[22:] = True
        scored.append(wanted)
    return rows, scored


def score_plainly(model: Any, rows: list[Any], scored: list[Any]) -> Tensor:
    """[S] by transformers alone, each row in a pass of its own, without positions: the class makes its own, in 3D."""
    parts = []
    for row, wanted in zip(rows, scored, strict=True):
        at = np.flatnonzero(wanted)
        logps = model(input_ids=torch.tensor(row)[None]).logits[0].log_softmax(-1)
        parts.append(logps[at - 1].gather(1, torch.tensor(row[at])[:, None])[:, 0])
    return torch.cat(parts)


def pack(kind: Any) -> list[PackedRows]:
    rows, scored = build_rows()
    if kind == "single":
        return [pack_rows([r], [s], kind=kind, device=CPU) for r, s in zip(rows, scored, strict=True)]
    if kind == "kept":  # of the first nine tokens none is scored or predicts a scored one
        prefix, halves = SharedPrefix(rows[0][:9]), (slice(0, 2), slice(2, 4))
        return [
            pack_rows(rows[some], scored[some], kind="tree", device=CPU, prefix=prefix, is_read=some.start == 0)
            for some in halves
        ]
    return [pack_rows(rows, scored, kind=kind, device=CPU)]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["tree", "packed", "single", "kept"])
def test_rows_are_scored_and_trained_as_by_plain_passes_over_each_alone(kind: Any, checkpointing: bool) -> None:
    plain = build_model()
    model = copy.deepcopy(plain)
    wanted = score_plainly(plain, *build_rows())
    wanted.sum().backward()
    assert choose_layout(model, None) == "tree"
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    prepare_model(model, "tree" if kind == "kept" else kind)
    if checkpointing:
        model.train()
        model.gradient_checkpointing_enable()
    parts = []
    for packed in pack(kind):
        with keep_prefix(packed.layout, model, SimpleNamespace(autocast=nullcontext, device=CPU)):
            parts.append(score(model, packed)[0])
            parts[-1].sum().backward()
    found = torch.cat(parts)
    assert len(found) == 4 * 4 + 3 + 68 + 31 + 18
    assert (found - wanted).abs().max() <= 2e-5
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    assert set(gradients) == set(expected) == {n for n, _ in model.named_parameters() if "visual" not in n}
    for name, gradient in gradients.items():
        assert (gradient - expected[name]).norm() <= 1e-4 * expected[name].norm(), name


def test_positions_count_within_rows_in_all_three_dimensions() -> None:
    # the same tokens at other positions give other numbers, so that the test above would see wrong ones
    model = build_model()
    rows, scored = build_rows()
    ids, at = torch.tensor(rows[1])[None], np.flatnonzero(scored[1])
    positions = torch.arange(ids.shape[1])[None]
    with torch.no_grad():
        plain = model(input_ids=ids).logits[0, at - 1]
        flat = model(input_ids=ids, position_ids=positions).logits[0, at - 1]
        stretched = model(input_ids=ids, position_ids=positions * 3).logits[0, at - 1]
    assert (plain - flat).abs().max() <= 1e-4
    assert (plain - stretched).abs().max() > 1e-2


def test_what_text_does_not_reach_is_frozen_and_the_rest_is_not() -> None:
    model = build_model()
    assert find_unreached(model) == ["model.visual"]
    num_visual = sum(p.numel() for p in model.model.visual.parameters())
    assert freeze_unreached(model) == num_visual > 0
    assert {n for n, p in model.named_parameters() if not p.requires_grad} == {
        n for n, _ in model.named_parameters() if n.startswith("model.visual.")
    }
    assert freeze_unreached(model) == 0


def test_a_model_of_text_has_no_such_parts() -> None:
    model = transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**SIZES))
    assert find_unreached(model) == []
    assert freeze_unreached(model) == 0
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(
    ("targets", "theirs", "excluded", "expected"),
    [
        ("all-linear", None, r"(model\.visual(\..*)?)", {"in_proj_qkv", "q_proj", "up_proj"}),
        ("all-linear", ["up_proj"], r"(model\.visual(\..*)?)|((.*\.)?up_proj)", {"in_proj_qkv", "q_proj"}),
        ("all-linear", r".*mlp.*", r"(model\.visual(\..*)?)|(.*mlp.*)", {"in_proj_qkv", "q_proj"}),
        (["q_proj", "proj"], None, r"(model\.visual(\..*)?)", {"q_proj"}),
        (["q_proj"], None, None, {"q_proj"}),
    ],
)
def test_an_adapter_leaves_out_what_text_does_not_reach(
    targets: Any, theirs: Any, excluded: str | None, expected: set[str]
) -> None:
    from peft import get_peft_model

    adapter = LoraConfig(r=2, target_modules=targets, exclude_modules=theirs)
    exclude_unreached(adapter, build_config())
    assert adapter.exclude_modules == excluded
    names = {
        n.split(".lora_A")[0] for n, _ in get_peft_model(build_model(), adapter).named_parameters() if "lora_A" in n
    }
    assert not [name for name in names if "visual" in name]
    assert {name.rsplit(".", 1)[1] for name in names} & {"in_proj_qkv", "q_proj", "up_proj"} == expected


@pytest.mark.parametrize("has_flashinfer", [False, True])
def test_the_engine_is_told_what_the_model_needs(monkeypatch: pytest.MonkeyPatch, has_flashinfer: bool) -> None:
    monkeypatch.setattr(colocate.importlib.util, "find_spec", lambda name: object() if has_flashinfer else None)
    no_images = {"limit_mm_per_prompt": {"image": 0, "video": 0}}
    triton = {} if has_flashinfer else {"additional_config": {"gdn_prefill_backend": "triton"}}
    cached = {"enable_prefix_caching": True}
    assert colocate.build_model_kwargs(build_config()) == no_images | triton | cached
    assert colocate.build_model_kwargs(transformers.Qwen3_5TextConfig(**SIZES)) == triton | cached
    assert colocate.build_model_kwargs(transformers.LlamaConfig()) == {}
    assert colocate.build_model_kwargs(transformers.Gemma3Config()) == no_images


# Whole steps: the published class in the trainer, and in vLLM's CPU build.


@pytest.fixture(scope="module")
def checkpoint(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-hybrid"
    sizes = {"hidden_size": 64, "num_layers": 2, "head_dim": 64, "delta_head_dim": 64}
    return build_tiny_hybrid(smollm2, folder, **sizes)  # type: ignore[arg-type]


def read_result(out: Path) -> dict[str, Any]:
    return json.loads((out / "result.json").read_text())


def check_steps(result: dict[str, Any]) -> None:
    steps = [entry for entry in result["log"] if "sampling/sampling_logp_difference/mean" in entry]
    assert len(steps) == 2
    for entry in steps:
        assert entry["sampling/sampling_logp_difference/mean"] < 0.02  # the engine is bfloat16
        assert entry["sampling/sampling_logp_difference/max"] < 0.1
        assert entry["polar/trained_tokens"] > 0
    assert result["layout"] == "tree"
    assert result["others_with_gradient"] == []
    assert all(changed == 0.0 for name, changed in result["others"].items() if "visual" in name)
    # merging an adapter into a weight for a push and taking it out again rounds twice
    assert all(changed < 1e-6 for changed in result["others"].values())


def test_two_steps_of_all_weights_on_two_ranks_without_a_search_for_unused_weights(
    checkpoint: Path, tmp_path: Path
) -> None:
    run_worker("hybrid_worker.py", str(checkpoint), str(tmp_path), "full", processes=2)
    result = read_result(tmp_path)
    check_steps(result)
    assert not [name for name in result["trainable"] if "visual" in name]
    assert {"model.language_model.embed_tokens.weight", "model.language_model.layers.0.linear_attn.conv1d.weight"} <= {
        name for name, moved in result["trainable"].items() if moved > 1e-4
    }
    # the engine has the trained weights and not the first ones, and so has the folder that was saved
    assert result["gap_saved"] < 0.05
    assert result["gap_first_weights"] > 5 * result["gap_saved"]
    assert result["saved_names"] and result["saved_equal"]


def test_two_steps_of_an_adapter_with_evaluation(checkpoint: Path, tmp_path: Path) -> None:
    run_worker("hybrid_worker.py", str(checkpoint), str(tmp_path), "lora")
    result = read_result(tmp_path)
    check_steps(result)
    assert all("lora_" in name and "visual" not in name for name in result["trainable"])
    assert any("in_proj_qkv" in name for name in result["trainable"])
    assert any("q_proj" in name for name in result["trainable"])
    assert result["gap_merged"] < 0.05
    assert result["gap_first_weights"] > 3 * result["gap_merged"]
