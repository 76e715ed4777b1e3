"""Compute the rewards of rollouts: the grader's verdicts, then TRL's reward functions.

A reward function abstains with None, and the others decide. A number that is not finite, of whichever function, leaves
the rollout without any reward. TRL makes NaN of None, so the two have to be told apart before it does.
"""

import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from trl.trainer.utils import get_callable_name, is_async_callable

from polar_trl.errors import ConfigError, PolarError
from polar_trl.grpo.dataset import build_prompt, list_columns
from polar_trl.grpo.logs.completions_table import CompletionsTable
from polar_trl.grpo.trl_bridge import TrlBridge
from polar_trl.rollout.session_run import RolloutResult
from polar_trl.types import Message, Rollout, Task
from polar_trl.user_code import describe_error, locate_function

logger = logging.getLogger(__name__)


class Rewards:
    """Computes rewards [R, F] of all ranks' rollouts: the grader's, if there is one, then TRL's reward functions'.

    TRL is given the grader's column as a reward function too, since it counts weights and names by them; the verdicts
    are in the rollouts, so TRL is not asked for them.

    Args:
        trainer: Initialized by TRL with the functions of `reward_funcs.list_reward_functions`.
        has_grader: Whether the first of them is the grader's.
        tasks: By mode and id.
        table: Keeps prompts and conversations of rollouts, if there is one.
    """

    def __init__(
        self,
        trainer: Any,
        trl: TrlBridge,
        *,
        has_grader: bool,
        tasks: Mapping[str, Mapping[str, Task]],
        table: CompletionsTable | None,
    ) -> None:
        self._accelerator = trainer.accelerator
        self._trl = trl
        self._tasks = tasks
        self._table = table
        self.names = list(trainer.reward_func_names)
        self.weights_F: Tensor = trainer.reward_weights
        self.num_not_finite = 0
        """Rollouts for which a reward function gave a number that is not finite, since `RolloutLog` last took it."""
        self._functions = list(trainer.reward_funcs)
        self._has_grader = has_grader
        self._asks_trl = len(self._functions) > has_grader
        if has_grader:
            trl.drop_first_reward_function()

    def compute(self, results: Sequence[RolloutResult], mode: str) -> Tensor:
        """Return [R, F] rewards of all ranks' rollouts, NaN where there is none (a collective).

        A rollout for which one function gave a number that is not finite has no reward of any.
        """
        rollouts = [result.rollout for result in results]
        tasks = [self._tasks[mode][rollout.task_id] for rollout in rollouts]
        prompts = [build_prompt(task) for task in tasks]
        conversations = [conversation_after_instruction(rollout) for rollout in rollouts]
        columns = []
        if self._has_grader:
            grades = [[math.nan if rollout.reward is None else rollout.reward] for rollout in rollouts]
            grades_R1 = torch.tensor(grades, dtype=torch.float32, device=self._accelerator.device)
            columns.append(self._accelerator.gather(grades_R1))
        if self._asks_trl:
            ids = [[i for call in rollout.calls for i in call.completion.token_ids] for rollout in rollouts]
            names = list_columns(self._tasks[mode])
            rows = [
                {**{name: task.metadata.get(name) for name in names}, "task": task, "rollouts": rollout}
                for task, rollout in zip(tasks, rollouts, strict=True)
            ]
            # as TRL has it: text after text, messages after messages
            completions = [
                conversation[-1]["content"] if isinstance(prompt, str) else conversation
                for prompt, conversation in zip(prompts, conversations, strict=True)
            ]
            with without_trl_warning():
                columns.append(self._trl.calculate_rewards(rows, prompts, completions, ids))
        rewards_RF = torch.cat(columns, dim=1)
        # Law 4: where the infrastructure failed or the grader could not decide, no reward function may do so instead.
        failed_R = self._accelerator.gather(
            torch.tensor([rollout.error is not None for rollout in rollouts], device=rewards_RF.device)
        )
        not_finite_RF = find_not_finite(rewards_RF, self._functions)
        not_finite_RF[failed_R] = False
        self.num_not_finite += int(not_finite_RF.any(dim=1).sum())
        first = self._accelerator.process_index * len(rollouts)
        local = slice(first, first + len(rollouts))
        warn_not_finite([rollout.id for rollout in rollouts], self.names, not_finite_RF[local])
        rewards_RF[failed_R | not_finite_RF.any(dim=1)] = torch.nan
        extra = self._trl.take_extra_columns()
        if self._table is not None:
            self._table.note(prompts, results, conversations, extra)
        return rewards_RF


def conversation_after_instruction(rollout: Rollout) -> list[dict[str, Any]]:
    """Return the last call's conversation after its first user message, in TRL's conversational form."""
    calls = [call for call in rollout.calls if call.purpose == "policy"]
    if not calls:
        return [{"role": "assistant", "content": ""}]
    messages = [*calls[-1].request.messages, calls[-1].message]
    first_user = next((i for i, m in enumerate(messages) if m.role == "user"), -1)
    return [_message_to_dict(m) for m in messages[first_user + 1 :]]


def _message_to_dict(message: Message) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.reasoning:
        plain["reasoning_content"] = message.reasoning
    if message.tool_calls:
        plain["tool_calls"] = [
            {"type": "function", "id": c.id, "function": {"name": c.name, "arguments": c.arguments}}
            for c in message.tool_calls
        ]
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    return plain


def mark_not_finite(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a TRL reward function under the same name, so that it gives infinity for each number that is not finite.

    TRL makes a float32 of it, by which numbers that float32 cannot hold become infinity as well. A reward model, or
    the name of one, is left as it is: it never abstains, and a NaN of it is one. The wrapper raises `ConfigError` that
    names the function and its line where it raises, or returns anything but a number or None for each session.
    """
    if isinstance(function, (nn.Module, str)):
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> list[float | None]:
        with _naming(function):
            given = function(*args, **kwargs)
        return _read_rewards(function, given, kwargs)

    @functools.wraps(function)
    async def call_async(*args: Any, **kwargs: Any) -> list[float | None]:
        with _naming(function):
            given = await function(*args, **kwargs)
        return _read_rewards(function, given, kwargs)

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
    trl_logger.addFilter(_is_other_warning)
    try:
        yield
    finally:
        trl_logger.removeFilter(_is_other_warning)


def _is_other_warning(record: logging.LogRecord) -> bool:
    return "All reward functions returned None" not in str(record.msg)


@contextmanager
def _naming(function: Any) -> Iterator[None]:
    """Name the reward function in the place of whatever it raises."""
    try:
        yield
    except PolarError:
        raise
    except Exception as error:
        raise ConfigError(f"the reward function {_name(function)} raised {describe_error(error)}") from error


def _read_rewards(function: Any, given: Any, kwargs: Mapping[str, Any]) -> list[float | None]:
    """Read what a reward function returned when it was called with `kwargs`. Raises `ConfigError`."""
    sessions = kwargs.get("completions")
    try:
        rewards = [None if reward is None else _to_float(reward) for reward in given]
    except (TypeError, ValueError):
        rewards = None
    if rewards is None or (sessions is not None and len(rewards) != len(sessions)):
        wanted = "a list of one number (or None) per session"
        count = "" if sessions is None else f", {len(sessions)} here"
        raise ConfigError(
            f"the reward function {_name(function)} returned {given!r:.100}; it must return {wanted}{count}"
        )
    return rewards


def _name(function: Any) -> str:
    place = locate_function(function)
    return get_callable_name(function) + (f" ({place})" if place else "")


def _to_float(reward: Any) -> float:
    try:
        value = float(reward)
    except OverflowError:  # an integer beyond every float
        return math.inf
    return math.inf if math.isnan(value) else value
