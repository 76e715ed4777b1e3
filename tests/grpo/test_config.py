"""Settings and task sets that cannot work are refused in one sentence."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from loss_table import CASES, build_case_settings

from polar_trl.errors import ConfigError, TaskError
from polar_trl.grpo.config import PolarGRPOConfig
from polar_trl.grpo.dataset import build_dataset, build_prompt, read_tasks
from polar_trl.types import Task, TestSpec


def config(tmp_path: Path, **settings: Any) -> PolarGRPOConfig:
    return PolarGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **settings)


def test_one_process_does_not_train_on_several_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PolarGRPOConfig, "n_gpu", property(lambda _: 2))
    with pytest.raises(ConfigError, match=r"this process sees 2 GPUs, and trains on one: .* CUDA_VISIBLE_DEVICES=0"):
        config(tmp_path)


@pytest.mark.parametrize(
    ("has_gpu", "settings", "expected"),
    [
        (False, {}, False),
        (False, {"fp16": True}, False),
        (False, {"use_cpu": True}, False),
        (False, {"use_cpu": True, "bf16": True}, True),
        (True, {"use_cpu": True}, False),
    ],
)
def test_without_a_gpu_float32_is_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_gpu: bool, settings: dict[str, Any], expected: bool
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    assert PolarGRPOConfig(str(tmp_path), **settings).bf16 is expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has bfloat16")
def test_bfloat16_that_is_asked_for_without_a_gpu_is_transformers_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="doesn't support bf16/gpu"):
        PolarGRPOConfig(str(tmp_path), bf16=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"top_p": 0.9}, "top_p must stay 1.0"),
        ({"top_k": 20}, "top_k must stay 0"),
        ({"min_p": 0.1}, "min_p must stay unset"),
        ({"repetition_penalty": 1.1}, "repetition_penalty must stay 1.0"),
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"use_vllm": False}, "use_vllm must be true"),
        ({"vllm_mode": "server"}, "vllm_mode must be 'colocate'"),
        ({"mask_truncated_completions": True}, "mask_truncated_completions is not supported"),
        ({"loss_type": "bnpo"}, r"loss_type must not divide by the tokens of a forward pass, .* 'dapo' divides by"),
        ({"importance_sampling_level": "row"}, "importance_sampling_level must be one of sequence, token"),
        ({"vllm_importance_sampling_mode": "clip"}, "vllm_importance_sampling_mode must be one of sequence_mask, .*"),
        ({"top_entropy_quantile": 0.0}, "top_entropy_quantile must be above 0 and at most 1"),
        (
            {"loss_type": "vespo", "importance_sampling_level": "sequence"},
            "importance_sampling_level must be 'token' with loss_type='vespo'",
        ),
        (
            {"loss_type": "vespo", "vllm_importance_sampling_mode": "sequence_mask"},
            "vllm_importance_sampling_mode must be 'token_truncate' or 'token_mask' with loss_type='vespo'",
        ),
        (
            {"max_policy_lag": 1, "vllm_importance_sampling_correction": False},
            "max_policy_lag must be 0 with vllm_importance_sampling_correction: false",
        ),
        (
            {"max_policy_lag": 1, "num_iterations": 2},
            r"max_policy_lag must be 0 where a generation batch feeds several optimizer steps: .* \(it is 2\) divide",
        ),
        (
            {"max_policy_lag": 1, "steps_per_generation": 4, "gradient_accumulation_steps": 2},
            r"max_policy_lag must be 0 where .* divide gradient_accumulation_steps \(it is 2\)",
        ),
        ({"beta": float("nan")}, "beta must be a finite number"),
        ({"learning_rate": float("inf")}, "learning_rate must be a finite number"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha must be unset"),
        ({"weight_rounding": "down"}, "weight_rounding must be one of dithered, nearest"),
        ({"engine_dtype": "fp8"}, "engine_dtype must be 'bfloat16', 'float16', 'float32', or left out"),
        ({"optim": "schedule_free_adamw"}, "optim must change weights in its step and nowhere else"),
        ({"max_agents": 0}, "max_agents must be at least 1"),
        ({"max_completion_length": None}, "max_completion_length must be at least 1"),
        ({"model_init_kwargs": {"attn_implementation": "sdpa"}}, "'sdpa' would not be used: packed rows have an att"),
        ({"model_init_kwargs": '{"quantization_config": {}}'}, "model_init_kwargs has quantization_config: quantized"),
    ],
)
def test_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(tmp_path, **settings)


def test_the_defaults_are_accepted(tmp_path: Path) -> None:
    assert config(tmp_path).vllm_importance_sampling_mode == "token_truncate"


def test_every_case_that_is_held_against_trl_is_accepted(tmp_path: Path) -> None:
    for case in CASES:
        args = config(tmp_path, **build_case_settings(case))
        assert args.loss_type == case.settings["loss_type"]


def test_sessions_may_stay_open_where_a_step_ends_with_its_generations(tmp_path: Path) -> None:
    for more in ({}, {"steps_per_generation": 1}, {"num_iterations": 2, "steps_per_generation": 1}):
        assert config(tmp_path, max_policy_lag=1, gradient_accumulation_steps=2, **more).max_policy_lag == 1


def test_rows_name_their_tasks() -> None:
    tasks = [
        Task(id="a", instruction="do", files={"x/y": "z\n"}, metadata={"expected": {"k": [1, "2"]}}),
        Task(id="b", instruction='say "hi"', env={"K": "V"}, agent_timeout_s=3.5),
    ]
    by_id = read_tasks(tasks)
    rows = build_dataset(by_id)
    assert rows is not None and [by_id[row["task_id"]] for row in rows] == tasks
    assert build_prompt(by_id["b"]) == [{"role": "user", "content": 'say "hi"'}]


def test_a_plain_dataset_is_read_by_its_columns() -> None:
    rows = Dataset.from_list([{"id": "a", "instruction": "x", "files": {"p": "1"}}, {"id": "b", "instruction": "y"}])
    (first, second) = read_tasks(rows).values()
    assert dict(first.files) == {"p": "1"}
    assert dict(second.files) == {}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"id": "a"}], "'instruction' is missing"),
        (
            [{"id": "a", "instruction": "x", "promt": "y"}],
            "row 0: unknown field 'promt'; the fields are id, instr",
        ),
        ([{"id": "a", "instruction": "x"}, {"id": "a", "instruction": "y"}], "'a' is there twice"),
    ],
)
def test_bad_rows(rows: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        read_tasks(Dataset.from_list(rows))


def test_hidden_tests_of_a_task_made_in_python_are_checked() -> None:
    with pytest.raises(TaskError, match=r"task 'a': 'tests\.fail_to_pass' is missing or empty"):
        read_tasks([Task(id="a", instruction="x", tests=TestSpec(fail_to_pass=()))])


def test_an_empty_set_is_refused() -> None:
    with pytest.raises(TaskError, match="empty"):
        read_tasks([])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss_type": "foo"}, r"loss_type must be one of cispo, dapo, .* \(it is 'foo'\)"),
        ({"max_policy_lag": None}, "max_policy_lag must be 0 or more"),
        ({"resample_zero_variance": -1}, "resample_zero_variance must be 0 or more"),
        ({"straggler_quantile": 1.0}, "straggler_quantile is 1.0: give a share between 0 and 1"),
        ({"max_tokens_per_device": 0}, "max_tokens_per_device must be at least 1"),
        ({"sequence_layout": "padded"}, "sequence_layout must be 'tree', 'packed', 'single'"),
        ({"max_trajectory_tokens": 1}, "max_trajectory_tokens must be at least 2"),
        ({"engine_max_num_seqs": -3}, "engine_max_num_seqs must be at least 1"),
        ({"engine_cuda_graphs": "FULL"}, "engine_cuda_graphs must not be 'FULL': .* silently wrong text .* 'decode'"),
        ({"engine_cuda_graphs": "full"}, "engine_cuda_graphs must not be 'full'"),
        ({"engine_cuda_graphs": "PIECEWISE"}, r"must be 'default' .* or 'none' .* \(it is 'PIECEWISE'\)"),
        ({"engine_cuda_graphs": None}, "engine_cuda_graphs must be 'default'"),
        ({"vllm_gpu_memory_utilization": 3.0}, "vllm_gpu_memory_utilization must be above 0 and at most 1"),
    ],
)
def test_keys_of_training(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PolarGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **settings)


def test_per_rollout_is_the_mean_of_grpo(tmp_path: Path) -> None:
    args = PolarGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, loss_type="per_rollout")
    assert args.loss_type == "grpo"
