"""`polar-trl clean`: remove the sandboxes that killed runs left behind."""

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polar_trl.tools.clean import Cleaned

EPILOG = """\
examples:
  polar-trl clean              after a run was killed
  polar-trl clean --json

Containers are looked for in the engine at $DOCKER_HOST. Sessions of runs that are alive stay as they are. The next run
does the same when it starts.
"""


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "clean",
        help="remove the sandboxes that killed runs left behind",
        description="Remove containers, session folders, mounts and control groups whose process is dead.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of sentences")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """`polar-trl clean`."""
    from polar_trl.tools.clean import clean

    cleaned = clean()
    if args.json:
        print(json.dumps(asdict(cleaned)))
    else:
        _print_cleaned(cleaned)
    return 0


def _print_cleaned(cleaned: "Cleaned") -> None:
    removed = {"container": cleaned.containers, "folder": cleaned.folders, "control group": cleaned.cgroups}
    for kind, names in removed.items():
        for name in names:
            print(f"removed the {kind} {name}")
    if not any(removed.values()):
        print("nothing was left behind")
    if cleaned.live_sessions:
        print(f"{cleaned.live_sessions} sessions of live runs were left alone")
    if cleaned.engine:
        print(f"no containers were looked for: {cleaned.engine}")
