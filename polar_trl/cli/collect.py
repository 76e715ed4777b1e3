"""`polar-trl collect`: run a strong model inside an agent, and keep what the grader accepts as a data set.

An earlier data set stays until the new one is whole.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polar_trl.cli.process import sigterm_interrupts, stdout_on_stderr
from polar_trl.errors import ConfigError

if TYPE_CHECKING:
    from polar_trl.collect.accept import Acceptance
    from polar_trl.collect.data_set import Report

EPILOG = """\
examples:
  polar-trl collect --config quickstart --num_samples 4 --output_dir runs/collect
      the run's model, loaded here

  polar-trl collect --config my_run.yaml --base_url http://127.0.0.1:8000/v1 --num_samples 4 \\
      --model_name_or_path Qwen/Qwen3.5-122B-A10B --output_dir runs/collect
      the model of a server that returns token ids: vllm serve MODEL --logprobs-mode processed_logprobs

  polar-trl collect --config my_run.yaml --base_url https://example.com/v1 --served_name strong --text_only \\
      --vllm_max_model_length 65536 --output_dir runs/collect
      any other chat server: messages without token ids

  polar-trl collect --recorded runs/serve-checkpoint-70 --sessions fix-login --output_dir runs/mine
      sessions of your own, which polar-trl serve recorded: nothing is run or graded

  polar-trl collect --recorded runs/pi --output_dir runs/mine
      sessions that passed in a training or an evaluation, by their rewards; held-out ones of a training are left out

Other flags are keys of the run, as polar-trl train takes them, and of polar-trl eval: num_samples, max_attempts,
limit, task_ids, eval_temperature, num_engines, base_url, served_name, text_only. A key for the server is read from
$OPENAI_API_KEY. The same command goes on where it was stopped; where nothing is left to run it builds the data set
again. Exits with 1 if nothing was accepted. docs/collect.md shows how to train on it.
"""


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "collect",
        help="a data set for SFT from sessions that a grader accepted",
        description="Run a strong model inside an agent on a task set and write what the grader accepts as a Hugging "
        "Face data set for TRL's SFTTrainer.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # what is left are keys of the run
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="a run file, whose keys are the defaults")
    parser.add_argument(
        "--output_dir", type=Path, required=True, metavar="OUT", help="folder of sessions and data set"
    )
    parser.add_argument("--recorded", type=Path, metavar="DIR", help="take recorded sessions, and run none")
    parser.add_argument(
        "--sessions", nargs="+", default=[], metavar="NAME", help="those to keep, by name or task id (default: all)"
    )
    parser.add_argument(
        "--min_reward", type=float, default=1.0, metavar="R", help="of an accepted session (default: %(default)s)"
    )
    parser.add_argument("--max_per_task", type=int, metavar="N", help="accepted sessions of a task that are kept")
    parser.add_argument("--max_tokens", type=int, metavar="N", help="leave longer rows out (default: none)")
    parser.add_argument(
        "--test_share", type=float, default=0.1, metavar="S", help="of the tasks, by repository (default: %(default)s)"
    )
    parser.add_argument("--split_seed", type=int, default=0, metavar="N", help="of the split (default: %(default)s)")
    parser.add_argument(
        "--with_auxiliary",
        action="store_true",
        help="rows of what agents ask beside their task (titles, summaries) too",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.set_defaults(run=run, overrides=[])


def run(args: argparse.Namespace) -> int:
    """`polar-trl collect`."""
    # torch, transformers, TRL, vLLM and datasets; the other subcommands start without
    from polar_trl.collect.data_set import Selection
    from polar_trl.collect.run import DATA_SET_FOLDER, collect_recorded, parse_collection, run_collection

    selection = Selection(
        min_reward=args.min_reward,
        max_per_task=args.max_per_task,
        max_tokens=args.max_tokens,
        with_auxiliary=args.with_auxiliary,
        test_share=args.test_share,
        seed=args.split_seed,
    )
    if args.recorded is not None:
        if unread := [*args.overrides, *(["--config"] if args.config else [])]:
            raise ConfigError(f"--recorded runs nothing, and nothing reads {unread[0]} with it; leave it out")
        report = collect_recorded(args.recorded, args.output_dir, selection, args.sessions)
        return _tell(report, args.output_dir / DATA_SET_FOLDER, selection.test_share, as_json=args.json)
    if args.sessions:
        raise ConfigError("--sessions names those of --recorded; give that folder too")
    with sigterm_interrupts(), stdout_on_stderr():  # vLLM prints on it
        collection = parse_collection(args.config, args.overrides, args.output_dir, selection)
        try:
            report = run_collection(collection, show_progress=not args.json)
        except KeyboardInterrupt:
            print("polar-trl: stopped; the same command goes on with what is left", file=sys.stderr)
            return 130
    return _tell(report, collection.data_set, selection.test_share, as_json=args.json)


def _tell(report: "Report", data_set: Path, test_share: float, *, as_json: bool) -> int:
    if as_json:
        print(json.dumps({"data_set": str(data_set), **report.render()}))
    else:
        _print_report(report, data_set)
        if test_share > 0 and not any(report.num_rows(form, "test") for form in report.rows):
            print(
                "no rows for testing: a repository's only task is trained on, and there are too few tasks for a share",
                file=sys.stderr,
            )
    return 0


def _print_report(report: "Report", data_set: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    # what training would take: ids where there are any
    form = "tokens" if report.num_rows("tokens") else "messages"
    caption = f"failed: without a reward, in no rate; train, test: rows of {form}"
    table = Table("repository", title="accepted sessions", caption=caption)
    for name in ("tasks", "attempts", "accepted", "rate %", "failed", "train", "test"):
        table.add_column(name, justify="right")
    for repo, counts in report.by_repo.items():
        rows = report.rows[form].get(repo, {})
        table.add_row(repo, *_list_cells(counts), str(rows.get("train", 0)), str(rows.get("test", 0)))
    table.add_section()
    table.add_row("total", *_list_cells(report.total), *(str(report.num_rows(form, s)) for s in ("train", "test")))
    console = Console()
    if report.is_graded:
        console.print(table)
    else:
        train, test = (report.num_rows(form, split) for split in ("train", "test"))
        console.print(
            f"{report.total.accepted} sessions chosen by name, none graded: {train} rows to train, {test} to test"
        )
    for reason, count in report.left_out.items():
        console.print(f"{count} rows left out: {reason.replace('_', ' ')}")
    if report.text_only_rows:
        console.print(f"text only: {report.text_only_rows} rows have no token ids, since the server gives none")
    console.print(f'load_dataset("{data_set}", "{form}")', markup=False, highlight=False, soft_wrap=True)


def _list_cells(counts: "Acceptance") -> list[str]:
    rate = "-" if counts.rate is None else f"{100 * counts.rate:.1f}"
    return [str(counts.tasks), str(counts.attempts), str(counts.accepted), rate, str(counts.failed)]
