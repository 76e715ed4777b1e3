"""`polar-trl doctor`: which agents work here, own ones too; with --security, which attacks sandboxes hold."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, cast

from polar_trl.configs import find_packaged, read_run_file
from polar_trl.errors import ConfigError
from polar_trl.harness import AGENTS
from polar_trl.harness.base import AgentHarness, Harness
from polar_trl.harness.mixed import list_agents, list_mixed
from polar_trl.sandbox import KINDS, choose_kind
from polar_trl.user_code import is_object_name

if TYPE_CHECKING:
    from polar_trl.tokens.base import Renderer
    from polar_trl.tools.doctor import Checkup
    from polar_trl.tools.own_agent import Trial
    from polar_trl.tools.security import Row
    from polar_trl.types import Task

EPILOG = """\
examples:
  polar-trl doctor                         every agent that is installed
  polar-trl doctor codex pi --install      these two, installed first where they are missing
  polar-trl doctor pi@1.5.2 --install      another version than the one that was verified
  polar-trl doctor 'my-agent --yes {instruction}' --agent_folders /opt/my-agent
  polar-trl doctor 'my-agent {instruction}' --tasks tasks.jsonl --sandbox docker   in the first task's image
  polar-trl doctor my_agents:Mine          an own class, as agent: my_agents:Mine of a run file
  polar-trl doctor --sandbox local         the same in folders of this user, with its network
  polar-trl doctor pi --sandbox_cluster ray://head:10001 --install   on every node of a Ray cluster
  polar-trl doctor --json
  polar-trl doctor codex pi --model MODEL --window 8192   does their own prompt fit, by this model's tokenizer?
  polar-trl doctor --config ladder_pi      the agent of a run file, with its options: does its prompt fit its window?
  polar-trl doctor --security              attack the sandboxes of this machine, in under a minute
  polar-trl doctor --security --sandbox docker --image python:3.11 --json

An agent works if it runs a session of two turns here: a model that says what it was told to has it write a file with
its own shell tool, and its calls continue each other token for token. Exits with 1 if one that was asked for does not.
Which sandboxes work here, and what the others lack, is said last.

An own agent, by its command (anything with a space or a slash in it) or its class, works if it calls the model, ends
as it should, and runs a tool that looks like a shell; what it spoke, sent and was refused is printed.

With --security nothing is asked of agents: a script attacks each kind of sandbox from inside, and harms nothing where
it succeeds. Exits with 1 if the sandbox of --sandbox, or else the one that a run takes by itself (bwrap, or docker
where an image is named and an engine is there), does not hold everything. One that cannot be tried does not hold.
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
    parser.add_argument(
        "agents",
        metavar="AGENT",
        nargs="*",
        help=f"of {', '.join(AGENTS)} (default: all), NAME@VERSION, the command of an own agent or its class",
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="a run file, by path or name: its agent with its options, and the model and window to count by",
    )
    parser.add_argument("--agent_options", metavar="JSON", help="options of the agents, as in a run file")
    parser.add_argument("--agent_files", metavar="FILE", nargs="+", default=[], help="as in a run file")
    parser.add_argument("--agent_folders", metavar="FOLDER", nargs="+", default=[], help="as in a run file")
    parser.add_argument("--install", action="store_true", help="install those that are missing")
    parser.add_argument(
        "--answer_s", type=float, default=0.0, metavar="S", help="seconds the model takes per answer (default: 0)"
    )
    parser.add_argument("--model", help="count the tokens of each agent's first prompt as this model is shown it")
    parser.add_argument(
        "--window",
        type=int,
        metavar="TOKENS",
        help="context window that they must fit (vllm_max_model_length)",
    )
    parser.add_argument(
        "--sandbox",
        choices=KINDS,
        default="auto",
        help="where the agents run (default: %(default)s; with --security: all that work here)",
    )
    parser.add_argument(
        "--sandbox_image", "--image", metavar="IMAGE", help="container image with Python, for docker or bwrap"
    )
    parser.add_argument(
        "--sandbox_cluster", metavar="ADDRESS", help="on each node of a Ray cluster: auto, or ray://host:port"
    )
    parser.add_argument("--tasks", metavar="SOURCE", help="run in the image of the first of these tasks instead")
    parser.add_argument("--security", action="store_true", help="try what sandboxes hold, instead of the agents")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """`polar-trl doctor`."""
    # the proxy and all it needs; the other subcommands start without
    from polar_trl.sandbox import build_backend, describe_kinds
    from polar_trl.tasks.load import load_task_set
    from polar_trl.tools.doctor import check_agent
    from polar_trl.tools.own_agent import try_agent

    if args.security:
        return _run_security(args)
    of_run_file = {} if args.config is None else _take_run_file(args)
    if not 0 <= args.answer_s < 86400:
        raise ConfigError(f"--answer_s must be a number of seconds from 0 to a day, not {args.answer_s}")
    if args.window is not None and (args.model is None or args.window < 1):
        raise ConfigError("--window is a number of tokens from 1, and needs the --model whose tokens they are")
    model = None if args.model is None else _load_model(args.model)
    harnesses = of_run_file or {name: _build(name, args) for name in dict.fromkeys(args.agents or AGENTS)}
    if args.sandbox_cluster is not None:
        return _run_cluster(args, harnesses)
    # agents of Node share it, and a container takes a folder once
    mounts = list(dict.fromkeys(folder for harness in harnesses.values() for folder in harness.folders))
    place = None if args.tasks is None else load_task_set(args.tasks, limit=1)[0]
    kind = choose_kind(args.sandbox, image=args.sandbox_image, tasks=[place] if place else [])
    if place is not None and (not _gives_image(place, kind) or args.sandbox_image is not None):
        raise ConfigError("--tasks gives the image for --sandbox docker or bwrap; leave it, or --sandbox_image, out")
    backend = build_backend(kind, image=args.sandbox_image, mounts=mounts)
    checkups: dict[str, Checkup] = {}
    trials: dict[str, Trial] = {}
    settings = {"backend": backend, "delay_s": args.answer_s, "model": model, "window": args.window, "place": place}
    for name, harness in harnesses.items():
        print(f"polar-trl: trying {name} ...", file=sys.stderr)
        if _is_known(name):
            checkups[name] = check_agent(cast(AgentHarness, harness), name, install=args.install, **settings)
        else:
            trials[name] = try_agent(harness, **settings)
    if args.json:
        reports = {name: asdict(c) for name, c in checkups.items()} | {name: asdict(t) for name, t in trials.items()}
        print(json.dumps({"agents": reports, "sandboxes": describe_kinds()}))
    else:
        if checkups:
            _print_checkups(checkups)
        for name, trial in trials.items():
            _print_trial(name, trial)
        print("where agents can run here:")
        for way, said in describe_kinds().items():
            print(f"  {way}: {said}")
    missed = [c for c in checkups.values() if not c.works and (args.agents or args.install or c.installed)]
    return 1 if missed or not all(trial.works for trial in trials.values()) else 0


def _gives_image(task: "Task", kind: str) -> bool:
    return kind == "docker" or (kind == "bwrap" and task.image is not None)


def _take_run_file(args: argparse.Namespace) -> dict[str, Harness]:
    """Take from a run file its agents, by name or command, and what flags do not say. Raises `ConfigError`."""
    from polar_trl.setup.agents import build_harness
    from polar_trl.setup.run_setup import RunArguments

    if args.agents:
        raise ConfigError("--config names the agent; leave the other agents out")
    content, _ = read_run_file(str(args.config))
    names = ("agent", "agents", "agent_command", "agent_options", "agent_files", "agent_folders")
    given = {name: getattr(args, name, None) or content.get(name) for name in names}
    run = RunArguments(**{name: value for name, value in given.items() if value})
    if not (run.agents or run.agent_command or run.agent != "shell"):
        raise ConfigError(f"--config {args.config} is no run file: it names no agent")
    harness = build_harness(run)
    args.agents = list_mixed(harness) or [run.agent_command or run.agent]
    if args.model is None and args.sandbox_cluster is None and content.get("model_name_or_path"):
        args.model = find_packaged(str(content["model_name_or_path"]))
    if args.model is not None and args.window is None and (window := content.get("vllm_max_model_length")) is not None:
        try:
            args.window = int(window)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"--config {args.config}: vllm_max_model_length is {window!r}; give a whole number"
            ) from error
    return dict(zip(args.agents, list_agents(harness).values(), strict=True))


def _run_cluster(args: argparse.Namespace, harnesses: Mapping[str, Harness]) -> int:
    from polar_trl.tools.cluster_doctor import check_cluster

    if not all(map(_is_known, harnesses)) or args.tasks or args.model:
        raise ConfigError("--sandbox_cluster tries agents that are known by name, without --tasks and --model")
    kind = choose_kind(args.sandbox, image=args.sandbox_image)
    found = check_cluster(
        args.sandbox_cluster,
        cast(Mapping[str, AgentHarness], harnesses),
        kind=kind,
        image=args.sandbox_image,
        install=args.install,
        delay_s=args.answer_s,
    )
    if args.json:
        print(json.dumps({"nodes": {name: asdict(node) for name, node in found.items()}}))
    for name, node in () if args.json else found.items():
        print(f"{name}: {node.problem or 'is set up, and reaches this machine'}")
        if node.agents:
            _print_checkups(node.agents)
    missed = [
        c for node in found.values() for c in node.agents.values() if not c.works and (args.agents or c.installed)
    ]
    return 1 if missed or any(node.problem for node in found.values()) else 0


def _is_known(name: str) -> bool:
    return name.partition("@")[0] in AGENTS


def _build(name: str, args: argparse.Namespace) -> Harness:
    """Build an agent from its name, its name and version, its class or its command. Raises `ConfigError`."""
    from polar_trl.setup.agents import build_harness, read_agent_options
    from polar_trl.setup.run_setup import RunArguments

    options = read_agent_options(args.agent_options)
    run = RunArguments(tasks="", agent=name, agent_options=options)
    run.agent_files, run.agent_folders = args.agent_files, args.agent_folders
    if any(character in name for character in " \t\n/"):
        run.agent, run.agent_command = "shell", name
    elif not is_object_name(name):
        run.agent, at, version = name.partition("@")
        if run.agent not in AGENTS:
            raise ConfigError(
                f"agent {name!r} is not known; known are {', '.join(AGENTS)}, each as NAME@VERSION too. An own agent "
                "is a command with a space or a slash in it, or a class as package.module:Class"
            )
        if at:
            options["version"] = version
    return build_harness(run)


def _load_model(name: str) -> "Renderer":
    from transformers import AutoTokenizer

    from polar_trl.tokens.load import load_renderer

    try:
        return load_renderer(AutoTokenizer.from_pretrained(name), name)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model: {name} has no tokenizer that can be read: {error}") from error


def _print_checkups(checkups: Mapping[str, "Checkup"]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("agent", "installed", "verified", "works", "prompt", "why")
    for name, checkup in checkups.items():
        works = "yes" if checkup.works else "no"
        prompt = "-" if checkup.prompt_tokens is None else f"{checkup.prompt_tokens} tokens"
        table.add_row(name, checkup.installed or "-", checkup.verified, works, prompt, checkup.why)
    Console().print(table)


def _print_trial(name: str, trial: "Trial") -> None:
    print(f"{name}\n  works: {'yes' if trial.works else f'no: {trial.why}'}")
    if trial.dialects:
        spoken = ", ".join(f"{dialect} ({count} calls)" for dialect, count in trial.dialects.items())
        print(f"  speaks: {spoken}; {trial.streamed} streamed, {trial.auxiliary} auxiliary")
        counted = trial.prompt_tokens
        unit = "bytes; --model counts tokens" if counted is None else "tokens"
        sizes = trial.prompt_bytes if counted is None else counted
        print(f"  prompts: {sizes[0]} first, {max(sizes)} longest ({unit})")
        asked = ", ".join(map(str, trial.max_tokens))
        print(f"  answers: {f'asks for at most {asked} tokens' if asked else 'sets no limit of their length'}")
        print(f"  tools: {', '.join(trial.tools) or 'none'}")
    for title, counts in (("unread fields", trial.unread), ("counted", trial.counters)):
        if counts:
            print(f"  {title}: " + ", ".join(f"{key} ({count})" for key, count in counts.items()))
    for note in trial.notes:
        print(f"  note: {note}")


def _run_security(args: argparse.Namespace) -> int:
    from polar_trl.tools.security import check_security

    if args.agents or args.install or args.config:
        raise ConfigError("--security tries sandboxes and no agents; leave out the agents, --config and --install")
    kinds = [kind for kind in KINDS if kind != "auto" and args.sandbox in ("auto", kind)]
    print(f"polar-trl: attacking {', '.join(kinds)} ...", file=sys.stderr)
    default = choose_kind(args.sandbox, image=args.sandbox_image)
    rows, missing = check_security(kinds, args.sandbox_image, default=default)
    if args.json:
        report = {"rows": [asdict(row) for row in rows], "default": default, "not_tried": missing}
        print(json.dumps(report))
    else:
        _print_rows(rows, missing, default)
    own = [row for row in rows if row.backend == default]
    return 0 if own and all(row.held for row in own) else 1


def _print_rows(rows: Sequence["Row"], missing: Mapping[str, str], default: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("attack", "sandbox", "held", "what succeeded")
    for row in rows:
        table.add_row(row.name, row.backend, "yes" if row.held else "no", row.detail)
    Console().print(table)
    for kind, reason in missing.items():
        print(f"{kind}: not tried: {reason}")
    for kind in dict.fromkeys(row.backend for row in rows):
        own = [row for row in rows if row.backend == kind]
        own_default = ", which a run takes unless told otherwise" if kind == default else ""
        print(f"{kind}{own_default}: {sum(row.held for row in own)} of {len(own)} attacks held")
        for advice in dict.fromkeys(row.advice for row in own if not row.held):
            names = ", ".join(row.name for row in own if row.advice == advice)
            print(f"  {names}: {advice}")
