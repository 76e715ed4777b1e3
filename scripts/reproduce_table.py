#!/usr/bin/env python3
"""Train a model inside several agents, with seeds, and make the paper's table of it: pass@1 before and after.

  python scripts/reproduce_table.py --agents pi codex --seeds 0 1 2 --stages base sft grpo both --out runs/small
  python scripts/reproduce_table.py --agents pi codex --seeds 0 1 2 --matrix --out runs/small
  python scripts/reproduce_table.py --render-only --out runs/small
  python scripts/reproduce_table.py --render-only --from docs/results/small
  python scripts/reproduce_table.py --out runs/table --config swe_8gpu --tasks swe-bench-verified --stages base grpo \\
      --trained codex=runs/codex pi=runs/pi --agents codex pi -- --num_engines 8

Stages: base, the model as it is; sft, on sessions of a program that knows the training tasks' solutions; grpo; both,
GRPO from the sft model. Each step is a command of the project, printed before it runs: polar-trl collect, TRL's SFT
script, polar-trl train, polar-trl eval, into OUT/data-AGENT, OUT/STAGE-AGENT-SEED and OUT/STAGE-AGENT-SEED__AGENT.
What is there is not run again; what was stopped goes on with the same command; a step that fails leaves the others
alone. Ctrl-C and SIGTERM end the steps that run, their sandboxes included. --matrix also evaluates each final model
inside every other agent.

What follows -- goes to each evaluation. Writes OUT/table.md, OUT/table.json, and OUT/summaries, a file for each model,
from which --from prints the table again. Cells of different tasks, or of different sampling, are no one table: it says
so first. Exits with 1 if a step failed, and with --render-only if a cell of the table is missing.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from table.picture import draw_report
from table.report import PAPER, build_report, order_agents, render_report
from table.run import run_steps
from table.steps import STAGES, Model, Settings, list_models, list_steps, require_saved
from table.summaries import build_summaries, find_agents, find_models, load_summaries, order_models, write_summaries

from polar_trl.cli.process import sigterm_interrupts
from polar_trl.configs import find_config
from polar_trl.errors import PolarError
from polar_trl.run_folder import own_folder


def main() -> None:
    own, extra = split_arguments(sys.argv[1:])
    parser = build_parser()
    args = parser.parse_args(own)
    refuse_twice(parser, args)
    if args.render_only:
        if extra:
            parser.error("what follows -- is for evaluations, and --render-only runs none")
        render(parser, args)
    settings = read_settings(parser, args, extra)
    steps = list_steps(settings)
    if args.dry_run:
        for step in steps:
            print(shlex.join(step.command))
        return
    own_folder(settings.out)
    with sigterm_interrupts():
        failed = run_steps(steps, settings.out, args.jobs)
    report = write_table(settings)
    if args.picture is not None:
        draw_report(report, args.picture)
    sys.exit(1 if failed else 0)


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the command line into our own arguments and those after --."""
    if "--" not in arguments:
        return list(arguments), []
    place = list(arguments).index("--")
    return list(arguments[:place]), list(arguments[place + 1 :])


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="OUT", help="folder of the runs and the table")
    parser.add_argument(
        "--agents", action="extend", nargs="+", metavar="AGENT",
        help="default: the paper's four; with --render-only, those that are there",
    )  # fmt: skip
    parser.add_argument(
        "--seeds", action="extend", nargs="+", type=parse_seed, metavar="N", help="of training (default: 0)"
    )
    parser.add_argument(
        "--stages", action="extend", nargs="+", choices=STAGES, metavar="STAGE", help="default: " + " ".join(STAGES)
    )
    parser.add_argument("--matrix", action="store_true", help="each final model inside every agent, too")
    parser.add_argument(
        "--config", default=Settings.config, metavar="FILE",
        help="run file, or the name of one of the package; {agent} in it is filled in (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--base", metavar="MODEL", help="the model before training (default: the run file's)")
    parser.add_argument("--tasks", metavar="TASKS", help="to evaluate on (default: the run file's eval_tasks)")
    parser.add_argument(
        "--trained", action="extend", nargs="+", default=[], type=parse_trained, metavar="AGENT=MODEL",
        help="a model of stage grpo and the first seed that was trained already",
    )  # fmt: skip
    for name, what in (("data", "polar-trl collect"), ("sft", "TRL's SFT script"), ("train", "polar-trl train")):
        parser.add_argument(
            f"--{name}", default="", metavar="FLAGS", help=f"more flags of {what}: --{name}='--flag 1'"
        )
    parser.add_argument(
        "--jobs", type=parse_jobs, default=1, metavar="N",
        help="steps at a time, each on one GPU, which may be shared; what they print is in OUT/STEP.txt (default: 1)",
    )  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="print the commands and run none")
    parser.add_argument("--render-only", action="store_true", help="the table of what is there; runs nothing")
    parser.add_argument("--picture", type=Path, metavar="PNG", help="draw the table, too")
    parser.add_argument("--from", dest="source", type=Path, metavar="DIR", help="folder of summaries to render")
    return parser


def parse_seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no seed, a whole number from 0")
    return int(text)


def parse_jobs(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1")
    return int(text)


def parse_trained(text: str) -> tuple[str, str]:
    agent, equals, model = text.partition("=")
    if not (agent and equals and model):
        raise argparse.ArgumentTypeError(f"{text!r} is not AGENT=MODEL")
    return agent, model


def read_settings(parser: argparse.ArgumentParser, args: argparse.Namespace, extra: Sequence[str]) -> Settings:
    """Read what is to be run; an error of the parser for what cannot be."""
    if args.out is None or args.source is not None:
        parser.error("give --out; --from goes with --render-only")
    settings = Settings(
        out=args.out,
        agents=args.agents or list(PAPER),
        seeds=args.seeds or [0],
        stages=[stage for stage in STAGES if stage in (args.stages or STAGES)],
        config=args.config,
        base=args.base,
        tasks=args.tasks,
        trained=dict(args.trained),
        matrix=args.matrix,
        data=shlex.split(args.data),
        sft=shlex.split(args.sft),
        train=shlex.split(args.train),
        eval=extra,
    )
    for agent in settings.trained:
        if agent not in settings.agents or "grpo" not in settings.stages:
            parser.error(f"--trained names {agent!r}, and the table has no stage grpo of it: see --agents, --stages")
    for agent in settings.agents:
        try:
            find_config(settings.name_config(agent))
        except PolarError as error:
            parser.error(f"--config for {agent!r}: {error}")
    require_saved(settings)
    return settings


def refuse_twice(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    given = {"--agents": args.agents, "--seeds": args.seeds, "--trained": [agent for agent, _ in args.trained]}
    for option, values in given.items():
        if twice := [value for value in values or () if values.count(value) > 1]:
            parser.error(f"{option} names {twice[0]!r} twice")


def write_table(settings: Settings) -> dict[str, Any]:
    """Write, print and return the table of a run of this script."""
    models = order_models([*list_models(settings.agents, settings.seeds, settings.stages), *find_models(settings.out)])
    agents = order_agents([*settings.agents, *find_agents(settings.out)])
    trained = {Model(stage="grpo", agent=agent, seed=settings.seeds[0]): at for agent, at in settings.trained.items()}
    summaries = build_summaries(settings.out, models, agents, trained)
    write_summaries(settings.out, summaries)
    report = build_report(summaries, settings.agents, settings.seeds, settings.stages)
    write_report(settings.out, report)
    return report


def render(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Render the table of folders or of summaries, and exit."""
    if (args.out is None) == (args.source is None):
        parser.error("--render-only takes --out, a folder of runs, or --from, a folder of summaries")
    if args.source is not None:
        summaries = load_summaries(args.source)
    else:
        if not (models := find_models(args.out)):
            parser.error(f"{args.out} is no folder of models and cells, such as base__pi or grpo-pi-0")
        seeds = args.seeds or sorted({model.seed for model in models if model.stage == "grpo"}) or [0]
        trained = {Model(stage="grpo", agent=agent, seed=seeds[0]): at for agent, at in args.trained}
        summaries = build_summaries(args.out, models, find_agents(args.out), trained)
        write_summaries(args.out, summaries)
    report = build_report(summaries, args.agents, args.seeds, args.stages)
    if args.out is not None:
        write_report(args.out, report)
    else:
        print("\n".join(render_report(report)))
    if args.picture is not None:
        draw_report(report, args.picture)
    sys.exit(0 if report["complete"] else 1)


def write_report(out: Path, report: dict[str, object]) -> None:
    """Write `table.md` and `table.json`, and print the table."""
    text = "\n".join(render_report(report)) + "\n"
    (out / "table.md").write_text(text, encoding="utf-8")
    (out / "table.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(text, end="")


if __name__ == "__main__":
    try:
        main()
    except (PolarError, OSError) as error:
        sys.exit(f"reproduce_table: {error}")
