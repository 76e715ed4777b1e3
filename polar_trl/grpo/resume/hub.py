"""Upload the model, its tokenizer, the card and figures of a run to the hub, and nothing else of its folder.

transformers uploads the whole folder of a run but for its checkpoints. Ours also holds sessions, trained rows,
completions and logs, with what users' tasks and agents say, and its training_args.bin the hub's own token.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import transformers.trainer

from polar_trl.errors import ConfigError

UPLOADED = (
    *("README.md", "*.png", "config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json"),
    *("pytorch_model*.bin", "pytorch_model.bin.index.json", "adapter_config.json", "adapter_model.bin", "*.py"),
    *("tokenizer*", "chat_template*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *("*.model", "*.tiktoken", "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
)
"""Patterns of files directly in the folder; `*.py` is the code of a model that brings its own."""
_IGNORED = ("*/*", "polar_masters*")
_SWITCHES = {
    "wandb": ("WANDB_LOG_MODEL", ("checkpoint",)),
    "mlflow": ("HF_MLFLOW_LOG_ARTIFACTS", ("1", "true", "yes", "on")),
    "dagshub": ("HF_DAGSHUB_LOG_ARTIFACTS", ("1", "true", "yes", "on")),
}
"""Variables by which a tracker uploads whole checkpoints or folders, and their values that do so."""


class _ModelFiles:
    """The hub's client, whose uploads of folders are filtered."""

    def __init__(self, api: Any) -> None:
        self._api = api

    def __getattr__(self, name: str) -> Any:
        return getattr(self._api, name)

    def upload_folder(self, *, ignore_patterns: Sequence[str] = (), **kwargs: Any) -> Any:
        """Upload only files of a model; see `HfApi.upload_folder`."""
        ignored = [*ignore_patterns, *_IGNORED]
        return self._api.upload_folder(**kwargs, allow_patterns=list(UPLOADED), ignore_patterns=ignored)


@contextmanager
def model_files_only() -> Iterator[None]:
    """Filter what transformers' trainer uploads inside the block."""
    hf_api = transformers.trainer.hf_api
    transformers.trainer.hf_api = lambda: _ModelFiles(hf_api())
    try:
        yield
    finally:
        transformers.trainer.hf_api = hf_api


def refuse_uploads(args: Any) -> None:
    """Raise `ConfigError` for settings that would upload checkpoints, which hold tokens of sessions."""
    strategy = str(getattr(args.hub_strategy, "value", args.hub_strategy))
    if args.push_to_hub and strategy not in ("end", "every_save"):
        raise ConfigError(
            f"hub_strategy must be 'end' or 'every_save' (it is {strategy!r}): checkpoints hold tokens of sessions, "
            "and these stay on this machine"
        )
    for tracker, (variable, values) in _SWITCHES.items():
        if tracker in (args.report_to or ()) and os.environ.get(variable, "").lower() in values:
            raise ConfigError(
                f"{variable}={os.environ[variable]} would upload checkpoints, which hold tokens of sessions, to "
                f"{tracker}: unset it{', or set it to end' if tracker == 'wandb' else ''}"
            )
