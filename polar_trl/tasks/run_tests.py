"""Run as a script: lay a task's hidden tests over a tree and run them -> the outcome of every test, and a reward.

    python run_tests.py --root TREE --spec SPEC.json [--report FILE] [--reward FILE]

The tests that the agent saw are removed, the hidden ones (in the folder "hidden" beside the spec) are laid, pytest
runs. The report is {"outcomes": {node id: outcome}, "messages": {node id: text}}; the reward is 1 where every test
that decides passed, else 0, and no file at all where the run died.

A copy of this file lies in every task folder, so it needs the standard library and pytest, nothing else. It refuses to
read what a run prints: outcomes come from pytest's own reports. (JUnit files would not do: they name the file in which
an inherited test is defined, and ids of mixin classes come out wrong.) What the tested code does in this very process
is not guarded against; see the graders for that.
"""

import argparse
import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

OPTIONS = (
    *("-q", "-q", "--tb=line", "-p", "no:cacheprovider", "-W", "ignore", "--continue-on-collection-errors"),
    # a package's own options may ask for plugins that are not installed, such as coverage
    *("-o", "addopts=", "-o", "xfail_strict=false"),
)
MAX_MESSAGE = 300
TEST_LIMIT_S = 30.0
"""Of one test: where a defect makes a test wait for ever, the others are still wanted."""


class Collector:
    """A pytest plugin that keeps one outcome per test: "passed", "failed", "error", "skipped" or "xfailed"."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}
        self.messages: dict[str, str] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        # pytest's own failure is no `Exception`, so code under test does not swallow it
        signal.signal(signal.SIGALRM, lambda *_: pytest.fail(f"ran longer than {TEST_LIMIT_S:g} s"))
        signal.setitimer(signal.ITIMER_REAL, TEST_LIMIT_S)
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.messages[report.nodeid] = str(report.longrepr)[-MAX_MESSAGE:]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.outcomes[report.nodeid] = "failed" if report.when == "call" else "error"
            crash = getattr(report.longrepr, "reprcrash", None)
            said = crash.message if crash is not None else str(report.longrepr)
            self.messages.setdefault(report.nodeid, said[:MAX_MESSAGE])
        elif report.skipped:
            self.outcomes.setdefault(report.nodeid, "xfailed" if hasattr(report, "wasxfail") else "skipped")
        elif report.when == "call":
            self.outcomes.setdefault(report.nodeid, "passed")


def run_tests(root: Path, paths: list[str], import_roots: list[str]) -> Collector:
    """Run pytest in this process, from `root`, with the package importable from `import_roots`."""
    os.chdir(root)
    folders = [str((root / folder).resolve()) for folder in import_roots]
    if str(root) not in folders:
        folders.append(str(root))
    # the first entry is this script's own folder: in a container "/tests", whose name packages use as well
    sys.path[0:1] = folders
    os.environ["PYTHONPATH"] = os.pathsep.join(folders)
    collector = Collector()
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--spec", type=Path, required=True)
    parser.add_argument("--report", type=Path)
    parser.add_argument("--reward", type=Path)
    parser.add_argument("--memory-mb", type=int, default=3072)
    args = parser.parse_args()
    limit = args.memory_mb << 20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    spec = json.loads(args.spec.read_text(encoding="utf-8"))
    report, reward = (None if path is None else path.resolve() for path in (args.report, args.reward))
    if reward is not None:
        reward.unlink(missing_ok=True)
    lay_tests(args.root.resolve(), spec, args.spec.resolve().parent / "hidden")
    collector = run_tests(args.root.resolve(), spec["paths"], spec["import_roots"])
    if report is not None:
        found = {"outcomes": collector.outcomes, "messages": collector.messages}
        report.write_text(json.dumps(found), encoding="utf-8")
    decisive = (*spec["fail_to_pass"], *spec["pass_to_pass"])
    failed = [name for name in decisive if collector.outcomes.get(name) != "passed"]
    print(f"{len(failed)} of {len(decisive)} tests that decide did not pass", *failed[:20], sep="\n  ")
    if reward is not None:
        reward.parent.mkdir(parents=True, exist_ok=True)
        reward.write_text("0\n" if failed else "1\n", encoding="utf-8")


if __name__ == "__main__":
    main()
