"""`polar-trl doctor`: which agents are installed, and whether each works here."""

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from polar_trl.errors import ConfigError
from polar_trl.harness import AGENTS, build_agent
from polar_trl.sandbox import KINDS

if TYPE_CHECKING:
    from polar_trl.tools.doctor import Checkup

EPILOG = """\
examples:
  polar-trl doctor                         every agent that is installed
  polar-trl doctor codex pi --install      these two, installed first where they are missing
  polar-trl doctor --sandbox local         the same in folders of this user, with its network
  polar-trl doctor --json

An agent works if it runs a session of two turns here: a model that says what it was told to has it write a file with
its own shell tool, and its calls continue each other token for token. Exits with 1 if one that was asked for does not.
"""


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "doctor",
        help="which agents are installed, and whether each works here",
        description="Run each agent through a short scripted session on this machine. Needs no model and no GPU.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("agents", metavar="AGENT", nargs="*", help=f"of {', '.join(AGENTS)} (default: all)")
    parser.add_argument("--install", action="store_true", help="install those that are missing")
    parser.add_argument(
        "--answer_s", type=float, default=0.0, metavar="S", help="seconds the model takes per answer (default: 0)"
    )
    parser.add_argument("--sandbox", choices=KINDS, default="auto", help="where the agents run (default: %(default)s)")
    parser.add_argument("--sandbox_image", metavar="IMAGE", help="container image, for --sandbox docker")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """`polar-trl doctor`."""
    # the proxy and all it needs; the other subcommands start without
    from polar_trl.sandbox import build_backend
    from polar_trl.tools.doctor import check_agent

    if not 0 <= args.answer_s < 86400:
        raise ConfigError(f"--answer_s must be a number of seconds from 0 to a day, not {args.answer_s}")
    harnesses = [build_agent(name) for name in dict.fromkeys(args.agents or AGENTS)]
    # agents of Node share it, and a container takes a folder once
    mounts = list(dict.fromkeys(folder for harness in harnesses for folder in harness.folders))
    backend = build_backend(args.sandbox, image=args.sandbox_image, mounts=mounts)
    checkups: dict[str, Checkup] = {}
    for harness in harnesses:
        print(f"polar-trl: trying {harness.name} ...", file=sys.stderr)
        checkups[harness.name] = check_agent(harness, install=args.install, delay_s=args.answer_s, backend=backend)
    if args.json:
        print(json.dumps({"agents": {name: asdict(checkup) for name, checkup in checkups.items()}}))
    else:
        _print_checkups(checkups)
    missed = [c for c in checkups.values() if not c.works and (args.agents or args.install or c.installed)]
    return 1 if missed else 0


def _print_checkups(checkups: Mapping[str, "Checkup"]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("agent", "installed", "verified", "works", "why")
    for name, checkup in checkups.items():
        works = "yes" if checkup.works else "no"
        table.add_row(name, checkup.installed or "-", checkup.verified, works, checkup.why)
    Console().print(table)
