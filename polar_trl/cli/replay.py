"""`polar-trl replay`: rebuild the trajectories of recorded sessions and check them."""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polar_trl.errors import ConfigError, LawError, RecordError
from polar_trl.reconstruct import BUILDERS, check_laws, count_as_policy, digest
from polar_trl.record import SessionRecord, read_record

EPILOG = """\
examples:
  polar-trl replay runs/first                      every session under runs/first/sessions
  polar-trl replay runs/first/sessions/0/a.jsonl   one session
  polar-trl replay runs/first --builder per_request --json

Exits with 1 if a session cannot be read, breaks a law, or no longer gives the trajectories it was trained on.
"""


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "replay",
        help="rebuild the trajectories of recorded sessions and check them",
        description="Read recorded sessions, rebuild their trajectories, check the laws, and compare with the digests "
        "that were stored when the sessions were trained.",
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


def run(args: argparse.Namespace) -> int:
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
