"""A run file and flags -> the settings of a run: one YAML file is a whole run, every key of it can be a flag.

It refuses keys that nobody reads, with the nearest known name.
"""

import dataclasses
import difflib
from collections.abc import Sequence
from typing import Any

from trl import ModelConfig, TrlParser
from yaml import YAMLError  # type: ignore[import-untyped]

from polar_trl.errors import ConfigError
from polar_trl.grpo.config import PolarGRPOConfig
from polar_trl.run_setup import RunArguments


class RunParser(TrlParser):  # type: ignore[misc]
    """TRL's parser of the three groups of settings."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__((RunArguments, PolarGRPOConfig, ModelConfig), **kwargs)


def parse_run(
    parser: RunParser, arguments: Sequence[str] | None = None
) -> tuple[RunArguments, PolarGRPOConfig, ModelConfig]:
    """Settings from `--config FILE` and flags, which win; None reads the command line.

    Raises:
        ConfigError: the file cannot be read, a key is unknown, or a value cannot work.
    """
    try:
        run, args, model = parser.parse_args_and_config(None if arguments is None else list(arguments))
    except (OSError, YAMLError) as error:
        raise ConfigError(str(error)) from error
    except ConfigError:
        raise
    except ValueError as error:
        known = [name for group in parser.dataclass_types for name in group.__dataclass_fields__]
        words = [word.strip("-'\"[],.=") for word in str(error).split()]
        near = [m for word in words for m in difflib.get_close_matches(word, known, 1, 0.8) if m != word]
        raise ConfigError(f"{error}" + (f" Did you mean {near[0]!r}?" if near else "")) from error
    return run, args, model


def refuse_unread(model_config: ModelConfig) -> None:
    """Keys of TRL's `ModelConfig` that a run does not pass on must not look as if it did."""
    for item in dataclasses.fields(ModelConfig):
        name, value = item.name, getattr(model_config, item.name)
        if name == "model_name_or_path" or name == "use_peft" or name.startswith(("lora_", "use_rslora", "use_dora")):
            continue
        if value != getattr(ModelConfig(), name):
            raise ConfigError(f"{name} is not read here; give it through model_init_kwargs instead")
