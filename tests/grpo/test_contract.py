"""The seams of TRL that we stand on: when a TRL release moves one, it fails here and says which."""

import inspect

import pytest
from accelerate.optimizer import AcceleratedOptimizer
from transformers import Trainer
from trl import GRPOTrainer
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer
from trl.trainer.utils import add_fused_lm_head


@pytest.mark.parametrize(
    ("owner", "method", "parameters"),
    [
        (GRPOTrainer, "_prepare_inputs", ["self", "generation_batch"]),
        (GRPOTrainer, "training_step", ["self", "model", "inputs", "num_items_in_batch"]),
        (Trainer, "training_step", ["self", "model", "inputs", "num_items_in_batch"]),
        (
            GRPOTrainer,
            "prediction_step",
            ["self", "model", "inputs", "prediction_loss_only", "ignore_keys"],
        ),
        (GRPOTrainer, "get_train_dataloader", ["self"]),
        (GRPOTrainer, "_clip_grad_norm", ["self", "model"]),
        (GRPOTrainer, "_get_grad_norm", ["self", "model", "grad_norm"]),
        (GRPOTrainer, "_compute_loss", ["self", "model", "inputs"]),
        (GRPOTrainer, "_calculate_rewards", ["self", "inputs", "prompts", "completions", "completion_ids_list"]),
        (GRPOTrainer, "_save_checkpoint", ["self", "model", "trial"]),
        (GRPOTrainer, "_get_train_sampler", ["self", "dataset"]),
        (VLLMGeneration, "_init_vllm", ["self"]),
        (VLLMGeneration, "sync_weights", ["self"]),
        (VLLMGeneration, "_iter_named_params", ["self"]),
    ],
)
def test_signatures(owner: type, method: str, parameters: list[str]) -> None:
    assert list(inspect.signature(getattr(owner, method)).parameters) == parameters


def test_the_fused_head_takes_labels_that_are_shifted_already() -> None:
    source = inspect.getsource(add_fused_lm_head)
    assert "shift_labels" in source and '"base_model"' in source


def test_the_names_that_we_replace_are_looked_up_in_these_modules() -> None:
    assert grpo_trainer.VLLMGeneration is VLLMGeneration
    assert "VLLMGeneration(" in inspect.getsource(GRPOTrainer.__init__)
    assert "LLM(" in inspect.getsource(VLLMGeneration._init_vllm)


def test_a_step_is_judged_before_it_is_made_and_a_skipped_one_keeps_the_learning_rate() -> None:
    loop = inspect.getsource(Trainer._run_epoch)
    names = (
        "_clip_grad_norm(",
        "_get_grad_norm(",
        "optimizer.step()",
        "optimizer_step_was_skipped",
        "_maybe_log_save",
    )
    places = [loop.index(name) for name in names]
    assert places == sorted(places)
    assert "tr_loss -= tr_loss" in inspect.getsource(Trainer._maybe_log_save_evaluate)
    assert "_is_overflow" in inspect.getsource(AcceleratedOptimizer.step_was_skipped.fget)
    assert "self.optimizer.step = self._optimizer_patched_step_method" in inspect.getsource(AcceleratedOptimizer.step)


def test_vespo_weighs_by_the_sum_that_it_is_given() -> None:
    names = list(inspect.signature(GRPOTrainer.get_gamma_weights).parameters)
    assert names[:4] == ["advantages", "log_ratio_per_token", "mask", "importance_sampling_ratio"]
    assert names[4:] == ["k_pos", "lambda_pos", "k_neg", "lambda_neg"]
