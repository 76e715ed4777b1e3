"""Test the operations that train_cost counts, by hand, and that its rows fill a pass."""

from typing import Any

import pytest
import torch
import train_cost
import train_flops
from peft import LoraConfig, get_peft_model
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig, Qwen3Config, Qwen3ForCausalLM

from polar_trl.grpo.packing.balance import CostModel, plan_micro_batches

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
    found = train_flops.count_flops(model, [5, 3], 4, checkpointed=1)
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
    found = train_flops.count_flops(adapted, [5, 3], 4, checkpointed=0)
    assert found.linear == 8 * (4 * WEIGHTS + 6 * 2 * (8 + 8))
    assert found.head == found.recomputed * 2 == 4 * 4 * 11 * 8


def test_a_delta_rule_counts_its_state_three_times_per_token() -> None:
    heads = {"linear_num_key_heads": 1, "linear_num_value_heads": 2}
    dims = {"linear_key_head_dim": 4, "linear_value_head_dim": 6}
    layers = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SIZES, **heads, **dims, **layers))
    found = train_flops.count_flops(model, [5, 3], 4, checkpointed=1)
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
