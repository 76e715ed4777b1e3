"""Tasks rebuilt from source archives: the solution is not in them, their tests decide, and failures are named.

The archives here are of made-up packages and lie in a cache of the test's own, so nothing is downloaded.
"""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from calc_releases import (
    BROKEN_TOTAL,
    NEW,
    OLD,
    OLD_TESTS,
    PYTHON,
    TOTAL_IDS,
    build,
    check_here,
    make_release,
    make_row,
    pretend_installed,
    read_tree,
)
from packaging.requirements import Requirement
from packaging.version import Version

from polar_trl.errors import TaskError
from polar_trl.tasks.build.folders import Tools, apply_patch, diff_trees, render_toml
from polar_trl.tasks.build.pypi import load_specs, parse_spec
from polar_trl.tasks.build.releases import (
    Release,
    fetch_release,
    find_import_roots,
    is_changelog,
    is_test,
    list_test_roots,
    unpack_release,
)
from polar_trl.tasks.harbor import load_harbor

CONFIGS = Path(__file__).resolve().parents[3] / "polar_trl" / "configs" / "tasks"
SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "build_pypi_tasks.py"

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
    assert task.tests.protected == ("tests/*",)
    assert "total() is one too large." in task.instruction
    assert task.env == {"PYTEST_ADDOPTS": "-o addopts= --continue-on-collection-errors -o pythonpath=src"}
    assert task.metadata["harbor"]["metadata"]["fixed_version"] == "1.1"
    patch = (folder / "solution" / "gold.patch").read_text()
    assert "-    result = 1\n+    result = 0\n" in patch and "extra.py" in patch
    assert "test_calc" not in patch and "CHANGES" not in patch
    checked = check_here(folder, tmp_path)
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


def test_the_visible_tests_run_as_the_instruction_says(tmp_path: Path, tools: Tools) -> None:
    """Whatever the package's own settings ask for."""
    setup = {"pyproject.toml": "[tool.pytest.ini_options]\naddopts = '--cov=calc --no-such-option'\n"}
    folder = build(make_row(old={**OLD, **setup}), tmp_path / "out", tools)
    (task,) = load_harbor(folder)
    assert "`python -m pytest tests` runs them" in task.instruction
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "tests"],
        cwd=folder / "environment" / "workspace",
        env={"PATH": os.defpath, **task.env},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, "1 passed" in done.stdout) == (0, True), done.stdout


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


# the program


def run_script(*arguments: str) -> tuple[int, Any, str]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments, "--json"], capture_output=True, text=True, timeout=600
    )
    return done.returncode, json.loads(done.stdout) if done.stdout else None, done.stderr


def test_the_program_goes_on_and_says_what_failed(tmp_path: Path, tools: Tools) -> None:
    pretend_installed(tools.requirements)
    pretend_installed(CONFIGS / "sdist_requirements.txt", "releases")
    row = make_row()
    spoiled = {**row, "id": "spoiled", "fixed_sha256": "00", "difficulty_rank": 0}
    specs = tmp_path / "specs.json"
    specs.write_text(json.dumps([row, spoiled, {**row, "id": "second", "difficulty_rank": 2}]))
    arguments = [f"--specs={specs}", f"--requirements={tools.requirements}", f"--out={tmp_path / 'out'}"]
    code, found, said = run_script(*arguments, "--limit=1")
    # one that fails is no reason to build fewer than asked for
    assert (code, found["asked"], found["built"]) == (0, 1, 1)
    assert [(task["id"], task["state"]) for task in found["tasks"]] == [("spoiled", "failed"), (row["id"], "built")]
    assert (found["tasks"][1]["fail_to_pass"], found["tasks"][1]["pass_to_pass"]) == (3, 2)
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
