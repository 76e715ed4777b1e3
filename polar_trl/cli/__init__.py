"""The command line: `polar-trl SUBCOMMAND`, a module of this package each.

Exit status: 0 all is well, 1 the answer is bad news, 2 the question was wrong. Errors are one sentence
on standard error. A subcommand imports heavy packages only when it runs.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from polar_trl import __version__
from polar_trl.errors import ConfigError, PolarError

SUBCOMMANDS = (
    *("train", "configs", "doctor", "inspect", "replay", "eval", "serve", "gym", "collect", "merge", "check_tasks"),
    *("plan", "lint_template", "clean"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status."""
    parser = _build_parser()
    args, rest = parser.parse_known_args(argv)
    if rest and not hasattr(args, "overrides"):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    args.overrides = rest
    try:
        status: int = args.run(args)
    except ConfigError as error:
        print(f"polar-trl: {error}", file=sys.stderr)
        return 2
    except PolarError as error:
        print(f"polar-trl: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        if error.filename is None:  # not a file's
            raise
        print(f"polar-trl: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("polar-trl: stopped", file=sys.stderr)
        return 130
    return status


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="polar-trl",
        description="GRPO for any unmodified coding agent: train, look at runs and check them.",
        epilog="examples:\n  polar-trl train quickstart\n  polar-trl doctor\n  polar-trl replay --help\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"polar-trl {__version__}")
    subparsers = parser.add_subparsers(metavar="SUBCOMMAND", required=True)
    for subcommand in SUBCOMMANDS:
        # imported here: `python -m polar_trl.cli.train` warns if its module is loaded before it runs
        import_module(f"polar_trl.cli.{subcommand}").add_parser(subparsers)
    return parser
