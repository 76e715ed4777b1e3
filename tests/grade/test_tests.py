"""Hidden tests in a fresh tree: solutions are paid, and pretended ones are not."""

import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from polar_trl.errors import GradeError, SandboxError, TreeUnreadableError
from polar_trl.grade.base import Grade
from polar_trl.grade.changes import apply_changes, find_changes
from polar_trl.grade.tests import TestsGrader
from polar_trl.sandbox.local import LocalSandboxBackend
from polar_trl.types import GradeReport, Task, TestSpec

SOLVE = "sed -i s/1/2/ m.py"
CHEATS = {
    "planted conftest": (
        "printf 'import pytest\\n@pytest.hookimpl(hookwrapper=True)\\ndef pytest_runtest_makereport(item, call):\\n"
        '    outcome = yield\\n    outcome.get_result().outcome = "passed"\\n\' > conftest.py',
        "conftests_planted",
    ),
    "edited tests": ("echo 'def test_f(): pass' > test_m.py", "tests_edited"),
    "a runner of its own": (
        "mkdir pytest; echo 'def main(*a, **k): return 0' > pytest/__init__.py",
        "test_settings_planted",
    ),
    "exit at import": ("echo 'import os; os._exit(0)' >> m.py", "test_runs_died"),
    "reports that always pass": (
        "printf 'import _pytest.reports as r\\nr.TestReport.failed = property(lambda s: False)\\n"
        'r.TestReport.outcome = "passed"\\ndef f(): return 1\\n\' > m.py',
        "canaries_broken",
    ),
    "a plugin of a package in the tree": (
        "mkdir evil-1.dist-info; printf '[pytest11]\\nx = evil\\n' > evil-1.dist-info/entry_points.txt; "
        "printf 'Name: evil\\nVersion: 1\\n' > evil-1.dist-info/METADATA; echo 'import os; os._exit(0)' > evil.py",
        "test_settings_planted",
    ),
    "a test's own function exchanged": (
        "printf 'import _pytest.python as p\\np.Function.runtest = lambda item: None\\ndef f(): return 1\\n' > m.py",
        "judges_patched",
    ),
    "a hook of its own": (
        'printf \'import sys\\nf = sys._getframe()\\nwhile "session" not in f.f_locals: f = f.f_back\\n'
        "class Evil:\\n    def pytest_pyfunc_call(self): return True\\n"
        'f.f_locals["session"].config.pluginmanager.register(Evil())\\ndef f(): return 1\\n\' > m.py',
        "judges_patched",
    ),
    "a reward file": ("echo 1 > reward.txt; echo 1 > $HOME/reward.txt", "reports_written"),
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


def grade(task: Task, command: str, tmp_path: Path, timeout_s: float = 60) -> tuple[float, dict[str, int]]:
    result = grade_whole(task, command, tmp_path, timeout_s)
    return result.reward, dict(result.counters)


def grade_whole(task: Task, command: str, tmp_path: Path, timeout_s: float = 60) -> Grade:
    backend = LocalSandboxBackend(tmp_path / "boxes", mounts=[tmp_path / "shown"])
    sandbox = backend.create(task, "agent")
    try:
        assert sandbox.run(command, env={}, timeout_s=20).exit_code == 0
        result = TestsGrader(backend).grade(task, sandbox, timeout_s=timeout_s)
    finally:
        sandbox.destroy()
    assert list((tmp_path / "boxes").iterdir()) == [], "the fresh sandbox was left behind"
    return result


def test_nothing_is_worth_nothing_and_the_fix_is_worth_one(task: Task, tmp_path: Path) -> None:
    assert grade(task, "true", tmp_path)[0] == 0.0
    assert grade(task, SOLVE, tmp_path)[0] == 1.0
    assert grade(task, f"{SOLVE}; rm test_old.py; echo x > notes.bin", tmp_path)[0] == 1.0


def test_the_report_names_what_failed_and_what_was_not_found(task: Task, tmp_path: Path) -> None:
    assert task.tests is not None
    spec = replace(task.tests, pass_to_pass=("test_m.py::test_ok", "test_m.py::test_gone"))
    report = grade_whole(replace(task, tests=spec), "true", tmp_path).report
    assert report == GradeReport(
        output_tail="test_m.py::test_f: assert 1 == 2\n +  where 1 = f()",
        failed_tests=("test_m.py::test_f",),
        missing_tests=("test_m.py::test_gone",),
        num_tests=3,
        num_passed=1,
        num_failed=1,
        num_missing=1,
    )


def test_the_report_says_what_keeps_a_file_of_tests_from_being_read(task: Task, tmp_path: Path) -> None:
    report = grade_whole(task, "echo 'def g(): pass' > m.py", tmp_path).report
    assert report.num_missing == 2 and "cannot import name 'f' from 'm'" in report.output_tail


@pytest.mark.parametrize(
    ("work", "said"),
    [
        ("echo 'import os; os._exit(0)' >> m.py", "the tests ended without a report"),
        ("truncate -s 600M big", "more than 512 MiB"),
    ],
)
def test_the_report_says_why_no_test_counts(task: Task, tmp_path: Path, work: str, said: str) -> None:
    report = grade_whole(task, work, tmp_path).report
    assert said in report.output_tail and report.failed_tests == () == report.missing_tests


@pytest.mark.parametrize("name", CHEATS)
def test_cheating_is_worth_nothing_and_counted(task: Task, tmp_path: Path, name: str) -> None:
    command, counter = CHEATS[name]
    reward, counters = grade(task, command, tmp_path)
    assert reward == 0.0
    assert counters[counter] >= 1 and counters["judge_attempts"] >= 1


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


def test_a_python_that_cannot_run_pytest_decides_nothing(task: Task, tmp_path: Path) -> None:
    assert task.tests is not None
    (tmp_path / "shown").mkdir()
    bare = tmp_path / "shown" / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')  # without its packages
    bare.chmod(0o755)
    for python, message in (
        ("no-such-python", "'no-such-python' cannot run pytest"),
        (str(bare), r"has no pytest; install pytest .*requirements"),
    ):
        with pytest.raises(GradeError, match=message):
            grade(replace(task, tests=replace(task.tests, python=python)), SOLVE, tmp_path)


def test_a_fresh_sandbox_that_cannot_be_made_decides_nothing(task: Task, tmp_path: Path) -> None:
    sandbox = LocalSandboxBackend(tmp_path / "boxes").create(task, "agent")
    try:
        with pytest.raises(SandboxError, match="names 'no-such-image'"):
            TestsGrader(LocalSandboxBackend(tmp_path / "boxes")).grade(
                replace(task, image="no-such-image"), sandbox, timeout_s=20
            )
    finally:
        sandbox.destroy()


def test_a_run_that_takes_too_long_is_worth_nothing(task: Task, tmp_path: Path) -> None:
    reward, counters = grade(task, f"{SOLVE}; echo 'while True: pass' >> m.py", tmp_path, timeout_s=5)
    assert (reward, counters) == (0.0, {"test_runs_timed_out": 1})


def test_too_much_to_take_over_is_worth_nothing(task: Task, tmp_path: Path) -> None:
    assert grade(task, f"{SOLVE}; truncate -s 600M big", tmp_path) == (0.0, {"changes_too_large": 1})


def test_what_cannot_be_read_is_the_agents_own_loss(task: Task, tmp_path: Path) -> None:
    nest = "python3 -c \"import os\nfor _ in range(1500): os.mkdir('a'); os.chdir('a')\""
    assert grade(task, f"{SOLVE}; {nest}", tmp_path) == (0.0, {"changes_unreadable": 1})
    assert grade(task, f"{SOLVE}; cd; {nest}", tmp_path) == (1.0, {})  # nothing of HOME is taken over


@pytest.mark.parametrize("closed", ["m.py", "pkg"])
def test_closed_files_and_folders(tmp_path: Path, closed: str) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    for folder in (before, after):
        (folder / "pkg").mkdir(parents=True)
        (folder / "pkg" / "x.py").write_text("x")
    (after / "m.py").write_text("x")
    (after / closed).chmod(0)
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.getuid() and folder.name.startswith(("pytest-", "popen-", "test_")):
            folder.chmod(0o755)
    user = os.geteuid()
    try:
        if user == 0:
            os.seteuid(65534)  # root can read everything
        with pytest.raises(TreeUnreadableError, match=closed):
            find_changes(before, after)
    finally:
        os.seteuid(user)
        (after / closed).chmod(0o755)


def test_a_folder_that_was_closed_before_is_nobodys_change(tmp_path: Path) -> None:
    def nest(folder: Path) -> Path:
        os.makedirs(folder / "/".join("a" * 300))
        return folder

    assert find_changes(nest(tmp_path / "before"), nest(tmp_path / "after")) == {}
    with pytest.raises(TreeUnreadableError):
        find_changes(None, tmp_path / "after")


def test_files_of_the_task_are_not_the_agents_changes(task: Task, tmp_path: Path) -> None:
    given = "import pytest\n\n\n@pytest.fixture(autouse=True)\ndef two(monkeypatch):\n    import m\n    m.N = 2\n"
    task = replace(task, files={"conftest.py": given, "m.py": "N = 1\ndef f():\n    return 1\n"})
    assert grade(task, "sed -i 's/return 1/return N/' m.py", tmp_path) == (1.0, {})
    reward, counters = grade(task, "sed -i 's/return 1/return N/' m.py; echo > conftest.py", tmp_path)
    assert (reward, counters["conftests_planted"]) == (1.0, 1)
    assert grade(task, "sed -i 's/return 1/return N/' m.py; rm conftest.py", tmp_path)[0] == 1.0


def test_what_an_overlay_shows_untouched_is_not_read(tmp_path: Path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    for folder in (before, after):
        folder.mkdir()
    with (before / "huge").open("wb") as file:
        file.truncate(600 << 20)  # more than may be read
    os.link(before / "huge", after / "huge")
    (before / "m.py").write_text("old")
    shutil.copy2(before / "m.py", after / "m.py")
    state = (before / "m.py").stat()
    assert find_changes(before, after) == {}
    (after / "m.py").write_text("new")
    os.utime(after / "m.py", ns=(state.st_atime_ns, state.st_mtime_ns))
    assert list(find_changes(before, after)) == ["m.py"]


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
