"""Build the table, its gains and costs, and the matrix, from summaries of models; and render them as Markdown."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from table.numbers import Counts, estimate_gain_over_seeds, estimate_over_seeds
from table.steps import BASE, STAGES, Model, name_cell

from polar_trl.cli.eval import format_rate
from polar_trl.grade.pass_at_k import TaskCount

PAPER: Mapping[str, tuple[float, float]] = {
    "codex": (3.8, 26.4),
    "claude_code": (29.8, 34.6),
    "qwen_code": (34.6, 35.2),
    "pi": (34.2, 40.4),
}
"""pass@1 in per cent of Qwen3.5-4B before and after training inside the agent, on SWE-bench Verified: table 1 of
arXiv 2605.24220."""
PAPER_TASKS = "swe-bench-verified"
TITLES = {"base": "base", "sft": "SFT", "grpo": "GRPO", "both": "SFT and GRPO"}
OF_MODEL = ("model", "served_name")
"""Settings that cells of one model share; those of one agent share what begins with "agent", and all the rest."""
Summary = Mapping[str, Any]


def order_agents(agents: Sequence[str]) -> list[str]:
    """Order agents: the paper's, in its order, then others."""
    return [agent for agent in PAPER if agent in agents] + sorted(set(agents) - set(PAPER))


def build_report(
    summaries: Sequence[Summary],
    agents: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    stages: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Build the content of `table.json`.

    Args:
        agents, seeds, stages: Of the table; None: those that some summary has. What is not there is "missing".
    """
    by_model = {Model(stage=s["stage"], agent=s["agent"], seed=s["seed"]): s for s in summaries}
    trained = [model for model in by_model if model.stage != BASE]
    tested = {agent for summary in summaries for agent in summary["evaluations"]}
    agents = list(agents or order_agents([*tested, *(model.agent for model in trained)]))
    seeds = sorted(seeds if seeds is not None else {model.seed for model in trained} or {0})
    stages = [stage for stage in STAGES if stage in (stages or [model.stage for model in by_model])]
    cells = {stage: {agent: _build_cell(by_model, stage, agent, agent, seeds) for agent in agents} for stage in stages}
    final = next((stage for stage in ("both", "grpo", "sft") if stage in stages), None)
    done = [e for s in summaries for e in s["evaluations"].values() if e["state"] == "done"]
    return {
        "agents": agents,
        "seeds": seeds,
        "stages": stages,
        "task_sets": sorted({e["task_set"] for e in done}),
        "num_tasks": sorted({e["tasks"] for e in done}),
        "num_samples": sorted({e["num_samples"] for e in done}),
        "cells": cells,
        "matrix": {
            inside: {agent: _build_cell(by_model, final, inside, agent, seeds) for agent in agents}
            for inside in agents
            if final
        },
        "differences": list(find_differences(by_model)),
        "errors": [
            f"{name_cell(model, agent)}: {found['error']}"
            for model, summary in by_model.items()
            for agent, found in summary["evaluations"].items()
            if "error" in found
        ],
        "complete": all(cell["num_done"] == cell["num_wanted"] for row in cells.values() for cell in row.values()),
    }


def _build_cell(
    by_model: Mapping[Model, Summary], stage: str, inside: str, agent: str, seeds: Sequence[int]
) -> dict[str, Any]:
    """Build the cell of a stage's models, trained inside one agent and evaluated in one, over seeds."""
    models = [Model(stage=BASE)] if stage == BASE else [Model(stage=stage, agent=inside, seed=s) for s in seeds]
    found = {model: by_model.get(model, {}).get("evaluations", {}).get(agent) for model in models}
    done = {model: cell for model, cell in found.items() if cell is not None and cell["state"] == "done"}
    states = [_name_state(cell, by_model.get(model, {})) for model, cell in found.items() if model not in done]
    rate = estimate_over_seeds([_read_counts(cell) for cell in done.values()])
    base = by_model.get(Model(stage=BASE), {}).get("evaluations", {}).get(agent)
    before = [_read_counts(base)] if base is not None and base["state"] == "done" else []
    gain = estimate_gain_over_seeds(before, [_read_counts(c) for c in done.values()]) if stage != BASE else None
    costs = [by_model[model]["cost"] for model in done if by_model[model].get("cost")]
    cost = _average(costs) if costs else None
    return {
        "num_wanted": len(models),
        "num_done": len(done),
        "states": sorted(set(states)),
        "rate": None
        if rate is None
        else {name: getattr(rate.rate, name) for name in ("rate", "low", "high", "num_tasks")},
        "by_seed": {} if rate is None else {m.seed: x for m, x in zip(done, rate.by_seed, strict=True)},
        "gain": None if gain is None else {name: getattr(gain, name) for name in ("rate", "low", "high", "num_tasks")},
        "cost": cost,
        "without_reward": sum(cell["sessions"]["failed"] for cell in done.values()) if done else None,
    }


def _name_state(cell: Mapping[str, Any] | None, summary: Summary) -> str:
    if cell is not None:
        return str(cell["state"])
    return "failed" if summary.get("failed") else "missing"


def _read_counts(cell: Mapping[str, Any]) -> Counts:
    return {task: TaskCount(num_graded=graded, num_passed=passed) for task, (graded, passed) in cell["counts"].items()}


def _average(costs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Average costs over seeds, in hours."""
    names = {"seconds": "hours", "cpu_seconds": "cpu_hours", "gpu_seconds": "gpu_hours"}
    return {ours: sum(cost[name] for cost in costs) / len(costs) / 3600 for name, ours in names.items()}


def find_differences(by_model: Mapping[Model, Summary]) -> Iterator[str]:
    """Yield a sentence per setting in which cells differ from the first one that should share it."""
    settings: dict[str, dict[str, Any]] = {}
    for model, summary in by_model.items():
        for agent, cell in summary["evaluations"].items():
            if cell["state"] != "done":
                continue
            if problem := cell["settings_problem"]:
                yield f"{name_cell(model, agent)}: its settings cannot be compared: {problem}"
            # it decides no session, and so is no setting of the folder
            settings[name_cell(model, agent)] = {**cell["settings"], "num_samples": cell["num_samples"]}
    keys = dict.fromkeys(key for found in settings.values() for key in found)
    for key in keys:
        first: dict[str, str] = {}
        differing: dict[str, list[str]] = {}
        for name, found in settings.items():
            if key not in found:
                if len(found) > 1:
                    yield f"{name}: its settings cannot all be compared: {key} is missing"
                continue
            model, _, agent = name.partition("__")
            other = first.setdefault(agent if key.startswith("agent") else model if key in OF_MODEL else "", name)
            if found[key] != settings[other][key]:
                sentence = f"{key} is {found[key]!r}, and {settings[other][key]!r} in {other}"
                differing.setdefault(sentence, []).append(name)
        for sentence, names in differing.items():
            yield f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {sentence}"


def render_report(report: Mapping[str, Any]) -> Iterator[str]:
    """Render the report as Markdown, a line at a time."""
    yield "# pass@1 before and after training inside each agent"
    yield ""
    if report["task_sets"]:
        yield (
            f"{_join(report['num_tasks'])} tasks of {_join(report['task_sets'])}, {_join(report['num_samples'])} "
            f"session(s) each; seeds {', '.join(map(str, report['seeds']))}. In per cent, with 95 % intervals over "
            "tasks and seeds (over tasks where there is one model). scripts/table/numbers.py has the formula."
        )
        yield ""
    for difference in report["differences"]:
        yield f"**Not one setting**: {difference}"
        yield ""
    yield from _render_table(report)
    for error in report["errors"]:
        yield error
        yield ""
    yield from _render_gains(report)
    yield from _render_matrix(report)


def _render_table(report: Mapping[str, Any]) -> Iterator[str]:
    with_paper = report["task_sets"] == [PAPER_TASKS]
    if with_paper:
        yield "Paper: arXiv 2605.24220, table 1, SWE-bench Verified."
        yield ""
    paper = ["paper: base", "paper: trained", "paper: gain"] * with_paper
    yield _row(["agent", *paper, *(TITLES[stage] for stage in report["stages"])])
    yield "|---" * (1 + len(paper) + len(report["stages"])) + "|"
    for agent in report["agents"]:
        theirs: list[str] = []
        if with_paper:
            base, trained = PAPER.get(agent, (None, None))
            theirs = (
                ["-"] * 3 if base is None or trained is None else [f"{base}", f"{trained}", f"{trained - base:+.1f}"]
            )
        yield _row([agent, *theirs, *(_render_cell(report["cells"][stage][agent]) for stage in report["stages"])])
    yield ""


def _render_gains(report: Mapping[str, Any]) -> Iterator[str]:
    rows = [(agent, stage) for agent in report["agents"] for stage in report["stages"] if stage != BASE]
    costs = [report["cells"][stage][agent]["cost"] for agent, stage in rows]
    on_gpu = any(cost and cost["gpu_hours"] for cost in costs)
    unit, key = ("GPU-hours", "gpu_hours") if on_gpu else ("CPU-hours", "cpu_hours")
    yield "## Gain over the base model, and its cost"
    yield ""
    yield f"Paired by task. Cost: training of one seed, its warm-start data included, in {unit}."
    yield ""
    yield _row(["agent", "trained by", "gain", "pass@1 by seed", "hours", unit, "per point", "without a reward"])
    yield "|---" * 8 + "|"
    for agent, stage in rows:
        cell = report["cells"][stage][agent]
        by_seed = ", ".join(f"{100 * rate:.1f}" for rate in cell["by_seed"].values()) or "-"
        cost, gain, given_up = cell["cost"], cell["gain"], cell["without_reward"]
        hours = ["-"] * 3
        if cost is not None:
            per_point = f"{cost[key] / (100 * gain['rate']):.3g}" if gain and gain["rate"] > 0 else "-"
            hours = [f"{cost['hours']:.2f}", f"{cost[key]:.3g}", per_point]
        given_up = "-" if given_up is None else str(given_up)
        yield _row([agent, TITLES[stage], render_gain(gain), by_seed, *hours, given_up])
    yield ""


def _render_matrix(report: Mapping[str, Any]) -> Iterator[str]:
    agents = report["agents"]
    if not report["matrix"] or len(agents) < 2:
        return
    yield "## Trained inside one agent, evaluated inside another"
    yield ""
    yield "pass@1, and its gain over the base model inside the same agent."
    yield ""
    yield _row(["trained inside", *(f"in {agent}" for agent in agents)])
    yield "|---" * (1 + len(agents)) + "|"
    if BASE in report["stages"]:
        yield _row(["nothing (base)", *(_render_cell(report["cells"][BASE][agent]) for agent in agents)])
    for inside, row in report["matrix"].items():
        cells = [
            _render_cell(row[agent]) + (f"; {render_gain(row[agent]['gain'])}" if row[agent]["gain"] else "")
            for agent in agents
        ]
        yield _row([inside, *cells])


def _render_cell(cell: Mapping[str, Any]) -> str:
    states = " and ".join(cell["states"])
    if cell["rate"] is None:
        return states or "no task in common"
    seeds = f", {cell['num_done']} of {cell['num_wanted']} seeds ({states})" if states else ""
    return format_rate(cell["rate"]) + seeds


def render_gain(gain: Mapping[str, Any] | None) -> str:
    """Render a gain and its interval, in points."""
    if gain is None:
        return "-"
    return f"{100 * gain['rate']:+.1f} ({100 * gain['low']:+.1f} to {100 * gain['high']:+.1f})"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _join(values: Sequence[Any]) -> str:
    return " or ".join(map(str, values))
