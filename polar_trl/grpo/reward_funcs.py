"""Find the reward functions that `reward_funcs` names: callables, dotted paths, names of TRL's own, reward models.

Each is checked before a model is loaded: a name that leads nowhere, or weights that are not one for each, raise
`ConfigError`.
"""

import difflib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from torch import nn
from transformers import PreTrainedModel
from trl.import_utils import is_math_verify_available
from trl.rewards import (
    accuracy_reward,
    get_soft_overlong_punishment,
    reasoning_accuracy_reward,
    think_format_reward,
)
from trl.trainer.utils import get_callable_name, get_config_model_id

from polar_trl.errors import ConfigError
from polar_trl.grade.base import Grader
from polar_trl.grpo.resume.model_folder import load_config
from polar_trl.grpo.rewards import mark_not_finite
from polar_trl.user_code import load_object

RewardFunction: TypeAlias = Callable[..., Any] | PreTrainedModel | str
"""A function of TRL's form, a reward model, or the name of either."""
TRL_REWARDS: dict[str, Callable[..., Any]] = {
    "accuracy_reward": accuracy_reward,
    "reasoning_accuracy_reward": reasoning_accuracy_reward,
    "think_format_reward": think_format_reward,
    # lengths in tokens, those of `trl grpo`
    "get_soft_overlong_punishment": get_soft_overlong_punishment(max_completion_len=1280, soft_punish_cache=256),
}
"""TRL's own reward functions, by the names that `trl grpo --reward_funcs` knows."""


def load_reward_functions(reward_funcs: RewardFunction | Sequence[RewardFunction] | None) -> list[Any]:
    """Return the functions and models that are named; a reward model that is a path or a hub id stays a text.

    Args:
        reward_funcs: One or several: a callable (async, too), "module.function" or "module:function", a name of
            `TRL_REWARDS`, a folder or hub id of a sequence classification model, or such a model.

    Raises `ConfigError`.
    """
    if reward_funcs is None:
        return []
    given = list(reward_funcs) if isinstance(reward_funcs, list | tuple) else [reward_funcs]
    return [_load(item) for item in given]


def list_reward_functions(
    grader: Grader | None,
    reward_funcs: RewardFunction | Sequence[RewardFunction] | None,
    weights: Sequence[float] | None = None,
) -> list[Any]:
    """Return the functions that TRL is given: a column for the grader first, if there is one, then `reward_funcs`.

    Args:
        weights: `reward_weights`, one for each of these.

    Raises:
        ConfigError: nothing gives a reward, a name leads nowhere, or weights do not fit.
    """
    functions = [mark_not_finite(function) for function in load_reward_functions(reward_funcs)]
    functions = functions if grader is None else [_grader_column, *functions]
    if not functions:
        raise ConfigError(
            "nothing gives a reward: pass grader=, reward_funcs=, or tasks with a 'grader' command or tests"
        )
    if weights is not None and len(weights) != len(functions):
        names = ", ".join(map(_name, functions))
        raise ConfigError(
            f"reward_weights has length {len(weights)}, and {len(functions)} parts give rewards: {names}; give one "
            "weight for each, in this order"
        )
    return functions


def match_processing_classes(processing_classes: Any, functions: Sequence[Any], grader: Grader | None) -> Any:
    """Return TRL's `reward_processing_classes` with a place for the grader's column. Raises `ConfigError`."""
    if processing_classes is None:
        return None
    given = processing_classes if isinstance(processing_classes, list) else [processing_classes]
    wanted = len(functions) - (grader is not None)
    if len(given) != wanted:
        raise ConfigError(
            f"reward_processing_classes has length {len(given)}, and reward_funcs {wanted}: give one for each, None "
            "for functions and for a model with its own tokenizer"
        )
    return given if grader is None else [None, *given]


def _grader_column(**_: Any) -> list[float | None]:
    raise AssertionError("the grader's rewards are in the rollouts")


_grader_column.__name__ = "grader"  # the metric's name


def _load(item: Any) -> Any:
    if isinstance(item, nn.Module):
        if getattr(getattr(item, "config", None), "num_labels", None) != 1:
            raise ConfigError(
                f"reward_funcs has a {type(item).__name__}: a reward model is a sequence classification model with "
                "num_labels=1"
            )
        return item
    if callable(item):
        return item
    if not isinstance(item, str):
        raise ConfigError(f"reward_funcs has {item!r:.100}: give a function, the name of one, or a reward model")
    if item in TRL_REWARDS:
        if "accuracy" in item and not is_math_verify_available():
            raise ConfigError(f"reward_funcs: {item!r} needs the package math-verify: pip install math-verify")
        return TRL_REWARDS[item]
    module, separator, name = item.partition(":") if ":" in item else item.rpartition(".")
    if separator and all(part.isidentifier() for part in (*module.split("."), name)) and not Path(item).is_dir():
        return _import(f"{module}:{name}")
    if Path(item).is_dir() or "/" in item:
        return _check_model(item)
    near = difflib.get_close_matches(item, TRL_REWARDS, n=1)
    raise ConfigError(
        f"reward_funcs has {item!r}: "
        + (f"did you mean {near[0]!r}? " if near else "")
        + f"give 'module.function', a folder or hub id of a reward model, or one of TRL's: {', '.join(TRL_REWARDS)}"
    )


def _import(name: str) -> Callable[..., Any]:
    function = load_object("reward_funcs", name)
    if not callable(function):
        raise ConfigError(f"reward_funcs {name!r} is {function!r:.100}, which is no function")
    return function


def _check_model(name: str) -> str:
    try:
        config = load_config(name)
    except ConfigError as error:
        raise ConfigError(f"reward_funcs: {error}") from error
    kinds = config.architectures or []
    if not any("ForSequenceClassification" in kind for kind in kinds):
        raise ConfigError(
            f"reward_funcs: {name!r} is a {', '.join(kinds) or 'model of no kind'}; a reward model is a sequence "
            "classification model, since its head would be random otherwise"
        )
    return name


def _name(function: Any) -> str:
    if isinstance(function, str):
        return function
    if isinstance(function, nn.Module):
        return str(get_config_model_id(function.config))
    return str(get_callable_name(function))
