"""A task about a package in src/, with a test that the agent sees and others that it does not."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from polar_trl.grade.by_task import GraderByTask
from polar_trl.sandbox.base import SandboxBackend
from polar_trl.types import Task, TestSpec

HIDDEN = "from pkg.m import f\n\n\ndef test_f(): assert f() == 2\n\n\ndef test_ok(): assert f() > 0\n"


def make_task(
    folder: Path,
    hidden: str = HIDDEN,
    fail_to_pass: Sequence[str] = ("test_f",),
    *,
    protected: Sequence[str] = ("conftest.py", "*/conftest.py", "tests/*"),
    more: Mapping[str, str] = {},
) -> Task:
    """Write the tree and the hidden tests below a folder.

    Args:
        more: Further files of the tree.
    """
    files = {
        "tree/src/pkg/__init__.py": "",
        "tree/src/pkg/m.py": "def f():\n    return 1\n",
        "tree/tests/test_m.py": "from pkg.m import f\n\n\ndef test_ok(): assert f() > 0\n",
        "hidden/tests/test_m.py": hidden,
        **{f"tree/{path}": content for path, content in more.items()},
    }
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(content)
    spec = TestSpec(
        fail_to_pass=tuple(f"tests/test_m.py::{name}" for name in fail_to_pass),
        pass_to_pass=("tests/test_m.py::test_ok",),
        python=sys.executable,
        folder=str(folder / "hidden"),
        files=("tests/test_m.py",),
        paths=("tests",),
        import_roots=("src", "."),
        protected=tuple(protected),
    )
    return Task(id="t", instruction="x", workspace=str(folder / "tree"), tests=spec)


def grade_work(
    task: Task, backend: SandboxBackend, command: str, *, timeout_s: float, **settings: bool
) -> tuple[float, dict[str, int]]:
    """Run a command where an agent would be, and grade what it did: the reward and the counters."""
    sandbox = backend.create(task, "agent")
    try:
        result = sandbox.run(command, env={}, timeout_s=120)
        assert result.exit_code == 0, result.stderr
        found = GraderByTask(backend, **settings).grade(task, sandbox, timeout_s=timeout_s)
    finally:
        sandbox.destroy()
    return found.reward, dict(found.counters)
