"""Write a Harbor task folder from a broken tree, a repaired one and hidden tests.

    task.toml  instruction.md
    environment/  Dockerfile  requirements.txt  workspace/
    tests/        test.sh  run_tests.py  guard.py  hide.py  spec.json  hidden/
    solution/     solve.sh  gold.patch

Refuses a task whose listed tests do not fail on the broken tree and pass on the repaired one (`TaskError`). A folder
is written whole or not at all.
"""

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from polar_trl.cache import find_cache
from polar_trl.errors import TaskError
from polar_trl.sandbox.inside.run_tests import RUNNER, SCRIPTS
from polar_trl.tasks.build.releases import find_import_roots, list_tests
from polar_trl.tasks.build.suite import SuiteRun, copied_tree, run_suite

SUITE_TIMEOUT_S = 300.0

Fields = Mapping[str, str | int | float | Sequence[str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """A task before its tests were run."""

    id: str
    instruction: str
    broken: Path
    """The tree that the agent gets, its visible tests included."""
    gold: Path
    """The same tree, repaired."""
    tests: Path
    """A tree with the hidden tests in it."""
    paths: tuple[str, ...]
    """Arguments of the test runner."""
    fail_to_pass: tuple[str, ...]
    """Ids that must fail before and pass after; empty takes all that do."""
    metadata: Fields
    python: str
    """Version of Python that the task was made for, such as "3.11"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tools:
    """Python and requirements of the environment that tests run in."""

    python: Path
    """Of the environment that tests run in."""
    requirements: Path
    """The file that this environment was made from."""


def write_task(draft: Draft, folder: Path, tools: Tools, *, max_fail_to_pass: int | None = None) -> SuiteRun:
    """Write the task to `folder`; return the run on the broken tree. Raises `TaskError`.

    Args:
        max_fail_to_pass: Refuse a task with more tests that fail before and pass after.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{draft.id[:80]}-", dir=folder.parent) as scratch:
        made = Path(scratch) / "task"
        shutil.copytree(draft.broken, made / "environment" / "workspace", symlinks=True)
        spec = _lay_out_tests(draft, made / "tests")
        (made / "solution").mkdir()
        (made / "solution" / "gold.patch").write_bytes(diff_trees(draft.broken, draft.gold))
        _write_json(made / "tests" / "spec.json", spec)
        repaired = [_run_cached(tools, draft.gold, made / "tests" / "spec.json", seed) for seed in (0, 1)]
        broken = _run_cached(tools, draft.broken, made / "tests" / "spec.json", 0)
        fail_to_pass, pass_to_pass = _compare(draft, repaired, broken)
        if max_fail_to_pass is not None and len(fail_to_pass) > max_fail_to_pass:
            raise TaskError(f"task {draft.id!r}: {len(fail_to_pass)} tests fail, more than {max_fail_to_pass}")
        _write_json(made / "tests" / "spec.json", {**spec, "fail_to_pass": fail_to_pass, "pass_to_pass": pass_to_pass})
        _write_rest(draft, made, tools)
        os.rename(made, folder)
    return broken


def diff_trees(before: Path, after: Path) -> bytes:
    """Make a patch for `git apply`, binary files included."""
    with tempfile.TemporaryDirectory(prefix="polar-diff-") as scratch:
        # the names of the two folders become the prefixes of the patch
        for name, tree in (("a", before), ("b", after)):
            shutil.copytree(tree, Path(scratch) / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        command = ["git", "-c", "core.autocrlf=false", "diff", "--no-index", "--binary", "--no-prefix", "--no-color"]
        done = _run_git([*command, "--no-ext-diff", "--no-renames", "a", "b"], Path(scratch))
    if done.returncode not in (0, 1):
        raise TaskError(f"git cannot compare {before} and {after}: {done.stderr.decode(errors='replace')[-300:]}")
    return done.stdout


def apply_patch(tree: Path, patch: Path, *options: str) -> None:
    """Apply a patch such as `diff_trees` makes, with options of `git apply`. Raises `TaskError`."""
    command = ["git", "-c", "core.autocrlf=false", "apply", "--whitespace=nowarn", *options, str(patch.resolve())]
    done = _run_git(command, tree)
    if done.returncode != 0:
        raise TaskError(f"{patch} does not apply: {done.stderr.decode(errors='replace')[-300:]}")


def _run_git(command: list[str], folder: Path) -> "subprocess.CompletedProcess[bytes]":
    # outside every repository: inside one, `git apply` skips paths without a word
    env = {"PATH": os.environ.get("PATH", os.defpath), "GIT_CEILING_DIRECTORIES": str(folder.resolve().parent)}
    env |= {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull, "HOME": str(folder), "LC_ALL": "C"}
    try:
        return subprocess.run(command, cwd=folder, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise TaskError(f"git failed: {error}") from error


def _lay_out_tests(draft: Draft, folder: Path) -> dict[str, list[str]]:
    """Copy the hidden tests and the runner; return the spec, without the ids that pass."""
    files = list_tests(draft.tests)
    for path in files:
        target = folder / "hidden" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(draft.tests / path, target)
    for script in SCRIPTS:
        shutil.copy2(script, folder / script.name)
    own = [path if path.endswith(".py") else f"{path}/*" for path in draft.paths]
    return {
        "fail_to_pass": list(draft.fail_to_pass),
        "pass_to_pass": [],
        "paths": list(draft.paths),
        "import_roots": list(find_import_roots(draft.broken)),
        "protected": own,
        "removed": sorted(set(list_tests(draft.broken)) - set(files)),
        "files": files,
    }


def _compare(draft: Draft, repaired: Sequence[SuiteRun], broken: SuiteRun) -> tuple[list[str], list[str]]:
    """Return the ids that decide, those that pass on every run of the repaired tree, split by the broken tree."""
    where = f"task {draft.id!r}"
    for run, name in ((repaired[0], "repaired"), (repaired[1], "repaired"), (broken, "broken")):
        if not run.outcomes:
            end = f"did not end within {SUITE_TIMEOUT_S:g} s" if run.timed_out else "died"
            raise TaskError(f"{where}: the tests of the {name} tree {end}; they said {run.said[-300:]!r}")
    passing = repaired[0].list_passed() & repaired[1].list_passed()
    kept = broken.list_passed()
    fail_to_pass = sorted(draft.fail_to_pass) or sorted(passing - kept)
    if missing := [name for name in fail_to_pass if name not in passing]:
        raise TaskError(
            f"{where}: fail_to_pass: the repaired tree does not pass {missing[:3]}: "
            f"{repaired[0].outcomes.get(missing[0], 'no such test')}, {repaired[0].messages.get(missing[0], '')!r}"
        )
    if solved := [name for name in fail_to_pass if name in kept]:
        raise TaskError(f"{where}: fail_to_pass: the broken tree passes {solved[:3]}")
    if not fail_to_pass:
        raise TaskError(f"{where}: fail_to_pass: no test tells the broken tree from the repaired one")
    return fail_to_pass, sorted(passing & kept)


def _write_rest(draft: Draft, made: Path, tools: Tools) -> None:
    """Write instruction, Dockerfile, scripts and task.toml."""
    (made / "instruction.md").write_text(draft.instruction.strip() + "\n", encoding="utf-8")
    shutil.copy2(tools.requirements, made / "environment" / "requirements.txt")
    roots = [root for root in find_import_roots(draft.broken) if root != "."]
    (made / "environment" / "Dockerfile").write_text(_DOCKERFILE.format(python=draft.python), encoding="utf-8")
    for path, text in (("tests/test.sh", _TEST_SH), ("solution/solve.sh", _SOLVE_SH)):
        (made / path).write_text(text, encoding="utf-8")
        (made / path).chmod(0o755)
    tables: dict[str, Fields] = {
        "task": {"name": f"polar-trl/{draft.id}"},
        "metadata": {**draft.metadata, "python": draft.python},
        "agent": {"timeout_sec": 900.0},
        "verifier": {"timeout_sec": SUITE_TIMEOUT_S},
        "environment": {
            "build_timeout_sec": 600.0,
            "network_mode": "no-network",
            "workdir": "/app",
            "cpus": 1,
            "memory_mb": 4096,
            "storage_mb": 4096,
        },
        "environment.env": {"PYTEST_ADDOPTS": " ".join([_ADDOPTS, *(f"-o pythonpath={root}" for root in roots)])},
    }
    (made / "task.toml").write_text(render_toml('schema_version = "1.4"\n', tables), encoding="utf-8")


def render_toml(head: str, tables: Mapping[str, Fields]) -> str:
    """Render flat tables as TOML; texts, numbers and lists of texts are written the same in JSON and TOML."""
    lines = [head]
    for name, table in tables.items():
        lines.append(f"[{name}]")
        lines += [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in table.items()]
        lines.append("")
    return "\n".join(lines)


def _run_cached(tools: Tools, tree: Path, spec: Path, hash_seed: int) -> SuiteRun:
    """Run `run_suite` on a copy of the tree, with cached outcomes: many tasks share one repaired tree."""
    key = hashlib.sha256(f"{tools.python}\n{hash_seed}\n{RUNNER.read_text()}".encode())
    wanted = json.loads(spec.read_text(encoding="utf-8"))
    key.update(json.dumps([wanted["paths"], wanted["import_roots"]]).encode())
    with copied_tree(tree) as copy:
        # visible tests are replaced by hidden ones before the run, so they do not tell trees apart
        for path in wanted["removed"] + wanted["files"]:
            (copy / path).unlink(missing_ok=True)
        for folder in (copy, spec.parent / "hidden"):
            for file in sorted(path for path in folder.rglob("*") if path.is_file()):
                key.update(f"\n{file.relative_to(folder)}\n".encode())
                key.update(file.read_bytes())
        kept = find_cache("suites") / f"{key.hexdigest()[:32]}.json"
        if kept.is_file():
            read = json.loads(kept.read_text(encoding="utf-8"))
            return SuiteRun(**read, timed_out=False, cpu_s=0.0, said="")
        run = run_suite(tools.python, copy, spec, timeout_s=SUITE_TIMEOUT_S, hash_seed=hash_seed)
    if run.outcomes:
        kept.parent.mkdir(parents=True, exist_ok=True)
        _write_json(kept, {"outcomes": run.outcomes, "messages": run.messages})
    return run


def _write_json(path: Path, value: object) -> None:
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(part, path)


# so that `python -m pytest` works without plugins that the package asks for and without what single tests import
_ADDOPTS = "-o addopts= --continue-on-collection-errors"

_DOCKERFILE = """\
FROM python:{python}-slim
RUN apt-get update && apt-get install --yes --no-install-recommends git && rm -rf /var/lib/apt/lists/*
COPY requirements.txt /tmp/requirements.txt
RUN pip install --no-cache-dir -r /tmp/requirements.txt
COPY workspace /app
WORKDIR /app
RUN git init --quiet && git add --all && git -c user.name=task -c user.email=task@localhost commit --quiet -m start
"""

_TEST_SH = """\
#!/bin/bash
# Lays the hidden tests over the work folder, runs them and writes the reward.
export PYTHONHASHSEED=0 TZ=UTC LC_ALL=C.UTF-8 COLUMNS=80
mkdir -p /logs/verifier
python -B /tests/run_tests.py --root "$PWD" --spec /tests/spec.json --reward /logs/verifier/reward.txt
# a run that dies has not passed
[ -e /logs/verifier/reward.txt ] || echo 0 > /logs/verifier/reward.txt
"""

_SOLVE_SH = """\
#!/bin/bash
git apply --whitespace=nowarn /solution/gold.patch
"""
