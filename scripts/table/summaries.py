"""Summarize the folders of a table, a JSON file for each model: its training, what it cost, and its evaluations."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from table.report import build_report, render_report
from table.run import find_newer, read_times
from table.steps import STAGES, Model, list_training, name_cell, parse_model

from polar_trl.errors import ConfigError, PolarError
from polar_trl.eval.sample_tasks import read_results
from polar_trl.grade.base import PASSING_REWARD
from polar_trl.run_folder import SETTINGS_FILE, SUMMARY_FILE, write_whole

FOLDER = "summaries"
UNREADABLE = (PolarError, OSError, ValueError, LookupError, TypeError, AttributeError)
"""What a broken file of one cell raises; the other cells are a table all the same."""
_OF_RUN = (
    *("steps", "seconds", "reward_first_quarter", "reward_last_quarter", "sampled_tokens", "trained_tokens"),
    *("logprob_gap_mean", "overhead_share", "best", "evaluations", "rewards"),
)
_OF_EVALUATION = ("task_set", "tasks", "tasks_graded", "num_samples", "sessions", "failures", "mean_reward")


def find_models(out: Path) -> list[Model]:
    """Find the models that have a folder of their own, or of an evaluation."""
    names = (path.name.partition("__")[0] for path in out.glob("*/"))
    return order_models([model for name in names if (model := parse_model(name)) is not None])


def order_models(models: Sequence[Model]) -> list[Model]:
    """Order models by stage, agent and seed, each once."""
    return sorted(set(models), key=lambda model: (STAGES.index(model.stage), model.agent, model.seed))


def find_agents(out: Path) -> list[str]:
    """Find the agents that some model has a folder of an evaluation in, or was trained inside."""
    tested = {path.name.partition("__")[2] for path in out.glob("*__*/") if parse_model(path.name.partition("__")[0])}
    return sorted((tested | {model.agent for model in find_models(out)}) - {""})


def build_summaries(
    out: Path, models: Sequence[Model], agents: Sequence[str], trained: Mapping[Model, str] = {}
) -> list[dict[str, Any]]:
    """Build a summary of each model.

    Args:
        agents: Inside which models may have been evaluated.
        trained: Folders of models that were trained elsewhere.
    """
    times = read_times(out)
    summaries = []
    for model in models:
        folder = Path(trained.get(model, out / model.name))
        steps = [] if model in trained else list_training(model)
        summaries.append(
            {
                **asdict(model),
                "training": read_training(folder),
                "cost": sum_cost(times, steps) or read_cost(folder),
                "failed": [name for name in steps if name in times and times[name][-1]["status"] not in (0, 130)],
                "evaluations": {
                    agent: found
                    for agent in agents
                    if (found := read_evaluation(out / name_cell(model, agent), times, steps))
                },
            }
        )
    return summaries


def write_summaries(out: Path, summaries: Sequence[Mapping[str, Any]]) -> None:
    """Write those that have something, to OUT/summaries."""
    folder = out / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for summary in summaries:
        if summary["training"] or summary["evaluations"] or summary["failed"]:
            name = Model(stage=summary["stage"], agent=summary["agent"], seed=summary["seed"]).name
            write_whole(folder / f"{name}.json", (json.dumps(summary, indent=1) + "\n").encode())


def load_summaries(folder: Path) -> list[dict[str, Any]]:
    """Load what `write_summaries` wrote. Raises `ConfigError` where there is none, or one is unreadable."""
    paths = [path for path in sorted(folder.glob("*.json")) if parse_model(path.stem)]
    if not paths:
        raise ConfigError(f"{folder} has no summaries of models, such as base.json or grpo-pi-0.json")
    summaries = []
    for path in paths:
        try:
            summary = dict(json.loads(path.read_text(encoding="utf-8")))
            name = Model(**{name: summary[name] for name in ("stage", "agent", "seed")}).name
            list(render_report(build_report([summary])))
        except UNREADABLE as error:
            raise ConfigError(f"{path} is no summary of a model: {error!r}") from error
        if name != path.stem:
            raise ConfigError(f"{path} is the summary of {name}; give it that name")
        summaries.append(summary)
    return summaries


def read_training(folder: Path) -> dict[str, Any] | None:
    """Read the figures of a run that is over; None where there is no such run."""
    try:
        summary = json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8"))
        settings = json.loads((folder / SETTINGS_FILE).read_text(encoding="utf-8"))
        start = settings["starts"][-1]
        return {
            **{name: summary.get(name) for name in _OF_RUN},
            **{name: start.get(name) for name in ("hardware", "versions", "git_commit")},
        }
    except UNREADABLE:
        return None


def sum_cost(times: Mapping[str, Sequence[Mapping[str, Any]]], steps: Sequence[str]) -> dict[str, float] | None:
    """Sum what all attempts of these steps took: wall time, processor time and GPU time (s). None for no attempt."""
    attempts = [attempt for name in steps for attempt in times.get(name, [])]
    if not attempts:
        return None
    return {
        "seconds": round(sum(a["seconds"] for a in attempts), 3),
        "cpu_seconds": round(sum(a["cpu_seconds"] for a in attempts), 3),
        "gpu_seconds": round(sum(a.get("gpu_seconds", 0.0) for a in attempts), 3),
    }


def read_cost(folder: Path) -> dict[str, float] | None:
    """Read what a run says of itself, one that this script did not start: its processors count as busy throughout."""
    try:
        seconds = json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8"))["seconds"]
        start = json.loads((folder / SETTINGS_FILE).read_text(encoding="utf-8"))["starts"][-1]
        gpus = min(len(start["hardware"]["gpus"]), start["processes"])
        return {"seconds": seconds, "cpu_seconds": seconds * start["hardware"]["cpus"], "gpu_seconds": seconds * gpus}
    except UNREADABLE:
        return None


def read_evaluation(
    folder: Path, times: Mapping[str, Sequence[Mapping[str, Any]]] = {}, training: Sequence[str] = ()
) -> dict[str, Any] | None:
    """Read state, numbers and graded sessions of one cell; None for one that nothing is known of.

    States: "begun" (a summary is not there, or has not all sessions), "failed", "of an earlier model", "no pass@1",
    "unreadable" (`error` says why), "done".

    Args:
        times: Of `read_times`.
        training: Steps that the model is made by.
    """
    attempts = times.get(folder.name, [])
    cost = {"cost": sum_cost({folder.name: attempts}, [folder.name])}
    path = folder / SUMMARY_FILE
    if attempts and attempts[-1]["status"] not in (0, 130):
        return {"state": "failed", **cost}
    if find_newer(times, folder.name, training):
        return {"state": "of an earlier model", **cost}
    if not path.exists():
        return {"state": "begun", **cost} if (folder / SETTINGS_FILE).exists() else None
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
        found = {name: summary[name] for name in _OF_EVALUATION}
        if summary["pass_at"].get("1") is None:
            return {"state": "no pass@1", **found, **cost}
        if summary["sessions"]["missing"]:
            return {"state": "begun", **found, **cost}
        counts = count_tasks(folder, summary["num_samples"])
        return {"state": "done", **found, "counts": counts, **_read_settings(folder), **cost}
    except UNREADABLE as error:
        return {"state": "unreadable", "error": f"{path}: {error!r}", **cost}


def count_tasks(folder: Path, num_samples: int) -> dict[str, tuple[int, int]]:
    """Count graded and passed sessions per task."""
    found: dict[str, list[bool]] = {}
    for result in read_results(folder):
        if result.reward is not None and result.sample < num_samples:
            found.setdefault(result.task, []).append(result.reward >= PASSING_REWARD)
    return {task: (len(passed), sum(passed)) for task, passed in found.items()}


def _read_settings(folder: Path) -> dict[str, Any]:
    try:
        settings = dict(json.loads((folder / SETTINGS_FILE).read_text(encoding="utf-8")))
        settings.pop("tokenizer", None)  # a path of this machine; it decides nothing
    except UNREADABLE as error:
        return {"settings": {}, "settings_problem": f"{SETTINGS_FILE}: {error!r}"}
    return {"settings": settings, "settings_problem": None if settings else f"{SETTINGS_FILE} has none"}
