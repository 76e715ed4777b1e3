"""The Python of tasks' tests: which tasks get one, its packages, and that none is a task's answer."""

import os
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from calc_releases import pretend_installed

from polar_trl.cache import find_cache
from polar_trl.errors import ConfigError
from polar_trl.tasks.build.suite import find_environment, install_environment
from polar_trl.tasks.environment import (
    find_answer,
    list_environments,
    list_releases,
    provide_python,
    refuse_answers,
)
from polar_trl.types import Task, TestSpec


def make_task(requirements: Path | None) -> Task:
    spec = TestSpec(fail_to_pass=("a",), requirements=None if requirements is None else str(requirements))
    return Task(id="t", instruction="Do it.", tests=spec)


def make_wheel(folder: Path, name: str, version: str) -> Path:
    """Make a wheel of one module."""
    folder.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", f"VERSION = {version!r}\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return folder


def test_a_python_for_those_who_have_none(tmp_path: Path) -> None:
    (tmp_path / "r.txt").write_text("pytest\n")
    pretend_installed(tmp_path / "r.txt")
    python = find_environment(tmp_path / "r.txt") / "bin" / "python"
    task = make_task(tmp_path / "r.txt")
    (provided,) = provide_python([replace(task, env={"A": "1"})])
    assert provided.tests is not None and provided.tests.python == str(python)
    assert provided.env == {"PATH": f"{python.parent}:/usr/local/bin:/usr/bin:/bin", "A": "1"}
    # an image of the task's own has all that its tests need
    built = replace(task, build_context=str(tmp_path))
    for other in (make_task(None), Task(id="t", instruction="x"), replace(task, image="i")):
        assert provide_python([other]) == [other]
    assert provide_python([built], sandbox="docker") == [built]
    assert provide_python([built], sandbox="docker", image="python:3.11")[0].tests == provided.tests
    assert provide_python([built])[0].tests == provided.tests


def test_an_environment_has_what_the_file_names_and_no_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(make_wheel(tmp_path / "wheels", "calc", "1.0")))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    (tmp_path / "r.txt").write_text("calc==1.0\n")
    python = install_environment(tmp_path / "r.txt")
    assert python.is_relative_to(find_cache("environments"))
    program = "import calc, importlib.util; print(calc.VERSION, importlib.util.find_spec('pip'))"
    assert subprocess.run([python, "-c", program], capture_output=True, check=True).stdout == b"1.0 None\n"
    # a second one is the same; what downloads releases is kept where no sandbox looks
    assert install_environment(tmp_path / "r.txt") == python
    hidden = install_environment(tmp_path / "r.txt", "releases")
    assert not hidden.is_relative_to(find_cache("environments"))
    assert subprocess.run([hidden, "-m", "pip", "--version"], capture_output=True).returncode == 0


@pytest.mark.parametrize(
    ("facts", "installed", "expected"),
    [
        ({"package": "ca-lc", "fixed_version": "1.10"}, "ca_lc-1.10", "ca_lc-1.10"),
        ({"package": "ca-lc", "fixed_version": "1.10"}, "Ca.Lc-1.11", "Ca.Lc-1.11"),
        ({"package": "ca-lc", "fixed_version": "1.10"}, "ca_lc-1.9", None),
        ({"package": "ca-lc", "fixed_version": "1.10"}, "other-2.0", None),
        # an edit was made to one release, and any other one shows what was there
        ({"package": "ca-lc", "version": "1.10"}, "ca_lc-1.9", "ca_lc-1.9"),
        ({}, "ca_lc-1.9", None),
    ],
)
def test_an_answer_is_found(tmp_path: Path, facts: dict[str, str], installed: str, expected: str | None) -> None:
    (tmp_path / "lib" / "site-packages" / "x" / "_vendor" / f"{installed}.dist-info").mkdir(parents=True)
    task = Task(id="t", instruction="x", metadata={"harbor": {"metadata": facts}})
    answer = find_answer(task, list_releases(tmp_path))
    assert (None if answer is None else answer.path.name) == (expected and f"{expected}.dist-info")


def test_an_environment_with_the_answer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "r.txt").write_text("calc\n")
    pretend_installed(tmp_path / "r.txt")
    (find_environment(tmp_path / "r.txt") / "lib" / "calc-2.0.dist-info").mkdir(parents=True)
    facts = {"package": "calc", "fixed_version": "2.0"}
    task = replace(make_task(tmp_path / "r.txt"), metadata={"harbor": {"metadata": facts}})
    with pytest.raises(ConfigError, match=r"task 't': .*r\.txt installs its answer, calc 2\.0"):
        provide_python([task])


def test_requirements_that_cannot_be_installed_are_named_with_their_task(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"task 't': 'tests\.requirements': cannot read the requirements"):
        provide_python([make_task(tmp_path / "none.txt")])


def test_every_form_of_an_installed_release(tmp_path: Path) -> None:
    site = tmp_path / "site-packages"
    (site / "a_b-1.0.dist-info").mkdir(parents=True)
    (site / "C.d-2.0-py3.11.egg-info").mkdir()
    (site / "pip" / "_vendor").mkdir(parents=True)
    (site / "pip" / "_vendor" / "vendor.txt").write_text("E_f==3.0  # why\n    g==4.0\n")
    (site / "h-5.0.egg-info").touch()
    (site / "notes.txt").write_text("i==6.0\n")
    found = {(release.name, release.version) for release in list_releases(tmp_path)}
    assert found == {("a-b", "1.0"), ("c-d", "2.0"), ("e-f", "3.0"), ("g", "4.0"), ("h", "5.0")}


def test_a_run_shows_no_answer(tmp_path: Path) -> None:
    """Not in the agent's own folder, and not in what another task's tests need."""

    def rebuild(name: str, package: str) -> Task:
        facts = {"package": package, "fixed_version": "2.0"}
        return Task(id=name, instruction="x", metadata={"harbor": {"metadata": facts}})

    agent, tests = tmp_path / "agent", tmp_path / "tests"
    (agent / "site-packages" / "calc-2.1.dist-info").mkdir(parents=True)
    (tests / "site-packages" / "other-1.9.dist-info").mkdir(parents=True)
    good, bad = rebuild("good", "other"), [rebuild("bad", "calc"), rebuild("worse", "Calc")]
    refuse_answers([good], [agent, tests])
    refuse_answers([good, *bad], [tests, tmp_path / "not-there"])
    with pytest.raises(ConfigError) as caught:
        refuse_answers([good, *bad], [agent, tests])
    said = str(caught.value)
    assert f"task 'bad': its sandbox shows its answer, calc 2.1 ({agent}/site-packages/calc-2.1.dist-info)" in said
    assert "take it out of the tasks, or choose another agent" in said and said.endswith("for 1 more: worse")


def test_a_run_shows_the_environments_of_its_own_tasks(tmp_path: Path) -> None:
    tasks = []
    for name in ("a", "b", "unused"):
        (tmp_path / f"{name}.txt").write_text(f"pytest  # {name}\n")
        pretend_installed(tmp_path / f"{name}.txt")
        tasks.append(make_task(tmp_path / f"{name}.txt"))
    provided = provide_python([tasks[0], tasks[1], tasks[0], make_task(None), Task(id="t", instruction="x")])
    assert list_environments(provided) == [find_environment(tmp_path / f"{name}.txt") for name in ("a", "b")]
    assert len(list(find_cache("environments").glob("python-*"))) == 3
