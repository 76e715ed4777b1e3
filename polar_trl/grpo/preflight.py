"""What a trainer is given -> what is wrong with it, said in one sentence before anything is loaded.

It refuses models that lead nowhere, too few tasks for a step, and tasks of which only some have a reward.
"""

from typing import Any

import transformers
from datasets import Dataset
from transformers import AutoConfig

from polar_trl.errors import ConfigError
from polar_trl.grade.base import Grader
from polar_trl.grade.by_task import GraderByTask, find_kind
from polar_trl.grpo.config import PolarGRPOConfig
from polar_trl.grpo.dataset import parse_task
from polar_trl.sandbox.base import SandboxBackend


def read_model_config(model: str) -> Any:
    """The model's configuration. Fails in one sentence, before anything is loaded, where `model` leads to none."""
    try:
        config = AutoConfig.from_pretrained(model)
        named = getattr(transformers, (config.architectures or [""])[0], None)
        # vLLM, once it has built an engine, puts classes of its own in the place of some of transformers'
        config_class = getattr(named, "config_class", None)
        return config if config_class is None else config_class.from_pretrained(model)
    except (OSError, ValueError) as error:
        hint = "give a folder with config.json and weights, or a hub id that this machine can reach"
        raise ConfigError(f"no model at {model!r}: {hint} ({str(error).splitlines()[0]})") from error


def require_a_step(train_rows: Dataset | None, args: PolarGRPOConfig) -> None:
    """TRL leaves out what does not fill a generation batch: of too few tasks it would make no step."""
    needed = args.generation_batch_size // args.num_generations
    if train_rows is not None and len(train_rows) < needed:
        raise ConfigError(
            f"{len(train_rows)} tasks are fewer than the {needed} of one generation batch (generation_batch_size="
            f"{args.generation_batch_size} rollouts, num_generations={args.num_generations}): give more tasks, or "
            "make per_device_train_batch_size or gradient_accumulation_steps smaller"
        )


def build_default_grader(backend: SandboxBackend, *datasets: Dataset | None) -> Grader | None:
    """The tasks' own ways; either all of them have one, or none."""
    tasks = [parse_task(row) for rows in datasets if rows is not None for row in rows]
    missing = [task.id for task in tasks if find_kind(task) is None]
    if len(missing) == len(tasks):
        return None
    if missing:
        raise ConfigError(f"task {missing[0]!r} has no 'grader' command and no tests while others do, or pass grader=")
    return GraderByTask(backend)
