#!/usr/bin/env python3
"""Rebuild repair tasks from PyPI source releases, as Harbor task folders.

Without --mutate: the real bug fixes of polar_trl/configs/tasks/pypi_tasks.json, easiest first. With --mutate: defects
made by single edits of a package's code, with its own tests as the judge. Nothing of a package is part of this
repository: archives are downloaded with pip (so your index settings hold) and kept in the cache, $POLAR_TRL_CACHE or
~/.cache/polar-trl. Folders that are there already are kept, so an interrupted run goes on where it ended.

  python scripts/build_pypi_tasks.py --out tasks                            all of them
  python scripts/build_pypi_tasks.py --out tasks --limit 40
  python scripts/build_pypi_tasks.py --out tasks --only pathspec-0.12.0-to-0.12.1
  python scripts/build_pypi_tasks.py --out tasks --mutate semver==3.1.2 --count 50 --seed 1

The exit code is 1 if fewer tasks than asked for were built. A task counts only if its tests fail without the fix and
pass with it. `polar-trl check-tasks` grades them as a run does.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from polar_trl.configs import FOLDER
from polar_trl.errors import ConfigError, TaskError
from polar_trl.tasks.build.folders import Tools, write_task
from polar_trl.tasks.build.mutants import HINTS, build_mutants
from polar_trl.tasks.build.pypi import Spec, build_draft, load_specs
from polar_trl.tasks.build.releases import Release
from polar_trl.tasks.build.suite import install_environment

TASKS = FOLDER / "tasks"


@dataclasses.dataclass(kw_only=True)
class Row:
    """Outcome of one task."""

    id: str
    state: str
    """"built", "kept" (it was there) or "failed"."""
    fail_to_pass: int = 0
    pass_to_pass: int = 0
    seconds: float = 0.0
    problem: str = ""


def describe(folder: Path, state: str, started: float) -> Row:
    spec = json.loads((folder / "tests" / "spec.json").read_text(encoding="utf-8"))
    return Row(
        id=folder.name,
        state=state,
        fail_to_pass=len(spec["fail_to_pass"]),
        pass_to_pass=len(spec["pass_to_pass"]),
        seconds=round(time.monotonic() - started, 1),
    )


def build_fix(spec: Spec, out: Path, tools: Tools, pip: Path) -> Row:
    started = time.monotonic()
    folder = out / spec.id
    if (folder / "task.toml").is_file():
        return describe(folder, "kept", started)
    try:
        with tempfile.TemporaryDirectory(prefix="polar-build-") as scratch:
            write_task(build_draft(spec, Path(scratch), pip), folder, tools)
    except TaskError as error:
        return Row(id=spec.id, state="failed", problem=str(error), seconds=round(time.monotonic() - started, 1))
    return describe(folder, "built", started)


def build_fixes(args: argparse.Namespace, tools: Tools, pip: Path) -> Iterator[Row]:
    """Rows in the order of the specs, until as many as asked for are there."""
    specs = load_specs(args.specs)
    if args.only:
        known = {spec.id: spec for spec in specs}
        if unknown := [name for name in args.only if name not in known]:
            raise ConfigError(f"no spec {unknown[0]!r} in {args.specs}")
        specs = [known[name] for name in args.only]
    wanted = args.wanted = len(specs) if args.limit is None else min(args.limit, len(specs))
    for spec in specs:
        if wanted == 0:
            return
        row = build_fix(spec, args.out, tools, pip)
        wanted -= row.state != "failed"
        yield row


def build_edits(args: argparse.Namespace, tools: Tools, pip: Path) -> Iterator[Row]:
    package, _, version = args.mutate.partition("==")
    if not version:
        raise ConfigError(f"--mutate is {args.mutate!r}; write PACKAGE==VERSION")
    args.wanted = args.count
    started = time.monotonic()
    for folder, is_new in build_mutants(
        Release(package=package, version=version),
        args.out,
        tools,
        pip,
        count=args.count,
        seed=args.seed,
        hint=args.hint,
    ):
        yield describe(folder, "built" if is_new else "kept", started)
        started = time.monotonic()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the task folders")
    parser.add_argument("--limit", type=int, help="how many fixes to build (default: all)")
    parser.add_argument("--only", nargs="+", metavar="ID", help="just these fixes")
    parser.add_argument("--mutate", metavar="PACKAGE==VERSION", help="make tasks out of this release by single edits")
    parser.add_argument("--count", type=int, default=20, help="how many edits (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="chooses the edits (default: %(default)s)")
    parser.add_argument("--hint", choices=HINTS, default="function", help="what an edit's instruction tells")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--specs", type=Path, default=TASKS / "pypi_tasks.json", help="specs of the fixes")
    parser.add_argument(
        "--requirements", type=Path, default=TASKS / "pypi_requirements.txt", help="what the tests need, pinned"
    )
    args = parser.parse_args()
    for name in ("limit", "count"):
        value = getattr(args, name)
        if value is not None and value < 1:
            parser.error(f"--{name} is {value}; it must be at least 1")
    return args


def run(args: argparse.Namespace) -> list[Row]:
    tools = Tools(python=install_environment(args.requirements), requirements=args.requirements)
    pip = install_environment(TASKS / "sdist_requirements.txt", "releases")
    rows = build_edits(args, tools, pip) if args.mutate else build_fixes(args, tools, pip)
    total = args.count if args.mutate else len(args.only or load_specs(args.specs))
    done = []
    with tqdm(rows, total=min(total, args.limit or total), unit="task", file=sys.stderr) as bar:
        for row in bar:
            bar.set_postfix_str(row.id[-40:])
            if row.problem:
                bar.write(f"{row.id}: {row.problem}", file=sys.stderr)
            done.append(row)
    return done


def main() -> None:
    args = parse_arguments()
    try:
        rows = run(args)
    except ConfigError as error:
        sys.exit(f"build_pypi_tasks: {error}")
    there = [row for row in rows if row.state != "failed"]
    if args.json:
        print(json.dumps({"asked": args.wanted, "built": len(there), "tasks": [dataclasses.asdict(r) for r in rows]}))
    else:
        width = max((len(row.id) for row in rows), default=0)
        for row in rows:
            counts = f"{row.fail_to_pass:3d} {row.pass_to_pass:5d}"
            print(f"{row.id:{width}}  {row.state:6}  {counts}  {row.seconds:6.1f} s  {row.problem[:100]}")
        print(f"{len(there)} of {args.wanted} tasks are in {args.out}")
    if len(there) < args.wanted:
        sys.exit(1)


if __name__ == "__main__":
    main()
