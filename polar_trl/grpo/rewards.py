"""Tell a reward that is not finite from a reward function that abstains, which are both NaN once TRL has asked it.

A function abstains with None, and the others decide. A number that is not finite, of whichever function, leaves the
rollout without any reward. TRL makes NaN of None, so the two have to be told apart before it does.
"""

import functools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from trl.trainer.utils import get_callable_name, is_async_callable

logger = logging.getLogger(__name__)


def mark_not_finite(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a TRL reward function under the same name, so that it gives infinity for each number that is not finite.

    TRL makes a float32 of it, by which numbers that float32 cannot hold become infinity as well. A reward model, or
    the name of one, is left as it is: it never abstains, and a NaN of it is one.
    """
    if isinstance(function, (nn.Module, str)):
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> list[float | None]:
        return _mark(function(*args, **kwargs))

    @functools.wraps(function)
    async def call_async(*args: Any, **kwargs: Any) -> list[float | None]:
        return _mark(await function(*args, **kwargs))

    wrapper: Any = call_async if is_async_callable(function) else call
    wrapper.__name__ = get_callable_name(function)  # the metric's; a partial or an object has none to copy
    return wrapper


def find_not_finite(rewards_RF: Tensor, functions: Sequence[Any]) -> Tensor:
    """Return [R, F]: where a reward of a function of `mark_not_finite` is there, but not finite."""
    is_model_F = torch.tensor([isinstance(function, nn.Module) for function in functions], device=rewards_RF.device)
    return torch.isinf(rewards_RF) | (torch.isnan(rewards_RF) & is_model_F)


def warn_not_finite(rollout_ids: Sequence[str], names: Sequence[str], not_finite_RF: Tensor) -> None:
    """Warn of each rollout that has no reward because one was not finite."""
    for rollout_id, found_F in zip(rollout_ids, not_finite_RF.tolist(), strict=True):
        if given := ", ".join(name for name, found in zip(names, found_F, strict=True) if found):
            logger.warning("rollout %s has no reward: that of %s is not a finite number", rollout_id, given)


@contextmanager
def without_trl_warning() -> Iterator[None]:
    """Silence TRL's warning, which prints a whole rollout; `polar/rollouts_without_reward` counts them."""
    trl_logger = logging.getLogger("trl.trainer.grpo_trainer")
    trl_logger.addFilter(_is_of_use)
    try:
        yield
    finally:
        trl_logger.removeFilter(_is_of_use)


def _is_of_use(record: logging.LogRecord) -> bool:
    return "All reward functions returned None" not in str(record.msg)


def _mark(rewards: Iterable[Any]) -> list[float | None]:
    return [None if reward is None else _to_float(reward) for reward in rewards]


def _to_float(reward: Any) -> float:
    try:
        value = float(reward)
    except OverflowError:  # an integer beyond every float
        return math.inf
    return math.inf if math.isnan(value) else value
