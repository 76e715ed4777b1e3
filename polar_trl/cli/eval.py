"""`polar-trl eval`: how often a checkpoint solves tasks inside an agent."""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from polar_trl.cli.process import sigterm_interrupts, stdout_on_stderr
from polar_trl.eval.arguments import EvalArguments

EPILOG = """\
examples:
  polar-trl eval --config quickstart --output_dir runs/eval
  polar-trl eval --config swe_8gpu --model_name_or_path runs/pi/checkpoint-70 \\
      --tasks swe-bench-verified --num_samples 4 --k 1 4 --num_engines 8 --output_dir runs/eval-pi-70
  polar-trl eval --agent pi --tasks tasks.jsonl --sandbox bwrap --model_name_or_path Qwen/Qwen3-4B \\
      --vllm_max_model_length 32768 --output_dir runs/eval-base

All keys of a run are flags here too, as polar-trl train takes them; what concerns training alone is not read. The
tasks are --tasks, or else eval_tasks of the run file, or else its tasks. A folder that holds results goes on from
them. Exits with 1 if nothing could be graded. docs/eval.md says what the numbers mean.

keys of an evaluation:
"""


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "eval",
        help="pass@k of a checkpoint inside an agent, with intervals",
        description="Run a checkpoint inside an agent on a task set, grade every session, and report pass@k.",
        epilog=EPILOG + "\n".join(_describe_keys()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # what is left are keys of the run
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="a run file, whose keys are the defaults")
    parser.add_argument("--output_dir", type=Path, required=True, metavar="OUT", help="folder of the results")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.set_defaults(run=run, overrides=[])


def run(args: argparse.Namespace) -> int:
    """`polar-trl eval`."""
    # torch, transformers, TRL and vLLM; the other subcommands start without
    from polar_trl.eval.evaluate import run_evaluation, run_worker
    from polar_trl.eval.setup import parse_eval

    with sigterm_interrupts(), stdout_on_stderr():  # vLLM prints on it
        setup = parse_eval(args.config, args.overrides, args.output_dir)
        if args.worker is not None:
            from polar_trl.eval.workers import end_with_parent

            end_with_parent()
            run_worker(setup, args.worker)
            return 0
        try:
            summary = run_evaluation(setup, show_progress=not args.json)
        except KeyboardInterrupt:
            print("polar-trl: stopped; the same command goes on with what is left", file=sys.stderr)
            return 130
    if args.json:
        print(json.dumps(summary))
    else:
        print_summary(summary)
    return 0 if summary["sessions"]["graded"] else 1


def print_summary(summary: Mapping[str, Any]) -> None:
    """Print the tables of an evaluation: its numbers, the failures of the infrastructure, the groups of its tasks."""
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    console = Console()
    sessions = summary["sessions"]
    table = Table(title=f"{summary['model']} inside {summary['agent']} on {summary['task_set']}", show_header=False)
    table.add_row("tasks", f"{summary['tasks']}, {summary['tasks_graded']} with a graded session")
    table.add_row("sessions", f"{sessions['wanted']}, {sessions['graded']} graded, {sessions['passed']} passed")
    if sessions["failed"] or sessions["missing"]:
        table.add_row("without a reward", f"{sessions['failed']} given up, {sessions['missing']} not run")
    for k, rate in summary["pass_at"].items():
        left_out = f"; {rate['num_left_out']} tasks with fewer than {k} graded sessions left out"
        table.add_row(f"pass@{k} in % (95 % interval)", format_rate(rate) + left_out * bool(rate["num_left_out"]))
    for name in ("mean_reward", "calls_per_session", "sampled_tokens_per_session", "agent_seconds_per_session"):
        if summary[name] is not None:
            table.add_row(name.replace("_", " "), f"{summary[name]:.4g}")
    table.add_row("stop reasons", ", ".join(f"{name}: {n}" for name, n in summary["stop_reasons"].items()) or "-")
    console.print(table)
    if summary["failures"]:
        latest = Column("the latest", overflow="fold")
        failures = Table("failures of the infrastructure", "sessions", latest, title="retried and in no rate")
        for name, failure in summary["failures"].items():
            failures.add_row(name, str(failure["sessions"]), Text(failure["latest"] or ""))
        console.print(failures)
    if summary["reasons"]:
        example = Column("example", overflow="fold")  # with a path
        reasons = Table("why graded sessions did not pass", "sessions", example, title="the most frequent reasons")
        for row in summary["reasons"][:10]:
            reasons.add_row(
                Text(row["reason"]), str(row["sessions"]), Text(f"{row['example']}\n{row['record']}".strip())
            )
        console.print(reasons)
    _print_groups(console, summary)
    console.print(f"sessions and numbers: {summary['output_dir']}", markup=False, highlight=False, soft_wrap=True)


def _print_groups(console: Any, summary: Mapping[str, Any]) -> None:
    from rich.table import Table

    groups = summary.get("by", {})
    if len(groups) < 2:
        return
    ks = list(summary["pass_at"])
    table = Table(summary["grouped_by"], "tasks", "graded", *(f"pass@{k} in % (95 %)" for k in ks), "reward", "failed")
    for name, group in groups.items():
        reward = "-" if group["mean_reward"] is None else f"{group['mean_reward']:.3f}"
        rates = (format_rate(group["pass_at"][k]) for k in ks)
        graded, failed = (str(group["sessions"][key]) for key in ("graded", "failed"))
        table.add_row(name, str(group["tasks"]), graded, *rates, reward, failed)
    console.print(table)


def format_rate(rate: Mapping[str, Any]) -> str:
    """Format a pass rate of a summary and its interval, in per cent."""
    if rate["rate"] is None:
        return "-"
    return f"{100 * rate['rate']:.1f} ({100 * rate['low']:.1f} to {100 * rate['high']:.1f})"


def _describe_keys() -> Iterator[str]:
    for key in fields(EvalArguments):
        default = key.default_factory() if key.default_factory is not MISSING else key.default
        yield f"  --{key.name}  {key.metadata['help']} (default: {default})"
