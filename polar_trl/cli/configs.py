"""`polar-trl configs`: the run files and accelerate files that the package ships."""

import argparse
from typing import Any

from polar_trl.configs import find_config, list_configs

EPILOG = """\
examples:
  polar-trl configs                            names, with the first line of each
  polar-trl configs quickstart > my_run.yaml   a copy to edit: polar-trl train my_run.yaml
  polar-trl configs fsdp2 --path               for accelerate launch --config_file

Wherever a command takes a run file, and where --accelerate takes an accelerate file, a name does as well.
"""


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "configs",
        help="the run files that come with the package",
        description="List the run files and accelerate files of the package, or print one.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help="of the file to print")
    parser.add_argument("--path", action="store_true", help="print where it is instead of what it says")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """`polar-trl configs`."""
    if args.name is not None:
        path = find_config(args.name, "accelerate" if args.name in list_configs("accelerate") else "run")
        print(path if args.path else path.read_text(encoding="utf-8"), end="\n" if args.path else "")
        return 0
    for kind, title in (("run", "run files: polar-trl train NAME"), ("accelerate", "accelerate files: --accelerate")):
        files = list_configs(kind)  # type: ignore[arg-type]
        width = max(map(len, files))
        print(title)
        for name, path in files.items():
            first = path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
            print(f"  {name:{width}}  {path if args.path else first}")
    return 0
