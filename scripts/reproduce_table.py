#!/usr/bin/env python3
"""Evaluate base and trained models inside four agents, and write the paper's table beside ours.

  python scripts/reproduce_table.py --out runs/table --base Qwen/Qwen3.5-4B \\
      --trained codex=runs/codex claude_code=runs/claude qwen_code=runs/qwen pi=runs/pi -- --num_engines 8
  python scripts/reproduce_table.py --out runs/table --base Qwen/Qwen3.5-4B --trained codex=runs/codex --transfer
  python scripts/reproduce_table.py --render-only runs/table

Each cell is a `polar-trl eval` of the run file with `--agent AGENT`, into OUT/MODEL__AGENT. What follows -- goes to
each of them. A cell that was stopped goes on with the same command; one that fails leaves the others alone. Writes
OUT/table.md and OUT/table.json. Exits with 1 if a cell failed, and with --render-only if one of the table is missing.
Cells of different tasks, or of different sampling, are no one table: table.md says so first.
"""

import argparse
import ctypes
import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polar_trl.cli.eval import format_rate
from polar_trl.cli.process import sigterm_interrupts
from polar_trl.configs import find_config
from polar_trl.errors import PolarError
from polar_trl.eval.sample_tasks import read_results
from polar_trl.grade.base import PASSING_REWARD
from polar_trl.grade.pass_at_k import TaskCount, estimate_gain
from polar_trl.run_folder import SETTINGS_FILE

PAPER: Mapping[str, tuple[float, float]] = {
    "codex": (3.8, 26.4),
    "claude_code": (29.8, 34.6),
    "qwen_code": (34.6, 35.2),
    "pi": (34.2, 40.4),
}
"""pass@1 in per cent of Qwen3.5-4B before and after training inside the agent, on SWE-bench Verified: table 1 of
arXiv 2605.24220."""
BASE, TRAINED = "base", "trained-"
CONFIG = "swe_8gpu"
TASKS = "swe-bench-verified"
OF_MODEL = ("model", "tokenizer", "served_name")
"""Settings that cells of one model share; those of one agent share what begins with "agent", and all the rest."""
UNREADABLE = (PolarError, OSError, ValueError, KeyError, TypeError, AttributeError)
"""What a broken file of one cell raises; the other cells are a table all the same."""
PR_SET_PDEATHSIG = 1  # prctl(2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """A model inside an agent."""

    model: str
    """"base", or "trained-AGENT" for the one that was trained inside that agent."""
    agent: str
    path: str
    """What `polar-trl eval` is given as the model."""

    @property
    def name(self) -> str:
        return f"{self.model}__{self.agent}"


def main() -> None:
    own, extra = split_arguments(sys.argv[1:])
    args = parse_arguments(own)
    if args.render_only is not None:
        report = build_report(args.render_only, args.agents)
        write_report(args.render_only, report)
        sys.exit(0 if report["complete"] else 1)
    cells = list_cells(args.agents, args.base, dict(args.trained), transfer=args.transfer)
    commands = {cell: build_command(cell, args.config, args.tasks, args.out, extra) for cell in cells}
    if args.dry_run:
        for command in commands.values():
            print(shlex.join(command))
        return
    with sigterm_interrupts():
        failed = run_cells(commands)
    report = build_report(args.out, args.agents, failed=failed)
    write_report(args.out, report)
    sys.exit(1 if failed else 0)


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the command line into our own arguments and those after --."""
    if "--" not in arguments:
        return list(arguments), []
    place = list(arguments).index("--")
    return list(arguments[:place]), list(arguments[place + 1 :])


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="OUT", help="folder of the cells and the table")
    parser.add_argument("--base", metavar="MODEL", help="the model before training")
    parser.add_argument(
        "--trained", action="extend", nargs="+", default=[], type=parse_trained, metavar="AGENT=MODEL",
        help="trained inside that agent",
    )  # fmt: skip
    parser.add_argument(
        "--agents", action="extend", nargs="+", metavar="AGENT",
        help="default: the paper's four; with --render-only, those of OUT's cells",
    )  # fmt: skip
    parser.add_argument("--transfer", action="store_true", help="each trained model inside every agent, too")
    parser.add_argument(
        "--config",
        default=CONFIG,
        metavar="FILE",
        help="run file, or the name of one of the package; {agent} in its name is filled in (default: %(default)s)",
    )
    parser.add_argument("--tasks", default=TASKS, help="(default: %(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="print the commands and run none")
    parser.add_argument("--render-only", type=Path, metavar="OUT", help="the table of what is there; runs nothing")
    args = parser.parse_args(arguments)
    for option, names in (("--trained", [agent for agent, _ in args.trained]), ("--agents", args.agents or [])):
        if twice := [agent for agent in names if names.count(agent) > 1]:
            parser.error(f"{option} names {twice[0]!r} twice")
    if args.render_only is not None:
        if not (found := find_agents(args.render_only)):
            parser.error(f"{args.render_only} is no folder of cells, MODEL__AGENT")
        args.agents = args.agents or found
        return args
    args.agents = args.agents or list(PAPER)
    if args.out is None or not (args.base or args.trained):
        parser.error("give --out, and --base or --trained; or --render-only")
    if unknown := [agent for agent, _ in args.trained if agent not in args.agents]:
        parser.error(f"--trained names {unknown[0]!r}, which is not among --agents {' '.join(args.agents)}")
    for agent in args.agents:
        try:
            find_config(name_config(args.config, agent))
        except PolarError as error:
            parser.error(f"--config for {agent!r}: {error}")
    return args


def find_agents(out: Path) -> list[str]:
    """Return the agents of the cells that have a folder: the paper's, in its order, then others."""
    found = set()
    for path in out.glob("*__*/"):
        model, _, agent = path.name.partition("__")
        if model == BASE or model.startswith(TRAINED):
            found |= {agent, model.removeprefix(TRAINED)} - {BASE}
    return [agent for agent in PAPER if agent in found] + sorted(found - set(PAPER))


def parse_trained(text: str) -> tuple[str, str]:
    agent, equals, model = text.partition("=")
    if not (agent and equals and model):
        raise argparse.ArgumentTypeError(f"{text!r} is not AGENT=MODEL")
    return agent, model


def name_config(template: str, agent: str) -> str:
    return template.replace("{agent}", agent)


def list_cells(agents: Sequence[str], base: str | None, trained: Mapping[str, str], *, transfer: bool) -> list[Cell]:
    """List the cells to evaluate: the table's first, then the transfer matrix's."""
    cells = [Cell(model=BASE, agent=agent, path=base) for agent in agents if base]
    own = [(inside, agent) for inside in agents for agent in agents if inside in trained and inside == agent]
    others = [(inside, agent) for inside in agents for agent in agents if inside in trained and inside != agent]
    pairs = own + others * transfer
    return cells + [Cell(model=TRAINED + inside, agent=agent, path=trained[inside]) for inside, agent in pairs]


def build_command(cell: Cell, config: str, tasks: str, out: Path, extra: Sequence[str]) -> list[str]:
    keys = ["--config", name_config(config, cell.agent), "--agent", cell.agent, "--tasks", tasks]
    keys += ["--model_name_or_path", cell.path, "--output_dir", str(out / cell.name)]
    return [sys.executable, "-m", "polar_trl", "eval", *keys, *extra]


def run_cells(commands: Mapping[Cell, Sequence[str]]) -> list[str]:
    """Run cells one after the other; return the names of those that failed. An interrupt ends the running one."""
    failed = []
    for number, (cell, command) in enumerate(commands.items(), start=1):
        try:
            print(f"[{number}/{len(commands)}] {cell.name}: {shlex.join(command)}", file=sys.stderr, flush=True)
            status = run_cell(command)
        except KeyboardInterrupt:
            print(f"stopped in {cell.name}; the same command goes on", file=sys.stderr)
            sys.exit(130)
        if status != 0:
            failed.append(cell.name)
            print(f"{cell.name} failed with exit status {status}; going on with the next", file=sys.stderr)
    return failed


def run_cell(command: Sequence[str]) -> int:
    """Run one cell; return its exit status. Raises `KeyboardInterrupt`, the cell ended, if either is interrupted."""
    libc = ctypes.CDLL(None)
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        start_new_session=True,  # a terminal would interrupt it, too; the second time ends it before it has tidied up
        preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM),  # SIGINT may be ignored, by a shell's "&"
    )
    try:
        status = process.wait()
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        raise
    if status in (130, -signal.SIGINT, -signal.SIGTERM):
        raise KeyboardInterrupt
    return status


def build_report(out: Path, agents: Sequence[str], *, failed: Sequence[str] = ()) -> dict[str, Any]:
    """Build the content of `table.json` from the folders of the cells."""
    names = [f"{model}__{agent}" for model in (BASE, *(TRAINED + agent for agent in agents)) for agent in agents]
    cells = {name: read_cell(out / name) for name in names}
    for name in failed:
        cells[name]["state"] = "failed"
    counts = {}
    for name, cell in cells.items():
        if cell["state"] == "done":
            try:
                counts[name] = count_tasks(out / name, cell["num_samples"])
            except UNREADABLE as error:
                cell["error"] = f"no gains: {error}"
    table = [f"{model}__{agent}" for agent in agents for model in (BASE, TRAINED + agent)]
    return {
        "agents": list(agents),
        "paper": {agent: list(PAPER[agent]) for agent in agents if agent in PAPER},
        "cells": cells,
        "gains": {
            f"{TRAINED}{inside}__{agent}": pair_tasks(
                counts.get(f"{BASE}__{agent}", {}), counts.get(f"{TRAINED}{inside}__{agent}", {})
            )
            for inside in agents
            for agent in agents
        },
        "differences": list(find_differences(out, cells)),
        "complete": all(cells[name]["state"] == "done" for name in table),
    }


def read_cell(folder: Path) -> dict[str, Any]:
    """Read state and numbers of one cell.

    "missing", "begun" (sessions are there, a summary is not), "no pass@1", "unreadable" (`error` says why) or "done".
    """
    path = folder / "summary.json"
    if not path.exists():
        return {"state": "begun" if (folder / SETTINGS_FILE).exists() else "missing"}
    kept = ("model", "task_set", "tasks", "tasks_graded", "num_samples", "sessions", "failures", "mean_reward")
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
        rate = summary["pass_at"].get("1")
        state = "no pass@1" if rate is None else "done"
        return {"state": state, "pass_at_1": rate, **{name: summary[name] for name in kept}}
    except UNREADABLE as error:
        return {"state": "unreadable", "error": f"{path}: {error!r}"}


def count_tasks(folder: Path, num_samples: int) -> dict[str, TaskCount]:
    """Count graded and passed sessions per task."""
    found: dict[str, list[bool]] = {}
    for result in read_results(folder):
        if result.reward is not None and result.sample < num_samples:
            found.setdefault(result.task, []).append(result.reward >= PASSING_REWARD)
    return {task: TaskCount(num_graded=len(passed), num_passed=sum(passed)) for task, passed in found.items()}


def pair_tasks(before: Mapping[str, TaskCount], after: Mapping[str, TaskCount]) -> dict[str, Any] | None:
    """Estimate the paired gain in pass@1 on the tasks of both."""
    both = [task for task in before if task in after]
    gain = estimate_gain([before[task] for task in both], [after[task] for task in both])
    return None if gain.rate is None else {"rate": gain.rate, "low": gain.low, "high": gain.high, "tasks": len(both)}


def find_differences(out: Path, cells: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield a sentence per setting in which a cell differs from the first one that should share it."""
    settings: dict[str, dict[str, Any]] = {}
    for name, cell in cells.items():
        path = out / name / SETTINGS_FILE
        if "pass_at_1" not in cell and not path.exists():
            continue
        try:
            settings[name] = dict(json.loads(path.read_text(encoding="utf-8")))
        except UNREADABLE as error:
            yield f"{name}: its settings cannot be compared: {SETTINGS_FILE}: {error!r}"
    keys = list(dict.fromkeys(key for found in settings.values() for key in found))
    for name, found in settings.items():
        if not found:
            yield f"{name}: its settings cannot be compared: {SETTINGS_FILE} has none"
        elif lacking := [key for key in keys if key not in found]:
            yield f"{name}: its settings cannot all be compared: {SETTINGS_FILE} lacks {', '.join(lacking)}"
        if "num_samples" in cells[name]:  # it decides no session, and so is no setting of the folder
            found["num_samples"] = cells[name]["num_samples"]
    for key in (*keys, "num_samples"):
        first: dict[str, str] = {}
        for name in (name for name in settings if key in settings[name]):
            model, _, agent = name.partition("__")
            other = first.setdefault(agent if key.startswith("agent") else model if key in OF_MODEL else "", name)
            ours, theirs = settings[name][key], settings[other][key]
            if ours != theirs:
                yield f"{name}: {key} is {ours!r}, and {theirs!r} in {other}"


def write_report(out: Path, report: Mapping[str, Any]) -> None:
    """Write `table.md` and `table.json`, and print the table."""
    text = "\n".join(render_report(report)) + "\n"
    out.mkdir(parents=True, exist_ok=True)  # every cell may have failed before it wrote anything
    (out / "table.md").write_text(text, encoding="utf-8")
    (out / "table.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(text)


def _join_numbers(cells: Sequence[Mapping[str, Any]]) -> str:
    """Name the numbers of sessions per task among the cells that are done."""
    return " or ".join(map(str, sorted({cell["num_samples"] for cell in cells})))


def render_report(report: Mapping[str, Any]) -> Iterator[str]:
    done = [cell for cell in report["cells"].values() if cell["state"] == "done"]
    yield "# pass@1 before and after training inside each agent"
    yield ""
    if done:
        yield (
            f"{done[0]['tasks']} tasks of {done[0]['task_set']}, {_join_numbers(done)} session(s) each; per cent, "
            "with 95 % intervals over tasks. Gains are paired by task. Paper: arXiv 2605.24220, table 1, SWE-bench "
            "Verified."
        )
        yield ""
    for difference in report["differences"]:
        yield f"**Not one setting**: {difference}"
        yield ""
    yield "| agent | paper: base | paper: trained | paper: gain | base | trained | gain | without a reward |"
    yield "|---|---|---|---|---|---|---|---|"
    for agent in report["agents"]:
        yield render_row(report, agent)
    yield ""
    for name, cell in report["cells"].items():
        if "error" in cell:
            yield f"{name}: {cell['error']}"
            yield ""
    yield from render_matrix(report)


def render_row(report: Mapping[str, Any], agent: str) -> str:
    cells, own = report["cells"], f"{TRAINED}{agent}__{agent}"
    base, trained = cells[f"base__{agent}"], cells[own]
    paper = report["paper"].get(agent)
    theirs = (f"{paper[0]}", f"{paper[1]}", f"{paper[1] - paper[0]:+.1f}") if paper else ("-", "-", "-")
    given_up = " / ".join(str(cell["sessions"]["failed"]) if "sessions" in cell else "-" for cell in (base, trained))
    ours = (render_cell(base), render_cell(trained), render_gain(report["gains"][own]), given_up)
    return "| " + " | ".join((agent, *theirs, *ours)) + " |"


def render_matrix(report: Mapping[str, Any]) -> Iterator[str]:
    agents, cells = report["agents"], report["cells"]
    yield "## Trained inside one agent, evaluated inside another"
    yield ""
    yield "pass@1, and its gain over the base model inside the same agent."
    yield ""
    yield "| trained inside | " + " | ".join(f"in {agent}" for agent in agents) + " |"
    yield "|---|" + "---|" * len(agents)
    yield "| nothing (base) | " + " | ".join(render_cell(cells[f"base__{agent}"]) for agent in agents) + " |"
    for inside in agents:
        names = [f"{TRAINED}{inside}__{agent}" for agent in agents]
        found = [
            f"{render_cell(cells[name])}; {render_gain(report['gains'][name])}"
            if cells[name]["state"] == "done"
            else render_cell(cells[name])
            for name in names
        ]
        yield f"| {inside} | " + " | ".join(found) + " |"


def render_cell(cell: Mapping[str, Any]) -> str:
    return format_rate(cell["pass_at_1"]) if cell.get("pass_at_1") and cell["state"] == "done" else cell["state"]


def render_gain(gain: Mapping[str, Any] | None) -> str:
    if gain is None:
        return "-"
    return f"{100 * gain['rate']:+.1f} ({100 * gain['low']:+.1f} to {100 * gain['high']:+.1f})"


if __name__ == "__main__":
    try:
        main()
    except (PolarError, OSError) as error:
        sys.exit(f"reproduce_table: {error}")
