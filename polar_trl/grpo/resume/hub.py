"""Write a card beside each saved model; upload model, tokenizer, card and figures to the hub, and nothing else.

transformers uploads the whole folder of a run but for its checkpoints. Ours also holds sessions, trained rows,
completions and logs, with what users' tasks and agents say, and its training_args.bin the hub's own token.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers.trainer
from accelerate.utils import is_peft_model
from httpx import HTTPError

from polar_trl.errors import ConfigError
from polar_trl.grpo.logs.model_card import CARD_FILE, build_card
from polar_trl.run_folder import write_whole

logger = logging.getLogger(__name__)

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


class WithModelCard:
    """The methods of transformers' trainer that save, evaluate and upload, with a card of ours in each folder.

    Mixed into a trainer that has `settings_log` and `resume`.
    """

    def save_model(self: Any, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """transformers', with a model card in the folder."""
        super().save_model(output_dir, _internal_call)  # type: ignore[misc]
        if self.args.should_save:
            _write_card(self, Path(output_dir or self.args.output_dir))

    def evaluate(self: Any, *args: Any, **kwargs: Any) -> dict[str, float]:
        """transformers'; the card of a model that was saved before gets the figures."""
        metrics: dict[str, float] = super().evaluate(*args, **kwargs)  # type: ignore[misc]
        folder = Path(self.args.output_dir)
        if self.is_world_process_zero() and (folder / CARD_FILE).exists():
            _write_card(self, folder)
        return metrics

    def create_model_card(self: Any, model_name: str | None = None, **kwargs: Any) -> None:
        """Write a card into the run's folder, in the place of TRL's. `tags` are added; a data set has no name here."""
        if self.is_world_process_zero():
            tags = kwargs.get("tags") or ()
            _write_card(self, Path(self.args.output_dir), model_name, (tags,) if isinstance(tags, str) else tags)

    def init_hf_repo(self: Any, token: str | None = None) -> None:
        """transformers'. Raises `ConfigError` where the hub cannot be reached or refuses."""
        try:
            super().init_hf_repo(token)  # type: ignore[misc]
        except (OSError, HTTPError) as error:  # offline mode and a missing login are the former
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ConfigError(
                "push_to_hub: the hub gives no repository "
                f"{self.args.hub_model_id or os.path.basename(os.path.abspath(self.args.output_dir))!r} ({reason}); "
                "check the network and `hf auth login`, or train with push_to_hub: false and upload afterwards"
            ) from error
        if self.is_world_process_zero() and is_peft_model(self.model):
            _warn_of_local_base(self.model.active_peft_config.base_model_name_or_path)

    def push_to_hub(self: Any, *args: Any, **kwargs: Any) -> Any:
        """transformers', without sessions, rows and logs."""
        with model_files_only():
            return super().push_to_hub(*args, **kwargs)  # type: ignore[misc]

    def _push_from_checkpoint(self: Any, checkpoint_folder: str) -> None:
        with model_files_only():
            super()._push_from_checkpoint(checkpoint_folder)  # type: ignore[misc]


def _warn_of_local_base(base: str | None) -> None:
    if base and os.path.isdir(base):
        logger.warning(
            "the base is a local folder (%s), from which nobody else can load the pushed adapter: set "
            "base_model_name_or_path in its adapter_config.json to the base's name on the hub",
            base,
        )


def _write_card(trainer: Any, folder: Path, name: str | None = None, tags: Sequence[str] = ()) -> None:
    run = (trainer.args.hub_model_id or os.path.abspath(trainer.args.output_dir)).rpartition("/")[2]
    card = build_card(
        trainer.settings_log.settings or trainer.settings_log.facts,
        trainer.state.log_history,
        name=name or run,
        seconds=trainer.resume.seconds,
        tags=[*trainer._tag_names, *tags],
        is_adapter=is_peft_model(trainer.model),
        hub_id=trainer.hub_model_id or trainer.args.hub_model_id,
    )
    write_whole(folder / CARD_FILE, card.encode())
