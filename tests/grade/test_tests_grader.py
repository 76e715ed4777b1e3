"""Hidden tests in a fresh tree: what solves the task, and what only pretends to."""

import sys
from pathlib import Path

import pytest

from polar_trl.errors import GradeError
from polar_trl.grade.changes import apply_changes, find_changes
from polar_trl.grade.tests import TestsGrader
from polar_trl.sandbox.local import LocalSandboxBackend
from polar_trl.types import Task, TestSpec

SOLVE = "sed -i s/1/2/ m.py"
CHEATS = {
    "planted conftest": (
        "printf 'import pytest\\n@pytest.hookimpl(hookwrapper=True)\\ndef pytest_runtest_makereport(item, call):\\n"
        '    outcome = yield\\n    outcome.get_result().outcome = "passed"\\n\' > conftest.py',
        "protected_changes_dropped",
    ),
    "edited tests": ("echo 'def test_f(): pass' > test_m.py", "protected_changes_dropped"),
    "a runner of its own": ("mkdir pytest; echo 'def main(*a, **k): return 0' > pytest/__init__.py", None),
    "exit at import": ("echo 'import os; os._exit(0)' >> m.py", "test_runs_died"),
    "reports that always pass": (
        "printf 'import _pytest.reports as r\\nr.TestReport.failed = property(lambda s: False)\\n"
        'r.TestReport.outcome = "passed"\\ndef f(): return 1\\n\' > m.py',
        "canaries_broken",
    ),
    "a reward file": ("mkdir -p /tmp/logs 2>/dev/null; echo 1 > reward.txt; echo 1 > $HOME/reward.txt", None),
}


@pytest.fixture
def task(tmp_path: Path) -> Task:
    tree, hidden = tmp_path / "tree", tmp_path / "hidden"
    tree.mkdir()
    hidden.mkdir()
    (tree / "m.py").write_text("def f():\n    return 1\n")
    (tree / "test_old.py").write_text("def test_old(): pass\n")
    (hidden / "test_m.py").write_text("from m import f\n\n\ndef test_f(): assert f() == 2\n\n\ndef test_ok(): pass\n")
    spec = TestSpec(
        fail_to_pass=("test_m.py::test_f",),
        python=sys.executable,
        pass_to_pass=("test_m.py::test_ok",),
        folder=str(hidden),
        files=("test_m.py",),
        removed=("test_old.py",),
        paths=("test_m.py",),
    )
    return Task(id="t", instruction="x", workspace=str(tree), tests=spec)


def grade(task: Task, command: str, tmp_path: Path) -> tuple[float, dict[str, int]]:
    backend = LocalSandboxBackend(tmp_path / "boxes")
    sandbox = backend.create(task, "agent")
    try:
        assert sandbox.run(command, env={}, timeout_s=20).exit_code == 0
        result = TestsGrader(backend).grade(task, sandbox, timeout_s=60)
    finally:
        sandbox.destroy()
    assert list((tmp_path / "boxes").iterdir()) == [], "the fresh sandbox was left behind"
    return result.reward, dict(result.counters)


def test_nothing_is_worth_nothing_and_the_fix_is_worth_one(task: Task, tmp_path: Path) -> None:
    assert grade(task, "true", tmp_path)[0] == 0.0
    assert grade(task, SOLVE, tmp_path)[0] == 1.0
    assert grade(task, f"{SOLVE}; rm test_old.py; echo x > notes.bin", tmp_path)[0] == 1.0


@pytest.mark.parametrize("name", CHEATS)
def test_cheating_is_worth_nothing_and_counted(task: Task, tmp_path: Path, name: str) -> None:
    command, counter = CHEATS[name]
    reward, counters = grade(task, command, tmp_path)
    assert reward == 0.0
    assert counter is None or counters[counter] == 1


def test_a_fix_that_breaks_something_else_is_worth_nothing(task: Task, tmp_path: Path) -> None:
    spec = task.tests
    assert spec is not None
    Path(spec.folder, "test_m.py").write_text(
        "from m import f\n\n\ndef test_f(): assert f() == 2\n\n\ndef test_ok(): 1 / (2 - f())\n"
    )
    assert grade(task, "sed -i s/1/2/ m.py", tmp_path)[0] == 0.0


def test_a_task_without_tests_is_refused(tmp_path: Path) -> None:
    backend = LocalSandboxBackend(tmp_path / "boxes")
    sandbox = backend.create(Task(id="t", instruction="x"), "agent")
    with pytest.raises(GradeError, match="task t has no tests"):
        TestsGrader(backend).grade(Task(id="t", instruction="x"), sandbox, timeout_s=5)
    sandbox.destroy()


def test_changes_are_taken_as_bytes_with_modes_and_links(tmp_path: Path) -> None:
    before, after, fresh = (tmp_path / name for name in ("before", "after", "fresh"))
    for folder in (before, after, fresh):
        (folder / "pkg").mkdir(parents=True)
        (folder / "pkg" / "same.py").write_text("same")
        (folder / "pkg" / "gone.py").write_text("gone")
        (folder / "tool.sh").write_text("echo")
    (after / "pkg" / "gone.py").unlink()
    (after / "pkg" / "new.bin").write_bytes(b"\0\xff\r\n")
    (after / "tool.sh").chmod(0o755)
    (after / "link").symlink_to("/etc/passwd")
    (after / ".git").mkdir()
    (after / ".git" / "config").write_text("x")
    changes = find_changes(before, after)
    assert {path: change.kind for path, change in changes.items()} == {
        "link": "link",
        "pkg/gone.py": "gone",
        "pkg/new.bin": "file",
        "tool.sh": "file",
    }
    apply_changes(changes, fresh)
    assert find_changes(after, fresh) == {}
    assert (fresh / "pkg" / "new.bin").read_bytes() == b"\0\xff\r\n" and not (fresh / ".git").exists()


def test_a_planted_link_leads_nowhere(tmp_path: Path) -> None:
    before, after, fresh, outside = (tmp_path / name for name in ("before", "after", "fresh", "outside"))
    for folder in (before, after, fresh, outside):
        folder.mkdir()
    (fresh / "d").symlink_to(outside)
    (after / "d").mkdir()
    (after / "d" / "x").write_text("planted")
    apply_changes(find_changes(before, after), fresh)
    assert list(outside.iterdir()) == []
    assert (fresh / "d" / "x").read_text() == "planted"
