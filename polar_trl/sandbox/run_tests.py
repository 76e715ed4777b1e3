"""Run as a script: pytest over paths of a tree -> the outcome of every test, by node id.

    python run_tests.py --root TREE --report FILE [--import-root DIR]... [--] PATH...
    python run_tests.py --root TREE --spec SPEC.json [--report FILE] [--reward FILE]

The report is {"outcomes": {node id: outcome}, "messages": {node id: text}}; a run that dies leaves none. The second
form is for a task folder: it removes the tests that the agent saw, lays the hidden ones (the folder "hidden" beside
the spec), runs them, and rewards 1 where every test that decides passed, else 0.

A copy of this file lies in every task folder and in every sandbox that grades, so it needs the standard library and
pytest, nothing else. It refuses to read what a run prints: outcomes come from pytest's own reports. (JUnit files would
not do: they name the file in which an inherited test is defined, and ids of mixin classes come out wrong.) What the
tested code does in this very process is not guarded against here; see the graders for that.
"""

import argparse
import configparser
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

RUNNER = Path(__file__)
OPTIONS = (
    *("-q", "-q", "--tb=line", "-p", "no:cacheprovider", "-W", "ignore", "--continue-on-collection-errors"),
    # a package's own options may ask for plugins that are not installed, such as coverage
    *("-o", "addopts=", "-o", "xfail_strict=false"),
)
MAX_MESSAGE = 300
TEST_LIMIT_S = 30.0
"""Of one test: where a defect makes a test wait for ever, the others are still wanted."""
_PROGRAM = """\
#!{python}
import sys
from {module} import {function}
sys.exit({function}())
"""


class Collector:
    """A pytest plugin that keeps one outcome per test: "passed", "failed", "error", "skipped" or "xfailed"."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}
        self.messages: dict[str, str] = {}

    def pytest_runtest_logstart(self) -> None:
        signal.signal(signal.SIGALRM, _give_up)
        signal.setitimer(signal.ITIMER_REAL, TEST_LIMIT_S)

    def pytest_runtest_logfinish(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)

    def pytest_collectreport(self, report: "pytest.CollectReport") -> None:
        if report.failed:
            self.messages[report.nodeid] = str(report.longrepr)[-MAX_MESSAGE:]

    def pytest_runtest_logreport(self, report: "pytest.TestReport") -> None:
        if report.failed:
            self.outcomes[report.nodeid] = "failed" if report.when == "call" else "error"
            crash = getattr(report.longrepr, "reprcrash", None)
            said = crash.message if crash is not None else str(report.longrepr)
            self.messages.setdefault(report.nodeid, said[:MAX_MESSAGE])
        elif report.skipped:
            self.outcomes.setdefault(report.nodeid, "xfailed" if hasattr(report, "wasxfail") else "skipped")
        elif report.when == "call":
            self.outcomes.setdefault(report.nodeid, "passed")


def _give_up(*_: object) -> None:
    import pytest

    # pytest's own failure is no `Exception`, so code under test does not swallow it
    pytest.fail(f"ran longer than {TEST_LIMIT_S:g} s")


def enter_tree(root: Path, import_roots: list[str]) -> None:
    """Make the package importable, here and in processes that its tests start. Comes before the import of pytest,
    which must not bring a package along that is under test itself."""
    os.chdir(root)
    folders = list(dict.fromkeys(str((root / folder).resolve()) for folder in [*import_roots, "."]))
    # the first entry is this script's own folder: in a container "/tests", whose name packages use as well
    sys.path[0:1] = folders
    os.environ["PYTHONPATH"] = os.pathsep.join(folders)


def write_programs(roots: list[Path], target: Path) -> None:
    """The command line programs that installing the package would make: some tests start them by name."""
    for file in (file for root in roots for file in root.glob("*.egg-info/entry_points.txt")):
        parser = configparser.ConfigParser(delimiters=("=",), interpolation=None)
        parser.read_string(file.read_text(encoding="utf-8"))
        for name, place in parser["console_scripts"].items() if "console_scripts" in parser else ():
            module, _, function = place.partition("[")[0].strip().partition(":")
            text = _PROGRAM.format(python=sys.executable, module=module, function=function)
            (target / name).write_text(text, encoding="utf-8")
            (target / name).chmod(0o755)
    os.environ["PATH"] = f"{target}{os.pathsep}{os.environ.get('PATH', os.defpath)}"


def run_tests(root: Path, paths: list[str], import_roots: list[str]) -> Collector:
    """Run pytest in this process, from `root`."""
    enter_tree(root, import_roots)
    import pytest

    collector = Collector()
    with tempfile.TemporaryDirectory() as programs:
        write_programs([root / folder for folder in import_roots], Path(programs))
        pytest.main([*OPTIONS, *paths], plugins=[collector])
    return collector


def lay_tests(root: Path, spec: dict[str, list[str]], hidden: Path) -> None:
    """Remove the tests that the agent saw, and put the hidden ones in their place."""
    for path in spec["removed"]:
        (root / path).unlink(missing_ok=True)
    for path in spec["files"]:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).unlink(missing_ok=True)
        shutil.copy2(hidden / path, root / path)


def run_spec(root: Path, file: Path, reward: Path | None) -> Collector:
    """Lay and run a task's hidden tests, and write the reward."""
    spec = json.loads(file.read_text(encoding="utf-8"))
    if reward is not None:
        reward.unlink(missing_ok=True)
    lay_tests(root, spec, file.parent / "hidden")
    collector = run_tests(root, spec["paths"], spec["import_roots"])
    decisive = (*spec["fail_to_pass"], *spec["pass_to_pass"])
    failed = [name for name in decisive if collector.outcomes.get(name) != "passed"]
    print(f"{len(failed)} of {len(decisive)} tests that decide did not pass", *failed[:20], sep="\n  ")
    if reward is not None:
        reward.parent.mkdir(parents=True, exist_ok=True)
        reward.write_text("0\n" if failed else "1\n", encoding="utf-8")
    return collector


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--report", type=Path)
    parser.add_argument("--import-root", action="append", default=[])
    parser.add_argument("--spec", type=Path)
    parser.add_argument("--reward", type=Path)
    parser.add_argument("--memory-mb", type=int, default=3072)
    parser.add_argument("paths", nargs="*")
    args = parser.parse_args()
    limit = args.memory_mb << 20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    root = args.root.resolve()
    # resolved before the run, which changes the folder
    report, reward = (None if path is None else path.resolve() for path in (args.report, args.reward))
    if args.spec is not None:
        collector = run_spec(root, args.spec.resolve(), reward)
    else:
        collector = run_tests(root, args.paths, args.import_root or ["."])
    if report is not None:
        found = {"outcomes": collector.outcomes, "messages": collector.messages}
        report.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
