"""Check a trainer's model, tasks and rewards before anything is loaded.

A model that cannot be found, too few tasks for a step, tasks of which only some have a reward, and a run that nothing
rewards raise `ConfigError`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import transformers
from datasets import Dataset

from polar_trl.errors import ConfigError
from polar_trl.grade.base import Grader
from polar_trl.grade.by_task import GraderByTask, find_kind
from polar_trl.grpo.config import PolarGRPOConfig
from polar_trl.grpo.dataset import parse_task
from polar_trl.grpo.resume.model_folder import load_config
from polar_trl.sandbox.base import SandboxBackend


def read_model_config(model: str | None, *, trust_remote_code: bool = False) -> Any:
    """Load the model's configuration, in transformers' own class. Raises `ConfigError` where `model` leads to none."""
    config = load_config(model, trust_remote_code=trust_remote_code)
    named = getattr(transformers, (config.architectures or [""])[0], None)
    # vLLM, once it has built an engine, puts classes of its own in the place of some of transformers'
    config_class = getattr(named, "config_class", None)
    return config if config_class is None else config_class.from_pretrained(model)


def require_a_step(train_rows: Dataset | None, args: PolarGRPOConfig) -> None:
    """Raise `ConfigError` for too few tasks: TRL leaves out what does not fill a generation batch."""
    needed = args.generation_batch_size // args.num_generations
    if train_rows is not None and len(train_rows) < needed:
        raise ConfigError(
            f"{len(train_rows)} tasks are fewer than the {needed} of one generation batch (generation_batch_size="
            f"{args.generation_batch_size} rollouts, num_generations={args.num_generations}): give more tasks, or "
            "make per_device_train_batch_size or gradient_accumulation_steps smaller"
        )


def build_default_grader(backend: SandboxBackend, *datasets: Dataset | None) -> Grader | None:
    """Build the grader that grades each task in its own way; either all tasks have one, or none."""
    tasks = [parse_task(row) for rows in datasets if rows is not None for row in rows]
    missing = [task.id for task in tasks if find_kind(task) is None]
    if len(missing) == len(tasks):
        return None
    if missing:
        raise ConfigError(
            f"task {missing[0]!r} has no 'grader' command and no tests, and others have: give it one, or pass grader="
        )
    return GraderByTask(backend)


def choose_reward_functions(
    grader: Grader | None, reward_funcs: Callable[..., Any] | Sequence[Callable[..., Any]]
) -> list[Callable[..., Any]]:
    """List the reward functions for TRL, the grader's first if there is one. Raises `ConfigError` for none at all."""
    functions = [reward_funcs] if callable(reward_funcs) else list(reward_funcs)
    if grader is not None:
        functions = [grader_reward, *functions]
    if not functions:
        raise ConfigError(
            "nothing gives a reward: pass grader=, reward_funcs=, or tasks with a 'grader' command or tests"
        )
    return functions


def grader_reward(rollouts: Sequence[Any], **_: Any) -> list[float | None]:
    """Return the grader's rewards, as a reward function of TRL; None where there is none."""
    return [rollout.reward for rollout in rollouts]


grader_reward.__name__ = "grader"  # the metric's name
