#!/usr/bin/env python3
"""Train a model inside an agent: one YAML file is a whole run, and every key of it can be given as a flag.

  accelerate launch scripts/train.py --config configs/quickstart.yaml
  accelerate launch scripts/train.py --config configs/quickstart.yaml --max_steps 3 --seed 7
  accelerate launch --multi_gpu --num_processes 2 scripts/train.py --config configs/quickstart.yaml

The last form is for two CPU processes too: without --multi_gpu, accelerate starts one process on a CPU.

The keys are those of `RunArguments` (polar_trl/grpo/arguments.py), of `PolarGRPOConfig` (which holds all of TRL's
`GRPOConfig`) and of TRL's `ModelConfig` (model_name_or_path, use_peft, lora_r, ...). Unknown keys are refused.
"""

import importlib
import json
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trl import ModelConfig, get_peft_config

from polar_trl.check_tasks import TaskChecker, has_solution, has_tests
from polar_trl.errors import ConfigError, PolarError
from polar_trl.grade.base import Grader
from polar_trl.grade.by_task import GraderByTask, check_gradable
from polar_trl.grade.command import CommandGrader
from polar_trl.grade.function import FunctionGrader
from polar_trl.grpo.arguments import RunArguments, RunParser, parse_run, refuse_unread
from polar_trl.grpo.checkpoint import choose_start, find_checkpoint, read_step
from polar_trl.grpo.config import PolarGRPOConfig
from polar_trl.grpo.summary import build_summary, print_summary, write_summary
from polar_trl.harness import AGENTS, build_agent
from polar_trl.harness.base import Harness
from polar_trl.harness.shell import ShellHarness
from polar_trl.sandbox import build_backend
from polar_trl.sandbox.base import SandboxBackend
from polar_trl.sandbox.limits import Limits
from polar_trl.sandbox.pool import WarmPool
from polar_trl.tasks.environment import list_environments, provide_python, refuse_answers
from polar_trl.tasks.load import load_task_set
from polar_trl.tasks.rules import check_limits
from polar_trl.types import Task


def load_grader(spec: str | None) -> Grader | None:
    """The grader that a setting names."""
    if spec is None:
        return None
    module, colon, name = spec.partition(":")
    if colon and all(part.isidentifier() for part in (*module.split("."), name)):
        try:
            function: Callable[..., Any] = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"grader {spec!r} cannot be imported: {error}") from error
        return FunctionGrader(function)
    return CommandGrader(spec)


def main() -> None:
    try:
        run, args, model_config = parse_run(RunParser(description=__doc__))
    except PolarError as error:
        sys.exit(f"train: {error}")
    started = time.monotonic()
    folder = Path(args.output_dir)
    signal.signal(signal.SIGTERM, stop_once)
    try:
        checkpoint = choose_start(folder, args.resume_from_checkpoint)
        if checkpoint is not None and is_over(args, checkpoint):
            print(f"the run in {folder} made all of its {args.max_steps} steps; set max_steps higher to go on")
            return
        trainer = build_trainer(run, args, model_config)
    except (PolarError, OSError) as error:
        sys.exit(f"train: {error}")
    except KeyboardInterrupt:
        sys.exit("train: stopped before the first step")
    try:
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        if args.save_strategy != "no":
            trainer.save_model()
    except PolarError as error:
        sys.exit(f"train: {error}")
    except KeyboardInterrupt:
        sys.exit(f"train: stopped at step {trainer.state.global_step}; {explain_resume(folder)}")
    finally:
        trainer.close()
    if trainer.accelerator.is_main_process:
        try:
            seconds = trainer.seconds_before + time.monotonic() - started
            summary = build_summary(trainer.state.log_history, seconds=seconds)
        except PolarError as error:
            sys.exit(f"train: {error}")
        write_summary(folder, summary)
        print_summary(summary)
        print(f"run folder: {folder}\npicture:    {folder / 'rewards.png'}\nlook back:  polar-trl replay {folder}")


def stop_once(signum: int, _frame: Any) -> None:
    """A signal as if it were Ctrl-C; the second one ends the process at once."""
    signal.signal(signum, signal.SIG_DFL)
    raise KeyboardInterrupt


def is_over(args: PolarGRPOConfig, checkpoint: Path) -> bool:
    """Whether nothing is left to do after a checkpoint."""
    return 0 < args.max_steps <= read_step(checkpoint) and (Path(args.output_dir) / "summary.json").exists()


def explain_resume(folder: Path) -> str:
    """How to go on with a run that was stopped."""
    checkpoint = find_checkpoint(folder)
    if checkpoint is None:
        return f"no checkpoint was written yet (save_strategy, save_steps); sessions are recorded in {folder}"
    return f"--resume_from_checkpoint auto goes on from {checkpoint}"


def read_agent_files(names: list[str]) -> dict[str, str]:
    """Their texts, by the names that they get in HOME."""
    if isinstance(names, str):
        raise ConfigError(f"agent_files must be a list, such as [{names}]")
    files: dict[str, str] = {}
    for path in map(Path, names):
        if path.name in files:
            raise ConfigError(f"agent_files has two files named {path.name!r}; they would overwrite each other")
        try:
            files[path.name] = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"agent_files: {path} is not a text file") from error
    return files


def find_agent_folders(names: list[str]) -> list[Path]:
    """The folders, as absolute paths."""
    if isinstance(names, str):
        raise ConfigError(f"agent_folders must be a list, such as [{names}]")
    folders = [Path(name).resolve() for name in names]
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"agent_folders: {folder} is no folder")
    return folders


def build_harness(run: RunArguments) -> Harness:
    """The agent that the settings name."""
    options = run.agent_options
    if isinstance(options, str):
        try:
            options = json.loads(options)
        except json.JSONDecodeError as error:
            raise ConfigError(f"agent_options is not JSON: {error}") from error
    if options is not None and not isinstance(options, dict):
        raise ConfigError("agent_options must be a mapping of names to values")
    if run.agent == "shell":
        if not run.agent_command:
            known = ", ".join(AGENTS)
            raise ConfigError(f"agent_command is needed: the command that runs your agent. Or set agent to {known}")
        if options:
            raise ConfigError("agent_options are for the agents that are known by name; agent_command takes none")
        return ShellHarness(
            run.agent_command,
            files=read_agent_files(run.agent_files),
            folders=find_agent_folders(run.agent_folders),
        )
    if run.agent not in AGENTS:
        raise ConfigError(f"agent {run.agent!r} is not known; known are shell, {', '.join(AGENTS)}")
    for name in ("agent_command", "agent_files", "agent_folders"):
        if getattr(run, name):
            raise ConfigError(
                f"{name} is read only with agent: shell, and agent is {run.agent!r}; leave it out of the YAML file"
            )
    return build_agent(run.agent, options)


def build_limits(run: RunArguments) -> Limits:
    """What one sandbox may use."""
    return Limits(
        memory_mb=run.sandbox_memory_mb,
        cpus=run.sandbox_cpus,
        pids=run.sandbox_pids,
        disk_mb=run.sandbox_disk_mb,
    )


def build_sandbox(run: RunArguments, mounts: Sequence[Path], run_id: str) -> SandboxBackend:
    """Where the settings say that agents run."""
    backend = build_backend(
        run.sandbox, image=run.sandbox_image, limits=build_limits(run), mounts=mounts, run_id=run_id
    )
    # folders of this machine are made in no time
    return backend if run.sandbox == "local" else WarmPool(backend, depth=run.sandbox_warm)


def load_run_tasks(run: RunArguments) -> tuple[list[Task], list[Task]]:
    """What to train on and what to evaluate on, with a Python for their tests where they need one."""
    builds_images = run.sandbox == "docker" and run.sandbox_image is None
    sources = (run.tasks, run.eval_tasks)
    train, evals = (
        provide_python(load_task_set(source), builds_images=builds_images) if source else [] for source in sources
    )
    return train, evals


def build_grader(run: RunArguments, tasks: Sequence[Task], backend: SandboxBackend) -> Grader | None:
    """What a session is worth; None leaves it to the command that each task names."""
    by_task = run.grader is None and any(has_tests(task) for task in tasks)
    if run.partial_credit and not by_task:
        raise ConfigError("partial_credit is for tasks with tests, graded by them; leave it or the grader out")
    if not by_task:
        return load_grader(run.grader)
    check_gradable(tasks, backend)
    return GraderByTask(backend, partial=run.partial_credit)


def require_good_tasks(
    run: RunArguments, args: PolarGRPOConfig, tasks: Sequence[Task], backend: SandboxBackend
) -> None:
    """Refuse tasks whose graders do not tell their solution from no change. Raises `ConfigError` with their ids."""
    wanted = [task for task in tasks if has_solution(task)]
    is_first = args.local_process_index == 0
    unknown = sum(has_tests(task) for task in tasks) - len(wanted)
    if is_first and unknown:
        print(f"{unknown} tasks have no known solution and are not checked", file=sys.stderr, flush=True)
    if not wanted:
        return
    if is_first:
        print(f"checking the solutions of {len(wanted)} tasks; good results are kept", file=sys.stderr, flush=True)
    checker = TaskChecker(backend, kind=run.sandbox, image=run.sandbox_image, limits=build_limits(run), gold_runs=1)
    results = checker.check_all(wanted, jobs=args.max_grading, show_progress=is_first)
    if bad := [checked for checked in results if checked.problem]:
        lines = [f"{checked.id}: {checked.problem}" for checked in bad[:20]]
        lines += [f"and {len(bad) - 20} more"] * (len(bad) > 20)
        raise ConfigError(
            f"{len(bad)} of {len(wanted)} tasks are of no use; take them out, or set check_tasks: false\n  "
            + "\n  ".join(lines)
        )


def build_trainer(run: RunArguments, args: PolarGRPOConfig, model_config: ModelConfig) -> Any:
    """Everything that a run needs, from its settings."""
    from polar_trl.grpo.trainer import PolarGRPOTrainer

    refuse_unread(model_config)
    harness = build_harness(run)
    train, evals = load_run_tasks(run)
    tasks = [*train, *evals]
    mounts = [*harness.folders, *list_environments(tasks)]
    backend = build_sandbox(run, mounts, Path(args.output_dir).name)
    try:
        grader = build_grader(run, tasks, backend)
        # what is wrong with images and tasks is said before minutes go into loading a model
        check_limits(tasks, build_limits(run), backend.capabilities)
        harness.install()
        refuse_answers(tasks, mounts)
        backend.prepare(tasks)
        if run.check_tasks and run.grader is None:
            require_good_tasks(run, args, tasks, backend)
        return PolarGRPOTrainer(
            model=model_config.model_name_or_path,
            args=args,
            train_dataset=train,
            eval_dataset=evals or None,
            harness=harness,
            sandbox=backend,
            grader=grader,
            peft_config=get_peft_config(model_config),
        )
    except BaseException:
        backend.close()
        raise


if __name__ == "__main__":
    main()
