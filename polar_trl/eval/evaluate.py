"""Evaluate a checkpoint on tasks, into a folder of graded sessions: `polar-trl eval`.

The engine is vLLM without a trainer, or a server; sessions go through the runner that trains. A session that has a
reward already is counted and not run again.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from polar_trl.engine.base import Engine, GenerationParams
from polar_trl.eval.open_model import open_engine, open_proxy, open_solutions, prepare_model
from polar_trl.eval.sample_tasks import (
    Sample,
    SampleResult,
    list_samples,
    open_folder,
    read_results,
    sample_tasks,
    share_folder,
)
from polar_trl.eval.setup import (
    EvalSetup,
    build_eval_parts,
    build_settings,
    find_checkpoint,
    load_eval_tasks,
    name_group,
    name_model,
)
from polar_trl.eval.summary import build_summary
from polar_trl.eval.workers import run_workers
from polar_trl.grpo.config import PolarGRPOConfig
from polar_trl.grpo.resume.model_folder import Checkpoint
from polar_trl.rollout.runner import RolloutRunner
from polar_trl.run_folder import disk_errors, write_whole
from polar_trl.setup.run_setup import RunParts
from polar_trl.types import Task

SUMMARY_FILE = "summary.json"


def run_evaluation(setup: EvalSetup, *, show_progress: bool = True) -> dict[str, Any]:
    """Run the samples that are left, write `summary.json`, and return that summary.

    Raises:
        ConfigError: settings that cannot work, or a folder that holds something else.
        PolarError: the infrastructure fails all the time, or an engine has stopped.
        KeyboardInterrupt: what has ended is kept.
    """
    checkpoint = find_checkpoint(setup)
    tasks = load_eval_tasks(setup)
    parts = build_eval_parts(setup, tasks)
    try:
        settings = build_settings(setup, tasks, checkpoint, parts.harness)
        with disk_errors(setup.folder), open_folder(setup.folder, settings) as before:
            samples = _list_left(setup, tasks, before)
            _say_what_is_left(setup, len(tasks), before, samples)
            if samples and setup.evaluation.num_engines > 1:
                prepare_model(setup, checkpoint)
                run_workers(setup, len(samples), show_progress=show_progress)
            elif samples:
                _sample(setup, parts, checkpoint, samples, show_progress=show_progress)
            summary = summarize_results(setup, tasks)
            write_whole(setup.folder / SUMMARY_FILE, (json.dumps(summary, indent=1) + "\n").encode())
    finally:
        parts.backend.close()
    return summary


def run_worker(setup: EvalSetup, number: int) -> None:
    """Run the share of one of several engines, in a folder that the process which started this one has open."""
    checkpoint = find_checkpoint(setup)
    tasks = load_eval_tasks(setup)
    parts = build_eval_parts(setup, tasks, is_first=False)
    try:
        samples = _list_left(setup, tasks, read_results(setup.folder))
        # by its place among all and not among those that are left: other engines are at work already
        mine = [s for s in samples if (s.sample * len(tasks) + s.place) % setup.evaluation.num_engines == number]
        if mine:
            with share_folder(setup.folder):
                _sample(setup, parts, checkpoint, mine, show_progress=False)
    finally:
        parts.backend.close()


def summarize_results(setup: EvalSetup, tasks: Sequence[Task]) -> dict[str, Any]:
    """Summarize the folder's results, and say what they are of (JSON values)."""
    evaluation = setup.evaluation
    numbers = build_summary(
        [task.id for task in tasks],
        read_results(setup.folder),
        num_samples=evaluation.num_samples,
        ks=sorted({1, *evaluation.k}),
        groups={task.id: name for task in tasks if (name := name_group(task, evaluation.by)) is not None},
    )
    about = {
        "model": name_model(setup),
        "agent": setup.run.agent,
        "task_set": setup.tasks,
        "output_dir": str(setup.folder),
    }
    return {**about, "num_samples": evaluation.num_samples, "grouped_by": evaluation.by, **numbers}


@contextmanager
def open_runner(
    args: PolarGRPOConfig, parts: RunParts, engine: Engine, *, model: str, params: GenerationParams
) -> Iterator[RolloutRunner]:
    """Open a proxy in front of the engine, as `open_proxy` does, and a runner; both end after the block."""
    # an evaluation that cuts agents would measure how quick the others were
    config = replace(args.build_rollout_config(), straggler_quantile=None)
    with open_proxy(args, engine, model=model, params=params) as proxy:
        runner = RolloutRunner(
            proxy=proxy, backend=parts.backend, harness=parts.harness, grader=parts.grader, config=config
        )
        try:
            yield runner
        finally:
            runner.close()


def _sample(
    setup: EvalSetup, parts: RunParts, checkpoint: Checkpoint, samples: Sequence[Sample], *, show_progress: bool
) -> None:
    model = prepare_model(setup, checkpoint)
    if setup.evaluation.solutions:
        opened = open_solutions(setup, model, parts.harness, [sample.task for sample in samples])
    else:
        opened = open_engine(setup, model)
    with (
        opened as engine,
        open_runner(setup.args, parts, engine, model=model, params=setup.params) as runner,
    ):
        sample_tasks(
            runner, samples, setup.folder, max_attempts=setup.evaluation.max_attempts, show_progress=show_progress
        )


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
    evaluation = setup.evaluation
    is_on_cpu = setup.on_cpu or evaluation.solutions
    where = evaluation.base_url or ("the CPU" if is_on_cpu else f"{evaluation.num_engines} GPU(s)")
    print(
        f"{num_tasks} tasks x {evaluation.num_samples}: {found}{len(samples)} sessions are left to run on {where}",
        file=sys.stderr,
        flush=True,
    )
