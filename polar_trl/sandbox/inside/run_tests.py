"""Run pytest over paths of a tree and report the outcome of every test by node id. Runs as a script.

    python run_tests.py --request REQUEST.json
    python run_tests.py --root TREE --spec SPEC.json [--report FILE] [--reward FILE]

The report is {"outcomes": {node id: outcome}, "messages": {node id: text}, "patched": name or null}; a run that dies
leaves none. The first form is for a grader, in the tree: the request, {"paths", "import_roots", "own", "report",
"key"}, is removed when it was read, and the report begins with a signature by the key. The second form is for a task
folder: it removes the tests that the agent saw, lays the hidden ones (the folder "hidden" beside the spec), runs them,
and rewards 1 where every test that decides passed, else 0.

Tests run in a process of their own, which hands its outcomes over once, at its end, through a pipe. The key, the
report's place and the reward stay in this one, so nothing that the tested code leaves running can write them later.

A copy of this file lies in every task folder and in every sandbox that grades, so it needs the standard library and
pytest, nothing else. Outcomes come from pytest's own reports, never from output. (JUnit files would not do: they name
the file in which an inherited test is defined, and ids of mixin classes come out wrong.) Tested code that exchanges a
part of pytest is noticed in the ways that `Guard` knows; there is no lock against it.
"""

import argparse
import configparser
import ctypes
import hashlib
import hmac
import importlib.metadata
import importlib.util
import json
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

RUNNER = Path(__file__)
OPTIONS = (
    *("-q", "-q", "--tb=line", "-p", "no:cacheprovider", "-W", "ignore", "--continue-on-collection-errors"),
    # a package's own options may ask for plugins that are not installed, such as coverage
    *("-o", "addopts=", "-o", "xfail_strict=false"),
)
MAX_MESSAGE = 300
NO_PYTEST = 96
"""Exit code where this Python has no pytest."""
PR_SET_DUMPABLE = 4  # prctl(2)
TEST_LIMIT_S = 30.0
"""Time limit of one test: where a defect makes a test wait for ever, the others are still wanted."""
JUDGES = (
    *("_pytest.reports", "_pytest.runner", "_pytest.python", "_pytest.nodes", "_pytest.skipping", "_pytest.main"),
    *("pluggy._callers", "pluggy._hooks", "pluggy._manager", "pluggy._result"),
)
"""Modules whose functions make a test's outcome."""
JUDGING_HOOKS = (
    *("pytest_runtest_protocol", "pytest_runtest_setup", "pytest_runtest_call", "pytest_runtest_teardown"),
    *("pytest_pyfunc_call", "pytest_runtest_makereport", "pytest_runtest_logreport", "pytest_report_teststatus"),
)
ADDED_LATER = frozenset({"fspath", "startdir"})
"""Names that pytest's own plugin `legacypath` adds to its classes when it is configured."""
AUTOLOAD_OFF = "PYTEST_DISABLE_PLUGIN_AUTOLOAD"
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


class Plugins:
    """A pytest plugin that registers those of the environment by their names, as pytest itself would.

    Pytest's own search goes by every folder of packages on the path, and so takes in a work tree's own metadata.
    """

    def __init__(self, found: "list[tuple[str, Any]]", arguments: list[str]) -> None:
        self._found = found
        self._arguments = arguments

    def pytest_addoption(self, pluginmanager: "pytest.PytestPluginManager") -> None:
        for name, plugin in self._found:
            pluginmanager.register(plugin, name)

    def pytest_configure(self) -> None:
        os.environ.pop(AUTOLOAD_OFF, None)  # tests may start a pytest of their own
        self._arguments.clear()  # frames above the tests hold this list: it need not tell which paths decide


class Guard:
    """A pytest plugin that notices when functions, classes or hooks that decide about tests were exchanged.

    Made before anything of the tree was imported. Looks when tests were collected, after each test, and at the end:
    a part that tested code exchanges and puts back in between is not seen.
    """

    def __init__(self) -> None:
        self.patched: str | None = None
        self._kept = list(_list_judges())
        self._classes = [(holder, holder.__mro__, _list_names(holder)) for holder in _list_classes()]
        self._plugins: list[object] | None = None

    def pytest_sessionstart(self, session: "pytest.Session") -> None:
        self._plugins = list(session.config.pluginmanager.get_plugins())

    def pytest_collection_finish(self, session: "pytest.Session") -> None:
        self.look(session)

    def pytest_runtest_makereport(self, item: "pytest.Item", call: "pytest.CallInfo[None]") -> None:
        if call.when == "call":
            self.look(item.session)

    def pytest_sessionfinish(self, session: "pytest.Session") -> None:
        self.look(session)

    def look(self, session: "pytest.Session") -> None:
        """Note the first part that was exchanged."""
        if self.patched is None:
            self.patched = next(self._find_patched(session), None)

    def _find_patched(self, session: "pytest.Session") -> Iterator[str]:
        for holder, name, value, code in self._kept:
            if vars(holder).get(name) is not value or _find_code(value) is not code:
                yield f"{holder.__name__}.{name}"
        for holder, bases, names in self._classes:
            if holder.__mro__ is not bases or (added := _list_names(holder) - names):
                yield f"{holder.__name__}.{'__mro__' if holder.__mro__ is not bases else min(added)}"
        known = {id(plugin) for plugin in self._plugins or ()}
        for hook in JUDGING_HOOKS:
            for found in getattr(session.config.hook, hook).get_hookimpls():
                # conftest files come as their folders are collected; those that a tree should not have were dropped
                is_conftest = os.path.basename(getattr(found.plugin, "__file__", None) or "") == "conftest.py"
                if id(found.plugin) not in known and not is_conftest:
                    yield hook


def _list_judges() -> "Iterator[tuple[Any, str, object, object]]":
    """Yield module or class, name, and the function or class that it has by this name, with the function's code."""
    for holder in [*(sys.modules[name] for name in JUDGES if name in sys.modules), *_list_classes()]:
        for name, value in vars(holder).items():
            if isinstance(value, (types.FunctionType, classmethod, staticmethod, property, type)):
                yield holder, name, value, _find_code(value)


def _list_classes() -> list[type]:
    modules = [sys.modules[name] for name in JUDGES if name in sys.modules]
    found = [value for module in modules for value in vars(module).values() if isinstance(value, type)]
    return [value for value in dict.fromkeys(found) if value.__module__ in JUDGES]


def _list_names(holder: type) -> set[str]:
    """List the names of a class that count: public ones and `__getattribute__`, as Python adds others as it goes."""
    names = {name for name in vars(holder) if not name.startswith("_") or name == "__getattribute__"}
    return names - ADDED_LATER


def _find_code(value: object) -> object:
    function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    return getattr(function, "__code__", None)


def _give_up(*_: object) -> None:
    import pytest

    # pytest's own failure is no `Exception`, so code under test does not swallow it
    pytest.fail(f"ran longer than {TEST_LIMIT_S:g} s")


def enter_tree(root: Path, import_roots: list[str]) -> None:
    """Make the package importable, here and in processes that its tests start."""
    os.chdir(root)
    folders = list(dict.fromkeys(str((root / folder).resolve()) for folder in [*import_roots, "."]))
    # the first entry is this script's own folder: in a container "/tests", whose name packages use as well
    sys.path[0:1] = folders
    os.environ["PYTHONPATH"] = os.pathsep.join(folders)


def write_programs(roots: list[Path], target: Path) -> None:
    """Write the command line programs that installing the package would make: some tests start them by name."""
    for file in (file for root in roots for file in root.glob("*.egg-info/entry_points.txt")):
        parser = configparser.ConfigParser(delimiters=("=",), interpolation=None)
        parser.read_string(file.read_text(encoding="utf-8"))
        for name, place in parser["console_scripts"].items() if "console_scripts" in parser else ():
            module, _, function = place.partition("[")[0].strip().partition(":")
            text = _PROGRAM.format(python=sys.executable, module=module, function=function)
            (target / name).write_text(text, encoding="utf-8")
            (target / name).chmod(0o755)
    os.environ["PATH"] = f"{target}{os.pathsep}{os.environ.get('PATH', os.defpath)}"


def list_own(root: Path, import_roots: list[str]) -> list[str]:
    """List top-level names that can be imported from a tree."""
    folders = [root / folder for folder in import_roots]
    return sorted({name.partition(".")[0] for folder in folders if folder.is_dir() for name in os.listdir(folder)})


def run_apart(root: Path, paths: list[str], import_roots: list[str], own: list[str]) -> dict[str, Any] | None:
    """Run pytest in a process of its own; return its outcomes, messages and `patched`, None where it died.

    Args:
        own: Top-level names of the tested code. Where pytest needs one of them, the tree's is taken, else never.
    """
    read_end, write_end = os.pipe()
    child = subprocess.Popen(build_command(write_end), stdin=subprocess.PIPE, pass_fds=[write_end], cwd=root)
    os.close(write_end)
    assert child.stdin is not None
    with child.stdin:
        # not as arguments: those can be read by everything that runs in the process
        asked = {"root": str(root), "paths": paths, "import_roots": import_roots, "own": own, "is_tree_first": False}
        child.stdin.write(json.dumps(asked).encode())
    said = b""
    try:
        while not said.endswith(b"\n"):
            if select.select([read_end], [], [], 0.1)[0]:
                block = os.read(read_end, 1 << 16)
                if not block:
                    break
                said += block
            elif child.poll() is not None:  # what it forked may hold the pipe open
                break
    finally:
        os.close(read_end)
        child.kill()
        child.wait()
    try:
        found = json.loads(said)
        return found if isinstance(found, dict) and isinstance(found.get("outcomes"), dict) else None
    except ValueError:
        return None


def build_command(pipe: int) -> list[str]:
    """Build the command that starts this file as the process in which tests run."""
    return [sys.executable, *(["-B"] if sys.flags.dont_write_bytecode else []), __file__, "--child", str(pipe)]


def run_child(pipe: int) -> None:
    """Run tests in the process of `run_apart`. Leaves no name of this file in reach of an `import __main__`."""
    request = json.loads(sys.stdin.read())
    plugins = import_pytest(request, pipe)
    os.set_inheritable(pipe, False)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv[:] = ["pytest"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.modules["__main__"].__file__ = sys.argv[0]  # without it, tested code takes this for an interactive shell
    dumps, write, leave = json.dumps, os.write, os._exit
    arguments = [*OPTIONS, *request.pop("paths")]
    collector, guard = run_tests(Path(request["root"]), arguments, request["import_roots"], plugins)
    found = {"outcomes": collector.outcomes, "messages": collector.messages, "patched": guard.patched}
    said = dumps(found).encode() + b"\n"
    while said:
        said = said[write(pipe, said) :]
    sys.stdout.flush()
    leave(0)  # no exit handler of the tested code runs


def import_pytest(request: dict[str, Any], pipe: int) -> "list[tuple[str, Any]]":
    """Import pytest and its plugins from the environment, and only then enter the tree; return plugins with names.

    So pytest never loads a file of the tree that has the name of a module that it imports. Where that module is the
    tested code (pluggy, say), this process starts again and takes the tree's.
    """
    root, import_roots = Path(request["root"]), request["import_roots"]
    found = list(importlib.metadata.entry_points(group="pytest11"))
    if request["is_tree_first"]:
        enter_tree(root, import_roots)
    before = set(sys.modules)
    import pytest  # noqa: F401

    plugins = [(entry.name, entry.load()) for entry in found]
    if not request["is_tree_first"]:
        if not {name.partition(".")[0] for name in sys.modules.keys() - before}.isdisjoint(request["own"]):
            with tempfile.TemporaryFile() as again:
                again.write(json.dumps({**request, "is_tree_first": True}).encode())
                again.seek(0)
                os.dup2(again.fileno(), 0)
                os.execv(sys.executable, build_command(pipe))
        enter_tree(root, import_roots)
    return plugins


def run_tests(
    root: Path, arguments: list[str], import_roots: list[str], plugins: "list[tuple[str, Any]]"
) -> tuple[Collector, Guard]:
    """Run pytest in this process, from `root`; it empties `arguments`."""
    import pytest

    collector, guard = Collector(), Guard()
    with tempfile.TemporaryDirectory() as programs:
        write_programs([root / folder for folder in import_roots], Path(programs))
        os.environ[AUTOLOAD_OFF] = "1"
        pytest.main(arguments, plugins=[Plugins(plugins, arguments), collector, guard])
    return collector, guard


def run_request(file: Path) -> None:
    """Run the tests that a grader asks for, and write the signed report."""
    request = json.loads(file.read_text(encoding="utf-8"))
    file.unlink()
    report = file.parent.resolve() / request["report"]
    # the tested code runs as the same user, and could read the key in this process's memory
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    found = run_apart(Path.cwd(), request["paths"], request["import_roots"], request["own"])
    if found is not None:
        text = json.dumps(found)
        report.unlink(missing_ok=True)
        report.write_text(f"{sign(request['key'], text)}\n{text}", encoding="utf-8")


def sign(key: str, text: str) -> str:
    """Sign a report: proof that its writer had the key."""
    return hmac.new(key.encode(), text.encode(), hashlib.sha256).hexdigest()


def lay_tests(root: Path, spec: dict[str, list[str]], hidden: Path) -> None:
    """Remove the tests that the agent saw, and put the hidden ones in their place, never outside of `root`."""
    for path in spec["removed"]:
        find_place(root, path).unlink(missing_ok=True)
    for path in spec["files"]:
        place = find_place(root, path)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.unlink(missing_ok=True)
        shutil.copy2(hidden / path, place)


def find_place(root: Path, path: str) -> Path:
    """Resolve a path of a spec. Raises `ValueError` where it leads out of `root`, by itself or through a link."""
    place = root / path
    if ".." in Path(path).parts or not place.parent.resolve().is_relative_to(root.resolve()):
        raise ValueError(f"{path!r} leads out of {root}")
    return place


def run_spec(root: Path, file: Path, report: Path | None, reward: Path | None) -> None:
    """Lay and run a task's hidden tests, and write the report and the reward."""
    spec = json.loads(file.read_text(encoding="utf-8"))
    for path in (report, reward):
        if path is not None:
            path.unlink(missing_ok=True)
    lay_tests(root, spec, file.parent / "hidden")
    found = run_apart(root, spec["paths"], spec["import_roots"], list_own(root, spec["import_roots"]))
    outcomes = {} if found is None or found.get("patched") else found["outcomes"]
    decisive = (*spec["fail_to_pass"], *spec["pass_to_pass"])
    failed = [name for name in decisive if outcomes.get(name) != "passed"]
    print(f"{len(failed)} of {len(decisive)} tests that decide did not pass", *failed[:20], sep="\n  ")
    if reward is not None:
        reward.parent.mkdir(parents=True, exist_ok=True)
        reward.write_text("0\n" if failed else "1\n", encoding="utf-8")
    if report is not None and found is not None:
        report.write_text(json.dumps(found), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--request", type=Path)
    parser.add_argument("--child", type=int)
    parser.add_argument("--root", type=Path)
    parser.add_argument("--spec", type=Path)
    parser.add_argument("--report", type=Path)
    parser.add_argument("--reward", type=Path)
    parser.add_argument("--memory-mb", type=int, default=3072)
    args = parser.parse_args()
    if args.child is not None:
        run_child(args.child)
    if importlib.util.find_spec("pytest") is None:
        print(f"{sys.executable} has no pytest", file=sys.stderr)
        sys.exit(NO_PYTEST)
    limit = args.memory_mb << 20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    if args.request is not None:
        run_request(args.request)
        return
    # resolved before the run, which changes the folder
    report, reward = (None if path is None else path.resolve() for path in (args.report, args.reward))
    run_spec(args.root.resolve(), args.spec.resolve(), report, reward)


if __name__ == "__main__":
    main()
