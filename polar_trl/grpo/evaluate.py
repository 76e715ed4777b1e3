"""The settings of a run, a checkpoint and tasks -> graded sessions in a folder: what `polar-trl eval` does.

The agent, sandboxes and graders are those of a run (`run_setup`), the engine is vLLM without a trainer, and sessions
go through the same runner. It refuses to leave tasks out whose own solutions do not pass (`polar-trl check-tasks`
finds them): a data set that others report on is evaluated whole.
"""

import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, GenerationConfig

from polar_trl.chat_server import ChatServer
from polar_trl.engine.base import Engine, GenerationParams
from polar_trl.engine.standalone import build_standalone_engine
from polar_trl.errors import ConfigError
from polar_trl.eval_summary import build_summary
from polar_trl.grade.by_task import GraderByTask, check_gradable
from polar_trl.grpo.arguments import RunParser, parse_groups, refuse_unread
from polar_trl.grpo.config import PolarGRPOConfig
from polar_trl.grpo.eval_arguments import EvalArguments
from polar_trl.grpo.eval_workers import run_workers
from polar_trl.grpo.model_folder import Checkpoint, find_model, merge_adapter
from polar_trl.grpo.served import open_served_model
from polar_trl.harness.base import Harness
from polar_trl.proxy import Proxy
from polar_trl.rollout import RolloutRunner
from polar_trl.run_setup import RunArguments, RunParts, build_parts
from polar_trl.sample_tasks import (
    Sample,
    SampleResult,
    find_repo,
    list_samples,
    open_folder,
    read_results,
    sample_tasks,
)
from polar_trl.tasks.environment import provide_python
from polar_trl.tasks.load import load_task_set
from polar_trl.tokens.base import Renderer
from polar_trl.tokens.load import load_renderer
from polar_trl.types import Task

SUMMARY_FILE = "summary.json"
MAX_COMPLETION_LENGTH = 8192
"""Of one model call where no setting says otherwise: TRL's own default is made for answers and not for agents."""
_OF_TRAINING: Mapping[str, Any] = {
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "num_generations": 2,
    "generation_batch_size": None, "steps_per_generation": None, "max_policy_lag": 0, "resample_zero_variance": 0,
    "eval_strategy": "no", "tf32": None,
}  # fmt: skip
"""What only a trainer reads, set to what is right on any machine: batches need not fit the processes there are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalSetup:
    """The settings of an evaluation."""

    run: RunArguments
    args: PolarGRPOConfig
    evaluation: EvalArguments
    model: str | None
    tasks: str
    """Where they are."""
    folder: Path
    on_cpu: bool
    """Whether the engine is on the CPU."""
    command: tuple[str, ...]
    """The same settings as arguments of `polar-trl eval`."""

    @property
    def params(self) -> GenerationParams:
        """How to sample, but for the tokens that end an answer."""
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
        self.set_defaults(max_completion_length=MAX_COMPLETION_LENGTH)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse. Training's device is none here: it would take memory of a GPU that is an engine's."""
        found, rest = super().parse_known_args(args, namespace)
        self.on_cpu = bool(found.use_cpu) or not torch.cuda.is_available()
        vars(found).update(_OF_TRAINING, use_cpu=True)
        return found, rest


def parse_eval(config: Path | None, overrides: Sequence[str], folder: Path) -> EvalSetup:
    """Settings from a run file, if there is one, and flags, which win. Raises `ConfigError`.

    Args:
        overrides: Keys of a run and of `EvalArguments` as flags.
        folder: Of the results.
    """
    parser = _EvalParser()
    arguments = [*(["--config", str(config)] if config else []), *overrides]
    run, args, model, evaluation = parse_groups(parser, arguments)
    refuse_unread(model)
    given = {argument.split("=")[0] for argument in overrides}
    names_tasks = "--tasks" in given and "--eval_tasks" not in given  # a flag comes before what the file says
    return EvalSetup(
        run=replace(run, check_tasks=False),
        args=args,
        evaluation=evaluation,
        model=model.model_name_or_path,
        tasks=run.tasks if names_tasks else run.eval_tasks or run.tasks,
        folder=folder,
        on_cpu=parser.on_cpu,
        command=("--output_dir", str(folder), *arguments),
    )


def run_evaluation(setup: EvalSetup, *, show_progress: bool = True) -> dict[str, Any]:
    """Run what is left to run; the summary of all, which `summary.json` holds as well.

    Raises:
        ConfigError: settings that cannot work, or a folder that holds something else.
        PolarError: the infrastructure fails all the time, or an engine has stopped.
        KeyboardInterrupt: what has ended is kept.
    """
    checkpoint = find_checkpoint(setup)
    tasks = load_eval_tasks(setup)
    parts = build_eval_parts(setup, tasks)
    try:
        with open_folder(setup.folder, build_settings(setup, tasks, checkpoint, parts.harness)) as before:
            samples = _list_left(setup, tasks, before)
            _say_what_is_left(setup, len(tasks), before, samples)
            if samples and setup.evaluation.num_engines > 1:
                _prepare_model(setup, checkpoint)
                run_workers(setup, len(samples), show_progress=show_progress)
            elif samples:
                _sample(setup, parts, checkpoint, samples, show_progress=show_progress)
            summary = summarise(setup, tasks)
    finally:
        parts.backend.close()
    path = setup.folder / SUMMARY_FILE
    path.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    return summary


def run_worker(setup: EvalSetup, number: int) -> None:
    """The share of one of several engines, in a folder that the process which started this one has open."""
    checkpoint = find_checkpoint(setup)
    tasks = load_eval_tasks(setup)
    parts = build_eval_parts(setup, tasks, is_first=False)
    try:
        samples = _list_left(setup, tasks, read_results(setup.folder))
        # by its place among all and not among those that are left: other engines are at work already
        mine = [s for s in samples if (s.sample * len(tasks) + s.place) % setup.evaluation.num_engines == number]
        if mine:
            _sample(setup, parts, checkpoint, mine, show_progress=False)
    finally:
        parts.backend.close()


def summarise(setup: EvalSetup, tasks: Sequence[Task]) -> dict[str, Any]:
    """The numbers of what the folder holds, and what they are of."""
    evaluation = setup.evaluation
    numbers = build_summary(
        [task.id for task in tasks],
        read_results(setup.folder),
        num_samples=evaluation.num_samples,
        ks=sorted({1, *evaluation.k}),
        groups={task.id: name for task in tasks if (name := _name_group(task, evaluation.by)) is not None},
    )
    about = {
        "model": setup.model or evaluation.served_name or evaluation.base_url,
        "agent": setup.run.agent,
        "task_set": setup.tasks,
        "output_dir": str(setup.folder),
    }
    return {**about, "num_samples": evaluation.num_samples, "grouped_by": evaluation.by, **numbers}


def find_checkpoint(setup: EvalSetup) -> Checkpoint:
    """What is evaluated. A server's model is known by its name; what has its tokenizer is looked for as well."""
    evaluation = setup.evaluation
    if evaluation.base_url is None or (setup.model is not None and not evaluation.text_only):
        return find_model(setup.model)
    name = evaluation.served_name or setup.model or evaluation.base_url
    return Checkpoint(name=name, identity=name)


def load_eval_tasks(setup: EvalSetup) -> list[Task]:
    """The chosen tasks, with a Python for their tests where they need one. Raises `ConfigError`."""
    chosen = setup.evaluation.task_ids
    tasks = load_task_set(setup.tasks, limit=setup.evaluation.limit)
    if unknown := sorted(set(chosen) - {task.id for task in tasks}):
        raise ConfigError(f"task_ids: {setup.tasks} has no task {unknown[0]!r}")
    if chosen:
        tasks = [task for task in tasks if task.id in chosen]
    key = setup.evaluation.by
    if key != "repo" and all(_name_group(task, key) is None for task in tasks):
        raise ConfigError(f"by is {key!r}, and no task has it in its metadata")
    return provide_python(tasks, builds_images=setup.run.sandbox == "docker" and setup.run.sandbox_image is None)


def build_eval_parts(setup: EvalSetup, tasks: Sequence[Task], *, is_first: bool = True) -> RunParts:
    """Agent, sandboxes and graders; every task has one that can say what a session is worth. Raises `ConfigError`."""
    parts = build_parts(
        setup.run, tasks, run_id=setup.folder.name, check_jobs=setup.args.max_grading, is_first=is_first
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
    """What decides the results, and whose tokens they are (JSON values).

    How many samples, attempts and processes there are decides nothing.
    """
    run, args, params = setup.run, setup.args, setup.params
    content = json.dumps([asdict(task) for task in tasks], sort_keys=True, default=str)
    find_version = getattr(harness, "find_installed_version", None)
    names = (
        *("agent", "agent_options", "agent_command", "agent_folders", "grader", "partial_credit"),
        *("sandbox", "sandbox_image", "sandbox_memory_mb", "sandbox_cpus", "sandbox_pids", "sandbox_disk_mb"),
    )
    of_sessions = (
        *("max_completion_length", "max_session_calls", "max_session_tokens", "vllm_max_model_length"),
        *("renderer", "thinking", "chat_template_kwargs", "model_label"),
    )
    return {
        "model": checkpoint.identity,
        "tokenizer": os.path.abspath(name) if Path(name := checkpoint.base or checkpoint.name).is_dir() else name,
        "engine": "vllm" if setup.evaluation.base_url is None else "server",
        "served_name": setup.evaluation.served_name,
        **{name: getattr(run, name) for name in names},
        "agent_version": None if find_version is None else find_version(),
        "agent_files": {Path(name).name: _digest(Path(name).read_bytes()) for name in run.agent_files},
        "tasks": f"{len(tasks)} tasks {_digest(content.encode('utf-8', 'surrogatepass'))}",
        **{name: getattr(params, name) for name in ("temperature", "top_p", "top_k")},
        **{name: getattr(args, name) for name in of_sessions},
    }


@contextmanager
def open_runner(
    args: PolarGRPOConfig, parts: RunParts, engine: Engine | ChatServer, *, model: str, params: GenerationParams
) -> Iterator[RolloutRunner]:
    """A proxy in front of the engine and a runner of sessions, both ended after the block.

    Args:
        engine: Or a chat server, which is its own renderer and gives text alone.
        model: Folder or hub name of what the engine samples from: its tokenizer is read.
        params: How to sample; the tokens that end an answer are added.
    """
    renderer: Renderer
    if isinstance(engine, ChatServer):
        renderer, ends = engine, set()
    else:
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=args.trust_remote_code)
        renderer = load_renderer(
            tokenizer, model, family=args.renderer, thinking=args.thinking, template_kwargs=args.chat_template_kwargs
        )
        ends = {*renderer.stop_token_ids, *find_end_tokens(model, tokenizer)}
    # an evaluation that cuts agents would measure how quick the others were
    config = replace(args.build_rollout_config(), straggler_quantile=None)
    params = replace(params, stop_token_ids=tuple(sorted({*params.stop_token_ids, *ends})))
    with Proxy(engine, renderer, params=params, model=args.model_label) as proxy:
        runner = RolloutRunner(
            proxy=proxy, backend=parts.backend, harness=parts.harness, grader=parts.grader, config=config
        )
        try:
            yield runner
        finally:
            runner.close()


def find_end_tokens(model: str, tokenizer: Any) -> set[int]:
    """Every token that the model's own settings call an end, as TRL's trainer takes them."""
    try:
        found = GenerationConfig.from_pretrained(model).eos_token_id
    except OSError:  # it has no generation_config.json
        found = None
    ends = found if isinstance(found, list) else [found]
    return {token for token in (*ends, tokenizer.eos_token_id) if token is not None}


def _sample(
    setup: EvalSetup, parts: RunParts, checkpoint: Checkpoint, samples: Sequence[Sample], *, show_progress: bool
) -> None:
    model = _prepare_model(setup, checkpoint)
    with (
        _open_engine(setup, model) as engine,
        open_runner(setup.args, parts, engine, model=model, params=setup.params) as runner,
    ):
        sample_tasks(
            runner, samples, setup.folder, max_attempts=setup.evaluation.max_attempts, show_progress=show_progress
        )


def _prepare_model(setup: EvalSetup, checkpoint: Checkpoint) -> str:
    """What the engine loads: the checkpoint, or what it is merged into; for a server, what has its tokenizer."""
    if checkpoint.base is None or setup.evaluation.base_url is not None:
        return checkpoint.base or checkpoint.name
    folder = setup.folder / "merged"
    print(f"merging the adapter {checkpoint.name} onto {checkpoint.base}: {folder}", file=sys.stderr, flush=True)
    return str(merge_adapter(checkpoint, folder))


@contextmanager
def _open_engine(setup: EvalSetup, model: str) -> Iterator[Engine | ChatServer]:
    args, evaluation = setup.args, setup.evaluation
    if evaluation.base_url is not None:
        tokenizer = None if evaluation.text_only or setup.model is None else model
        with open_served_model(
            evaluation.base_url,
            args,
            setup.params,
            model=tokenizer,
            served_name=evaluation.served_name,
            text_only=evaluation.text_only,
        ) as served:
            yield served
        return
    engine = build_standalone_engine(
        model,
        cpu=setup.on_cpu,
        max_model_len=args.vllm_max_model_length,
        max_num_seqs=args.engine_max_num_seqs or min(256, 4 * args.max_agents),
        gpu_memory_utilization=evaluation.eval_gpu_memory_utilization,
        graphs=args.engine_cuda_graphs,
        trust_remote_code=args.trust_remote_code,
        # another one in each process: samples that are added later must not repeat the earlier ones
        seed=int.from_bytes(os.urandom(4), "big"),
    )
    try:
        yield engine
    finally:
        engine.close()


def _list_left(setup: EvalSetup, tasks: Sequence[Task], results: Sequence[SampleResult]) -> list[Sample]:
    evaluation = setup.evaluation
    return list_samples(tasks, results, num_samples=evaluation.num_samples, max_attempts=evaluation.max_attempts)


def _say_what_is_left(
    setup: EvalSetup, num_tasks: int, before: Sequence[SampleResult], samples: Sequence[Sample]
) -> None:
    graded = sum(result.reward is not None for result in before)
    found = (
        f"{graded} graded sessions and {len(before) - graded} without a reward are there already, " if before else ""
    )
    where = setup.evaluation.base_url or ("the CPU" if setup.on_cpu else f"{setup.evaluation.num_engines} GPU(s)")
    print(
        f"{num_tasks} tasks x {setup.evaluation.num_samples}: {found}{len(samples)} sessions are left to run "
        f"on {where}",
        file=sys.stderr,
        flush=True,
    )


def _name_group(task: Task, key: str) -> str | None:
    value = find_repo(task) if key == "repo" else task.metadata.get(key)
    return None if value is None else str(value)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
