"""Rebuild real bug fixes as task drafts, from specs and the source archives of PyPI packages.

A spec holds facts only: a package, two releases with the hashes of their archives, and the ids of the tests that tell
them apart. "release_pair": the agent gets the older release. "partial revert" (`revert`): it gets the newer one, in
which one changed region is reverted, and so a defect that its maintainers have repaired.

The solution is not shown: changelogs come from the older release, and the tests that fail are not in the tree.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from polar_trl.errors import TaskError
from polar_trl.tasks.build.folders import Draft
from polar_trl.tasks.build.releases import (
    Release,
    add_metadata,
    fetch_release,
    is_changelog,
    is_test,
    list_files,
    unpack_release,
)

Block = tuple[int, int, int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Revert:
    """A region of the newer release that is reverted."""

    file: str
    blocks: tuple[Block, ...]
    """(i1, i2, j1, j2): lines i1..i2 of the older file stand for lines j1..j2 of the newer one, counted from 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """One task that can be rebuilt."""

    id: str
    base: Release
    """The release with the defect."""
    fixed: Release
    test_paths: tuple[str, ...]
    fail_to_pass: tuple[str, ...]
    hint: str
    """The defect in our own words."""
    kind: str
    """"bugfix" or "api_addition"."""
    difficulty: str
    difficulty_rank: int
    """1 is the easiest."""
    revert: Revert | None = None


_TEXTS = (
    "id",
    "package",
    "base_version",
    "fixed_version",
    "base_sha256",
    "fixed_sha256",
    "kind",
    "difficulty",
    "hint",
)
_LISTS = ("test_paths", "fail_to_pass")


def load_specs(path: Path) -> list[Spec]:
    """Load the specs of a JSON file, easiest first. Raises `TaskError`."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TaskError(f"cannot read {path}: {error}") from error
    if not isinstance(rows, list):
        raise TaskError(f"{path}: must be a list of specs, not {type(rows).__name__}")
    specs: dict[str, Spec] = {}
    for index, row in enumerate(rows):
        spec = parse_spec(row, f"{path}: spec {index}")
        if spec.id in specs:
            raise TaskError(f"{path}: the id {spec.id!r} is there twice; ids must be unique")
        specs[spec.id] = spec
    return sorted(specs.values(), key=lambda spec: spec.difficulty_rank)


def parse_spec(row: object, where: str) -> Spec:
    """Parse one spec. Raises `TaskError` with its id and the field."""
    if not isinstance(row, Mapping):
        raise TaskError(f"{where} must be an object, not {type(row).__name__}")
    if isinstance(row.get("id"), str):
        where = f"{where} ({row['id']!r})"
    for name in _TEXTS:
        if not isinstance(row.get(name), str) or not row[name]:
            raise TaskError(f"{where}: {name!r} must be text, not {row.get(name)!r}")
    for name in _LISTS:
        items = row.get(name)
        if not isinstance(items, list) or not items or not all(isinstance(item, str) for item in items):
            raise TaskError(f"{where}: {name!r} must be a list of texts, not {items!r:.100}")
    if not isinstance(row.get("difficulty_rank"), int):
        raise TaskError(f"{where}: 'difficulty_rank' must be a whole number, not {row.get('difficulty_rank')!r}")
    if unknown := sorted(set(row) - {*_TEXTS, *_LISTS, "difficulty_rank", "revert"}):
        raise TaskError(f"{where}: unknown field {unknown[0]!r}")
    return Spec(
        id=row["id"],
        base=Release(package=row["package"], version=row["base_version"], sha256=row["base_sha256"]),
        fixed=Release(package=row["package"], version=row["fixed_version"], sha256=row["fixed_sha256"]),
        test_paths=tuple(row["test_paths"]),
        fail_to_pass=tuple(row["fail_to_pass"]),
        hint=row["hint"],
        kind=row["kind"],
        difficulty=row["difficulty"],
        difficulty_rank=row["difficulty_rank"],
        revert=_parse_revert(row["revert"], f"{where}: 'revert'") if "revert" in row else None,
    )


def _parse_revert(value: Any, where: str) -> Revert:
    if not isinstance(value, Mapping) or not isinstance(value.get("file"), str):
        raise TaskError(f"{where} must be an object with 'file' and 'blocks', not {value!r:.100}")
    blocks = value.get("blocks")
    if not isinstance(blocks, list) or not all(
        isinstance(block, list) and len(block) == 4 and all(isinstance(line, int) for line in block)
        for block in blocks
    ):
        raise TaskError(f"{where}: 'blocks' must be lists of four line numbers, not {blocks!r:.100}")
    return Revert(file=value["file"], blocks=tuple(cast(Block, tuple(block)) for block in blocks))


def build_draft(spec: Spec, scratch: Path, pip: Path) -> Draft:
    """Build the task's trees under `scratch`, from downloaded archives. Raises `TaskError`."""
    base, fixed = scratch / "base", scratch / "fixed"
    for release, tree in ((spec.base, base), (spec.fixed, fixed)):
        unpack_release(fetch_release(release, pip), tree)
    broken = scratch / "broken"
    if spec.revert is None:
        shutil.copytree(base, broken, symlinks=True)
    else:
        shutil.copytree(fixed, broken, symlinks=True)
        _put_back(spec, spec.revert, base, broken)
    add_metadata(broken)
    gold = scratch / "gold"
    shutil.copytree(broken, gold, symlinks=True)
    _repair(gold, fixed)
    return Draft(
        id=spec.id,
        instruction=_build_instruction(spec, [path for path in spec.test_paths if _has_tests(broken / path)]),
        broken=broken,
        gold=gold,
        tests=fixed,
        paths=spec.test_paths,
        fail_to_pass=spec.fail_to_pass,
        metadata={
            "package": spec.base.package,
            "base_version": spec.base.version,
            "fixed_version": spec.fixed.version,
            "base_sha256": spec.base.sha256 or "",
            "fixed_sha256": spec.fixed.sha256 or "",
            "kind": spec.kind,
            "difficulty": spec.difficulty,
            "difficulty_rank": spec.difficulty_rank,
            "mode": "release_pair" if spec.revert is None else "partial_revert",
        },
        python="3.11",
    )


def _put_back(spec: Spec, revert: Revert, base: Path, broken: Path) -> None:
    """Revert the region, and hide its traces: the tests that fail, and the changelog's entries."""
    try:
        old, new = ((tree / revert.file).read_bytes().decode().splitlines(keepends=True) for tree in (base, broken))
    except OSError as error:
        raise TaskError(f"task {spec.id!r}: revert.file: {error}") from error
    lines: list[str] = []
    position = 0
    for i1, i2, j1, j2 in sorted(revert.blocks, key=lambda block: block[2]):
        lines += new[position:j1] + old[i1:i2]
        position = j2
    (broken / revert.file).write_bytes("".join(lines + new[position:]).encode())
    telling = {name.partition("::")[0] for name in spec.fail_to_pass}
    telling |= {str(path.relative_to(broken)) for path in broken.rglob("*") if is_changelog(path.name)}
    for path in sorted(telling):
        if (broken / path).is_dir():
            continue
        (broken / path).unlink(missing_ok=True)
        if (base / path).is_file():
            (broken / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(base / path, broken / path)


def _repair(gold: Path, fixed: Path) -> None:
    """Bring the sources of a tree to those of the newer release, and leave its tests and metadata alone."""
    wanted = {path for path in list_files(fixed) if _is_source(path)}
    for path in {path for path in list_files(gold) if _is_source(path)} - wanted:
        (gold / path).unlink()
    for path in wanted:
        (gold / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(fixed / path, gold / path)


def _is_source(path: str) -> bool:
    if is_test(path) or is_changelog(path):
        return False
    return "/" in path or (path.endswith((".py", ".pyi")) and path not in ("setup.py", "noxfile.py", "tasks.py"))


def _has_tests(path: Path) -> bool:
    """Return whether a path has Python tests: some archives have only the data of their tests."""
    return path.is_file() or any(is_test(file.name) for file in path.rglob("*.py"))


def _build_instruction(spec: Spec, visible: list[str]) -> str:
    need = "lacks something" if spec.kind == "api_addition" else "has a defect"
    tests = (
        f"\nThere are tests of an earlier state. `python -m pytest {' '.join(visible)}` runs them.\n"
        if visible
        else ""
    )
    return f"""\
The current folder holds the source of the Python package `{spec.base.package}`, which {need}:

{spec.hint}

Change the source of the package so that this is right, and leave everything else as it behaves now.
{tests}
Tests that you do not see decide. They replace the tests of this folder, and changes to files that configure tests or
packaging (such as `conftest.py`, `pytest.ini`, `setup.cfg` and `pyproject.toml`) are not taken over. There is no
network.
"""
