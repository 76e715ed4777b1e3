"""Every argument of TRL works, works differently or is refused, and docs/trl-arguments.md says which."""

import dataclasses

import pytest
import trl_arguments as table
from trl import ModelConfig
from trl.scripts.grpo import GRPOScriptArguments

from polar_trl.grpo.config import PolarGRPOConfig
from polar_trl.grpo.trl_arguments import refused


def test_every_argument_is_listed_once() -> None:
    works = [name for names in table.WORKS.values() for name in names]
    listed = [*works, *table.DIFFERS, *table.UNREAD, *table.TRANSFORMERS, *refused.SETTINGS]
    assert sorted(listed) == sorted(table.list_settings())
    assert sorted([*table.TRAINER, *refused.ARGUMENTS]) == sorted(table.list_arguments())
    for kind, names in ((ModelConfig, table.MODEL), (GRPOScriptArguments, table.SCRIPT)):
        refused_names = refused.MODEL if kind is ModelConfig else refused.SCRIPT
        assert sorted([*names, *refused_names]) == sorted(field.name for field in dataclasses.fields(kind))


@pytest.mark.parametrize("name", refused.SETTINGS)
def test_what_is_refused_is_refused_before_anything_is_loaded(name: str) -> None:
    assert table.refuse_setting(name).startswith(f"{name} {refused.SETTINGS[name]}")


ACCEPTED = {
    "accelerator_config": {"split_batches": False},
    "debug": "underflow_overflow",
    "loss_type": "grpo",
    "importance_sampling_level": "sequence",
    "vllm_importance_sampling_mode": "token_mask",
    "multi_objective_aggregation": "normalize_then_sum",
    "scale_rewards": "batch",
    "model_init_kwargs": {"dtype": "float32"},
    "chat_template_kwargs": {"enable_thinking": False},
    "generation_batch_size": 16,
    "steps_per_generation": 2,
    "num_generations": 4,
    "num_generations_eval": 2,
    "reward_weights": [1.0],
    "router_aux_loss_coef": 0.0,
    "top_entropy_quantile": 0.5,
    "vllm_importance_sampling_clip_min": 0.1,
    "vllm_max_model_length": 1024,
    "off_policy_mask_threshold": 0.5,
    "epsilon_high": 0.3,
    "delta": 1.5,
    "num_completions_to_print": 2,
    "eval_steps": 2,
    "metric_for_best_model": "eval_reward",
    "vllm_importance_sampling_cap": 2.0,
    "vllm_gpu_memory_utilization": 0.5,
    "temperature": 0.7,
    "beta": 0.1,
    "max_completion_length": 64,
    "lr_scheduler_type": "cosine",
    "optim": "adafactor",
    "save_strategy": "epoch",
    "hub_strategy": "end",
    "report_to": "none",
    "seed": 7,
}
"""A value of each setting of GRPO, and of those of transformers that differ."""


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_works_is_accepted_and_kept(name: str) -> None:
    args = PolarGRPOConfig(**{**table.CPU, name: ACCEPTED[name]})
    value = getattr(args, name)
    if name not in ("accelerator_config", "debug", "lr_scheduler_type", "optim", "save_strategy", "hub_strategy"):
        assert value == ([] if name == "report_to" else ACCEPTED[name])


def test_booleans_and_numbers_of_grpo_are_accepted() -> None:
    """Those for which no value is named above: the other boolean, or a number that is near."""
    tried = 0
    for name in [name for names in table.WORKS.values() for name in names]:
        default = PolarGRPOConfig.__dataclass_fields__[name].default
        if name in ACCEPTED or name in ("eval_strategy", "load_best_model_at_end"):  # which need others beside them
            continue
        other = (
            not default if isinstance(default, bool) else default + 1 if isinstance(default, int) else default * 1.5
        )
        assert getattr(PolarGRPOConfig(**{**table.CPU, name: other}), name) == other, name
        tried += 1
    assert tried > 20


@pytest.mark.parametrize("name", refused.ARGUMENTS)
def test_arguments_of_the_trainer_that_are_refused(name: str) -> None:
    assert table.refuse_argument(name).startswith(f"{name} cannot be used: ")


@pytest.mark.parametrize(
    ("kind", "name"),
    [*((ModelConfig, name) for name in refused.MODEL), *((GRPOScriptArguments, name) for name in refused.SCRIPT)],
)
def test_keys_of_models_and_scripts_that_are_refused(kind: type, name: str) -> None:
    assert table.refuse_key(kind, name).startswith(f"{name} ")


def test_tests_that_the_table_names_are_there() -> None:
    named = {*table.WORKS, *(test for _, test in table.TRAINER.values())} - {""}
    for test in named:
        assert (table.PAGE.parents[1] / test).is_file(), test


def test_the_page_is_what_the_table_says() -> None:
    assert table.PAGE.read_text() == table.build_page(), "run scripts/dev/trl_arguments.py --write"
