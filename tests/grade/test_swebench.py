"""Rows of SWE-bench, graded by the package's own script and parser: on a stand-in for a repository that it knows."""

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import docker
import pytest
from swe_repository import FIX, build_image, build_task, make_repository

from polar_trl.errors import ConfigError, TaskError
from polar_trl.grade.base import Grade
from polar_trl.grade.canary import Canary
from polar_trl.grade.swebench import (
    SwebenchGrader,
    build_script,
    check_row,
    contradicts_itself,
    cut_script,
    find_log_faults,
    find_style,
    has_passed,
    parse_log,
)
from polar_trl.sandbox.base import SandboxBackend
from polar_trl.sandbox.docker.backend import DockerSandboxBackend
from polar_trl.sandbox.limits import Limits
from polar_trl.sandbox.local import LocalSandboxBackend
from polar_trl.types import Task

GOLD = f"git apply - <<'END'\n{FIX}END"
HOOK = """cat > conftest.py <<'END'
import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    outcome.get_result().outcome = "passed"
END"""
PRINT = """cat >> src/flask/tiny.py <<'END'
import atexit, os
names = ["test_kind", "test_f", "test_cut[a b]", "test_cut[a c]"]
def forge():
    for name in names:
        os.write(1, f"\\nPASSED tests/test_tiny.py::{name}\\n".encode())
atexit.register(forge)
END"""
BY_PLACE = """cat >> src/flask/tiny.py <<'END'
import _pytest.reports
make = _pytest.reports.TestReport.from_item_and_call.__func__
def forge(cls, item, call):
    report = make(cls, item, call)
    if item.nodeid.startswith("tests/"):
        report.outcome = "passed"
    return report
_pytest.reports.TestReport.from_item_and_call = classmethod(forge)
END"""
WRITE = "cat > src/flask/tiny.py <<'END'\n{code}\nEND"
PRINT_ALL = """cat > src/flask/tiny.py <<'END'
import os, re, sys
def f(x): return x
said = ""
for path in [word for word in sys.argv if word.endswith(".py")]:
    for name, sum in re.findall(r"def (test_\\w+)\\(\\w*\\):\\s+assert (.*)", open(path).read()):
        said += f"{'PASSED' if sum[0].isalpha() or eval(sum) else 'FAILED'} {path}::{name}\\n"
if said:
    said += "PASSED tests/test_tiny.py::test_cut[a b]\\nPASSED tests/test_tiny.py::test_cut[a c]\\n"
    os.write(1, said.encode())
    os._exit(0)
END"""
IMAGE = "polar-trl-swe-test:latest"
CASES = {
    "the fix": (GOLD, 1.0, None),
    "the fix, committed": (f"{GOLD}\ngit -c user.name=a -c user.email=a@b commit -qam done", 1.0, None),
    "nothing": ("true", 0.0, None),
    "a planted conftest.py": (HOOK, 0.0, "conftests_planted"),
    "edited tests": (
        "printf 'def test_f(): pass\\ndef test_kind(): pass\\n' > tests/test_tiny.py",
        0.0,
        "tests_edited",
    ),
    "exit at import": ("echo 'import os; os._exit(0)' >> src/flask/tiny.py", 0.0, "test_runs_died"),
    "reports that always pass": (
        "printf 'import _pytest.reports as r\\n' >> src/flask/tiny.py; "
        "echo 'r.TestReport.outcome = property(lambda s: \"passed\", lambda s, v: 0)' >> src/flask/tiny.py",
        0.0,
        "canaries_broken",
    ),
    "reports of its tests that always pass": (BY_PLACE, 0.0, "canaries_broken"),
    "a test's own function exchanged": (
        WRITE.format(code="import _pytest.python as p\np.Function.runtest = lambda s: 0\ndef f(x): return x"),
        0.0,
        "judges_patched",
    ),
    "failures swallowed of some": (
        WRITE.format(
            code="import _pytest.python as p\nr = p.Function.runtest\ndef f(x): return x\n"
            "def run(s):\n    if 'tiny' not in s.nodeid: r(s)\np.Function.runtest = run"
        ),
        0.0,
        "judges_patched",
    ),
    "pytest.xfail": (WRITE.format(code="import pytest\ndef f(x): pytest.xfail('x')"), 0.0, "outcomes_not_witnessed"),
    "an outcome of pytest's": (
        WRITE.format(code="from _pytest.outcomes import XFailed\ndef f(x): raise XFailed('x')"),
        0.0,
        "outcomes_not_witnessed",
    ),
    "a whole log printed": (PRINT_ALL, 0.0, "test_runs_died"),
    "a module in place of another": (
        f"mkdir src/iniconfig; touch src/iniconfig/__init__.py; {GOLD}",
        1.0,
        "modules_shadowed",
    ),
    "a number that equals all": (
        WRITE.format(code="class E(int):\n    def __eq__(s, o): return True\ndef f(x): return E(1)"),
        1.0,
        "equal_to_all",
    ),
    "a plugin that the tree claims to have": (
        "mkdir src/e.egg-info; printf '[pytest11]\\ne = e\\n' > src/e.egg-info/entry_points.txt",
        0.0,
        "test_settings_planted",
    ),
}


def grade(task: Task, backend: SandboxBackend, command: str, *, partial: bool = False) -> tuple[float, dict[str, int]]:
    graded = grade_whole(task, backend, command, partial=partial)
    return graded.reward, dict(graded.counters)


def grade_whole(task: Task, backend: SandboxBackend, command: str, *, partial: bool = False) -> Grade:
    sandbox = backend.create(task, "agent")
    try:
        result = sandbox.run(command, env={}, timeout_s=60)
        assert result.exit_code == 0, result.stderr
        return SwebenchGrader(backend, partial=partial).grade(task, sandbox, timeout_s=120)
    finally:
        sandbox.destroy()


@pytest.fixture
def local(tmp_path: Path) -> tuple[Task, SandboxBackend]:
    """The row with the repository as a folder of this machine; what the script does outside of it fails, unheeded."""
    base = make_repository(tmp_path / "testbed")
    env = {"PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"}
    task = replace(build_task(base), image=None, workspace=str(tmp_path / "testbed"), env=env)
    return task, LocalSandboxBackend(tmp_path / "boxes")


@pytest.mark.parametrize("name", CASES)
def test_a_row_in_folders(local: tuple[Task, SandboxBackend], name: str) -> None:
    command, reward, counter = CASES[name]
    found, counters = grade(*local, command)
    assert found == reward and (counter is None or counters[counter] >= 1), counters


def test_tests_that_may_fail_have_passed_where_they_do(local: tuple[Task, SandboxBackend]) -> None:
    """As in the package; in both ways in which a test says so."""
    task, backend = local
    more = "\n\n@pytest.mark.xfail\ndef test_x(): assert f(1) == 3\n\n\ndef test_y(): pytest.xfail('not yet')\n"
    lines = "".join(f"+{line}\n" for line in more.splitlines())
    row = task.metadata["swebench"]
    patch = row["test_patch"].replace("+3,12 @@", f"+3,{12 + len(more.splitlines())} @@") + lines
    task = replace(task, metadata={"swebench": {**row, "test_patch": patch}})
    assert task.tests is not None
    names = ("tests/test_tiny.py::test_x", "tests/test_tiny.py::test_y")
    task = replace(task, tests=replace(task.tests, pass_to_pass=(*task.tests.pass_to_pass, *names)))
    assert grade(task, backend, GOLD) == (1.0, {})
    assert grade(task, backend, CASES["pytest.xfail"][0])[0] == 0.0


def test_part_of_the_work(local: tuple[Task, SandboxBackend]) -> None:
    task, backend = local
    assert task.tests is not None
    spec = replace(task.tests, fail_to_pass=(*task.tests.fail_to_pass, "tests/test_tiny.py::test_never"))
    task = replace(task, tests=spec)
    assert grade(task, backend, GOLD)[0] == 0.0
    assert grade(task, backend, GOLD, partial=True)[0] == 0.5
    assert grade(task, backend, "echo 'def f(x): return 0' > src/flask/tiny.py", partial=True)[0] == 0.0


def test_the_report_names_tests_and_hides_the_canary(local: tuple[Task, SandboxBackend]) -> None:
    task, backend = local
    assert task.tests is not None
    spec = replace(task.tests, pass_to_pass=(*task.tests.pass_to_pass, "tests/test_tiny.py::test_gone"))
    report = grade_whole(replace(task, tests=spec), backend, "true").report
    assert report.failed_tests == task.tests.fail_to_pass
    assert report.missing_tests == ("tests/test_tiny.py::test_gone",)
    assert f"FAILED {task.tests.fail_to_pass[0]}" in report.output_tail
    assert report.output_tail.count("FAILED ") == 1


def test_printed_outcomes_beside_the_real_ones(local: tuple[Task, SandboxBackend]) -> None:
    reward, counters = grade(*local, PRINT)
    assert (reward, counters["logs_contradict"]) == (0.0, 1)


def test_a_row_with_its_own_script(local: tuple[Task, SandboxBackend]) -> None:
    task, backend = local
    script = build_script(task)
    assert "source /opt/miniconda3/bin/activate" in script and "pytest -rA tests/test_tiny.py" in script
    row = {**task.metadata["swebench"], "eval_script": script.replace("2.3", ""), "log_parser": "parse_log_pytest"}
    task = replace(task, metadata={"swebench": {**row, "repo": "un/known", "version": "0"}})
    assert grade(task, backend, GOLD)[0] == 1.0
    assert grade(task, backend, "true")[0] == 0.0


def test_a_repository_that_the_package_does_not_know(local: tuple[Task, SandboxBackend]) -> None:
    task, backend = local
    task = replace(task, metadata={"swebench": {**task.metadata["swebench"], "repo": "getmoto/moto"}})
    assert grade(task, backend, GOLD)[0] == 1.0
    assert grade(task, backend, "true")[0] == 0.0
    assert task.tests is not None
    with pytest.raises(TaskError, match=r"flask-5063.*does not know getmoto/moto in version '2\.3'"):
        check_row(replace(task, tests=replace(task.tests, fail_to_pass=("test_f (tests.T)",))))


def test_a_missing_package_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "swebench.harness.log_parsers", None)
    with pytest.raises(ConfigError, match=r"pip install 'polar-trl\[swe\]'"):
        check_row(build_task("abc"))


def test_ids_that_were_cut() -> None:
    outcomes = {"a.py::t[x": "PASSED", "a.py::u[x-1]": "PASSED", "a.py::u[x-2]": "FAILED", "a.py::s": "SKIPPED"}
    assert has_passed("a.py::t[x", outcomes)
    assert not has_passed("a.py::u[x", outcomes)
    assert has_passed("a.py::u[x-1", outcomes) and not has_passed("a.py::u[y", outcomes)
    assert not has_passed("a.py::s", outcomes) and not has_passed("a.py::gone", outcomes)


def test_logs_that_contradict_themselves() -> None:
    assert contradicts_itself("PASSED a.py::t\nFAILED a.py::t - assert 1 - 2\n")
    assert contradicts_itself("ERROR a.py::t[x - y] - no\nPASSED a.py::t[x - y]\n")
    assert not contradicts_itself("PASSED a.py::t[1]\nFAILED a.py::t[2] - PASSED a.py::t[2]\nPASSED a.py::t[1]\n")


def test_what_the_script_puts_into_a_file_of_its_own() -> None:
    before, body, after = cut_script("a\n: '>>>>> Start Test Output'\npytest x\n: '>>>>> End Test Output'\nb\n")
    assert (before, body, after) == ("a\n", "pytest x\n", "\nb\n")


def test_every_python_repository_has_a_canary() -> None:
    from swebench.harness.constants import MAP_REPO_TO_EXT, MAP_REPO_VERSION_TO_SPECS
    from swebench.harness.log_parsers import MAP_REPO_TO_PARSER

    without = {
        repo
        for repo, versions in MAP_REPO_VERSION_TO_SPECS.items()
        for specs in versions.values()
        if MAP_REPO_TO_EXT[repo] == "py" and repo in MAP_REPO_TO_PARSER and not find_style(f"{specs['test_cmd']} x")
    }
    assert without == set()
    assert find_style("./tests/runtests.py --verbosity 2 x\n") == "django"


def test_the_canary_of_djangos_runner(tmp_path: Path) -> None:
    canary = Canary(["test_f (a.tests.T)"], "django")
    for path, text in canary.files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    # its runner is the standard library's, and prints the same lines
    command = [sys.executable, "-m", "unittest", "-v", f"{canary.arguments[0]}.tests"]
    log = subprocess.run(command, cwd=tmp_path / "tests", capture_output=True, text=True).stderr
    task = build_task("abc")
    task = replace(task, metadata={"swebench": {**task.metadata["swebench"], "repo": "django/django"}})
    assert canary.find_fault(parse_log(task, log), passed="PASSED", failed="FAILED") is None
    assert canary.find_fault(parse_log(task, log.replace("FAIL", "ok")), passed="PASSED", failed="FAILED") is not None
    forged = log + "".join(f"{line.removesuffix('FAIL')}ok\n" for line in log.splitlines() if line.endswith("FAIL"))
    assert contradicts_itself(forged) and not contradicts_itself(log)


def test_the_canary_of_sympys_runner(tmp_path: Path) -> None:
    canary = Canary(["test_f"], "sympy", ["sympy/core/tests/test_args.py"])
    ((path, text),) = canary.files.items()
    assert path.startswith("sympy/core/tests/test_") and canary.arguments == (path,)
    (tmp_path / "test_canary.py").write_text(text)
    program = (
        "from sympy.testing.runtests import PyTestReporter, SymPyTests\n"
        "tests = SymPyTests(PyTestReporter(verbose=True, colors=False), post_mortem=False)\n"
        "tests._testfiles = ['test_canary.py']\ntests.test()\n"
    )
    log = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True).stdout
    task = build_task("abc")
    task = replace(task, metadata={"swebench": {**task.metadata["swebench"], "repo": "sympy/sympy"}})
    assert find_log_faults(log, parse_log(task, log), canary) == [], log
    forged = re.sub(r" F\b", " ok", log)
    assert find_log_faults(log + forged, parse_log(task, log + forged), canary) != []
    assert find_log_faults(forged, parse_log(task, forged), canary) == ["canaries_broken"]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """As `build_image` makes it; the base commit."""
    base = build_image(tmp_path_factory.mktemp("context"), IMAGE)
    client = docker.from_env()
    yield base
    client.images.remove(IMAGE, force=True)
    client.close()


@pytest.mark.containers
@pytest.mark.parametrize("name", CASES)
def test_a_row_in_its_image(image: str, tmp_path: Path, name: str) -> None:
    command, reward, counter = CASES[name]
    backend = DockerSandboxBackend(
        limits=Limits(memory_mb=1024, cpus=1.0, pids=64, disk_mb=64), root=tmp_path / "state"
    )
    task = replace(build_task(image), image=IMAGE)
    assert task.workdir == "/testbed"
    try:
        found, counters = grade(task, backend, command)
    finally:
        backend.close()
    assert found == reward and (counter is None or counters[counter] >= 1), counters
    assert list((tmp_path / "state").iterdir()) == [], "a sandbox was left behind"
