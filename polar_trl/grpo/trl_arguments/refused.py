"""Refuse arguments of TRL and transformers that nothing here would read, or that would train another policy.

One table for each place where they are given. `scripts/dev/trl_arguments.py` writes docs/trl-arguments.md from these,
and tests/grpo/test_trl_arguments.py tries every argument that TRL has.
"""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from trl import GRPOConfig, ModelConfig
from trl.scripts.grpo import GRPOScriptArguments

from polar_trl.errors import ConfigError

_EXACT = "the trainer's log-probabilities do not apply it, so the loss would be biased"
_NO_SERVER = "there is no vLLM server to reach: the engine shares the trainer's process"
_NO_GENERATE = "transformers generates nothing here: agents are served by vLLM (use_vllm)"
_NO_WORKERS = "a row is a task's id, so that loading takes no time, and sandboxes are ordered as rows are fetched"
_NO_COMPILE = "each pass has other lengths, so that a compiled model would be compiled anew at every step"
_NO_QLORA = (
    "quantized weights cannot be trained here: the engine needs the trainer's own weights with the adapter merged in; "
    "use LoRA in bf16 (peft_config, use_peft)"
)

SETTINGS: Mapping[str, str] = {
    # How agents sample
    "use_vllm": "must be true: agents are served by the engine",
    "vllm_mode": "must be 'colocate': the engine shares the trainer's process and its weights",
    "top_p": f"must stay 1.0: {_EXACT}",
    "top_k": f"must stay 0: {_EXACT}",
    "min_p": f"must stay unset: {_EXACT}",
    "repetition_penalty": f"must stay 1.0: {_EXACT}",
    "generation_kwargs": f"must stay unset: {_EXACT}",
    "vllm_structured_outputs_regex": f"must stay unset: {_EXACT}",
    "cache_implementation": f"must stay unset: {_NO_GENERATE}",
    "use_transformers_continuous_batching": f"must be false: {_NO_GENERATE}",
    "transformers_continuous_batching_config": f"must stay unset: {_NO_GENERATE}",
    "use_transformers_paged": f"must be false: {_NO_GENERATE}",
    "vllm_model_impl": "must be 'vllm': transformers' models inside vLLM were not held against the trainer's",
    "vllm_tensor_parallel_size": (
        "must be 1: agents talk to one rank, and a tensor-parallel engine needs the same requests on all of them"
    ),
    "vllm_server_base_url": f"must stay unset: {_NO_SERVER}",
    "vllm_server_host": f"must stay unset: {_NO_SERVER}",
    "vllm_server_port": f"must stay unset: {_NO_SERVER}",
    "vllm_server_timeout": f"must stay unset: {_NO_SERVER}",
    "vllm_group_port": f"must stay unset: {_NO_SERVER}",
    "max_tool_calling_iterations": "must stay unset: the agent calls its own tools. Bound it with max_session_calls",
    "mask_truncated_completions": (
        "is not supported: a session is not one completion. Bound it with max_session_calls instead"
    ),
    # What is trained
    "cast_lm_head_to_fp32": "must be false: the engine computes the head in engine_dtype, and both must agree",
    "ds3_gather_for_generation": "must be true: the engine needs whole weights",
    "pad_to_multiple_of": "must stay 'auto': rows are packed without padding; max_tokens_per_device sizes a pass",
    "label_smoothing_factor": "must be 0: it is for losses with labels, and GRPO's has none",
    "neftune_noise_alpha": "must be unset: the trained pass is the policy's own",
    "torch_compile": f"must be false: {_NO_COMPILE}",
    "torch_compile_backend": f"must stay unset: {_NO_COMPILE}",
    "torch_compile_mode": f"must stay unset: {_NO_COMPILE}",
    "bf16_full_eval": "must be false: an evaluation would round the weights that are trained",
    "fp16_full_eval": "must be false: an evaluation would round the weights that are trained",
    # Data
    "remove_unused_columns": "must be false: rows name their tasks. Take columns out of the data set yourself",
    "train_sampling_strategy": "must stay 'random': TRL's own sampler deals out groups (shuffle_dataset)",
    "dataloader_num_workers": f"must be 0: {_NO_WORKERS}",
    "dataloader_persistent_workers": f"must be false: {_NO_WORKERS}",
    "dataloader_prefetch_factor": f"must stay unset: {_NO_WORKERS}",
    "dataloader_multiprocessing_context": f"must stay unset: {_NO_WORKERS}",
    # Logs and checkpoints
    "log_completions_hub_repo": "must stay unset: sessions stay on this machine. `polar-trl collect` makes data sets",
    "include_num_input_tokens_seen": "must be 'no': polar/sampled_tokens and polar/trained_tokens count tokens",
    "save_on_each_node": "must be false: all machines have one output_dir, which rank 0 writes to",
    "enable_jit_checkpoint": "must be false: SIGTERM ends a run, which goes on from its last checkpoint (save_steps)",
}
"""Settings of `GRPOConfig`, and what each must be: TRL's default, but for `_OTHER_VALUES`."""
_OTHER_VALUES: Mapping[str, tuple[Any, ...]] = {
    "use_vllm": (True,),
    "min_p": (None, 0.0),
    "generation_kwargs": (None, {}),
    "transformers_continuous_batching_config": (None, {}),
    "pad_to_multiple_of": ("auto", None),
    "neftune_noise_alpha": (None, 0.0),
    "include_num_input_tokens_seen": ("no", False),
}
"""The values of a setting that are fine, where that is not its default alone."""

ARGUMENTS: Mapping[str, str] = {
    "quantization_config": _NO_QLORA,
    "tools": "the agent brings its own tools: choose the agent by harness=, and give files and programs by its tasks",
    "rollout_func": "the agent makes the rollout: wrap yours as a command, harness=ShellHarness('python my_agent.py')",
    "environment_factory": (
        "an agent works in a sandbox, not in an environment object: put what reset() makes into a task's files, "
        "and get_reward() into grader="
    ),
}
"""Arguments of `GRPOTrainer.__init__`, and what to use instead."""

MODEL: Mapping[str, str] = {
    "model_revision": "is not read: the engine loads the default one; download the revision and name its folder",
    "load_in_8bit": f"must be false: {_NO_QLORA}",
    "load_in_4bit": f"must be false: {_NO_QLORA}",
    "bnb_4bit_quant_type": f"is not read: {_NO_QLORA}",
    "use_bnb_nested_quant": f"is not read: {_NO_QLORA}",
    "bnb_4bit_quant_storage": f"is not read: {_NO_QLORA}",
}
"""Keys of `ModelConfig`."""

SCRIPT: Mapping[str, str] = {
    "dataset_streaming": "must be false: a run must know its tasks before it starts",
    "ignore_bias_buffers": "must be false: `trl grpo` does not read it either",
}
"""Keys of `GRPOScriptArguments`."""


def refuse_settings(config: Any) -> None:
    """Raise `ConfigError` for a setting that is not as `SETTINGS` says. Call it before transformers changes them."""
    for name, must_be in SETTINGS.items():
        value = getattr(config, name)
        if value not in _OTHER_VALUES.get(name, (_default(GRPOConfig, name),)):
            raise ConfigError(f"{name} {must_be} (it is {value!r})")


def refuse_model_kwargs(config: Any) -> None:
    """Raise `ConfigError` for `model_init_kwargs` that cannot work."""
    given = config.model_init_kwargs or {}
    if "quantization_config" in given:
        raise ConfigError(f"model_init_kwargs has quantization_config: {_NO_QLORA}")
    if given.get("attn_implementation") is not None and config.sequence_layout != "single":
        raise ConfigError(
            f"attn_implementation {given['attn_implementation']!r} would not be used: packed rows have an attention "
            "of their own (FlexAttention on a GPU); leave it out, or set sequence_layout: single"
        )


def refuse_arguments(*given: Any) -> None:
    """Raise `ConfigError` for an argument that is given, of those in `ARGUMENTS` and in that order."""
    for name, value in zip(ARGUMENTS, given, strict=True):
        if value is not None and value != []:
            raise ConfigError(f"{name} cannot be used: {ARGUMENTS[name]}")


def refuse_keys(given: ModelConfig | GRPOScriptArguments) -> None:
    """Raise `ConfigError` for a key of `MODEL` or `SCRIPT` that is set."""
    for name, why in (MODEL if isinstance(given, ModelConfig) else SCRIPT).items():
        value = getattr(given, name)
        if value != _default(type(given), name):
            raise ConfigError(f"{name} {why} (it is {value!r})")


def _default(kind: type, name: str) -> Any:
    field = next(field for field in fields(kind) if field.name == name)
    return field.default if field.default_factory is MISSING else field.default_factory()
