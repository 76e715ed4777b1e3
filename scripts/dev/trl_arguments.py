#!/usr/bin/env python3
"""Write docs/trl-arguments.md: what becomes of every argument of TRL. `--write` writes it, otherwise it is printed.

  python scripts/dev/trl_arguments.py --write

The texts of what is refused are the errors themselves, got by setting each to a value that is not its default.
tests/grpo/test_trl_arguments.py fails where a release of TRL has an argument that is not listed, or the page is old.
"""

import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trl import GRPOConfig, GRPOTrainer, ModelConfig
from trl.scripts.grpo import GRPOScriptArguments

from polar_trl.errors import ConfigError
from polar_trl.grpo.config import PolarGRPOConfig
from polar_trl.grpo.trainer import PolarGRPOTrainer
from polar_trl.grpo.trl_arguments import refused
from polar_trl.harness.shell import ShellHarness

PAGE = Path(__file__).resolve().parents[2] / "docs" / "trl-arguments.md"
CPU = {"output_dir": "unused", "use_cpu": True, "bf16": False}
AS_TRL = "as TRL's"

LOSS = "tests/grpo/loss/test_token_loss.py"
STOCK = "tests/grpo/test_stock_training.py"
SAMPLE_COUNTS = "counts rollouts, of which each may become several rows"
NOT_READ = "GRPO does not read it, here as in TRL"
OF_TRANSFORMERS = "as transformers'"

# name -> (how, the test that holds it)
TRAINER: dict[str, tuple[str, str]] = {
    "model": ("a path, hub id or loaded model; `name_or_path` must lead vLLM to the same weights", STOCK),
    "reward_funcs": (
        "callables (async, too), `module.function` or `module:function`, TRL's own names, reward models; besides the "
        "grader, if there is one. `completions` hold the whole session after the instruction",
        STOCK,
    ),
    "args": (
        "`PolarGRPOConfig`, which takes everything of `GRPOConfig`; None: its defaults",
        "tests/grpo/test_inputs.py",
    ),
    "train_dataset": (
        "rows with a `prompt` (text, or one user message after system messages), or tasks; extra columns reach reward "
        "functions and `task.metadata`. No `IterableDataset`; None for an evaluation alone",
        STOCK,
    ),
    "eval_dataset": ("the same, or several by name, with metrics `eval_NAME_...`", STOCK),
    "processing_class": (AS_TRL, ""),
    "reward_processing_classes": ("as TRL's, one for each of `reward_funcs`", "tests/grpo/test_inputs.py"),
    "callbacks": (AS_TRL, ""),
    "optimizers": (AS_TRL, ""),
    "peft_config": ("LoRA that merges into its weights; the engine gets them merged", "tests/engine/test_lora.py"),
}
WORKS: dict[str, tuple[str, ...]] = {
    STOCK: (
        *("num_generations_eval", "reward_weights", "sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps"),
        *("log_completions", "load_best_model_at_end", "eval_strategy", "eval_steps"),
    ),
    LOSS: (
        *("beta", "epsilon", "delta", "epsilon_high", "sapo_temperature_neg", "sapo_temperature_pos", "vespo_k_pos"),
        *("vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg", "importance_sampling_level", "top_entropy_quantile"),
        *("entropy_coef", "use_adaptive_entropy", "entropy_coef_min", "entropy_coef_max", "entropy_coef_delta"),
        *("entropy_target", "vllm_importance_sampling_correction", "vllm_importance_sampling_clip_max"),
        *("vllm_importance_sampling_clip_min", "off_policy_mask_threshold", "use_bias_correction_kl"),
    ),
    "tests/grpo/test_step.py": ("generation_batch_size", "steps_per_generation", "num_iterations"),
    "tests/grpo/credit/test_advantage.py": ("scale_rewards", "multi_objective_aggregation"),
    "tests/grpo/test_preflight.py": ("trust_remote_code",),
    "tests/grpo/resume/test_resume.py": ("shuffle_dataset", "save_strategy", "save_steps", "seed"),
    "tests/grpo/logs/test_tracking.py": ("num_completions_to_print", "log_unique_prompts"),
    "tests/grpo/test_training.py": ("num_generations", "temperature", "gradient_accumulation_steps", "max_steps"),
    "": (
        *("disable_dropout", "vllm_gpu_memory_utilization", "vllm_enable_sleep_mode"),
        *("vllm_max_model_length", "vllm_importance_sampling_cap", "log_multimodal"),
    ),
}
"""Settings of GRPO that mean what they mean in TRL, by the test that uses them."""
DIFFERS: dict[str, str] = {
    "max_completion_length": "bounds one answer of the model, of which a session has many; 4,096 by default",
    "model_init_kwargs": "no `quantization_config`; `attn_implementation` with `sequence_layout: single` only",
    "logging_steps": "1 by default: a step takes minutes",
    "per_device_train_batch_size": SAMPLE_COUNTS,
    "per_device_eval_batch_size": SAMPLE_COUNTS,
    "chat_template_kwargs": "goes to the renderer, which knows the families' own",
    "router_aux_loss_coef": "must be 0 for a mixture of experts that has one",
    "metric_for_best_model": "`reward` by default, where a run evaluates; of several evaluation sets the first one's",
    "loss_type": "all but `bnpo`; means over rows are means over rollouts. `per_rollout` is another name of `grpo`",
    "vllm_importance_sampling_mode": "`token_truncate` by default: sums over a session would mask nearly all",
    "optim": "all that change weights in their step alone: not schedule-free, layerwise or LOMO",
    "logging_nan_inf_filter": "always off: a NaN is logged as one",
    "ddp_find_unused_parameters": "off for multimodal models, whose vision tower is frozen here",
    "ignore_data_skip": "must be false to resume",
    "save_only_model": "such a checkpoint cannot be resumed",
    "push_to_hub": "uploads the model's files and no sessions",
    "hub_strategy": "`end` or `every_save`: checkpoints hold tokens of sessions",
    "report_to": "all trackers; those that upload checkpoints are refused",
    "resume_from_checkpoint": "also `auto`: the newest that is whole, or a new run",
    "output_dir": "belongs to one run; also holds sessions, rows and logs",
    "gradient_checkpointing": "on a GPU for as many layers as a pass needs; checkpointed_layers sets how many",
    "bf16": (
        "false by default without a GPU or with `use_cpu`; the engine computes in the same, with weights rounded "
        "alike (docs/precision.md)"
    ),
    "fp16": "as `bf16`",
    "deepspeed": "ZeRO-2 and 3, by the accelerate files of `polar-trl configs`",
    "fsdp": "FSDP2, by the accelerate files of `polar-trl configs`",
    "use_liger_kernel": "its layers, not its loss (docs/packing.md)",
}
"""Settings that work, but not quite as TRL's."""
UNREAD: tuple[str, ...] = (
    *("average_tokens_across_devices", "batch_eval_metrics", "data_seed", "do_predict", "do_train", "do_eval"),
    *("eval_accumulation_steps", "eval_do_concat_batches", "eval_use_gather_object", "include_for_metrics"),
    *("label_names", "length_column_name", "prediction_loss_only", "use_cache"),
)
"""Settings of transformers that GRPO does not read."""
TRANSFORMERS: tuple[str, ...] = (
    *("accelerator_config", "adam_beta1", "adam_beta2", "adam_epsilon", "auto_find_batch_size"),
    *("dataloader_drop_last", "dataloader_in_order", "dataloader_pin_memory", "ddp_backend", "ddp_broadcast_buffers"),
    *("ddp_bucket_cap_mb", "ddp_static_graph", "ddp_timeout", "debug", "disable_tqdm", "eval_delay", "eval_on_start"),
    *("fsdp_config", "full_determinism", "gradient_checkpointing_kwargs", "greater_is_better", "hub_always_push"),
    *("hub_model_id", "hub_private_repo", "hub_revision", "hub_token", "learning_rate", "liger_kernel_config"),
    *("local_rank", "log_level", "log_level_replica", "log_on_each_node", "logging_first_step", "logging_strategy"),
    *("lr_scheduler_kwargs", "lr_scheduler_type", "max_grad_norm", "num_train_epochs", "optim_args"),
    *("optim_target_modules", "parallelism_config", "project", "restore_callback_states_from_checkpoint", "run_name"),
    *("save_total_limit", "skip_memory_metrics", "tf32", "torch_empty_cache_steps"),
    *("trackio_bucket_id", "trackio_space_id", "trackio_static_space_id", "use_cpu", "warmup_steps", "weight_decay"),
)
"""Settings that transformers' loop reads itself."""
MODEL: dict[str, str] = {
    "model_name_or_path": "also a run's `checkpoint-N`, or the name of a model that the package makes",
    "dtype": "to `model_init_kwargs`, as `trl grpo` does",
    "attn_implementation": "with `sequence_layout: single` only: packed rows have an attention of their own",
    **dict.fromkeys(
        (
            *("use_peft", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_target_parameters"),
            *("lora_modules_to_save", "lora_task_type", "use_rslora", "use_dora"),
        ),
        AS_TRL,
    ),
}
SCRIPT: dict[str, str] = {
    "dataset_name": "a folder or file of this machine, or a data set of the hub; `tasks` has more forms",
    "dataset_config": AS_TRL,
    "dataset_train_split": AS_TRL,
    "dataset_test_split": "as TRL's; `eval_tasks` instead names tasks",
    "reward_funcs": "as TRL's, and `module:function`",
    "reward_model_name_or_path": AS_TRL,
}
VALUES: dict[str, Any] = {
    "vllm_mode": "server", "vllm_model_impl": "transformers", "min_p": 0.1, "top_p": 0.9,
    "generation_kwargs": {"stop": ["x"]}, "vllm_structured_outputs_regex": "a+", "cache_implementation": "static",
    "transformers_continuous_batching_config": {"block_size": 8}, "vllm_server_base_url": "http://host:8000",
    "vllm_server_host": "host", "max_tool_calling_iterations": 3, "pad_to_multiple_of": 8,
    "label_smoothing_factor": 0.1, "neftune_noise_alpha": 5.0, "torch_compile_backend": "inductor",
    "torch_compile_mode": "default", "train_sampling_strategy": "sequential", "dataloader_num_workers": 2,
    "dataloader_prefetch_factor": 2, "dataloader_multiprocessing_context": "spawn",
    "log_completions_hub_repo": "me/sessions", "include_num_input_tokens_seen": "all",
    "model_revision": "v2", "bnb_4bit_quant_type": "fp4", "bnb_4bit_quant_storage": "uint8",
    "quantization_config": {"load_in_4bit": True}, "tools": [len], "rollout_func": len, "environment_factory": object,
}  # fmt: skip
"""Values that are not the default of what is refused; of booleans and numbers it is the opposite, or one more."""


def other_value(name: str, default: Any) -> Any:
    """Return a value that is not the default."""
    if name in VALUES:
        return VALUES[name]
    return not default if isinstance(default, bool) else default + 1


def catch(call: Callable[[], Any]) -> str:
    """Return the sentence of the `ConfigError` that a call raises."""
    try:
        call()
    except ConfigError as error:
        return str(error)
    raise AssertionError("nothing was refused")


def refuse_setting(name: str) -> str:
    """Set a refused setting; return the sentence."""
    default = next(field.default for field in dataclasses.fields(PolarGRPOConfig) if field.name == name)
    return catch(lambda: PolarGRPOConfig(**{**CPU, name: other_value(name, default)}))


def refuse_argument(name: str) -> str:
    """Give a refused argument to the trainer; return the sentence."""
    return catch(lambda: PolarGRPOTrainer("unused", harness=ShellHarness("true"), **{name: VALUES[name]}))


def refuse_key(kind: type, name: str) -> str:
    """Set a refused key of a dataclass of keys; return the sentence."""
    given = kind()
    setattr(given, name, other_value(name, getattr(given, name)))
    return catch(lambda: refused.refuse_keys(given))


def list_settings() -> list[str]:
    """List the settings of `GRPOConfig`."""
    return [field.name for field in dataclasses.fields(GRPOConfig)]


def list_arguments() -> list[str]:
    """List the arguments of `GRPOTrainer`."""
    return [name for name in inspect.signature(GRPOTrainer.__init__).parameters if name != "self"]


def describe_setting(name: str) -> tuple[str, str]:
    """Return the verdict on a setting, and how or why. Raises `KeyError` for one that is not listed."""
    if name in refused.SETTINGS:
        return "refused", refuse_setting(name)
    if name in DIFFERS:
        return "differs", DIFFERS[name]
    if name in UNREAD:
        return "works", NOT_READ
    if name in TRANSFORMERS:
        return "works", OF_TRANSFORMERS
    tests = [test for test, names in WORKS.items() if name in names]
    if not tests:
        raise KeyError(f"{name} is not listed in scripts/dev/trl_arguments.py")
    return "works", f"{AS_TRL} ({tests[0]})" if tests[0] else AS_TRL


def build_page() -> str:
    """Build the page."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield "# TRL's arguments"
    yield ""
    yield "Every argument of TRL 1.16: `GRPOTrainer`, `GRPOConfig` (with all of transformers' `TrainingArguments`),"
    yield "`ModelConfig` and the script `trl grpo`. *Works*: as in TRL. *Differs*: works, with the difference named."
    yield "*Refused*: by the sentence shown here, before anything is loaded. Ours: `polar-trl train --help`."
    yield ""
    yield "`scripts/dev/trl_arguments.py --write` writes this page. A test tries every argument."
    yield from _table("PolarGRPOTrainer", list_arguments(), _describe_argument)
    yield ""
    yield "Then, by keyword only: `harness` (the agent), `sandbox` and `grader`."
    own = [name for name in list_settings() if name in set(_of_grpo())]
    yield from _table("GRPOConfig", own, describe_setting)
    yield from _table("TrainingArguments", [n for n in list_settings() if n not in own], describe_setting)
    for kind, works, why in ((ModelConfig, MODEL, refused.MODEL), (GRPOScriptArguments, SCRIPT, refused.SCRIPT)):
        names = [field.name for field in dataclasses.fields(kind)]
        title = "ModelConfig" if kind is ModelConfig else "trl grpo"
        yield from _table(title, names, lambda n, w=works, r=why, k=kind: _describe_key(k, n, w, r))
    yield ""


def _of_grpo() -> list[str]:
    inherited = {field.name for field in dataclasses.fields(GRPOConfig.__mro__[1])}
    return [name for name in list_settings() if name not in inherited]


def _describe_argument(name: str) -> tuple[str, str]:
    if name in refused.ARGUMENTS:
        return "refused", refuse_argument(name)
    how, _ = TRAINER[name]
    return "works" if how == AS_TRL else "differs", how


def _describe_key(kind: type, name: str, works: dict[str, str], why: Any) -> tuple[str, str]:
    if name in why:
        return "refused", refuse_key(kind, name)
    return "works" if works[name] == AS_TRL else "differs", works[name]


def _table(title: str, names: list[str], describe: Callable[[str], tuple[str, str]]) -> Iterator[str]:
    yield from ("", f"## {title}", "", "| argument | | how, or why not |", "|---|---|---|")
    for name in names:
        verdict, text = describe(name)
        yield f"| `{name}` | {verdict} | {text.replace('|', chr(92) + '|')} |"


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        PAGE.write_text(build_page(), encoding="utf-8")
    else:
        print(build_page())
