"""Tasks rebuilt from source archives: the solution is not in them, their tests decide, and failures are named.

The archives here are of made-up packages and lie in a cache of the test's own, so nothing is downloaded.
"""

import io
import json
import os
import subprocess
import sys
import tarfile
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from polar_trl.cache import CACHE_VARIABLE, find_cache
from polar_trl.errors import TaskError
from polar_trl.tasks.folders import PROTECTED, Tools, apply_patch, check_task, diff_trees, render_toml, write_task
from polar_trl.tasks.harbor import load_harbor
from polar_trl.tasks.mutants import build_mutants
from polar_trl.tasks.mutate import OPERATORS, list_edits
from polar_trl.tasks.pypi import build_draft, load_specs, parse_spec
from polar_trl.tasks.releases import (
    Release,
    fetch_release,
    find_import_roots,
    hash_file,
    is_changelog,
    is_test,
    list_test_roots,
    unpack_release,
)
from polar_trl.tasks.suite import find_environment, run_suite

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "tasks"
SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "build_pypi_tasks.py"
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


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def tools(tmp_path: Path) -> Tools:
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("pytest\n")
    return Tools(python=PYTHON, requirements=requirements)


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


def make_row(**changes: Any) -> dict[str, Any]:
    """A spec of the fix that 1.1 of the made-up package brings."""
    base, fixed = make_release("1.0", OLD), make_release("1.1", NEW)
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


# the committed specs


def test_the_committed_specs() -> None:
    specs = load_specs(CONFIGS / "pypi_tasks.json")
    assert len(specs) >= 40
    assert [spec.difficulty_rank for spec in specs] == sorted(spec.difficulty_rank for spec in specs)
    for spec in specs:
        assert len(spec.base.sha256 or "") == len(spec.fixed.sha256 or "") == 64
        assert all(name.startswith(spec.test_paths) for name in spec.fail_to_pass), spec.id


def test_no_fix_is_installed_beside_the_task_that_asks_for_it() -> None:
    """An agent may read what its Python imports: a repaired release there would be the answer."""
    lines = (CONFIGS / "pypi_requirements.txt").read_text().splitlines()
    requirements = [Requirement(line) for line in lines if line and not line.startswith("#")]
    pinned = {one.name.lower().replace("_", "-"): Version(next(iter(one.specifier)).version) for one in requirements}
    assert len(pinned) == len(requirements)
    for spec in load_specs(CONFIGS / "pypi_tasks.json"):
        if spec.fixed.package in pinned:
            assert pinned[spec.fixed.package] < Version(spec.fixed.version), spec.id


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"id": 3}, "spec: 'id' must be text, not 3"),
        ({"hint": ""}, "spec ('calc-1.0-to-1.1'): 'hint' must be text, not ''"),
        ({"fail_to_pass": []}, "spec ('calc-1.0-to-1.1'): 'fail_to_pass' must be a list of texts, not []"),
        ({"test_paths": "tests"}, "spec ('calc-1.0-to-1.1'): 'test_paths' must be a list of texts, not 'tests'"),
        ({"difficulty_rank": "1"}, "spec ('calc-1.0-to-1.1'): 'difficulty_rank' must be a whole number, not '1'"),
        ({"colour": 1}, "spec ('calc-1.0-to-1.1'): unknown field 'colour'"),
        ({"revert": {"blocks": []}}, "spec ('calc-1.0-to-1.1'): 'revert' must be an object with 'file' and 'blocks'"),
        ({"revert": {"file": "a", "blocks": [[1, 2]]}}, "'revert': 'blocks' must be lists of four line numbers"),
    ],
)
def test_bad_specs(change: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError) as caught:
        parse_spec(make_row(**change), "spec")
    assert message in str(caught.value)


def test_bad_spec_files(tmp_path: Path) -> None:
    path = tmp_path / "specs.json"
    for text, message in (
        ("{", "cannot read"),
        ("{}", "must be a list of specs, not dict"),
        ("[3]", "spec 0 must be"),
    ):
        path.write_text(text)
        with pytest.raises(TaskError, match=message):
            load_specs(path)
    row = make_row()
    path.write_text(json.dumps([row, row]))
    with pytest.raises(TaskError, match=r"the id 'calc-1\.0-to-1\.1' is there twice"):
        load_specs(path)


# archives and trees


def test_an_archive_that_is_not_the_recorded_one(cache: Path) -> None:
    make_release("1.0", OLD)
    with pytest.raises(TaskError, match=r"calc 1\.0: the archive .* has SHA-256 .*, not 00"):
        fetch_release(Release(package="calc", version="1.0", sha256="00"), PYTHON)


def test_a_release_that_cannot_be_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(TaskError, match=r"calc==1\.0: pip could not download it: ERROR: "):
        fetch_release(Release(package="calc", version="1.0"), PYTHON)


@pytest.mark.parametrize("content", [b"", b"no archive", b"\x1f\x8b\x08\x00cut off"])
def test_a_broken_archive(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.tar.gz").write_bytes(content)
    with pytest.raises(TaskError, match=r"(?s)cannot unpack .*; remove it to have it downloaded again"):
        unpack_release(tmp_path / "a.tar.gz", tmp_path / "tree")
    assert not (tmp_path / "tree").exists()


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        *((path, True) for path in ("tests/a.py", "pkg/tests/data/x.txt", "test_a.py", "a/conftest.py", "tests.py")),
        *((path, True) for path in ("testing/x.py", "a/b_test.py", "unit_tests/x")),
        *(
            (path, False)
            for path in ("src/testable.py", "contest.py", "latest/a.py", "README.md", "src/test_data.txt")
        ),
    ],
)
def test_what_is_a_test(path: str, expected: bool) -> None:
    assert is_test(path) is expected


def test_what_is_a_changelog() -> None:
    names = ["CHANGELOG.md", "docs/changes.rst", "HISTORY", "NEWS.txt", "change.py", "docs/newsletter.md"]
    assert [is_changelog(name) for name in names] == [True, True, True, True, False, False]


def test_what_tests_are_run_and_what_they_import(tmp_path: Path) -> None:
    for path in ("src/a/__init__.py", "src/a/tests/test_a.py", "tests/deep/test_b.py", "test_c.py", "tests_of/x.md"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("")
    assert list_test_roots(tmp_path) == ["src/a/tests", "test_c.py", "tests"]
    assert find_import_roots(tmp_path) == ("src", ".")
    assert find_import_roots(tmp_path / "src") == (".",)


def test_patches_are_binary_safe(tmp_path: Path) -> None:
    before, after = tmp_path / "x", tmp_path / "y"
    trees: dict[Path, dict[str, bytes]] = {
        before: {"a.txt": b"1\r\n2\r\n", "b.bin": b"\x00\xff", "gone": b"x", "same": b"y"},
        after: {"a.txt": b"1\r\n3", "b.bin": b"\x00\xfe\x00", "d e/é.txt": b"", "same": b"y"},
    }
    for tree, files in trees.items():
        for path, content in files.items():
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            (tree / path).write_bytes(content)
    (tmp_path / "p").write_bytes(diff_trees(before, after))
    apply_patch(before, tmp_path / "p")
    found = {str(path.relative_to(before)): path.read_bytes() for path in before.rglob("*") if path.is_file()}
    assert found == trees[after]
    with pytest.raises(TaskError, match="does not apply"):
        apply_patch(before, tmp_path / "p")
    # and inside a repository as well
    subprocess.run(["git", "init", "-q", str(tmp_path / "repo")], check=True)
    inner = tmp_path / "repo" / "x"
    inner.mkdir()
    (inner / "a").write_text("1\n")
    (tmp_path / "q").write_bytes(b"--- a/a\n+++ b/a\n@@ -1 +1 @@\n-1\n+2\n")
    apply_patch(inner, tmp_path / "q")
    assert (inner / "a").read_text() == "2\n"


# whole tasks


def test_a_pair_of_releases(tmp_path: Path, tools: Tools) -> None:
    folder = build(make_row(), tmp_path / "out", tools)
    workspace = read_tree(folder / "environment" / "workspace")
    assert workspace == {
        **OLD,
        "src/calc-1.0.dist-info/METADATA": OLD["PKG-INFO"],
        "src/calc-1.0.dist-info/RECORD": "",
    }
    assert read_tree(folder / "tests" / "hidden") == {path: NEW[path] for path in NEW if path.startswith("tests/")}
    (task,) = load_harbor(folder)
    assert task.tests is not None
    assert task.tests.fail_to_pass == tuple(TOTAL_IDS)
    assert task.tests.pass_to_pass == ("tests/test_calc.py::test_clamp", "tests/test_calc.py::test_last")
    assert (task.tests.paths, task.tests.import_roots) == (("tests",), ("src", "."))
    assert task.tests.protected == (*PROTECTED, "tests/*")
    assert "total() is one too large." in task.instruction
    assert task.metadata["harbor"]["metadata"]["fixed_version"] == "1.1"
    patch = (folder / "solution" / "gold.patch").read_text()
    assert "-    result = 1\n+    result = 0\n" in patch and "extra.py" in patch
    assert "test_calc" not in patch and "CHANGES" not in patch
    checked = check_task(folder, tools)
    assert (checked.gold, checked.empty, checked.problem) == (1.0, 0.0, "")


def test_the_reward_of_the_folders_own_script(tmp_path: Path, tools: Tools) -> None:
    """tests/test.sh has fixed paths; what it calls is run here."""
    folder = build(make_row(), tmp_path / "out", tools)
    rewards = []
    for patched in (False, True):
        tree = tmp_path / f"tree{patched}"
        subprocess.run(["cp", "-r", str(folder / "environment" / "workspace"), str(tree)], check=True)
        if patched:
            apply_patch(tree, folder / "solution" / "gold.patch")
        command = [sys.executable, str(folder / "tests" / "run_tests.py"), "--root", str(tree)]
        reward = tmp_path / "logs" / "reward.txt"
        options = ["--spec", str(folder / "tests" / "spec.json"), "--reward", str(reward)]
        subprocess.run([*command, *options], check=True, capture_output=True)
        rewards.append(reward.read_text())
    assert rewards == ["0\n", "1\n"]


def test_a_partial_revert_tells_nothing_of_the_fix(tmp_path: Path, tools: Tools) -> None:
    revert = {"file": "src/calc/__init__.py", "blocks": [[1, 2, 1, 2]]}
    folder = build(make_row(revert=revert), tmp_path / "out", tools)
    workspace = read_tree(folder / "environment" / "workspace")
    assert workspace["src/calc/__init__.py"] == BROKEN_TOTAL
    assert workspace["src/calc/extra.py"] == NEW["src/calc/extra.py"]
    assert (workspace["CHANGES.md"], workspace["tests/test_calc.py"]) == (OLD["CHANGES.md"], OLD_TESTS)
    patch = (folder / "solution" / "gold.patch").read_text()
    assert [line for line in patch.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")] == [
        "-    result = 1",
        "+    result = 0",
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fail_to_pass": ["tests/test_calc.py::test_clamp"]}, "fail_to_pass: the broken tree passes"),
        ({"fail_to_pass": ["tests/test_calc.py::test_none"]}, "fail_to_pass: the repaired tree does not pass"),
        ({"test_paths": ["nothing"]}, "the tests of the repaired tree died"),
        ({"revert": {"file": "nowhere.py", "blocks": [[0, 1, 0, 1]]}}, "revert.file: "),
    ],
)
def test_a_spec_that_its_tests_do_not_bear_out(
    tmp_path: Path, tools: Tools, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(TaskError) as caught:
        build(make_row(**change), tmp_path / "out", tools)
    assert "task 'calc-1.0-to-1.1'" in str(caught.value) and message in str(caught.value)
    assert not (tmp_path / "out").exists() or list((tmp_path / "out").iterdir()) == []


def test_a_check_finds_a_folder_that_was_spoiled(tmp_path: Path, tools: Tools) -> None:
    folder = build(make_row(), tmp_path / "out", tools)
    hidden = folder / "tests" / "hidden" / "tests" / "test_calc.py"
    hidden.write_text("def test_total():\n    assert 1 == 2\n")
    assert check_task(folder, tools).gold == 0.0
    (folder / "environment" / "workspace" / "src" / "calc" / "__init__.py").write_text(CALC)
    (folder / "solution" / "gold.patch").write_text("")
    with pytest.raises(TaskError, match="does not apply"):
        check_task(folder, tools)


# runs of tests


def run_text(tmp_path: Path, text: str, timeout_s: float = 60.0) -> tuple[Any, float]:
    """Run one hidden test file over an empty tree; the run and its seconds."""
    (tmp_path / "tests" / "hidden").mkdir(parents=True)
    (tmp_path / "tests" / "hidden" / "test_it.py").write_text(text)
    (tmp_path / "tree").mkdir()
    spec = {"fail_to_pass": ["test_it.py::test_it"], "pass_to_pass": [], "removed": [], "files": ["test_it.py"]}
    (tmp_path / "tests" / "spec.json").write_text(json.dumps({**spec, "paths": ["test_it.py"], "import_roots": ["."]}))
    started = time.monotonic()
    return (
        run_suite(PYTHON, tmp_path / "tree", tmp_path / "tests" / "spec.json", timeout_s=timeout_s),
        time.monotonic() - started,
    )


def test_outcomes(tmp_path: Path) -> None:
    run, _ = run_text(
        tmp_path,
        """
import pytest, unittest

class Shared:
    def test_inherited(self): pass
class TestA(Shared, unittest.TestCase): pass
@pytest.fixture
def bad(): raise ValueError("no")
def test_it(): assert 1 == 2
def test_error(bad): pass
def test_skip(): pytest.skip("x")
@pytest.mark.xfail
def test_x(): assert 0
@pytest.mark.xfail(strict=False)
def test_x_passes(): pass
""",
    )
    assert run.outcomes == {
        "test_it.py::TestA::test_inherited": "passed",
        "test_it.py::test_it": "failed",
        "test_it.py::test_error": "error",
        "test_it.py::test_skip": "skipped",
        "test_it.py::test_x": "xfailed",
        "test_it.py::test_x_passes": "passed",
    }
    assert "assert 1 == 2" in run.messages["test_it.py::test_it"]


def test_a_run_that_hangs_ends_with_everything_it_started(tmp_path: Path) -> None:
    text = """
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(r"{path}").write_text(str(child.pid))
time.sleep(600)
""".replace("{path}", str(tmp_path / "pid"))
    run, _ = run_text(tmp_path, text, timeout_s=5)
    assert (run.timed_out, run.outcomes) == (True, {})
    status = Path(f"/proc/{(tmp_path / 'pid').read_text()}/stat")
    # killed; nobody may have collected it yet
    assert not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_run_that_wants_all_memory_fails_there(tmp_path: Path) -> None:
    run, _ = run_text(tmp_path, "def test_it():\n    b' ' * (8 << 30)\n\ndef test_next(): pass\n")
    assert run.outcomes == {"test_it.py::test_it": "failed", "test_it.py::test_next": "passed"}
    assert "MemoryError" in run.messages["test_it.py::test_it"]


def test_a_run_that_leaves_at_once_has_no_outcomes(tmp_path: Path) -> None:
    run, _ = run_text(tmp_path, "import os\nos._exit(0)\n")
    assert (run.timed_out, run.outcomes) == (False, {})


# edits


EDITS = {
    "comparison": ("if a < b: pass", "if a <= b: pass"),
    "arithmetic": ("x = a + b", "x = a - b"),
    "off by one": ("x = a[3]", "x = a[4]"),
    "boolean": ("x = True", "x = False"),
    "and/or": ("x = (a) and (b)  # and", "x = (a) or (b)  # and"),
    "negated condition": ("if a: pass", "if not (a): pass"),
    "dropped not": ("x = b if not (a or b) else a", "x = b if (a or b) else a"),
    "dropped sign": ("x = - a", "x = a"),
    "returned None": ("return a", "return None"),
    "lost return": ("return f(a)", "f(a)"),
    "break/continue": ("for x in a: break", "for x in a: continue"),
    "augmented assignment": ("a += b", "a -= b"),
    "dropped statement": ("a.x = b", "pass"),
    "swapped arguments": ("f(a, (b), c)", "f(b, (a), c)"),
    "swapped branches": ("x = a if c else b", "x = b if c else a"),
    "other function": ("x = min(a, b)", "x = max(a, b)"),
    "other method": ("x = a.é.lower()", "x = a.é.upper()"),
    "dropped bound": ("x = a[1:]", "x = a[:]"),
    "dropped default": ("x = a.get('k', b)", "x = a.get('k')"),
}


@pytest.mark.parametrize("operator", list(OPERATORS))
def test_every_operator_makes_its_slip(operator: str) -> None:
    before, after = EDITS[operator]
    source = f"é = 1\n\nclass K:\n    @property\n    def m(self, a=1):\n        {before}\n".encode()
    edited = {edit.apply(source).decode() for edit in list_edits(source) if edit.operator == operator}
    assert source.decode().replace(before, after) in edited
    (edit, *_) = [edit for edit in list_edits(source) if edit.operator == operator]
    assert (edit.function, edit.outer, edit.outer_line, edit.line) == ("K.m", "m", 4, 6)


def test_edits_stay_within_functions() -> None:
    source = b"x = 1 + 2\n\n@deco(3)\ndef f(a=4, *, b: int = 5 < 6) -> {7: 8}:\n    y: list[9] = 10\n"
    assert [(edit.operator, edit.old, edit.new) for edit in list_edits(source)] == [("off by one", "10", "11")]


def test_every_edit_of_a_file_changes_its_own_place_only() -> None:
    source = Path(tarfile.__file__).read_bytes()
    edits = list_edits(source)
    assert len(edits) > 1000 and {edit.operator for edit in edits} > {"comparison", "swapped arguments", "lost return"}
    for edit in edits:
        assert source[edit.start : edit.end].decode() == edit.old != edit.new
        assert source.count(b"\n", 0, edit.start) + 1 == edit.line


@pytest.fixture
def calc() -> Release:
    return make_release("1.1", NEW)


def test_tasks_of_edits(tmp_path: Path, tools: Tools, calc: Release) -> None:
    made = list(build_mutants(calc, tmp_path / "out", tools, PYTHON, count=4, seed=3))
    assert [is_new for _, is_new in made] == [True] * 4
    assert len({folder for folder, _ in made}) == 4
    for folder, _ in made:
        (task,) = load_harbor(folder)
        assert task.tests is not None and task.workspace is not None
        facts = task.metadata["harbor"]["metadata"]
        assert f"`{facts['function']}` of `src/calc/__init__.py`" in task.instruction
        # the tests that notice are not in the tree
        assert not (Path(task.workspace) / "tests" / "test_calc.py").exists()
        apply_patch(Path(task.workspace), folder / "solution" / "gold.patch")
        assert (Path(task.workspace) / "src" / "calc" / "__init__.py").read_text() == CALC
    names = {folder.name for folder, _ in made}
    again = list(build_mutants(calc, tmp_path / "out", tools, PYTHON, count=4, seed=3))
    assert (again, {folder.name for folder, _ in again}) == ([(folder, False) for folder, _ in made], names)


def test_every_task_of_an_edit_is_decided_by_its_tests(tmp_path: Path, tools: Tools, calc: Release) -> None:
    made = list(build_mutants(calc, tmp_path / "out", tools, PYTHON, count=100, seed=0, hint="line"))
    # all that there are: each function has at most three
    assert 5 <= len(made) <= 9
    for folder, _ in made[:2]:
        checked = check_task(folder, tools)
        assert (checked.gold, checked.empty, checked.problem) == (1.0, 0.0, "")
        assert "It is in line " in (folder / "instruction.md").read_text()


def test_an_endless_edit_does_not_stop_the_judge(tmp_path: Path, tools: Tools) -> None:
    code = "def f(n):\n    while n > 0:\n        n -= 1\n    return n\n"
    tests = "from loop import f\n\ndef test_f():\n    assert f(3) == 0\n"
    tests += "".join(f"\ndef test_{index}(): pass\n" for index in range(5))
    release = make_release("1.0", {"loop.py": code, "test_loop.py": tests}, package="loop")
    made = list(build_mutants(release, tmp_path / "out", tools, PYTHON, count=100, seed=0, hint="symptom"))
    edits = {(folder / "solution" / "gold.patch").read_text().partition("@@\n")[2] for folder, _ in made}
    assert edits and not any("n += 1" in edit for edit in edits)


def test_packages_that_cannot_be_judged(tmp_path: Path, tools: Tools) -> None:
    untested = make_release("1.0", {"a.py": "def f():\n    return 1\n"}, package="untested")
    with pytest.raises(TaskError, match=r"untested 1\.0: its archive has no tests, or no code to edit"):
        list(build_mutants(untested, tmp_path / "out", tools, PYTHON, count=1, seed=0))
    needy = make_release(
        "1.0", {"a.py": "def f():\n    return 1\n", "test_a.py": "import not_there\n"}, package="needy"
    )
    with pytest.raises(TaskError, match=r"needy 1\.0: 0 of its tests pass here; they may need packages"):
        list(build_mutants(needy, tmp_path / "out", tools, PYTHON, count=1, seed=0))


# the program


def pretend_installed(requirements: Path) -> None:
    """This Python in the place of an environment of pinned packages."""
    folder = find_environment(requirements)
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (folder / "bin" / "python").chmod(0o755)
    (folder / ".installed").touch()


def run_script(*arguments: str) -> tuple[int, Any, str]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments, "--json"], capture_output=True, text=True, timeout=250
    )
    return done.returncode, json.loads(done.stdout) if done.stdout else None, done.stderr


def test_the_program_goes_on_and_says_what_failed(tmp_path: Path, tools: Tools) -> None:
    pretend_installed(tools.requirements)
    pretend_installed(CONFIGS / "sdist_requirements.txt")
    row = make_row()
    spoiled = {**row, "id": "spoiled", "fixed_sha256": "00", "difficulty_rank": 0}
    specs = tmp_path / "specs.json"
    specs.write_text(json.dumps([row, spoiled, {**row, "id": "second", "difficulty_rank": 2}]))
    arguments = [f"--specs={specs}", f"--requirements={tools.requirements}", f"--out={tmp_path / 'out'}"]
    code, found, said = run_script(*arguments, "--limit=1", "--check")
    # one that fails is no reason to build fewer than asked for
    assert (code, found["asked"], found["built"]) == (0, 1, 1)
    assert [(task["id"], task["state"]) for task in found["tasks"]] == [("spoiled", "failed"), (row["id"], "built")]
    assert (found["tasks"][1]["gold"], found["tasks"][1]["empty"]) == (1.0, 0.0)
    assert "spoiled: calc 1.1: the archive" in said
    code, found, _ = run_script(*arguments)
    assert (code, found["asked"], found["built"]) == (1, 3, 2)
    assert [task["state"] for task in found["tasks"]] == ["failed", "kept", "built"]
    code, found, said = run_script(*arguments, "--only", "third")
    assert (code, found) == (1, None)
    assert f"build_pypi_tasks: no spec 'third' in {specs}" in said


@pytest.mark.parametrize("text", ['a "quoted" \\ word', "two\nlines\t", "é \u2028 \U0001f600", "\x01"])
def test_task_toml_is_toml_whatever_is_in_it(text: str) -> None:
    tables: dict[str, Any] = {"metadata": {"text": text, "number": 1, "share": 0.5, "list": [text, ""]}, "agent": {}}
    assert tomllib.loads(render_toml('schema_version = "1.4"\n', tables)) == {"schema_version": "1.4", **tables}
