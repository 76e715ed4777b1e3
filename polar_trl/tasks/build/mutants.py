"""Build repair tasks by mutation testing: small edits of a package's code that its own tests notice.

The judge (judge_mutants.py) proposes edits cheaply; each task is then confirmed by whole runs of the tests on the
edited and on the untouched tree. Edits that no test or too many tests notice are left out. Same release, seed and
environment give the same tasks.
"""

import dataclasses
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from polar_trl.errors import TaskError
from polar_trl.sandbox.inside.run_tests import RUNNER
from polar_trl.tasks.build.confined import confine, list_python_folders
from polar_trl.tasks.build.folders import Draft, Tools, write_task
from polar_trl.tasks.build.mutate import Edit, list_edits
from polar_trl.tasks.build.releases import (
    Release,
    add_metadata,
    fetch_release,
    find_import_roots,
    hash_file,
    list_sources,
    list_test_roots,
    unpack_release,
)
from polar_trl.tasks.build.suite import build_env

JUDGE = Path(__file__).with_name("judge_mutants.py")
HINTS = ("line", "function", "symptom")
"""Hints of the instruction, easiest first: line and kind of the edit; function and a failing test's message; the
message alone."""
MAX_FAILED = 15
MAX_PER_FUNCTION = 3
MIN_PASSED = 5


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """An edit of a file of the package."""

    file: str
    edit: Edit


def build_mutants(
    release: Release, out: Path, tools: Tools, pip: Path, *, count: int, seed: int, hint: str = "function"
) -> Iterator[tuple[Path, bool]]:
    """Build up to `count` task folders in `out`, each with whether it is new: existing ones are kept.

    Raises `TaskError` where the package's own tests cannot judge.
    """
    with tempfile.TemporaryDirectory(prefix="polar-mutants-") as scratch:
        tree = Path(scratch) / "tree"
        archive = fetch_release(release, pip)
        unpack_release(archive, tree)
        add_metadata(tree)
        candidates = order_candidates(tree, seed)
        if not candidates or not list_test_roots(tree):
            raise TaskError(f"{release.package} {release.version}: its archive has no tests, or no code to edit")
        made = 0
        for verdict in _judge(release, tree, candidates, tools.python, Path(scratch)):
            candidate = candidates[verdict["edit"]]
            draft = _build_draft(release, hash_file(archive), tree, candidate, verdict, hint, Path(scratch))
            folder = out / draft.id
            is_new = not (folder / "task.toml").is_file()
            if is_new:
                # edits that the whole suite does not confirm are no tasks; the next one is tried
                with suppress(TaskError):
                    write_task(draft, folder, tools, max_fail_to_pass=MAX_FAILED)
            shutil.rmtree(draft.broken.parent)
            if (folder / "task.toml").is_file():
                made += 1
                yield folder, is_new
            if made == count:
                return


def order_candidates(tree: Path, seed: int) -> list[Candidate]:
    """List all edits of the tree's sources, shuffled, the operators in turn so that rare ones come early too."""
    by_operator: dict[str, list[Candidate]] = {}
    for file in list_sources(tree):
        try:
            edits = list_edits((tree / file).read_bytes())
        except (SyntaxError, ValueError):
            continue  # a file for another version of Python
        for edit in edits:
            by_operator.setdefault(edit.operator, []).append(Candidate(file=file, edit=edit))
    rng = random.Random(seed)
    for name in sorted(by_operator):
        rng.shuffle(by_operator[name])
    ordered = []
    while by_operator:
        for name in sorted(by_operator):
            ordered.append(by_operator[name].pop())
            if not by_operator[name]:
                del by_operator[name]
    return ordered


def _judge(
    release: Release, tree: Path, candidates: list[Candidate], python: Path, scratch: Path
) -> Iterator[dict[str, Any]]:
    """Yield the judge's verdicts as they come; it is killed when the caller has enough."""
    root = scratch / "judged"
    shutil.copytree(tree, root, symlinks=True)
    request = {
        "root": str(root),
        "paths": list_test_roots(tree),
        "import_roots": find_import_roots(tree),
        "max_failed": MAX_FAILED,
        "max_per_function": MAX_PER_FUNCTION,
        "edits": [{"file": one.file, **dataclasses.asdict(one.edit)} for one in candidates],
    }
    for script in (JUDGE, RUNNER):
        shutil.copy2(script, scratch / script.name)
    command = [str(python), "-B", str(scratch / JUDGE.name)]
    process = subprocess.Popen(
        confine(command, writable=[scratch], visible=list_python_folders(python), network=False),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=build_env(python, str(scratch), 0),
        start_new_session=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(json.dumps(request).encode() + b"\n")
        process.stdin.flush()
        first = json.loads(process.stdout.readline() or b'{"error": "its tests cannot be collected"}')
        if "error" in first:
            raise TaskError(f"{release.package} {release.version}: {first['error']}")
        if first["passed"] < MIN_PASSED:
            raise TaskError(
                f"{release.package} {release.version}: {first['passed']} of its tests pass here; "
                "they may need packages that the requirements do not have"
            )
        for line in process.stdout:
            yield json.loads(line)
            process.stdin.write(b"\n")
            process.stdin.flush()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()
        with suppress(BrokenPipeError):
            process.stdin.close()
        process.wait()


def _build_draft(
    release: Release,
    sha256: str,
    tree: Path,
    candidate: Candidate,
    verdict: dict[str, Any],
    hint: str,
    scratch: Path,
) -> Draft:
    edit = candidate.edit
    name = f"{candidate.file}\n{edit.start}\n{edit.end}\n{edit.new}"
    broken, gold = scratch / "draft" / "broken", scratch / "draft" / "gold"
    shutil.copytree(tree, gold, symlinks=True)
    # the tests that notice the edit are not shown
    for file in {failed.partition("::")[0] for failed in verdict["failed"]}:
        (gold / file).unlink(missing_ok=True)
    shutil.copytree(gold, broken, symlinks=True)
    (broken / candidate.file).write_bytes(edit.apply((tree / candidate.file).read_bytes()))
    return Draft(
        id=f"{release.package}-{release.version}-edit-{hashlib.sha256(name.encode()).hexdigest()[:10]}",
        instruction=_build_instruction(release, candidate, verdict, hint),
        broken=broken,
        gold=gold,
        tests=tree,
        paths=tuple(list_test_roots(tree)),
        fail_to_pass=(),
        metadata={
            "package": release.package,
            "version": release.version,
            "sha256": sha256,
            "kind": "edit",
            "operator": edit.operator,
            "file": candidate.file,
            "function": edit.function,
            "line": edit.line,
            "hint": hint,
        },
        python="3.11",
    )


def _build_instruction(release: Release, candidate: Candidate, verdict: dict[str, Any], hint: str) -> str:
    edit = candidate.edit
    places = {
        "line": f"It is in line {edit.line} of `{candidate.file}`, and of the kind: {edit.operator}.",
        "function": f"It is in the function `{edit.function}` of `{candidate.file}`.",
        "symptom": "",
    }
    said = "" if hint == "line" else _quote(verdict)
    return f"""\
The current folder holds the source of the Python package `{release.package}`. One small defect was put into its code.
{places[hint]}
{said}
Find and repair it, and leave everything else as it behaves now. Tests that you do not see decide. They replace the
tests of this folder, and changes to files that configure tests or packaging (such as `conftest.py`, `pytest.ini`,
`setup.cfg` and `pyproject.toml`) are not taken over. There is no network.
"""


def _quote(verdict: dict[str, Any]) -> str:
    name = verdict["failed"][0].rpartition("::")[2]
    message = "\n".join("    " + line for line in verdict["message"].splitlines()[:8])
    return f"\nA test named `{name}` fails because of it:\n\n{message}\n"
