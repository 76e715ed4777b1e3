"""`polar-trl gym`: sessions for the agent server of NeMo Gym that examples/nemo_gym has."""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from polar_trl.cli.process import interrupted_once, stdout_on_stderr

EPILOG = """\
Gym's agent server starts this command, with the addresses of Gym's own servers:

  polar-trl gym --config run.yaml --output_dir runs/gym --base_url http://127.0.0.1:PORT/v1 \\
      --served_name policy_model --grader http://127.0.0.1:11000

It prints {"origin": ADDRESS}, answers POST ADDRESS/run with a session per row, and ends with its standard input. Other
flags are keys of a run, as polar-trl eval takes them; vllm_max_model_length is needed. docs/nemo-gym.md says more.
"""


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "gym",
        help="sessions for NeMo Gym's agent server",
        usage="polar-trl gym [--config FILE] --output_dir OUT [--KEY VALUE ...]",
        description="Run a session for each row that NeMo Gym's agent server posts.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # what is left are keys of the run
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="a run file, whose keys are the defaults")
    parser.add_argument("--output_dir", type=Path, required=True, metavar="OUT", help="folder of the records")
    parser.set_defaults(run=run, overrides=[])


def run(args: argparse.Namespace) -> int:
    """`polar-trl gym`."""
    # torch, transformers and TRL; the other subcommands start without
    from polar_trl.eval.gym import serve_sessions
    from polar_trl.eval.setup import parse_eval

    # the parser of a run asks for tasks, which Gym posts
    setup = parse_eval(args.config, ["--tasks", "none", *args.overrides], args.output_dir)
    with os.fdopen(os.dup(1), "w") as answer, interrupted_once(), stdout_on_stderr():

        def announce(origin: str) -> None:
            print(json.dumps({"origin": origin}), file=answer, flush=True)

        serve_sessions(setup, announce, _read_to_end)
    return 0


def _read_to_end() -> None:
    """Return once standard input has ended, as it does with the process that started this one."""
    while sys.stdin.buffer.read(4096):
        pass
