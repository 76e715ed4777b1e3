"""Run pytest over paths of a tree and report the outcome of every test by node id. Runs as a script.

    python run_tests.py --request REQUEST.json
    python run_tests.py --root TREE --spec SPEC.json [--report FILE] [--reward FILE]

The report is {"outcomes": {node id: outcome}, "messages": {node id: text}, "patched", "seen", "shadows"}, the last
three as in guard.py; a run that dies leaves none. The first form is for a grader, in the tree: the request, {"paths",
"import_roots", "own", "candidates", "report", "key"}, is removed when it was read, and the report begins with a
signature by the key. The second form is for a task folder: it removes the tests that the agent saw, lays the hidden
ones (the folder "hidden" beside the spec), runs them, and rewards 1 where every test that decides passed, else 0.

Tests run in a process of their own, which tells each outcome as it comes, signed and counted, through a pipe; the
report is written here, of what was told. A line that is not signed, or out of turn, ends it as a run that died. The
key of the report, its place and the reward stay in this process, so nothing that the tested code leaves running can
write them later.

A copy of this file, of guard.py and of hide.py lies in every task folder and every sandbox that grades: they need the
standard library and pytest, nothing else. Outcomes come from pytest's own reports, never from output. (JUnit files
would not do: they name the file in which an inherited test is defined, and ids of mixin classes come out wrong.)
Tampering is noticed in the ways that guard.py knows; there is no lock against it.
"""

import argparse
import configparser
import ctypes
import functools
import hmac
import importlib.metadata
import importlib.util
import json
import os
import resource
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

RUNNER = Path(__file__)
GUARD = RUNNER.with_name("guard.py")
SCRIPTS = (RUNNER, GUARD, RUNNER.with_name("hide.py"))
"""The files that have to lie beside each other."""
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
AUTOLOAD_OFF = "PYTEST_DISABLE_PLUGIN_AUTOLOAD"
_PROGRAM = """\
#!{python}
import sys
from {module} import {function}
sys.exit({function}())
"""


@functools.cache
def load_beside(name: str) -> Any:
    """Load a file that lies beside this one, without a name that tested code could import.

    Once, and guard.py before any of that runs: tested code can write over the file.
    """
    spec = importlib.util.spec_from_file_location(name, RUNNER.with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    beside = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(beside)
    return beside


def load_guard() -> Any:
    """Load guard.py."""
    return load_beside("guard")


class Outcomes:
    """One outcome per test: "passed", "failed", "error", "skipped" or "xfailed"; and messages of failures."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}
        self.messages: dict[str, str] = {}

    def note(self, name: str, outcome: str, message: str | None) -> None:
        """Take an outcome into account: a test fails if any part of it does, else the first outcome holds."""
        if outcome in ("failed", "error"):
            self.outcomes[name] = outcome
        elif outcome:
            self.outcomes.setdefault(name, outcome)
        if message is not None:
            self.messages.setdefault(name, message)


class Collector(Outcomes):
    """A pytest plugin that keeps the outcome of each test.

    Args:
        tell: Called with the arguments of each `note`.
    """

    def __init__(self, tell: "Callable[[list[str | None]], None] | None" = None) -> None:
        super().__init__()
        self._tell = tell

    def pytest_runtest_logstart(self) -> None:
        signal.signal(signal.SIGALRM, _give_up)
        signal.setitimer(signal.ITIMER_REAL, TEST_LIMIT_S)

    def pytest_runtest_logfinish(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)

    def pytest_collectreport(self, report: "pytest.CollectReport") -> None:
        if report.failed:
            self._take(report.nodeid, "", str(report.longrepr)[-MAX_MESSAGE:])

    def pytest_runtest_logreport(self, report: "pytest.TestReport") -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            said = crash.message if crash is not None else str(report.longrepr)
            self._take(report.nodeid, "failed" if report.when == "call" else "error", said[:MAX_MESSAGE])
        elif report.skipped:
            self._take(report.nodeid, "xfailed" if hasattr(report, "wasxfail") else "skipped", None)
        elif report.when == "call":
            self._take(report.nodeid, "passed", None)

    def _take(self, name: str, outcome: str, message: str | None) -> None:
        self.note(name, outcome, message)
        if self._tell is not None:
            self._tell([name, outcome, message])


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


def list_own(root: Path, folders: Sequence[str]) -> list[str]:
    """List names that can be imported from folders of a tree."""
    places = [root / folder for folder in folders]
    return sorted({name.partition(".")[0] for place in places if place.is_dir() for name in os.listdir(place)})


def run_apart(
    root: Path, paths: list[str], import_roots: list[str], own: list[str], candidates: Sequence[str] = ()
) -> dict[str, Any] | None:
    """Run pytest in a process of its own; return the report, None where it died.

    Args:
        own: Top-level names of the tested code. Where pytest needs one of them, the tree's is taken, else never.
        candidates: New modules, which are removed where the environment has one by the same name.
    """
    shadows = load_guard().drop_shadows(str(root), candidates)
    read_end, write_end = os.pipe()
    key = secrets.token_hex(32)
    child = subprocess.Popen(build_command(write_end), stdin=subprocess.PIPE, pass_fds=[write_end], cwd=root)
    os.close(write_end)
    assert child.stdin is not None
    with child.stdin:
        # not as arguments: those can be read by everything that runs in the process
        asked = {"root": str(root), "paths": paths, "import_roots": import_roots, "own": own, "is_tree_first": False}
        child.stdin.write(json.dumps({**asked, "key": key}).encode())
    said = b""
    try:
        while not said.endswith(b"\n\n"):
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
    found = read_told(said, key)
    return None if found is None else {**found, "shadows": shadows}


def read_told(said: bytes, key: str) -> dict[str, Any] | None:
    """Read what the process of the tests told, None where that is not whole or has a line of somebody else's."""
    if not said.endswith(b"\n\n"):
        return None
    told, sign, end = Outcomes(), load_guard().sign, None
    for number, line in enumerate(said[:-2].decode(errors="replace").split("\n")):
        proof, _, text = line.partition(" ")
        if end is not None or not hmac.compare_digest(proof, sign(key, f"{number} {text}")):
            return None
        value = json.loads(text)
        if isinstance(value, dict):
            end = value
        else:
            told.note(*value)
    return None if end is None else {"outcomes": told.outcomes, "messages": told.messages, **end}


def build_teller(pipe: int, key: str) -> "Callable[[Any], None]":
    """Build the function that writes values into the pipe of `run_apart`, a signed line each."""
    dumps, write, sign, count = json.dumps, os.write, load_guard().sign, 0

    def tell(value: Any) -> None:
        nonlocal count
        text = dumps(value)
        line = f"{sign(key, f'{count} {text}')} {text}\n".encode()
        count += 1
        while line:
            line = line[write(pipe, line) :]

    return tell


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
    # as of `python -m pytest`: tested code without one believes in an interactive shell, and multiprocessing runs it
    sys.modules["__main__"].__file__ = str(Path(sys.modules["pytest"].__file__ or "").with_name("__main__.py"))
    leave, flush, write = os._exit, sys.stdout.flush, os.write
    tell = build_teller(pipe, request.pop("key"))
    arguments = [*OPTIONS, *request.pop("paths")]
    guard, lookout = run_tests(Path(request["root"]), arguments, request["import_roots"], plugins, tell)
    tell({"patched": guard.patched, "seen": lookout.seen})
    write(pipe, b"\n")
    flush()
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
        load_guard().import_tools([str(root / path) for path in request["paths"]], request["own"])
        if not {name.partition(".")[0] for name in sys.modules.keys() - before}.isdisjoint(request["own"]):
            with tempfile.TemporaryFile() as again:
                again.write(json.dumps({**request, "is_tree_first": True}).encode())
                again.seek(0)
                os.dup2(again.fileno(), 0)
                os.execv(sys.executable, build_command(pipe))
        enter_tree(root, import_roots)
    return plugins


def run_tests(
    root: Path,
    arguments: list[str],
    import_roots: list[str],
    plugins: "list[tuple[str, Any]]",
    tell: "Callable[[Any], None]",
) -> tuple[Any, Any]:
    """Run pytest in this process, from `root`; return the guard and the lookout. Empties `arguments`."""
    import pytest

    beside = load_guard()
    files = [path for path in arguments if not path.startswith("-")]
    texts = {path: Path(path).read_bytes() for path in beside.list_python(files)}
    hide = load_beside("hide")
    hide.name_no_tests(texts)
    collector, hider, guard = Collector(tell), hide.Hider(texts), beside.Guard(files, True, [Collector, Outcomes])
    lookout = beside.Lookout(str(root), files)
    with tempfile.TemporaryDirectory() as programs:
        write_programs([root / folder for folder in import_roots], Path(programs))
        os.environ[AUTOLOAD_OFF] = "1"
        # the last one is asked first: files are compared before they are removed
        pytest.main(arguments, plugins=[Plugins(plugins, arguments), collector, hider, guard, lookout])
    return guard, lookout


def run_request(file: Path) -> None:
    """Run the tests that a grader asks for, and write the signed report."""
    request = json.loads(file.read_text(encoding="utf-8"))
    file.unlink()
    report = file.parent.resolve() / request["report"]
    # the tested code runs as the same user, and could read the key in this process's memory
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    found = run_apart(Path.cwd(), *(request[name] for name in ("paths", "import_roots", "own", "candidates")))
    if found is not None:
        text = json.dumps(found)
        report.unlink(missing_ok=True)
        report.write_text(f"{load_guard().sign(request['key'], text)}\n{text}", encoding="utf-8")


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
