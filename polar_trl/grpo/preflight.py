"""Check what a trainer is given before anything is loaded: the model, the number of tasks, and how they are graded."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import transformers
from trl.trainer.utils import get_callable_name, get_config_model_id

from polar_trl.errors import ConfigError
from polar_trl.grade.base import Grader
from polar_trl.grade.by_task import GraderByTask, find_kind
from polar_trl.grpo.config import PolarGRPOConfig
from polar_trl.grpo.resume.model_folder import load_config
from polar_trl.harness.base import Harness
from polar_trl.harness.mixed import find_version
from polar_trl.sandbox import build_backend, choose_kind
from polar_trl.sandbox.base import SandboxBackend
from polar_trl.sandbox.pool import WarmPool
from polar_trl.tasks.environment import list_environments
from polar_trl.types import Task

DEFAULT_WARM = 4


def require_harness(harness: Harness | None) -> Harness:
    """Return the agent. Raises `ConfigError` where there is none."""
    if harness is None:
        raise ConfigError(
            "harness= is needed, the agent to train in: harness=polar_trl.build_agent('pi') for a known one, or "
            "harness=polar_trl.ShellHarness('my-agent {instruction}') for any command"
        )
    if not callable(getattr(harness, "build_launch", None)):
        raise ConfigError(f"harness= is {harness!r:.100}: give an agent, such as harness=polar_trl.build_agent('pi')")
    return harness


def describe_agent(harness: Harness) -> dict[str, str | None]:
    """Return the agent's name and its installed version, where it has one."""
    return {"agent": harness.name, "agent_version": find_version(harness)}


def require_config(model: Any, args: PolarGRPOConfig | None) -> PolarGRPOConfig:
    """Return the settings; None: the defaults, in a folder named by the model, as TRL's. Raises `ConfigError`."""
    if args is None:
        name = model if isinstance(model, str) else get_config_model_id(model.config)
        return PolarGRPOConfig(f"{Path(name).name}-GRPO")
    if not isinstance(args, PolarGRPOConfig):
        raise ConfigError(
            f"args is a {type(args).__name__}: give a polar_trl.PolarGRPOConfig, which takes the same arguments"
        )
    return args


def require_tasks(tasks: Mapping[str, Mapping[str, Task]]) -> list[Task]:
    """Return the tasks of all modes. Raises `ConfigError` where there is nothing to train or to evaluate on."""
    found = [task for by_id in tasks.values() for task in by_id.values()]
    if not found:
        raise ConfigError("train_dataset= is needed: a list of polar_trl.Task, or a data set with a column 'prompt'")
    return found


def read_model_config(model: str | None, *, trust_remote_code: bool = False) -> Any:
    """Read the model's configuration, in transformers' own class. Raises `ConfigError` where `model` leads to none."""
    config = load_config(model, trust_remote_code=trust_remote_code)
    named = getattr(transformers, (config.architectures or [""])[0], None)
    # vLLM, once it has built an engine, puts classes of its own in the place of some of transformers'
    config_class = getattr(named, "config_class", None)
    return config if config_class is None else config_class.from_pretrained(model)


def require_a_step(num_tasks: int, args: PolarGRPOConfig) -> None:
    """Raise `ConfigError` for too few tasks: TRL leaves out what does not fill a generation batch, and would make no
    step. None at all are for an evaluation."""
    needed = args.generation_batch_size // args.num_generations
    if 0 < num_tasks < needed:
        raise ConfigError(
            f"{num_tasks} tasks are fewer than the {needed} of one generation batch (generation_batch_size="
            f"{args.generation_batch_size} rollouts, num_generations={args.num_generations}): give more tasks, or "
            "make per_device_train_batch_size or gradient_accumulation_steps smaller"
        )


def find_parts(
    harness: Harness, tasks: Sequence[Task], *, sandbox: SandboxBackend | None, grader: Grader | None
) -> tuple[SandboxBackend, Grader | None]:
    """Return the sandboxes and the grader that were given, or the defaults for these tasks.

    Raises:
        ConfigError: one is not of its kind, or only some tasks say how they are graded.
        SandboxError: the default sandboxes do not work on this machine.
    """
    backend = sandbox or build_default_backend(harness, tasks)
    grader = grader or build_default_grader(backend, tasks)
    require_bases(backend, grader)
    return backend, grader


def require_bases(backend: Any, grader: Any) -> None:
    """Raise `ConfigError` for parts of a user's own that do not derive from the base class of their kind."""
    for part, base in ((backend, SandboxBackend), (grader, Grader)):
        if isinstance(part, type) and base in part.__mro__:
            raise ConfigError(f"{part.__name__} is a class: give what it makes, {part.__name__}(...)")
        if base is Grader and callable(part) and base not in type(part).__mro__ and not hasattr(part, "grade"):
            name = get_callable_name(part)
            name = name if name.isidentifier() else "my_function"  # a lambda's is none
            raise ConfigError(
                f"grader= is a function: give grader=polar_trl.FunctionGrader({name}), which calls it with a task and "
                f"the session's sandbox, or reward_funcs=[{name}] for one of TRL's form"
            )
        if part is not None and base not in type(part).__mro__:
            raise ConfigError(f"{type(part).__name__} must derive from {base.__module__}.{base.__name__}")


def build_default_backend(harness: Harness, tasks: Sequence[Task]) -> SandboxBackend:
    """Build the sandboxes that a run file without a word about them would get. Raises `SandboxError`."""
    mounts = [*harness.folders, *list_environments(tasks)]
    return WarmPool(build_backend(choose_kind("auto", tasks=tasks), mounts=mounts), depth=DEFAULT_WARM)


def build_default_grader(backend: SandboxBackend, tasks: Sequence[Task]) -> Grader | None:
    """Return a grader that judges each task as it says itself; None where no task says anything.

    Raises:
        ConfigError: only some of the tasks say how.
    """
    missing = [task.id for task in tasks if find_kind(task) is None]
    if len(missing) == len(tasks):
        return None
    if missing:
        raise ConfigError(
            f"task {missing[0]!r} has no 'grader' command and no tests, and others have: give it one, or pass grader="
        )
    return GraderByTask(backend)
