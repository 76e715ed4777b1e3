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
    """TRL's parser of the three groups of settings of a run, and of what another command adds to them.

    Args:
        more: Dataclasses of settings.
    """

    def __init__(self, *more: type, **kwargs: Any) -> None:
        super().__init__((RunArguments, PolarGRPOConfig, ModelConfig, *more), **kwargs)


def parse_run(
    parser: RunParser, arguments: Sequence[str] | None = None
) -> tuple[RunArguments, PolarGRPOConfig, ModelConfig]:
    """Settings from `--config FILE` and flags, which win; None reads the command line. Raises as `parse_groups`."""
    run, args, model = parse_groups(parser, arguments)
    return run, args, model


def parse_groups(parser: RunParser, arguments: Sequence[str] | None = None) -> tuple[Any, ...]:
    """The same, with what the parser reads `more`: one object of each dataclass.

    Raises:
        ConfigError: the file cannot be read, a key is unknown, or a value cannot work.
    """
    try:
        return tuple(parser.parse_args_and_config(None if arguments is None else list(arguments)))
    except (OSError, YAMLError) as error:
        raise ConfigError(str(error)) from error
    except ConfigError:
        raise
    except ValueError as error:
        known = [name for group in parser.dataclass_types for name in group.__dataclass_fields__]
        words = [word.strip("-'\"[],.=") for word in str(error).split()]
        near = [m for word in words for m in difflib.get_close_matches(word, known, 1, 0.8) if m != word]
        raise ConfigError(f"{error}" + (f" Did you mean {near[0]!r}?" if near else "")) from error


def refuse_unread(model_config: ModelConfig) -> None:
    """Keys of TRL's `ModelConfig` that a run does not pass on must not look as if it did."""
    for item in dataclasses.fields(ModelConfig):
        name, value = item.name, getattr(model_config, item.name)
        if name == "model_name_or_path" or name == "use_peft" or name.startswith(("lora_", "use_rslora", "use_dora")):
            continue
        if value != getattr(ModelConfig(), name):
            raise ConfigError(f"{name} is not read here; give it through model_init_kwargs instead")
