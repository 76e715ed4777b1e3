"""Tests of a tree are run and judged, and single edits that they notice become tasks."""

import json
import os
import socket
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
from calc_releases import CALC, NEW, PYTHON, check_here, make_release

from polar_trl.errors import TaskError
from polar_trl.tasks.build.folders import Tools, apply_patch
from polar_trl.tasks.build.mutants import build_mutants
from polar_trl.tasks.build.mutate import OPERATORS, list_edits
from polar_trl.tasks.build.releases import Release
from polar_trl.tasks.build.suite import run_suite
from polar_trl.tasks.harbor import load_harbor

# runs of tests


def run_text(tmp_path: Path, text: str, timeout_s: float = 60.0) -> tuple[Any, float]:
    """Run one hidden test file over an empty tree; return the run and its seconds."""
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

class RunnerContext:
    def test_inherited(self): pass
class TestA(RunnerContext, unittest.TestCase): pass
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
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "{name}"])
pathlib.Path("child").write_text("is there")
time.sleep(600)
""".replace("{name}", str(tmp_path))
    run, _ = run_text(tmp_path, text, timeout_s=5)
    assert (run.timed_out, run.outcomes) == (True, {})
    assert list(tmp_path.rglob("child")) != []
    while find_sleepers(tmp_path):  # they were sent the signal; a busy machine takes a moment to deliver it
        time.sleep(0.05)


def find_sleepers(folder: Path) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += [path.parent.name] if f"(600)\0{folder}".encode() in path.read_bytes() else []
        except OSError:
            continue
    return found


def test_a_release_changes_reads_and_reaches_nothing_outside(tmp_path: Path) -> None:
    """The code of a release and its tests are strangers': each of these would have worked without bubblewrap."""
    secret = Path.home() / f".polar-secret-{os.getpid()}"
    secret.write_text("a key")
    text = """
import pathlib, pytest, socket

def test_it():
    pathlib.Path(r"{outside}").write_text("into a /tmp of its own")
    with pytest.raises(OSError):
        pathlib.Path("/usr/polar-was-here").touch()
    with pytest.raises(OSError):
        pathlib.Path(r"{secret}").read_text()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", {port}), timeout=5)
    assert len([name for name in pathlib.Path("/proc").iterdir() if name.name.isdigit()]) < 10
    pathlib.Path("mine").write_text("its own folder")
"""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            values = {"outside": tmp_path / "outside", "secret": secret, "port": server.getsockname()[1]}
            for name, value in values.items():
                text = text.replace(f"{{{name}}}", str(value))
            run, _ = run_text(tmp_path, text)
    finally:
        secret.unlink()
    assert run.outcomes == {"test_it.py::test_it": "passed"}, run.messages
    assert not (tmp_path / "outside").exists() and not Path("/usr/polar-was-here").exists()
    assert len(list((tmp_path / "tree").rglob("mine"))) == 1


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
        checked = check_here(folder, tmp_path)
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
