"""`polar-trl check-tasks`: whether the graders tell each task's solution from no change."""

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from polar_trl.errors import ConfigError
from polar_trl.sandbox import KINDS

if TYPE_CHECKING:
    from polar_trl.setup.check_tasks import Checked

EPILOG = """\
examples:
  polar-trl check-tasks tasks.jsonl --sandbox bwrap
  polar-trl check-tasks tasks/ --sandbox docker --limit 10      Harbor folders
  polar-trl check-tasks swe-bench-verified --sandbox docker     rows of the hub; files of rows work as well

SOURCE is what `tasks` of a run may be. Each task's solution is graded three times and an empty change once, by the
graders of a run: 1 and 0 is good, and rewards that differ among the three are flaky. Without a solution to try, a task
whose empty change gets 0 is not proven. Good results are kept until the task, its image or a grader changes. Exits
with 1 if a task is bad, or none is good.
"""


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "check-tasks",
        help="whether the graders tell each task's solution from no change",
        description="Grade the known solution of each task, and no change, in sandboxes as a run has them.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", metavar="SOURCE", help="a file, a folder, or a data set of the hub")
    parser.add_argument("--sandbox", choices=KINDS, default="auto", help="where to grade (default: %(default)s)")
    parser.add_argument("--sandbox_image", metavar="IMAGE", help="container image, for --sandbox docker")
    for name, unit, default in (("memory_mb", int, 4096), ("cpus", float, 2.0), ("disk_mb", int, 4096)):
        parser.add_argument(
            f"--sandbox_{name}", type=unit, default=default, metavar="N", help="of one sandbox (default: %(default)s)"
        )
    parser.add_argument("--columns", metavar="JSON", help="what tasks have of a row's columns, as in a run file")
    parser.add_argument("--limit", type=int, metavar="N", help="the first N tasks (default: all)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="tasks at a time (default: %(default)s)")
    parser.add_argument("--fresh", action="store_true", help="check again what is known to be good")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """`polar-trl check-tasks`."""
    from polar_trl.sandbox import build_backend, choose_kind
    from polar_trl.sandbox.limits import Limits
    from polar_trl.setup.agents import read_mapping
    from polar_trl.setup.check_tasks import TaskChecker, has_tests
    from polar_trl.setup.run_setup import find_unused_images
    from polar_trl.tasks.environment import list_environments, provide_python
    from polar_trl.tasks.load import load_task_set
    from polar_trl.tasks.rules import check_limits

    if args.jobs < 1:
        raise ConfigError(f"--jobs is {args.jobs}; it must be at least 1")
    columns = read_mapping("columns", args.columns) if args.columns else None
    loaded = load_task_set(args.source, columns=columns, limit=args.limit)
    tasks = [task for task in loaded if has_tests(task)]
    if not tasks:
        raise ConfigError(f"no task of {args.source} has tests or a verifier; there is nothing to check")
    if len(tasks) < len(loaded):
        print(f"polar-trl: {len(loaded) - len(tasks)} tasks have no tests and are left out", file=sys.stderr)
    kind = choose_kind(args.sandbox, image=args.sandbox_image, tasks=tasks)
    if unused := find_unused_images(tasks, kind):
        print(f"polar-trl: {unused}", file=sys.stderr)
    tasks = provide_python(tasks, sandbox=kind, image=args.sandbox_image)
    limits = Limits(memory_mb=args.sandbox_memory_mb, cpus=args.sandbox_cpus, disk_mb=args.sandbox_disk_mb)
    mounts = list_environments(tasks)
    backend = build_backend(kind, image=args.sandbox_image, limits=limits, mounts=mounts, run_id="check-tasks")
    try:
        check_limits(tasks, limits, backend.capabilities)
        checker = TaskChecker(backend, kind=kind, image=args.sandbox_image, limits=limits, fresh=args.fresh)
        results = checker.check_all(tasks, jobs=args.jobs)
    finally:
        backend.close()
    if args.json:
        print(json.dumps({"tasks": [asdict(checked) for checked in results]}))
    else:
        _print_checks(results)
    verdicts = {checked.verdict for checked in results}
    return 1 if "bad" in verdicts or "good" not in verdicts else 0


def _name_problem(checked: "Checked") -> str:
    """Name a problem without what is of one task: its id, and all from a colon, a bracket or a semicolon on."""
    problem = re.sub(rf"(?<=\btask ){re.escape(checked.id)}(?!\w)", "...", checked.problem)
    return re.split(r"[:;(]", problem)[0].strip()


_OTHERS = {"bad": "bad", "not proven": "not proven (no solution to try)"}


def _print_checks(results: Sequence["Checked"]) -> None:
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    # names of tests are long words, which would be cut
    names = ("verdict", "gold", "empty", "seconds", "flaky")
    table = Table(Column("task", overflow="fold"), *names, Column("problem", overflow="fold"))
    for checked in results:
        gold, empty = ("-" if value is None else f"{value:g}" for value in (checked.gold, checked.empty))
        flaky = "yes" if checked.flaky else "no"
        problem = checked.problem
        if checked.verdict == "not proven":
            problem = "no solution to try"
            if checked.missing_tests:
                problem += f"; not found without a change: {', '.join(checked.missing_tests[:3])}"
        table.add_row(checked.id, checked.verdict, gold, empty, f"{checked.seconds:g}", flaky, Text(problem))
    console = Console()
    console.print(table)
    bad = [checked for checked in results if checked.problem]
    if len(bad) > 1:
        why = Table("why tasks are bad", "tasks", Column("example", overflow="fold"))
        counts = Counter(map(_name_problem, bad))
        latest = {_name_problem(checked): checked for checked in bad}
        for name, count in counts.most_common():
            why.add_row(Text(name), str(count), Text(f"{latest[name].id}: {latest[name].problem}"))
        console.print(why)
    verdicts = Counter[str](checked.verdict for checked in results)
    others = "".join(f", {verdicts[name]} {text}" for name, text in _OTHERS.items() if verdicts[name])
    console.print(f"{verdicts['good']} of {len(results)} tasks are good{others}")
