"""What `train_cost` counts, and that its rows fill a pass."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig, Qwen3Config, Qwen3ForCausalLM

from polar_trl.grpo.packing.balance import CostModel, plan_micro_batches

SCRIPTS = Path(__file__).parents[3] / "scripts"

import fla_tuning  # noqa: E402
import kernel_shares  # noqa: E402
import train_cost  # noqa: E402
import train_flops  # noqa: E402

SIZES: dict[str, Any] = {
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "tie_word_embeddings": True,
}
# query, key, value and output of attention, and three matrices of the MLP
WEIGHTS = 8 * 8 + 8 * 4 + 8 * 4 + 8 * 8 + 3 * 8 * 12
PAIRS = 5 * 6 // 2 + 3 * 4 // 2


def test_full_fine_tuning_counts_six_operations_per_weight_and_token() -> None:
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES, num_hidden_layers=2))
    found = train_flops.count_flops(model, [5, 3], 4, checkpointing=True)
    attention = 2 * 4 * (2 * 4) * PAIRS
    assert found.linear == 6 * 8 * 2 * WEIGHTS
    assert found.attention == 3 * attention
    assert found.delta_rule == 0
    assert found.head == 6 * 4 * 11 * 8
    assert found.recomputed == 2 * 8 * 2 * WEIGHTS + attention + 2 * 4 * 11 * 8
    assert found.model == found.linear + found.attention + found.head
    assert found.hardware == found.model + found.recomputed


def test_lora_counts_four_for_frozen_weights_and_six_for_its_own() -> None:
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES, num_hidden_layers=1))
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])).get_base_model()
    found = train_flops.count_flops(adapted, [5, 3], 4, checkpointing=False)
    assert found.linear == 8 * (4 * WEIGHTS + 6 * 2 * (8 + 8))
    assert found.head == found.recomputed * 2 == 4 * 4 * 11 * 8


def test_a_delta_rule_counts_its_state_three_times_per_token() -> None:
    heads = {"linear_num_key_heads": 1, "linear_num_value_heads": 2}
    dims = {"linear_key_head_dim": 4, "linear_value_head_dim": 6}
    layers = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SIZES, **heads, **dims, **layers))
    found = train_flops.count_flops(model, [5, 3], 4, checkpointing=True)
    assert found.delta_rule == 3 * 2 * (6 * 8 * 2 * 4 * 6)
    assert found.attention == 3 * 4 * (2 * 4) * PAIRS


@pytest.mark.parametrize("tokens", train_cost.TOKENS)
def test_rows_fill_the_pass_and_train_three_tenths(tokens: int) -> None:
    rows = train_cost.build_rows(tokens, 100, scale=1)
    assert sum(len(row.token_ids_T) for row in rows) == tokens
    assert sum(row.num_trainable for row in rows) / tokens == pytest.approx(0.3, abs=0.02)
    assert not any(row.trainable_T[0] for row in rows)


@pytest.mark.parametrize("tokens", train_cost.TOKENS[:-1])
def test_rows_of_full_fine_tuning_are_two_full_passes(tokens: int) -> None:
    case = train_cost.Case.parse(f"qwen3-4b:full:{tokens}")
    assert (case.passes, case.dtype) == (2, torch.float32)
    rows = [row.token_ids_T for row in train_cost.build_rows(2 * tokens, 100, scale=1)]
    cost = CostModel(per_token=1.0, per_pair=1e-4)
    plan = plan_micro_batches(rows, num_ranks=1, max_tokens=tokens, share_prefixes=False, cost=cost)
    assert [sum(len(rows[i]) for i in part) for part in plan.micro_batches[0]] == [tokens, tokens]


@pytest.mark.parametrize(("name", "billions"), [("qwen3.5-4b", 4.206), ("qwen3-4b", 4.022), ("qwen3-0.6b", 0.596)])
def test_sizes_make_models_of_their_names(name: str, billions: float) -> None:
    make: Any = Qwen3_5ForCausalLM if name == "qwen3.5-4b" else Qwen3ForCausalLM
    with torch.device("meta"):
        model = make(train_cost.build_config(name, tiny=False))
    assert sum(weight.numel() for weight in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.001)


def test_a_case_that_there_is_not_is_refused() -> None:
    case = train_cost.Case.parse("qwen3-4b:lora:32768")
    assert (case.tokens, case.checkpointing, case.liger) == (32768, True, False)
    case = train_cost.Case.parse("qwen3-4b:lora:16384:keep:liger")
    assert (case.checkpointing, case.liger) == (False, True)
    for text in (
        "qwen3-8b:lora:16384",
        "qwen3-4b:qlora:16384",
        "qwen3-4b:lora:20000",
        "qwen3-4b",
        "qwen3-4b:lora:16384:x",
    ):
        with pytest.raises(ValueError):
            train_cost.Case.parse(text)


def test_tuning_keeps_usual_configurations_and_one_that_fits() -> None:
    configs = [SimpleNamespace(num_warps=w, num_stages=s) for w in (2, 4, 8) for s in (2, 3, 4)]
    kept = [(config.num_warps, config.num_stages) for config in fla_tuning.choose_configs(configs, 3)]
    assert kept == [(4, 3), (2, 3), (4, 2)]
    assert [(c.num_warps, c.num_stages) for c in fla_tuning.choose_configs(configs, 1)] == [(4, 2)]


@pytest.mark.parametrize(
    ("kernel", "group"),
    [
        ("triton_tem_fused_flex_attention_0", "attention"),
        ("chunk_gated_delta_rule_fwd_kernel_h_blockdim64", "delta rule"),
        ("causal_conv1d_bwd_kernel", "delta rule"),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", "matrix products"),
        ("_backward_kernel", "LM head, without its products"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::silu_kernel>", "elementwise, norms, copies"),
        ("ncclDevKernel_AllReduce", "other"),
    ],
)
def test_kernels_are_grouped_by_their_names(kernel: str, group: str) -> None:
    assert kernel_shares.find_group(kernel) == group
