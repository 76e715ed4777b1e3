"""Set up an evaluation from a run file and flags: the checkpoint, the tasks, the agent, sandboxes and graders.

Tasks whose own solutions do not pass (`polar-trl check-tasks` finds them) are not left out: a data set that others
report on is evaluated whole.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from polar_trl.engine.base import GenerationParams
from polar_trl.engine.openai_server import OpenAIServer
from polar_trl.engine.remote import find_served_model
from polar_trl.errors import ConfigError
from polar_trl.eval.arguments import EvalArguments
from polar_trl.eval.sample_tasks import find_repo, read_settings
from polar_trl.eval.served_model import API_KEY_VARIABLE
from polar_trl.grade.by_task import GraderByTask, check_gradable
from polar_trl.grpo.arguments import RunParser, parse_groups
from polar_trl.grpo.config import PolarGRPOConfig
from polar_trl.grpo.resume.model_folder import Checkpoint, find_model
from polar_trl.harness.base import Harness
from polar_trl.harness.mixed import find_version
from polar_trl.harness.shell import read_file
from polar_trl.setup.agents import choose_agent, find_agent_files, take_own_tasks
from polar_trl.setup.run_setup import (
    RunArguments,
    RunParts,
    build_parts,
    find_sandbox_kind,
    limit_times,
    list_eval_sources,
    read_columns,
    require_tasks,
)
from polar_trl.tasks.environment import provide_python
from polar_trl.tasks.load import load_task_set
from polar_trl.types import Task

_OF_TRAINING: Mapping[str, Any] = {
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "num_generations": 2,
    "generation_batch_size": None, "steps_per_generation": None, "max_policy_lag": 0, "resample_zero_variance": 0,
    "eval_strategy": "no", "tf32": None,
}  # fmt: skip
"""Settings that only a trainer reads, at values that are right on any machine: batches need not fit its processes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalSetup:
    """The settings of an evaluation."""

    run: RunArguments
    """Of one agent."""
    with_agents: RunArguments
    """As they were given: the agent may be one of several."""
    args: PolarGRPOConfig
    evaluation: EvalArguments
    model: str | None
    tasks: str
    """Where they are."""
    columns: dict[str, Any]
    """What they have of the columns of their rows."""
    folder: Path
    on_cpu: bool
    """Whether the engine is on the CPU."""
    command: tuple[str, ...]
    """The same settings as arguments of `polar-trl eval`."""

    @property
    def params(self) -> GenerationParams:
        """Return the sampling settings, but for the tokens that end an answer."""
        evaluation, args = self.evaluation, self.args
        chosen = evaluation.eval_temperature
        return GenerationParams(
            max_tokens=args.max_completion_length,
            temperature=args.temperature if chosen is None else chosen,
            top_p=evaluation.eval_top_p,
            top_k=evaluation.eval_top_k,
        )


class _EvalParser(RunParser):
    """The parser of a run, on a machine that need not be the one that trains."""

    on_cpu = False

    def __init__(self) -> None:
        usage = "polar-trl eval [--config FILE] --output_dir OUT [--KEY VALUE ...]; see polar-trl eval --help"
        super().__init__(EvalArguments, prog="polar-trl eval", usage=usage)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does. Training gets no device here: it would take memory of a GPU that is an engine's."""
        found, rest = super().parse_known_args(args, namespace)
        self.on_cpu = bool(found.use_cpu) or not torch.cuda.is_available()
        vars(found).update(_OF_TRAINING, use_cpu=True)
        return found, rest


def parse_eval(config: Path | None, overrides: Sequence[str], folder: Path, *, of_training: bool = False) -> EvalSetup:
    """Parse settings from a run file, if there is one, and flags, which win. Raises `ConfigError`.

    Args:
        overrides: Keys of a run and of `EvalArguments` as flags.
        folder: Of the results.
        of_training: Take the tasks to train on, whatever there is to evaluate on.
    """
    parser = _EvalParser()
    arguments = [*(["--config", str(config)] if config else []), *overrides]
    run, args, model, evaluation, _ = parse_groups(parser, arguments)
    given = {argument.split("=")[0] for argument in overrides}
    names_tasks = "--tasks" in given and "--eval_tasks" not in given  # a flag comes before what the file says
    held_out = None if names_tasks or of_training else _choose_set(run)
    columns, eval_columns = read_columns(run)
    return EvalSetup(
        run=choose_agent(replace(run, check_tasks=False)),
        with_agents=run,
        args=args,
        evaluation=evaluation,
        model=model.model_name_or_path,
        tasks=held_out or require_tasks(run),
        columns=eval_columns if held_out else columns,
        folder=folder,
        on_cpu=parser.on_cpu,
        command=("--output_dir", str(folder), *arguments),
    )


def _choose_set(run: RunArguments) -> str | None:
    """Return where the evaluation set is; None where the run has none. Raises `ConfigError` for several."""
    sources = list_eval_sources(run)
    if len(sources) > 1:
        sets = ", ".join(f"{source} ({name})" for name, source in sources.items())
        raise ConfigError(f"eval_tasks has several sets: give --tasks with one of {sets}")
    return next(iter(sources.values()), None)


def find_checkpoint(setup: EvalSetup) -> Checkpoint:
    """Find the checkpoint. A server's model is known by its name; what has its tokenizer is looked for as well."""
    evaluation = setup.evaluation
    if evaluation.base_url is None or (setup.model is not None and not evaluation.text_only):
        return find_model(setup.model, trust_remote_code=setup.args.trust_remote_code)
    name = evaluation.served_name or setup.model or evaluation.base_url
    return Checkpoint(name=name, identity=name)


def load_eval_tasks(setup: EvalSetup) -> list[Task]:
    """Load the chosen tasks, with a Python for their tests where they need one. Raises `ConfigError`."""
    chosen = setup.evaluation.task_ids
    tasks = limit_times(setup.run, load_task_set(setup.tasks, columns=setup.columns, limit=setup.evaluation.limit))
    tasks = take_own_tasks(setup.with_agents, tasks)
    if unknown := sorted(set(chosen) - {task.id for task in tasks}):
        raise ConfigError(f"task_ids: {setup.tasks} has no task {unknown[0]!r}")
    if chosen:
        tasks = [task for task in tasks if task.id in chosen]
    key = setup.evaluation.by
    if key != "repo" and all(name_group(task, key) is None for task in tasks):
        raise ConfigError(f"by is {key!r}, and no task has it in its metadata")
    return provide_python(tasks, sandbox=find_sandbox_kind(setup.run, tasks), image=setup.run.sandbox_image)


def build_eval_parts(setup: EvalSetup, tasks: Sequence[Task], *, is_first: bool = True) -> RunParts:
    """Build agent, sandboxes and graders; every task has a grader. Raises `ConfigError`."""
    args = setup.args
    parts = build_parts(
        setup.run,
        tasks,
        run_id=setup.folder.name,
        check_jobs=args.max_grading,
        is_first=is_first,
        limits=args.endpoint_limits,
    )
    if parts.grader is not None:
        return parts
    try:
        check_gradable(tasks, parts.backend)
    except BaseException:
        parts.backend.close()
        raise
    return replace(parts, grader=GraderByTask(parts.backend))


def build_settings(
    setup: EvalSetup, tasks: Sequence[Task], checkpoint: Checkpoint, harness: Harness
) -> dict[str, Any]:
    """Build the settings that decide the results, and whose tokens they are (JSON values).

    How many samples, attempts and processes there are decides nothing.
    """
    run, args, params = setup.run, setup.args, setup.params
    contents = [asdict(task) for task in tasks]
    for fields in contents:
        del fields["agent"], fields["cut_sessions"]  # which decide nothing here
        if fields["start_patch"] is None:
            del fields["start_patch"]  # which earlier versions did not have
    content = json.dumps(contents, sort_keys=True, default=str)
    names = (
        *("agent", "agent_options", "agent_command", "agent_folders", "grader", "partial_credit"),
        "zero_suspected_cheats",
        *("sandbox_image", "sandbox_memory_mb", "sandbox_cpus", "sandbox_pids", "sandbox_disk_mb"),
    )
    of_sessions = (
        *("max_completion_length", "max_session_calls", "max_session_tokens", "vllm_max_model_length"),
        *("renderer", "thinking", "chat_template_kwargs"),
    )
    of_engine = ("engine_dtype", "engine_kwargs", "weight_rounding") if name_engine(setup.evaluation) == "vllm" else ()
    return {
        "model": checkpoint.identity,
        "tokenizer": os.path.abspath(name) if Path(name := checkpoint.base or checkpoint.name).is_dir() else name,
        "engine": name_engine(setup.evaluation),
        "served_name": _find_served_name(setup.evaluation),
        **{name: getattr(run, name) for name in names},
        "sandbox": find_sandbox_kind(run, tasks),
        "agent_version": find_version(harness),
        "agent_files": {
            name: _digest(read_file(path).encode()) for name, path in find_agent_files(run.agent_files).items()
        },
        "tasks": f"{len(tasks)} tasks {_digest(content.encode('utf-8', 'surrogatepass'))}",
        **{name: getattr(params, name) for name in ("temperature", "top_p", "top_k")},
        **{name: getattr(args, name) for name in of_sessions},
        **{name: getattr(args, name) for name in of_engine},
    }


def name_engine(evaluation: EvalArguments) -> str:
    """Name what answers: "vllm", "server" or "solutions"."""
    if evaluation.solutions:
        return "solutions"
    return "vllm" if evaluation.base_url is None else "server"


def _find_served_name(evaluation: EvalArguments) -> str | None:
    """Find the server's name of its model; None where it cannot be asked, or there is no server."""
    if evaluation.base_url is None:
        return None
    server = OpenAIServer(evaluation.base_url, api_key=os.environ.get(API_KEY_VARIABLE))
    try:
        return find_served_model(server, evaluation.served_name).name
    except ConfigError:
        return evaluation.served_name  # a folder with nothing left to run needs no server
    finally:
        server.close()


def name_model(setup: EvalSetup) -> str:
    """Name the model that sampled the folder's sessions; a server's has the server's name, not a tokenizer's."""
    if setup.evaluation.solutions:
        return name_solutions(setup.model or "")
    if setup.evaluation.base_url is None:
        return setup.model or ""
    return read_settings(setup.folder).get("served_name") or setup.evaluation.base_url


def name_solutions(model: str) -> str:
    """Name what the folder's sessions were played by, with the model whose tokens they are."""
    return f"the tasks' solutions, spelled by {Path(model).name}"


def name_group(task: Task, key: str) -> str | None:
    """Name the group that a task is reported in: its repository, or its metadata's value at `key`."""
    value = find_repo(task) if key == "repo" else task.metadata.get(key)
    return None if value is None else str(value)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
