"""The canary tests lie among the deciding ones, and pytest finds them there."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from polar_trl.grade.canary import Canary
from polar_trl.sandbox.inside.run_tests import run_apart

CASES = {
    # ids, paths, a file's name pattern -> the folder, and whether pytest is told of the file
    "in a folder": (["tests/unit/test_m.py::test_f"], ["tests"], "tests/unit/test_*.py", False),
    "in a folder, names that end so": (["tests/m_test.py::test_f"], ["tests"], "tests/*_test.py", False),
    "beside a file": (["tests/test_m.py::T::test_f[x]"], ["tests/test_m.py"], "tests/test_*.py", True),
    "at the top": (["tests.py::test_f"], ["tests.py"], "test_*.py", True),
    "of names that only settings explain": (["pkg/tests.py::test_f"], ["pkg"], "*_*/test_*.py", True),
    "all below the work folder": (["test_m.py::test_f"], ["."], "test_*.py", False),
}


@pytest.mark.parametrize("name", CASES)
def test_it_lies_with_the_tests_that_decide(tmp_path: Path, name: str) -> None:
    ids, paths, pattern, is_argument = CASES[name]
    file = tmp_path / ids[0].partition("::")[0]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("def test_f(): pass\n")
    canary = Canary(ids, paths=paths)
    (place,) = canary.files
    assert Path(place).match(pattern) and Path(place).parent.parts[:-1] == Path(pattern).parent.parts[:-1]
    assert canary.arguments == ((place,) if is_argument else ())
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).write_text(canary.files[place])
    found = run_in(tmp_path, [*paths, *canary.arguments])
    assert canary.find_fault(found, passed="passed", failed="failed") is None
    lies = dict.fromkeys(found, "passed")
    assert canary.find_fault(lies, passed="passed", failed="failed") == "canaries_broken"


def run_in(tree: Path, paths: Sequence[str]) -> dict[str, str]:
    found = run_apart(tree, list(paths), ["."], [])
    assert found is not None and found["patched"] is None
    outcomes: dict[str, str] = found["outcomes"]
    return outcomes
