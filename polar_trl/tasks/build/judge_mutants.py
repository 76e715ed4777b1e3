"""Judge mutants: find the edits of a package's functions that its own tests notice. Runs as a script.

    python judge_mutants.py

Input is a line with the request, then an empty line whenever another edit is wanted; output is JSON lines on stdout.

Pytest collects once. A forked child then runs every test and notes which functions it calls; after that each edit
costs one more fork, which exchanges the function's code and runs only the tests that call it, under limits of its own.
A line is {"edit": index, "failed": [node ids], "message": text}, the first is {"passed": number of tests}.

Needs the standard library and pytest, nothing else. The verdict is provisional: code that a decorator or an import has
copied elsewhere stays as it was, so building a task runs the whole suite on the edited file again.
"""

import gc
import json
import os
import resource
import select
import signal
import sys
import time
import types
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

# a copy of sandbox/inside/run_tests.py lies beside the copy of this file that is run
from run_tests import OPTIONS, Collector, enter_tree  # type: ignore[import-not-found]

if TYPE_CHECKING:
    import pytest

COLLECT_LIMIT_S = 120
BASELINE_LIMIT_S = 300.0
MIN_CPU_S = 2
MEMORY_BYTES = 3 << 30
FUNCTION_FLAGS = 0x01
"""CO_OPTIMIZED: set for functions, not for the bodies of classes and modules."""

Functions = dict[tuple[str, int], list[types.FunctionType]]


def run_forked(work: Callable[[], dict[str, Any]], *, cpu_s: int, wall_s: float) -> dict[str, Any] | None:
    """Run `work` in a forked child and return its result; None where it died or was too slow."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            os.close(read_end)
            resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
            answer = json.dumps(work()).encode()
            with os.fdopen(write_end, "wb") as pipe:
                pipe.write(answer)
        finally:
            os._exit(0)
    os.close(write_end)
    answer, deadline = b"", time.monotonic() + wall_s
    while (left_s := deadline - time.monotonic()) > 0 and select.select([read_end], [], [], left_s)[0]:
        block = os.read(read_end, 1 << 20)
        if not block:
            break
        answer += block
    os.close(read_end)
    with suppress(ProcessLookupError):  # its group is gone, or it had not called setsid yet
        os.killpg(pid, signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    try:
        found: dict[str, Any] = json.loads(answer)
    except ValueError:
        return None
    return found


def find_code(code: types.CodeType, name: str, line: int) -> types.CodeType | None:
    """Find the code of the function that begins at a line, however deep in classes it is."""
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            is_function = constant.co_flags & FUNCTION_FLAGS
            if is_function and constant.co_firstlineno == line and constant.co_name == name:
                return constant
            if not is_function and (found := find_code(constant, name, line)) is not None:
                return found
    return None


class CallRecorder:
    """A pytest plugin that notes which functions below a folder each test calls, and how long the test takes."""

    def __init__(self, root: str) -> None:
        self._root = root + os.sep
        self.calls: dict[str, list[tuple[str, int]]] = {}
        self.seconds: dict[str, float] = {}
        self._seen: set[types.CodeType] = set()
        self._started = 0.0

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._seen.clear()
        self._started = time.monotonic()
        sys.setprofile(self._note)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        sys.setprofile(None)
        self.seconds[nodeid] = time.monotonic() - self._started
        self.calls[nodeid] = [
            (code.co_filename, code.co_firstlineno) for code in self._seen if code.co_filename.startswith(self._root)
        ]

    def _note(self, frame: types.FrameType, event: str, _: object) -> None:
        if event == "call":
            self._seen.add(frame.f_code)


def list_callers(calls: dict[str, list[tuple[str, int]]], names: list[str]) -> dict[tuple[str, int], list[str]]:
    """List the tests that call a function, by its file and first line."""
    callers: dict[tuple[str, int], list[str]] = {}
    for name in names:
        for filename, line in calls[name]:
            callers.setdefault((filename, line), []).append(name)
    return callers


def list_functions(root: str) -> Functions:
    """List the function objects below a folder that are alive, by file and first line."""
    functions: Functions = {}
    for found in gc.get_objects():
        if isinstance(found, types.FunctionType) and found.__code__.co_filename.startswith(root):
            key = (found.__code__.co_filename, found.__code__.co_firstlineno)
            functions.setdefault(key, []).append(found)
    return functions


class Judge:
    """A pytest plugin whose test loop tries edits instead of running tests."""

    def __init__(self, request: dict[str, Any], wanted: TextIO, output: int) -> None:
        self._request = request
        self._wanted = wanted
        self._root = os.path.realpath(request["root"])
        self._output = output
        self._sources: dict[str, bytes] = {}

    def pytest_runtestloop(self, session: "pytest.Session") -> bool:
        signal.alarm(0)
        items = {item.nodeid: item for item in session.items}
        baseline = run_forked(lambda: self._run_all(session), cpu_s=int(BASELINE_LIMIT_S), wall_s=2 * BASELINE_LIMIT_S)
        if baseline is None:
            self._say({"error": "the package's own tests died or ran too long"})
            return True
        passed = {name for name, outcome in baseline["outcomes"].items() if outcome == "passed"}
        self._say({"passed": len(passed)})
        callers = list_callers(baseline["calls"], sorted(passed & items.keys()))
        functions = list_functions(self._root)
        used: dict[str, int] = {}
        for index, edit in enumerate(self._request["edits"]):
            place = f"{edit['file']}:{edit['function']}"
            if used.get(place, 0) >= self._request["max_per_function"]:
                continue
            key = (os.path.join(self._root, edit["file"]), edit["outer_line"])
            tests = [items[name] for name in callers.get(key, [])]
            code = self._compile(edit, key[0])
            if not tests or code is None:
                continue
            exchangeable = [
                function for function in functions.get(key, []) if function.__code__.co_freevars == code.co_freevars
            ]
            if not exchangeable:
                continue
            if (verdict := self._try(tests, exchangeable, code, baseline["seconds"])) is not None:
                used[place] = used.get(place, 0) + 1
                self._say({"edit": index, **verdict})
                if not self._wanted.readline():
                    break
        return True

    def _try(
        self,
        tests: "list[pytest.Item]",
        functions: list[types.FunctionType],
        code: types.CodeType,
        seconds: dict[str, float],
    ) -> dict[str, Any] | None:
        """Return the tests that fail with the code exchanged; None for none, too many or a run that was killed."""
        limit = self._request["max_failed"]
        expected_s = sum(seconds[test.nodeid] for test in tests)

        def work() -> dict[str, Any]:
            collector = Collector()
            tests[0].config.pluginmanager.register(collector)
            for function in functions:
                function.__code__ = code
            for number, test in enumerate(tests):
                following = tests[number + 1] if number + 1 < len(tests) else None
                test.config.hook.pytest_runtest_protocol(item=test, nextitem=following)
                failed = [name for name, outcome in collector.outcomes.items() if outcome != "passed"]
                if len(failed) > limit:
                    break
            return {"failed": sorted(failed), "message": collector.messages.get(failed[0], "") if failed else ""}

        verdict = run_forked(work, cpu_s=int(MIN_CPU_S + 4 * expected_s), wall_s=60 + 20 * expected_s)
        return verdict if verdict is not None and 1 <= len(verdict["failed"]) <= limit else None

    def _compile(self, edit: dict[str, Any], filename: str) -> types.CodeType | None:
        source = self._sources.get(filename)
        if source is None:
            with open(filename, "rb") as file:
                source = self._sources[filename] = file.read()
        edited = source[: edit["start"]] + edit["new"].encode() + source[edit["end"] :]
        try:
            module = compile(edited, filename, "exec", dont_inherit=True)
        except (SyntaxError, ValueError):
            return None
        return find_code(module, edit["outer"], edit["outer_line"])

    def _run_all(self, session: "pytest.Session") -> dict[str, Any]:
        recorder, collector = CallRecorder(self._root), Collector()
        for plugin in (recorder, collector):
            session.config.pluginmanager.register(plugin)
        for number, item in enumerate(session.items):
            following = session.items[number + 1] if number + 1 < len(session.items) else None
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        return {"outcomes": collector.outcomes, "calls": recorder.calls, "seconds": recorder.seconds}

    def _say(self, line: dict[str, Any]) -> None:
        os.write(self._output, json.dumps(line).encode() + b"\n")


def main() -> None:
    wanted = os.fdopen(os.dup(0))
    request = json.loads(wanted.readline())
    output = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    enter_tree(Path(request["root"]).resolve(), request["import_roots"])
    import pytest

    signal.alarm(COLLECT_LIMIT_S)
    # no capturing: the loop runs tests outside the place where pytest expects them
    pytest.main([*OPTIONS, "-s", *request["paths"]], plugins=[Judge(request, wanted, output)])


if __name__ == "__main__":
    main()
