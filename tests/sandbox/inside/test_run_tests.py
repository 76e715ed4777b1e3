"""The runner of hidden tests: the origin of its plugins and modules, and the tampering that it reports."""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from polar_trl.sandbox.inside.run_tests import AUTOLOAD_OFF, list_own, run_apart


def run(tree: Path, own: list[str] | None = None) -> dict[str, Any]:
    found = run_apart(tree, ["tests"], ["."], list_own(tree, ["."]) if own is None else own)
    assert found is not None
    return found


def write(tree: Path, **files: str) -> None:
    for name, text in files.items():
        path = tree / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_plugins_are_the_environments(tmp_path: Path) -> None:
    # asked in a process of its own: what other tests imported here (setuptools does) adds folders to the path
    program = "import importlib.metadata as m; print(*(entry.name for entry in m.entry_points(group='pytest11')))"
    names = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert names, "this environment has no plugin to see"
    write(
        tmp_path,
        evil="import os; os._exit(0)",
        tests__test_m="import os\n\n\ndef test_it(request):\n"
        f"    assert [name for name in {names} if not request.config.pluginmanager.hasplugin(name)] == []\n"
        f"    assert not request.config.pluginmanager.hasplugin('x') and '{AUTOLOAD_OFF}' not in os.environ\n",
    )
    (tmp_path / "evil-1.dist-info").mkdir()
    (tmp_path / "evil-1.dist-info" / "entry_points.txt").write_text("[pytest11]\nx = evil\n")
    (tmp_path / "evil-1.dist-info" / "METADATA").write_text("Name: evil\nVersion: 1\n")
    found = run(tmp_path)
    assert (found["outcomes"], found["patched"]) == ({"tests/test_m.py::test_it": "passed"}, None)


def test_what_pytest_needs_comes_from_the_tree_only_where_that_is_tested(tmp_path: Path) -> None:
    shutil.copytree(Path(sysconfig.get_paths()["purelib"]) / "iniconfig", tmp_path / "iniconfig")
    test = f"def test_it(): assert iniconfig.__file__.startswith({str(tmp_path)!r})"
    write(tmp_path, tests__test_m=f"import iniconfig\n\n\n{test}\n")
    assert run(tmp_path)["outcomes"] == {"tests/test_m.py::test_it": "passed"}
    assert run(tmp_path, own=["tests"])["outcomes"] == {"tests/test_m.py::test_it": "failed"}


CONFTEST = """
import pytest

@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    return (yield)

@pytest.fixture(autouse=True, params=[1, 2])
def twice(request):
    yield request.param
"""
SUITE = """
import unittest
from unittest import mock
import pytest

class TestOld(unittest.TestCase):
    def test_a(self): self.fail()

def test_b(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("os.getlogin", mock.Mock())
    assert 1 == 2

@pytest.mark.xfail
def test_c(): 1 / 0

def test_d(): pytest.skip()

@pytest.mark.parametrize("x", "ab")
def test_e(x): pass
"""


def test_honest_suites_are_not_called_tampered_with(tmp_path: Path) -> None:
    """Pytest changes its own classes as it goes."""
    write(tmp_path, tests__conftest=CONFTEST, tests__test_m=SUITE)
    found = run(tmp_path)
    assert found["patched"] is None
    names = ("test_b[1]", "test_c[2]", "test_d[1]", "test_e[2-b]")
    outcomes = [found["outcomes"].get(f"tests/test_m.py::{name}") for name in names]
    assert outcomes == ["failed", "xfailed", "skipped", "passed"], found["outcomes"]


def test_what_was_put_in_pytests_place_is_named(tmp_path: Path) -> None:
    cases = {
        "from _pytest.reports import TestReport as T\nT.failed = property(lambda s: False)": "TestReport.failed",
        "import _pytest.runner as r\nr.call_and_report = lambda *a, **k: None": "_pytest.runner.call_and_report",
        "from _pytest.python import Function as F\nF.runtest.__code__ = (lambda s: None).__code__": "Function.runtest",
    }
    for code, name in cases.items():
        write(tmp_path, m=code, tests__test_m="def test_f():\n    import m\n    assert m is None\n")
        assert run(tmp_path)["patched"] == name
