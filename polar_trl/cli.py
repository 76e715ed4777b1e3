"""The command line: `polar-trl SUBCOMMAND`. Looks and reports; nothing here changes a run.

Exit status: 0 all is well, 1 the answer is bad news, 2 the question was wrong. What is wrong is said in one sentence
on standard error.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polar_trl.errors import ConfigError, LawError, PolarError, RecordError
from polar_trl.harness import AGENTS, build_agent
from polar_trl.reconstruct import BUILDERS, check_laws, count_as_policy, digest
from polar_trl.record import SessionRecord, read_record
from polar_trl.sandbox import KINDS

if TYPE_CHECKING:
    from polar_trl.check_tasks import Checked
    from polar_trl.clean import Cleaned
    from polar_trl.doctor import Checkup
    from polar_trl.grpo.memory import Plan
    from polar_trl.grpo.plan import Advice

REPLAY_EPILOG = """\
examples:
  polar-trl replay runs/first                      every session under runs/first/sessions
  polar-trl replay runs/first/sessions/0/a.jsonl   one session
  polar-trl replay runs/first --builder per_request --json

Exits with 1 if a session cannot be read, breaks a law, or no longer gives the trajectories it was trained on.
"""


DOCTOR_EPILOG = """\
examples:
  polar-trl doctor                         every agent that is installed
  polar-trl doctor codex pi --install      these two, installed first where they are missing
  polar-trl doctor --sandbox bwrap         the same without a network
  polar-trl doctor --json

An agent works if it runs a session of two turns here: a model that says what it was told to has it write a file with
its own shell tool, and its calls continue each other token for token. Exits with 1 if one that was asked for does not.
"""

CHECK_TASKS_EPILOG = """\
examples:
  polar-trl check-tasks tasks.jsonl --sandbox bwrap
  polar-trl check-tasks tasks/ --sandbox docker --limit 10      Harbor folders
  polar-trl check-tasks swe-bench-verified --sandbox docker     rows of the hub; files of rows work as well

SOURCE is what `tasks` of a run may be. Each task's solution is graded three times and an empty change once, by the
graders of a run: 1 and 0 is good, and rewards that differ among the three are flaky. Good results are kept until the
task, its image or a grader changes. Exits with 1 if a task is not good.
"""


CLEAN_EPILOG = """\
examples:
  polar-trl clean              after a run was killed
  polar-trl clean --json

Containers are looked for in the engine at $DOCKER_HOST. Sessions of runs that are alive stay as they are. The next run
does the same when it starts.
"""


PLAN_EPILOG = """\
examples:
  polar-trl plan --config configs/qwen3_4b_pi_pypi_1gpu.yaml --gpu 80GB
  polar-trl plan --config my_run.yaml --gpu 80GB --gpus 8 --accelerate configs/accelerate/fsdp2.yaml
  polar-trl plan --config my_run.yaml --gpu 24GB --lora_r 16 --max_tokens_per_device 16384

Other flags are keys of the run, as scripts/train.py takes them. Only the model's configuration is read. Exits with 1
if the run does not fit; see docs/scaling.md for what is counted and what is estimated.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; the exit status."""
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
    except KeyboardInterrupt:
        print("polar-trl: stopped", file=sys.stderr)
        return 130
    return status


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="polar-trl",
        description="GRPO for any unmodified coding agent: look at runs and check them.",
        epilog="examples:\n  polar-trl doctor\n  polar-trl replay runs/first\n  polar-trl replay --help\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    subparsers = parser.add_subparsers(metavar="SUBCOMMAND", required=True)
    _add_doctor(subparsers)
    _add_replay(subparsers)
    _add_check_tasks(subparsers)
    _add_clean(subparsers)
    _add_plan(subparsers)
    return parser


def _add_doctor(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="which agents are installed, and whether each works here",
        description="Run each agent through a short scripted session on this machine. Needs no model and no GPU.",
        epilog=DOCTOR_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("agents", metavar="AGENT", nargs="*", help=f"of {', '.join(AGENTS)} (default: all)")
    parser.add_argument("--install", action="store_true", help="install those that are missing")
    parser.add_argument(
        "--answer_s", type=float, default=0.0, metavar="S", help="seconds the model takes per answer (default: 0)"
    )
    parser.add_argument(
        "--sandbox", choices=KINDS, default="local", help="where the agents run (default: %(default)s)"
    )
    parser.add_argument("--sandbox_image", metavar="IMAGE", help="container image, for --sandbox docker")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.set_defaults(run=run_doctor)


def run_doctor(args: argparse.Namespace) -> int:
    """`polar-trl doctor`."""
    # the proxy and all it needs; the other subcommands start without
    from polar_trl.doctor import check_agent
    from polar_trl.sandbox import build_backend

    if not 0 <= args.answer_s < 86400:
        raise ConfigError(f"--answer_s must be a number of seconds from 0 to a day, not {args.answer_s}")
    harnesses = [build_agent(name) for name in dict.fromkeys(args.agents or AGENTS)]
    mounts = [folder for harness in harnesses for folder in harness.folders]
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


def _add_check_tasks(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "check-tasks",
        help="whether the graders tell each task's solution from no change",
        description="Grade the known solution of each task, and no change, in sandboxes as a run has them.",
        epilog=CHECK_TASKS_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", metavar="SOURCE", help="a file, a folder, or a data set of the hub")
    parser.add_argument("--sandbox", choices=KINDS, default="local", help="where to grade (default: %(default)s)")
    parser.add_argument("--sandbox_image", metavar="IMAGE", help="container image, for --sandbox docker")
    for name, unit, default in (("memory_mb", int, 4096), ("cpus", float, 2.0), ("disk_mb", int, 4096)):
        parser.add_argument(
            f"--sandbox_{name}", type=unit, default=default, metavar="N", help="of one sandbox (default: %(default)s)"
        )
    parser.add_argument("--limit", type=int, metavar="N", help="the first N tasks (default: all)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="tasks at a time (default: %(default)s)")
    parser.add_argument("--fresh", action="store_true", help="check again what is known to be good")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.set_defaults(run=run_check_tasks)


def run_check_tasks(args: argparse.Namespace) -> int:
    """`polar-trl check-tasks`."""
    from polar_trl.check_tasks import TaskChecker, has_tests
    from polar_trl.sandbox import build_backend
    from polar_trl.sandbox.limits import Limits
    from polar_trl.tasks.environment import list_environments, provide_python
    from polar_trl.tasks.load import load_task_set
    from polar_trl.tasks.rules import check_limits

    if args.jobs < 1:
        raise ConfigError(f"--jobs is {args.jobs}; it must be at least 1")
    loaded = load_task_set(args.source, limit=args.limit)
    tasks = [task for task in loaded if has_tests(task)]
    if not tasks:
        raise ConfigError(f"no task of {args.source} has tests or a verifier; there is nothing to check")
    if len(tasks) < len(loaded):
        print(f"polar-trl: {len(loaded) - len(tasks)} tasks have no tests and are left out", file=sys.stderr)
    tasks = provide_python(tasks, builds_images=args.sandbox == "docker" and args.sandbox_image is None)
    limits = Limits(memory_mb=args.sandbox_memory_mb, cpus=args.sandbox_cpus, disk_mb=args.sandbox_disk_mb)
    mounts = list_environments(tasks)
    backend = build_backend(args.sandbox, image=args.sandbox_image, limits=limits, mounts=mounts, run_id="check-tasks")
    try:
        check_limits(tasks, limits, backend.capabilities)
        checker = TaskChecker(backend, kind=args.sandbox, image=args.sandbox_image, limits=limits, fresh=args.fresh)
        results = checker.check_all(tasks, jobs=args.jobs)
    finally:
        backend.close()
    if args.json:
        print(json.dumps({"tasks": [asdict(checked) for checked in results]}))
    else:
        _print_checks(results)
    return 1 if any(checked.problem for checked in results) else 0


def _print_checks(results: Sequence["Checked"]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("task", "gold", "empty", "seconds", "flaky", "problem")
    for checked in results:
        gold, empty = ("-" if value is None else f"{value:g}" for value in (checked.gold, checked.empty))
        flaky = "yes" if checked.flaky else "no"
        table.add_row(checked.id, gold, empty, f"{checked.seconds:g}", flaky, checked.problem)
    console = Console()
    console.print(table)
    good = sum(not checked.problem for checked in results)
    console.print(f"{good} of {len(results)} tasks are good")


def _add_clean(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "clean",
        help="remove the sandboxes that killed runs left behind",
        description="Remove containers, session folders, mounts and control groups whose process is dead.",
        epilog=CLEAN_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of sentences")
    parser.set_defaults(run=run_clean)


def run_clean(args: argparse.Namespace) -> int:
    """`polar-trl clean`."""
    from polar_trl.clean import clean

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


def _add_plan(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="where the memory of a GPU would go, and whether a run fits",
        description="Count the memory of one GPU, phase by phase, before anything is started.",
        epilog=PLAN_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # what is left are keys of the run
    )
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="the run file")
    parser.add_argument("--gpu", required=True, metavar="SIZE", help="memory of one GPU, such as 80GB")
    parser.add_argument("--gpus", type=int, metavar="N", help="how many (default: the accelerate file's, or 1)")
    parser.add_argument("--accelerate", type=Path, metavar="FILE", help="as accelerate launch --config_file gets it")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.set_defaults(run=run_plan, overrides=[])


def run_plan(args: argparse.Namespace) -> int:
    """`polar-trl plan`."""
    # torch, transformers and TRL; the other subcommands start without
    from polar_trl.grpo.plan import find_advice, plan, read_setup

    setup = read_setup(args.config, args.overrides, gpu=args.gpu, gpus=args.gpus, accelerate=args.accelerate)
    found = plan(setup)
    advice = [] if found.fits else find_advice(setup, found)
    if args.json:
        print(json.dumps(_build_plan_json(found, advice)))
    else:
        _print_plan(found, advice)
    return 0 if found.fits else 1


def _build_plan_json(found: "Plan", advice: Sequence["Advice"]) -> dict[str, Any]:
    return {
        "fits": found.fits,
        "gpu_bytes": found.gpu_bytes,
        "phases": {name: {"total": found.total(name), **parts} for name, parts in found.phases.items()},
        "kv_tokens": found.kv_tokens,
        "kv_sessions": found.kv_sessions,
        "max_model_len": found.max_model_len,
        "host_bytes_asleep": found.host_bytes,
        "advice": [asdict(item) for item in advice],
    }


def _print_plan(found: "Plan", advice: Sequence["Advice"]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("GiB of one GPU")
    for phase in found.phases:
        table.add_column(phase, justify="right")
    names = dict.fromkeys(name for parts in found.phases.values() for name in parts)
    for name in names:
        table.add_row(name, *(_gib(parts[name]) if name in parts else "" for parts in found.phases.values()))
    table.add_section()
    table.add_row("in all", *(_gib(found.total(phase)) for phase in found.phases))
    table.add_row("of", *(_gib(found.gpu_bytes) for _ in found.phases))
    console = Console()
    console.print(table)
    console.print(
        f"key-value cache: {found.kv_tokens:,} tokens, {found.kv_sessions:,} sessions of {found.max_model_len:,}"
    )
    if found.host_bytes:
        console.print(f"host memory for sleeping engines: {_gib(found.host_bytes)} GiB")
    console.print("it fits" if found.fits else "it does not fit")
    fullest = max(found.phases, key=found.total)
    for item in advice:
        console.print(
            f"  {item.change}: frees {_gib(item.saved_bytes)} GiB in {fullest!r}" + (", and it fits" * item.fits),
            markup=False,
            highlight=False,
        )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f}"


def _add_replay(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "replay",
        help="rebuild the trajectories of recorded sessions and check them",
        description="Read recorded sessions, rebuild their trajectories, check the laws, and compare with the digests "
        "that were stored when the sessions were trained.",
        epilog=REPLAY_EPILOG,
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
    parser.set_defaults(run=run_replay)


@dataclass(kw_only=True, slots=True)
class ReplayReport:
    """Totals over the sessions of a replay; the keys of its JSON output."""

    sessions: int = 0
    unfinished: int = 0
    calls: int = 0
    trajectories: int = 0
    forks: int = 0
    sampled_tokens: int = 0
    trained_tokens: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    digests_compared: int = 0
    digest_mismatches: int = 0
    broken_laws: int = 0
    unreadable: int = 0

    def build_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def run_replay(args: argparse.Namespace) -> int:
    """`polar-trl replay`."""
    report = ReplayReport()
    for path in _find_sessions(args.path):
        try:
            _replay_session(read_record(path), args.builder, path, report)
        except RecordError as error:
            report.unreadable += 1
            print(f"polar-trl: {error}", file=sys.stderr)
        except LawError as error:
            report.broken_laws += 1
            print(f"polar-trl: {path}: {error}", file=sys.stderr)
    if args.json:
        print(json.dumps(report.build_json()))
    else:
        _print_table(report.build_json())
    return 1 if report.unreadable or report.broken_laws or report.digest_mismatches else 0


def _find_sessions(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.exists():
        raise ConfigError(f"{path}: no such file or folder; give a run folder or one session's .jsonl file")
    found = sorted((path / "sessions").rglob("*.jsonl"))
    if not found:
        raise ConfigError(f"{path}: no sessions; a run folder holds them as sessions/**/*.jsonl")
    return found


def _replay_session(record: SessionRecord, builder: str, path: Path, report: ReplayReport) -> None:
    """Add one session to the report. Raises `LawError` or `RecordError`."""
    rollout = count_as_policy(record.rollout) if record.extra.get("train_auxiliary") else record.rollout
    reconstruction = BUILDERS[builder](rollout)
    report.sessions += 1
    report.unfinished += not record.finished
    report.calls += len(rollout.calls)
    report.trajectories += len(reconstruction.trajectories)
    report.forks += reconstruction.counters["forks"]
    report.sampled_tokens += sum(len(call.completion.token_ids) for call in rollout.calls)
    report.trained_tokens += sum(sum(trajectory.trainable) for trajectory in reconstruction.trajectories)
    report.dropped.update(reconstruction.dropped)
    stored = record.extra.get("trajectory_digest")
    if stored is not None:
        # The digest is of what was trained, whichever builder this replay was asked to show.
        trained_with = record.extra.get("builder", "prefix_merging")
        if trained_with not in BUILDERS:
            raise RecordError(
                f"{path}: trained with an unknown builder {trained_with!r}, known are {sorted(BUILDERS)}"
            )
        report.digests_compared += 1
        found = digest(BUILDERS[trained_with](rollout).trajectories)
        if found != stored:
            report.digest_mismatches += 1
            print(f"polar-trl: {path}: trained on trajectories {stored}, the record gives {found}", file=sys.stderr)
    check_laws(rollout, reconstruction)


def _print_table(report: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in report.items():
        if name == "dropped":
            for reason, num_tokens in sorted(value.items()):
                table.add_row(f"dropped tokens, {reason}", f"{num_tokens:,}")
        else:
            table.add_row(name.replace("_", " "), f"{value:,}")
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
