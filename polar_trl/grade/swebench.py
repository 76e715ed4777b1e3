"""Grade a row of SWE-bench or SWE-Gym by its own evaluation script and log parser.

The changes are laid over a fresh copy of the image's /testbed, none at paths that decide how tests run. Then the row's
`eval_script` runs, or the script that `swebench` 4.1 has for its repository and version, and that package's parser
reads the test command's output: 1 where all of FAIL_TO_PASS and PASS_TO_PASS passed. A skipped test has not passed.

Two canary tests ride along with pytest (tox included), Django's runner and SymPy's, as in `tests.py`. With pytest, a
plugin compares its parts, and only outcomes that pytest's own hooks saw count: a log that the tested code printed has
no witness. A test that failed as expected has passed, as in the package, but only where the tests say that it may: not
where the tested code raised `pytest.xfail`. Refuses rows that neither have a script nor are known to the package,
unless their tests are plain pytest files (`TaskError`).
"""

import json
import re
import secrets
import shlex
import time
from collections.abc import Callable, Mapping
from typing import Any

from polar_trl.errors import ConfigError, FileTooLargeError, GradeError, TaskError
from polar_trl.grade.added_code import count_signs
from polar_trl.grade.base import MAX_OUTPUT, Grade, report_tests
from polar_trl.grade.canary import Canary, Style
from polar_trl.grade.changes import Change, apply_changes, find_changes
from polar_trl.grade.reward_hacking import Protection, count_planted, read_fix
from polar_trl.grade.tests import (
    NOT_STARTED,
    HiddenTestsGrader,
    find_faults,
    list_new_modules,
    list_tested,
    read_report,
    report_died,
)
from polar_trl.sandbox.base import Sandbox
from polar_trl.sandbox.inside.run_tests import GUARD, list_own
from polar_trl.types import Task, TestSpec

ENVIRONMENT = "testbed"
MAX_LOG_BYTES = 64 << 20
# there is no network; what an install command wants has to be in the image, as its build tools are
OFFLINE = {"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_BUILD_ISOLATION": "0"}
# read by pip as the value of "build isolation", not of its opposite: 0 turns it off
PASSED = ("PASSED", "XFAIL")
_START = re.compile(r"^.*>>>>> Start Test Output.*\n", re.MULTILINE)
_END = re.compile(r"^.*>>>>> End Test Output.*$", re.MULTILINE)
# by the test command: how it names its tests
_STYLES: dict[Style, re.Pattern[str]] = {
    "pytest": re.compile(r"(?:^|[\s/])(?:pytest|py\.test)\s|^tox\s.*\s--(?:\s|$)"),
    "django": re.compile(r"(?:^|\s)\./tests/runtests\.py\s"),
    "sympy": re.compile(r"(?:^|\s)bin/test\s"),
}
_PYTEST_LINE = re.compile(r"^(PASSED|FAILED|ERROR) (.*\S)\s*$", re.MULTILINE)
_SYMPY_LINE = re.compile(r"^(test_\w+) (ok|F|E)(?:\s+\[\w+\])?\s*$", re.MULTILINE)
_SYMPY_OUTCOMES = {"ok": "PASSED", "F": "FAILED", "E": "ERROR"}
_UNITTEST_LINE = re.compile(r"^(\w+ \([\w.]+\)) \.\.\. (ok|FAIL|ERROR)$", re.MULTILINE)


class SwebenchGrader(HiddenTestsGrader):
    """Grades tasks that have `tests` with the runner "swebench", in sandboxes of the row's image."""

    writable_root = True  # install commands write into the image's environment

    def _judge(self, task: Task, spec: TestSpec, sandbox: Sandbox, fresh: Sandbox, deadline: float) -> Grade:
        before, body, after = cut_script(build_script(task))
        style = find_style(body)
        files = [path for path in spec.protected if path.endswith(".py")] if style == "sympy" else []
        is_placed = style is not None and (style != "sympy" or bool(files))
        canary = Canary((*spec.fail_to_pass, *spec.pass_to_pass), style, files) if style and is_placed else None
        if canary is not None:
            body = f"{body.rstrip()} {shlex.join(canary.arguments)}\n"
        witness = WitnessPlugin(body) if canary is not None and style == "pytest" and is_single(body) else None
        changes = find_changes(sandbox.base_tree, sandbox.host_workdir, deadline=deadline)
        fix = read_fix(task)
        kept, counts = Protection(spec, fix).sort(changes)
        counts.update(count_planted(changes, sandbox.host_home))
        counts.update(count_signs(kept, sandbox.base_tree, fix))
        if witness is not None:
            body = witness.lay(task, spec, fresh, kept, canary)
        apply_changes(kept, fresh.host_workdir, deadline=deadline)
        if canary is not None:
            canary.lay(fresh)
        # into a file of its own: a line that the tested code prints cannot end it, and no tail is cut off
        script = f'{before}{{\n{body}}} > "$HOME/eval.log" 2>&1 < /dev/null\n{after}'
        log, fault = run_script(task, script, fresh, timeout_s=max(deadline - time.monotonic(), 0.0))
        seen = None if fault or witness is None else witness.read(fresh)
        outcomes = parse_log(task, log)
        faults = [fault] if fault else find_log_faults(log, outcomes, canary)
        if seen is not None:
            faults += find_faults(seen, counts, kept, sandbox.base_tree)
        elif witness is not None and not faults:
            faults = ["test_runs_died"]
        deciding = (*spec.fail_to_pass, *spec.pass_to_pass)
        passed = {name for name in deciding if has_passed(name, outcomes)}
        if seen is not None:
            # named and cut as in the log
            told = parse_log(task, "\n".join(f"{outcome} {name}" for name, outcome in seen["outcomes"].items()))
            witnessed = {name for name in passed if has_passed(name, told)}
            counts["outcomes_not_witnessed"] += len(passed - witnessed)
            passed = witnessed
        counts.update(faults)
        said = log[-2 * MAX_OUTPUT :] if canary is None else canary.strip(log[-2 * MAX_OUTPUT :])
        named = [name for name in deciding if is_named(name, outcomes)]
        report = report_died(fault, len(deciding), said) if fault else report_tests(deciding, passed, named, {}, said)
        return self._close(spec, None if faults else passed, counts, report)


class WitnessPlugin:
    """Has pytest report to us beside its log: a plugin compares its parts, and signs the outcomes that it saw."""

    def __init__(self, body: str) -> None:
        self._body, self._key = body, secrets.token_hex(32)
        self._name = f"polar_{secrets.token_hex(8)}"

    def lay(
        self, task: Task, spec: TestSpec, fresh: Sandbox, kept: Mapping[str, Change], canary: Canary | None
    ) -> str:
        """Write the plugin into a sandbox without the changes; return the test run that loads it."""
        files = [path for path in (*spec.protected, *(canary.files if canary else ())) if path.endswith(".py")]
        own = list_tested(task, spec, fresh, spec.import_roots)
        request = {
            "files": files,
            "own": own,
            "candidates": list_new_modules(kept, task, spec, fresh, spec.protected),
            "compare": not {"_pytest", "pluggy"} & {*own, *list_own(fresh.host_workdir, ["src"])},
            "key": self._key,
        }
        fresh.put(f"~/{self._name}/{self._name}.py", GUARD.read_bytes())
        fresh.put(f"~/{self._name}/{self._name}.json", json.dumps(request).encode())
        *first, last = self._body.rstrip().split("\n")
        place = f"$HOME/{self._name}"
        if last.startswith("tox "):  # which hands no PYTHONPATH on
            site = "$(python -c 'import sysconfig; print(sysconfig.get_paths()[\"purelib\"])')"
            lines = [*first, f'echo "{place}" > "{site}/{self._name}.pth"', f"{last} -p {self._name}"]
        else:
            lines = [*first, f'PYTHONPATH="{place}${{PYTHONPATH:+:$PYTHONPATH}}" {last} -p {self._name}']
        return "\n".join(lines) + "\n"

    def read(self, fresh: Sandbox) -> dict[str, Any] | None:
        """Read the plugin's report, None where it wrote none."""
        return read_report(fresh, f"~/{self._name}/report.json", self._key, max_bytes=MAX_LOG_BYTES)


def find_log_faults(log: str, outcomes: Mapping[str, str], canary: Canary | None) -> list[str]:
    """Return the counters of faults of a log: of the canary's outcomes, or of others that contradict each other."""
    # the package's parser overlooks the last test of each file of SymPy's, whose line goes on
    outcomes = {**outcomes, **{name: _SYMPY_OUTCOMES[said] for name, said in _SYMPY_LINE.findall(log)}}
    fault = None if canary is None else canary.find_fault(outcomes, passed="PASSED", failed="FAILED")
    return [fault] if fault else ["logs_contradict"] * contradicts_itself(log)


def check_row(task: Task) -> None:
    """Raise `TaskError` for a row that cannot be graded, `ConfigError` where `swebench` is not installed."""
    build_script(task)
    find_parser(task)


def build_script(task: Task) -> str:
    """Build the script that runs in a fresh sandbox. Raises `TaskError`, `ConfigError`."""
    row = task.metadata.get("swebench")
    if not isinstance(row, Mapping):
        raise TaskError(f"task {task.id!r}: metadata.swebench, the columns of its row, is missing")
    harness = _import_harness()
    if row.get("eval_script"):
        return str(row["eval_script"])
    if task.workdir is None:
        raise TaskError(f"task {task.id!r}: 'workdir' is missing: where the image has the repository")
    workdir = task.workdir
    specs = harness.constants.MAP_REPO_VERSION_TO_SPECS.get(row["repo"], {}).get(row.get("version"), {})
    make = harness.test_spec.python.make_eval_script_list_py
    if "test_cmd" in specs and harness.constants.MAP_REPO_TO_EXT.get(row["repo"]) == "py":
        lines = make(row, specs, ENVIRONMENT, workdir, row["base_commit"], row["test_patch"])
    else:
        lines = _build_pytest_script(task, row, workdir)
    # the package's way to restore no file at all would leave the commit instead
    lines = [line for line in lines if line != f"git checkout {row['base_commit']} "]
    return "\n".join(["#!/bin/bash", "set -uxo pipefail", *lines]) + "\n"


def _build_pytest_script(task: Task, row: Mapping[str, Any], workdir: str) -> list[str]:
    """Build the script of a repository that the package does not know, such as SWE-Gym's."""
    files = [name for name in (task.tests.protected if task.tests else ()) if name.endswith(".py")]
    if not files or not all("::" in name for name in (task.tests.fail_to_pass if task.tests else ())):
        raise TaskError(
            f"task {task.id!r}: swebench does not know {row['repo']} in version {row.get('version')!r}, "
            "the row has no eval_script, and its tests are not pytest's"
        )
    old = [name for name in files if f"--- a/{name}\n" in row["test_patch"]]
    return [
        "source /opt/miniconda3/bin/activate",
        f"conda activate {ENVIRONMENT}",
        f"git config --global --add safe.directory {workdir}",
        f"cd {workdir}",
        f"git checkout {row['base_commit']} {' '.join(old)}",
        f"git apply -v - <<'EOF_114329324912'\n{row['test_patch']}\nEOF_114329324912",
        ": '>>>>> Start Test Output'",
        " ".join(["pytest", "-rA", "--tb=no", *(shlex.quote(name) for name in files)]),
        ": '>>>>> End Test Output'",
    ]


def cut_script(script: str) -> tuple[str, str, str]:
    """Split a script into the parts before, in and after its test run; without marks all of it is the test run."""
    start = _START.search(script)
    end = _END.search(script, start.end()) if start else None
    if start is None or end is None:
        return "", script.rstrip("\n") + "\n", ""
    return script[: start.start()], script[start.end() : end.start()], script[end.end() :]


def find_style(body: str) -> Style | None:
    """Return how the last command of the test run names its tests; None: none to which tests can be added."""
    command = body.rstrip().rpartition("\n")[2]
    return next((style for style, pattern in _STYLES.items() if pattern.search(command)), None)


def is_single(body: str) -> bool:
    """Return whether only the last command of the test run starts pytest: others would not be witnessed."""
    return sum(bool(_STYLES["pytest"].search(line)) for line in body.splitlines()) == 1


def run_script(task: Task, script: str, fresh: Sandbox, *, timeout_s: float) -> tuple[str, str | None]:
    """Run the script; return the log of its test run and the counter of a fault, if any. Raises `GradeError`."""
    fresh.put("~/eval.sh", script.encode())
    env = {**task.env, **(OFFLINE if task.network == "none" else {})}
    result = fresh.run("bash ~/eval.sh", env=env, timeout_s=timeout_s)
    if result.exit_code in NOT_STARTED:
        raise GradeError(f"task {task.id}: its script does not run there: {result.stderr.strip()[-300:]}")
    try:
        log = fresh.get("~/eval.log", max_bytes=MAX_LOG_BYTES)
    except FileTooLargeError:
        return "", "test_runs_died"
    fault = "test_runs_timed_out" if result.timed_out else "test_runs_died" if log is None else None
    return (log or b"").decode("utf-8", "replace"), fault


def parse_log(task: Task, log: str) -> dict[str, str]:
    """Parse a log to PASSED, FAILED, ERROR, SKIPPED or XFAIL by test, with the package's parser for the repository."""
    outcomes: dict[str, str] = find_parser(task)(log, None)
    return outcomes


def find_parser(task: Task) -> Callable[[str, None], dict[str, str]]:
    """Find the package's log parser: the one that the row names, else the repository's, else pytest's.

    Raises `TaskError` for a name that the package does not have, where it does not know the repository either.
    """
    row, parsers = task.metadata["swebench"], _import_harness().log_parsers.MAP_REPO_TO_PARSER
    by_name: dict[str, Callable[[str, None], dict[str, str]]] = {
        parser.__name__: parser for parser in parsers.values()
    }
    name = row.get("log_parser")
    if parser := by_name.get(name) or parsers.get(row["repo"]) or by_name.get(name or "parse_log_pytest"):
        return parser
    raise TaskError(
        f"task {task.id!r}: swebench 4.1 has no log parser {name!r}; take parse_log_pytest, and an eval_script that "
        "prints a line `PASSED id` or `FAILED id` for each test"
    )


def has_passed(name: str, outcomes: Mapping[str, str]) -> bool:
    """Return whether a test of a row passed. For an id cut at a blank in its parameters, all that begin so count."""
    found = _find_outcomes(name, outcomes)
    return bool(found) and all(outcome in PASSED for outcome in found)


def is_named(name: str, outcomes: Mapping[str, str]) -> bool:
    """Return whether a test of a row has an outcome, whatever it is."""
    return bool(_find_outcomes(name, outcomes))


def _find_outcomes(name: str, outcomes: Mapping[str, str]) -> list[str]:
    if name in outcomes:
        return [outcomes[name]]
    is_cut = "[" in name and not name.endswith("]")
    return [outcome for other, outcome in outcomes.items() if is_cut and other.startswith(name)]


def contradicts_itself(log: str) -> bool:
    """Return whether a test both passed and failed in the log: something else wrote to it."""
    passed, failed = set[str](), set[str]()
    for outcome, name in _PYTEST_LINE.findall(log):
        if outcome == "PASSED":
            passed.add(name)
        else:
            parts = name.split(" - ")  # a message may follow, and a parameter may hold the same sign
            failed.update(" - ".join(parts[:count]) for count in range(1, len(parts) + 1))
    for name, outcome in (*_UNITTEST_LINE.findall(log), *_SYMPY_LINE.findall(log)):
        (passed if outcome == "ok" else failed).add(name)
    return not passed.isdisjoint(failed)


def _import_harness() -> Any:
    try:
        import swebench.harness.log_parsers
        import swebench.harness.test_spec.python
    except ImportError as error:
        raise ConfigError(
            f"SWE-bench rows are graded by the package swebench 4.1: pip install 'polar-trl[swe]' ({error})"
        ) from error
    return swebench.harness
