"""`polar-trl replay`: whether what a run trained is what its sessions sampled."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polar_trl.reconstruct import BUILDERS
from polar_trl.tools.replay import replay

EPILOG = """\
examples:
  polar-trl replay runs/first                      every session under runs/first/sessions, and the trained rows
  polar-trl replay runs/first/sessions/0/a.jsonl   one session
  polar-trl replay runs/first --builder per_request --json

Exits with 1 if a session cannot be read, breaks a law, or no longer gives the trajectories it was trained on; or if a
row that was trained (rows/, trained.jsonl) is not as its session has it, or its session is gone.
"""


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "replay",
        help="whether what a run trained is what its sessions sampled",
        description="Read recorded sessions, rebuild their trajectories, check the laws, compare with the digests "
        "that were stored when they were trained, and hold the trained rows against the sessions.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", metavar="RUN", type=Path, help="a run folder (RUN/sessions/**/*.jsonl) or one session")
    parser.add_argument(
        "--builder",
        choices=sorted(BUILDERS),
        default="prefix_merging",
        help="how calls become trajectories (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """`polar-trl replay`."""
    report = replay(args.path, args.builder, lambda fault: print(f"polar-trl: {fault}", file=sys.stderr))
    totals = {item.name: getattr(report, item.name) for item in dataclasses.fields(report)}
    if args.json:
        print(json.dumps(totals))
    else:
        _print_table(totals)
    return 0 if report.is_good else 1


def _print_table(totals: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in totals.items():
        if name == "dropped":
            for reason, num_tokens in sorted(value.items()):
                table.add_row(f"dropped tokens, {reason}", f"{num_tokens:,}")
        else:
            table.add_row(name.replace("_", " "), f"{value:,}")
    Console().print(table)
