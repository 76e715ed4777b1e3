"""Canary tests: two tests of known outcome among those that decide, one that must pass and one that must fail.

They are made of words of the deciding tests' own names and lie in the same folder, so that neither name, place nor
look tells them from real ones. Code that works out which is which, and answers right, is not noticed.
"""

import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Literal

from polar_trl.grade.changes import Change, apply_changes
from polar_trl.sandbox.base import Sandbox

Style = Literal["pytest", "django", "sympy"]
WORDS = ("values", "empty", "nested", "order", "types", "keys", "names", "parse", "range", "simple", "copy", "items")


class Canary:
    """Files with both tests, beside a file of the deciding tests where possible.

    Args:
        ids: Of the tests that decide.
        style: Of the test command: "pytest" takes paths, "django" (its tests/runtests.py) names of folders of tests/,
            "sympy" (its bin/test) paths, and its ids are names of functions.
        paths: What pytest is given besides; of "sympy" the files of the tests that decide.
    """

    def __init__(self, ids: Sequence[str], style: Style = "pytest", paths: Sequence[str] = ()) -> None:
        names = [name.partition("[")[0].rpartition("::")[2].removeprefix("test_") for name in ids]
        found = {word for name in names for word in re.findall(r"[a-z]{3,}", name.lower())} - {"test", "tests"}
        words = sorted(found | set(WORDS))
        made = {"_".join(secrets.SystemRandom().sample(words, 3)) for _ in range(64)} - {*names}
        folder, module, passing, failing = secrets.SystemRandom().sample(sorted(made), 4)
        left, right = (1000 + secrets.randbelow(9000) for _ in range(2))
        tests = [
            (passing, f"{left} + {right} == {left + right}"),
            (failing, f"{left} + {right} == {left + right + 1}"),
        ]
        secrets.SystemRandom().shuffle(tests)
        self._names = (passing, failing)
        self.arguments: tuple[str, ...]
        """Words for the test command that name the canary."""
        if style == "django":
            self.arguments = (folder,)
            head = f"import unittest\n\n\nclass {module.title().replace('_', '')}(unittest.TestCase):\n"
            text = "\n".join(f"    def test_{name}(self):\n        assert {claim}\n" for name, claim in tests)
            self.files = {f"tests/{folder}/__init__.py": "", f"tests/{folder}/tests.py": head + text}
            self._passing, self._failing = (f"test_{name} ({folder}.tests." for name in (passing, failing))
        else:
            is_sympy = style == "sympy"
            near = _find_place([paths[0]], (), module) if is_sympy else _find_place(ids, paths, module)
            place, is_found = near or (f"{folder}/test_{module}.py", False)
            # pytest 9 drops a file that lies in a folder it was given too
            self.arguments = () if is_found else (place,)
            text = "\n\n".join(f"def test_{name}():\n    assert {claim}\n" for name, claim in tests)
            self.files = {place: text}
            where = "" if is_sympy else f"{place}::"
            self._passing, self._failing = (f"{where}test_{name}" for name in (passing, failing))

    def lay(self, sandbox: Sandbox) -> None:
        """Write the files of the canary into a sandbox."""
        # as an agent's changes are, and with the same care: its links may be in the way
        laid = {path: Change(kind="file", content=text.encode()) for path, text in self.files.items()}
        apply_changes(laid, sandbox.host_workdir)

    def strip(self, log: str) -> str:
        """Remove the lines of a log that name its tests: people look for their own."""
        return "\n".join(line for line in log.split("\n") if not any(name in line for name in self._names))

    def find_fault(self, outcomes: Mapping[str, str], *, passed: str, failed: str) -> str | None:
        """Return the counter of a fault of the two outcomes, None where both are right."""
        seen = [_find(outcomes, name) for name in (self._passing, self._failing)]
        if seen == [passed, failed]:
            return None
        return "test_runs_died" if seen == [None, None] else "canaries_broken"


def _find(outcomes: Mapping[str, str], name: str) -> str | None:
    """Find a test's outcome by the beginning of its id: the rest depends on the version of the runner."""
    return next((outcome for id_, outcome in outcomes.items() if id_.startswith(name)), None)


def _find_place(ids: Sequence[str], paths: Sequence[str], module: str) -> tuple[str, bool] | None:
    """Return a path beside a deciding file and whether pytest finds it by itself; None where it takes no such name."""
    for file in dict.fromkeys(PurePosixPath(name.partition("::")[0]) for name in ids):
        if file.suffix != ".py":
            continue
        name = f"{module}_test.py" if file.stem.endswith("_test") else f"test_{module}.py"
        is_in_folder = any(PurePosixPath(path) in file.parents for path in paths)
        if not is_in_folder or file.stem.startswith("test_") or file.stem.endswith("_test"):
            return str(file.with_name(name)), is_in_folder
    return None
