"""Build a package of two releases, in archives like those of PyPI, and the task that their difference makes.

The archives lie in the cache that $POLAR_TRL_CACHE names, so nothing is downloaded. A test sets that variable first.
"""

import io
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polar_trl.cache import Part, find_cache
from polar_trl.sandbox.local import LocalSandboxBackend
from polar_trl.setup.check_tasks import Checked, TaskChecker
from polar_trl.tasks.build.folders import Tools, write_task
from polar_trl.tasks.build.pypi import build_draft, parse_spec
from polar_trl.tasks.build.releases import Release, hash_file
from polar_trl.tasks.build.suite import find_environment
from polar_trl.tasks.environment import list_environments, provide_python
from polar_trl.tasks.harbor import load_harbor

PYTHON = Path(sys.executable)

CALC = """\
def total(values):
    result = 0
    for value in values:
        result += value
    return result


def clamp(value, low, high):
    return min(max(value, low), high)


def last(values):
    if not values:
        return None
    return values[-1]
"""
BROKEN_TOTAL = CALC.replace("result = 0", "result = 1")
TESTS = """\
import pytest
from calc import clamp, last, total

@pytest.mark.parametrize("values", [[], [1], [1, 2]])
def test_total(values):
    assert total(values) == sum(values)

def test_clamp():
    assert [clamp(value, 2, 5) for value in (1, 3, 9)] == [2, 3, 5]

def test_last():
    assert last([]) is None
    assert last([1, 2]) == 2
"""
OLD_TESTS = "from calc import clamp\n\ndef test_clamp():\n    assert clamp(3, 2, 5) == 3\n"
OLD = {
    "src/calc/__init__.py": BROKEN_TOTAL,
    "tests/test_calc.py": OLD_TESTS,
    "CHANGES.md": "1.0: first\n",
    "PKG-INFO": "Metadata-Version: 2.1\nName: calc\nVersion: 1.0\n",
}
NEW = {
    "src/calc/__init__.py": CALC,
    "src/calc/extra.py": "WORD = 'new'\n",
    "tests/test_calc.py": TESTS,
    "tests/data/é.txt": "x",
    "CHANGES.md": "1.1: total() began at 1\n1.0: first\n",
    "PKG-INFO": "Metadata-Version: 2.1\nName: calc\nVersion: 1.1\n",
}
TOTAL_IDS = [f"tests/test_calc.py::test_total[values{index}]" for index in range(3)]


def make_release(version: str, files: Mapping[str, str], package: str = "calc") -> Release:
    """An archive of the files, where `fetch_release` looks first."""
    path = find_cache("releases") / package / version / f"{package}-{version}.tar.gz"
    path.parent.mkdir(parents=True)
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"{package}-{version}/{name}")
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    return Release(package=package, version=version, sha256=hash_file(path))


def make_row(old: Mapping[str, str] = OLD, **changes: Any) -> dict[str, Any]:
    """A spec of the fix that 1.1 of the made-up package brings."""
    base, fixed = make_release("1.0", old), make_release("1.1", NEW)
    return {
        "id": "calc-1.0-to-1.1",
        "package": "calc",
        "base_version": "1.0",
        "fixed_version": "1.1",
        "base_sha256": base.sha256,
        "fixed_sha256": fixed.sha256,
        "test_paths": ["tests"],
        "fail_to_pass": TOTAL_IDS,
        "kind": "bugfix",
        "difficulty": "easy",
        "difficulty_rank": 1,
        "hint": "total() is one too large.",
        **changes,
    }


def build(row: dict[str, Any], out: Path, tools: Tools) -> Path:
    spec = parse_spec(row, "spec")
    write_task(build_draft(spec, out.parent / "scratch", PYTHON), out / spec.id, tools)
    return out / spec.id


def read_tree(tree: Path) -> dict[str, str]:
    return {str(path.relative_to(tree)): path.read_text() for path in tree.rglob("*") if path.is_file()}


def pretend_installed(requirements: Path, part: Part = "environments") -> None:
    """This Python in the place of an environment of pinned packages."""
    folder = find_environment(requirements, part)
    (folder / "bin").mkdir(parents=True, exist_ok=True)
    (folder / "bin" / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (folder / "bin" / "python").chmod(0o755)
    (folder / ".installed").touch()


def check_here(folder: Path, scratch: Path) -> Checked:
    """Return what a run's graders say about a task folder, in sandboxes of this machine."""
    pretend_installed(folder / "environment" / "requirements.txt")
    (task,) = provide_python(load_harbor(folder))
    backend = LocalSandboxBackend(scratch / "sessions", mounts=list_environments([task]))
    return TaskChecker(backend, kind="local", gold_runs=1).check(task)
