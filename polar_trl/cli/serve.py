"""`polar-trl serve`: a checkpoint as a server for the agents of this machine, which records their sessions."""

import argparse
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from polar_trl.cli.process import interrupted_once, stdout_on_stderr

if TYPE_CHECKING:
    from polar_trl.eval.serve import ServedSessions, Totals
    from polar_trl.types import Endpoint

DEFAULT_PORT = 8642
STATUS_INTERVAL_S = 0.5
EPILOG = f"""\
examples:
  polar-trl serve runs/pi/checkpoint-70                       a full model or an adapter, recorded in
                                                              runs/serve-checkpoint-70
  polar-trl serve runs/pi/checkpoint-70 --config my_run.yaml  sampled, rendered and read as in that run
  polar-trl serve Qwen/Qwen3-4B --vllm_max_model_length 32768 --eval_temperature 0.7
  polar-trl serve Qwen/Qwen3-4B --base_url http://127.0.0.1:8000/v1   another server samples, this one records

MODEL comes first: a folder, a run's checkpoint-N or a hub name. Left out, it is the run file's, or the only one that
--base_url serves.

It prints a key, and what to paste in front of an agent or into its shell. The key records one session, called
"default"; KEY.NAME records one called NAME: give each conversation that you want to keep apart a name of its own.
Ctrl-C ends serving and the records; the second one ends it at once.

  polar-trl inspect OUT                       the sessions as pages
  polar-trl collect --recorded OUT --output_dir DATA   a data set of those that you keep

The port is {DEFAULT_PORT} unless it is given. Other flags are keys of a run, as polar-trl train takes them, and of
polar-trl eval. What an agent asks of sampling (temperature and the like) is recorded and not done: the run's settings
are. docs/serve.md says more.
"""


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "serve",
        help="a checkpoint as a server for your own agent, recording",
        usage="polar-trl serve [MODEL] [--config FILE] [--KEY VALUE ...]",
        description="Load a checkpoint and serve it to the agents of this machine, in every provider's dialect, "
        "recording.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # what is left are keys of the run
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="a run file, whose keys are the defaults")
    parser.add_argument(
        "--output_dir", type=Path, metavar="OUT", help="folder of the records (default: runs/serve-MODEL)"
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="to listen on (default: %(default)s, this machine alone)",
    )
    parser.add_argument(
        "--port",
        type=int,
        default=DEFAULT_PORT,
        metavar="N",
        help="to listen on; 0: a free one (default: %(default)s)",
    )
    parser.add_argument("--key", metavar="KEY", help="what agents send (default: another one at each start)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of settings to paste")
    parser.set_defaults(run=run, overrides=[])


def run(args: argparse.Namespace) -> int:
    """`polar-trl serve`."""
    # torch, transformers, TRL and vLLM; the other subcommands start without
    from polar_trl.eval.serve import ServeOptions, open_serving
    from polar_trl.eval.setup import parse_eval

    # no positional argument: argparse would take the value of a key of the run for it
    named, keys = [], list(args.overrides)
    if keys and not keys[0].startswith("-"):
        named = ["--model_name_or_path", keys.pop(0)]
    # the parser of a run asks for tasks, which nobody reads here
    setup = parse_eval(args.config, ["--tasks", "none", *named, *keys], Path("runs"))
    model = setup.model or setup.evaluation.served_name or "model"
    folder = args.output_dir or Path("runs") / f"serve-{Path(model).name}"
    key = {"api_key": args.key} if args.key else {}
    options = ServeOptions(host=args.host, port=args.port, **key)
    with (
        os.fdopen(os.dup(1), "w") as answer,
        interrupted_once(),
        stdout_on_stderr(),  # vLLM prints on it
        open_serving(replace(setup, folder=folder), options) as (endpoint, sessions),
    ):
        try:
            _announce(endpoint, folder, answer, as_json=args.json)
            _watch(sessions)
        except KeyboardInterrupt:  # the way to end it
            print("polar-trl: ending, records get their end; once more ends it at once", file=sys.stderr)
    print(f"polar-trl: {_describe(sessions.count())}: polar-trl inspect {folder}", file=sys.stderr)
    return 0


def _announce(endpoint: "Endpoint", folder: Path, answer: TextIO, *, as_json: bool) -> None:
    from polar_trl.harness.by_hand import list_settings

    agents = (folder / "agents").absolute()
    settings = list_settings(endpoint, agents)
    for one in settings:
        for name, text in one.files.items():
            path = agents / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    if as_json:
        about = {
            "origin": endpoint.origin,
            "api_key": endpoint.api_key,
            "model": endpoint.model,
            "max_model_len": endpoint.max_model_len,
            "output_dir": str(folder),
            "settings": {one.name: one.command for one in settings},
        }
        print(json.dumps(about), file=answer, flush=True)
        return
    lines = [f"{one.name}\n    {one.command}" for one in settings]
    lines += [
        f"served at {endpoint.origin} to whoever has the key {endpoint.api_key}",
        f"    {endpoint.api_key}.NAME records a session of its own, called NAME",
        f"    a prompt and its answer have {endpoint.max_model_len} tokens, an answer at most {endpoint.max_tokens} "
        "(max_completion_length)",
        f"    recorded in {folder}; Ctrl-C ends it",
    ]
    print("\n".join(["", *lines]), file=answer, flush=True)


def _watch(sessions: "ServedSessions") -> None:
    """Show what goes on, on a terminal, until Ctrl-C."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        while True:
            time.sleep(3600)
    with console.status("no call yet") as status:
        while True:
            time.sleep(STATUS_INTERVAL_S)
            status.update(_describe(sessions.count()))


def _describe(totals: "Totals") -> str:
    parts = [
        f"{totals.sessions} session{'s' * (totals.sessions != 1)}",
        f"{totals.calls} call{'s' * (totals.calls != 1)}",
        f"{totals.sampled_tokens:,} tokens",
    ]
    if totals.tokens_per_s is not None:
        parts.append(f"{totals.tokens_per_s:.1f} tokens/s in the last")
    parts += [f"{count} {name.replace('_', ' ')}" for name, count in totals.troubles.items()]
    return ", ".join(parts)
