"""The seams of TRL, transformers, accelerate and vLLM that we stand on: when a release moves one, it fails here.

Private names that the package reads, writes or calls are found in its code, so that a new one has to be pinned here.
"""

import ast
import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import GradientState
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import PreTrainedModel, Trainer
from transformers.integrations import WandbCallback
from transformers.integrations.integration_utils import TrackioCallback
from trl import GRPOTrainer
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer
from trl.trainer.utils import add_fused_lm_head

PACKAGE = Path(__file__).resolve().parents[2] / "polar_trl"
PRIVATE: dict[str, Any] = {
    "_metrics": GRPOTrainer,
    "_step": GRPOTrainer,
    "_tokenizer": GRPOTrainer,
    "_calculate_rewards": GRPOTrainer,
    "_pending_metrics": GRPOTrainer,
    "_pending_extra_logs": GRPOTrainer,
    "_current_train_step_time": GRPOTrainer,
    "_entropy_bonus_enabled": GRPOTrainer,
    "_last_world_entropy": GRPOTrainer,
    "_last_loaded_step": GRPOTrainer,
    "_llm_weights_sleeping": VLLMGeneration,
    "_dist": VLLMGeneration,
    "_get_output_dir": Trainer,
    "_globalstep_last_logged": Trainer,
    "_total_loss_scalar": Trainer,
    "_from_config": PreTrainedModel,
    "_wandb": WandbCallback,
    "_trackio": TrackioCallback,
    "_set_sync_gradients": GradientState,
    "_optimizer_patched_step_method": AcceleratedOptimizer,
    "_is_overflow": AcceleratedOptimizer,
    "_cast_input_dtype": BaseTunerLayer,
    "_get_attn_isa": "vllm.v1.attention.backends.cpu_attn",
    "_run_in_subprocess": "vllm.model_executor.models.registry",
    "_actions": "argparse",
    "_get_values": "argparse",
    "_buffers": "torch.nn.modules.module",
    "_parameters": "torch.nn.modules.module",
    "_fp": "urllib3.response",
    "_sock": "socket",
    "_update_current_test_var": "_pytest.runner",
}
"""Name -> the class or module in whose source it is."""
FORWARD = "Forwarded"
"""The descriptor of grpo/trl_bridge.py that takes a name as text."""
NOT_PRIVATE = {"_exit", "_getframe", "_cdata"}
"""`os._exit` and `sys._getframe` are documented; `_cdata` is an attribute of torch's compiled classes, which
`tests/tools` rests on."""


def find_private_names() -> set[str]:
    """Attributes with an underscore that the package takes from objects whose classes it does not define."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    ours = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))}
    ours |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    is_self = [isinstance(node.value, ast.Name) and node.value.id == "self" for node in attributes]
    ours |= {
        node.attr for node, own in zip(attributes, is_self, strict=True) if own and isinstance(node.ctx, ast.Store)
    }
    forwarded = [
        node.args[0] for node in nodes if isinstance(node, ast.Call) and getattr(node.func, "id", "") == FORWARD
    ]
    names = [node.value for node in forwarded if isinstance(node, ast.Constant)]
    names += [node.attr for node in attributes if node.attr not in ours]
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


def test_every_private_name_that_we_touch_is_pinned() -> None:
    assert find_private_names() <= set(PRIVATE) | NOT_PRIVATE


@pytest.mark.parametrize("name", PRIVATE)
def test_private_names_are_there(name: str) -> None:
    owner = PRIVATE[name]
    assert name in inspect.getsource(importlib.import_module(owner) if isinstance(owner, str) else owner)


def test_every_private_method_that_we_override_is_pinned() -> None:
    """`test_signatures` says what each takes."""
    pinned = {parameters[1] for parameters in SIGNATURES}
    for path in ("grpo/trainer.py", "grpo/packed_trainer.py", "grpo/resume/hub.py"):
        tree = ast.parse((PACKAGE / path).read_text(encoding="utf-8"))
        methods = {
            node.name
            for owner in tree.body
            if isinstance(owner, ast.ClassDef)
            for node in owner.body
            if isinstance(node, ast.FunctionDef)
        }
        overridden = {name for name in methods if hasattr(GRPOTrainer, name) and name != "__init__"}
        assert overridden <= pinned, path


SIGNATURES = [
    (GRPOTrainer, "train", ["self", "resume_from_checkpoint", "trial", "ignore_keys_for_eval"]),
    (GRPOTrainer, "_prepare_inputs", ["self", "generation_batch"]),
    (GRPOTrainer, "training_step", ["self", "model", "inputs", "num_items_in_batch"]),
    (Trainer, "training_step", ["self", "model", "inputs", "num_items_in_batch"]),
    (GRPOTrainer, "prediction_step", ["self", "model", "inputs", "prediction_loss_only", "ignore_keys"]),
    (GRPOTrainer, "get_train_dataloader", ["self"]),
    (GRPOTrainer, "_clip_grad_norm", ["self", "model"]),
    (GRPOTrainer, "_get_grad_norm", ["self", "model", "grad_norm"]),
    (GRPOTrainer, "_compute_loss", ["self", "model", "inputs"]),
    (GRPOTrainer, "_calculate_rewards", ["self", "inputs", "prompts", "completions", "completion_ids_list"]),
    (GRPOTrainer, "_save_checkpoint", ["self", "model", "trial"]),
    (GRPOTrainer, "_finalize_training", ["self", "trial", "num_train_samples", "start_time"]),
    (GRPOTrainer, "create_model_card", ["self", "model_name", "dataset_name", "tags"]),
    (GRPOTrainer, "evaluate", ["self", "eval_dataset", "ignore_keys", "metric_key_prefix"]),
    (GRPOTrainer, "log", ["self", "logs", "start_time"]),
    (GRPOTrainer, "save_model", ["self", "output_dir", "_internal_call"]),
    (GRPOTrainer, "_push_from_checkpoint", ["self", "checkpoint_folder"]),
    (Trainer, "init_hf_repo", ["self", "token"]),
    (Trainer, "push_to_hub", ["self", "commit_message", "blocking", "token", "revision", "kwargs"]),
    (GRPOTrainer, "_get_output_dir", ["self", "trial"]),
    (GRPOTrainer, "_get_train_sampler", ["self", "dataset"]),
    (
        Trainer,
        "_run_epoch",
        [
            *("self", "model", "epoch", "train_dataloader", "steps_in_epoch", "num_update_steps_per_epoch", "trial"),
            *("ignore_keys_for_eval", "start_time", "resume_from_checkpoint", "epochs_trained"),
            "steps_trained_in_current_epoch",
        ],
    ),
    (
        Trainer,
        "_maybe_log_save_evaluate",
        [
            *("self", "tr_loss", "grad_norm", "model", "trial", "epoch", "ignore_keys_for_eval", "start_time"),
            "learning_rate",
        ],
    ),
    (VLLMGeneration, "_init_vllm", ["self"]),
    (VLLMGeneration, "sync_weights", ["self"]),
    (VLLMGeneration, "_iter_named_params", ["self"]),
    (GradientState, "_set_sync_gradients", ["self", "sync_gradients"]),
]


@pytest.mark.parametrize(("owner", "method", "parameters"), SIGNATURES)
def test_signatures(owner: type, method: str, parameters: list[str]) -> None:
    assert list(inspect.signature(getattr(owner, method)).parameters) == parameters


def test_the_fused_head_takes_labels_that_are_shifted_already() -> None:
    source = inspect.getsource(add_fused_lm_head)
    assert "shift_labels" in source and '"base_model"' in source


def test_the_names_that_we_replace_are_looked_up_in_these_modules() -> None:
    assert grpo_trainer.VLLMGeneration is VLLMGeneration
    assert "VLLMGeneration(" in inspect.getsource(GRPOTrainer.__init__)
    assert "LLM(" in inspect.getsource(VLLMGeneration._init_vllm)
    for method in (Trainer.push_to_hub, Trainer._push_from_checkpoint):
        source = inspect.getsource(method)
        assert source.count("upload_folder(") == source.count(" hf_api().upload_folder(") > 0


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
