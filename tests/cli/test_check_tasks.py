"""`polar-trl check-tasks`: good tasks are kept as good, bad and flaky ones are named, and nothing is left behind."""

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import swe_repository
from calc_releases import CALC, PYTHON, build, make_row
from environments import IMAGE, install_pytest
from launch import find_warm_python
from serving import wait_until

from polar_trl.cache import CACHE_VARIABLE, find_cache
from polar_trl.cli import main
from polar_trl.cli.check_tasks import _name_problem
from polar_trl.sandbox.docker import client
from polar_trl.setup.check_tasks import Checked
from polar_trl.tasks.build.folders import Tools

HIDDEN = Path("tests", "hidden", "tests", "test_calc.py")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, cache: None) -> Path:
    folder = tmp_path_factory.mktemp("built")
    requirements = folder / "requirements.txt"
    requirements.write_text("pytest\n")
    install_pytest(requirements)
    return build(make_row(), folder / "out", Tools(python=PYTHON, requirements=requirements))


@pytest.fixture
def task(built: Path, tmp_path: Path) -> Path:
    """A task folder of the test's own."""
    return shutil.copytree(built, tmp_path / "tasks" / "calc")


def check(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, list[dict[str, Any]]]:
    code = main(["check-tasks", *map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)["tasks"]


def test_a_good_task_is_kept_as_good(task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, (found,) = check(capsys, task)
    seconds = found.pop("seconds")
    assert (code, found) == (
        0,
        {
            "id": "calc",
            "gold": 1.0,
            "empty": 0.0,
            "flaky": False,
            "problem": "",
            "verdict": "good",
            "missing_tests": [],
        },
    )
    (kept,) = find_cache("checks").glob("*.json")
    kept.write_text(kept.read_text().replace(f'"seconds": {seconds}', '"seconds": 1234.5'))
    assert check(capsys, task.parent)[1][0]["seconds"] == 1234.5
    assert check(capsys, task, "--fresh")[1][0]["seconds"] < 1234.5
    # and what decides has changed
    kept.write_text(kept.read_text().replace('"id": "calc"', '"id": "calc", "seconds": 1234.5'))
    (task / HIDDEN).write_text((task / HIDDEN).read_text() + "\n")
    assert check(capsys, task)[1][0]["seconds"] < 1234.5


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        (HIDDEN, "def test_total():\n    assert 1 == 2\n", (0.0, 0.0, "the solution gets 0, 0, 0")),
        ("environment/workspace/src/calc/__init__.py", CALC, (None, None, "gold.patch does not apply")),
        ("solution/gold.patch", "", (None, None, "does not apply")),
    ],
)
def test_a_spoiled_task(
    task: Path, capsys: pytest.CaptureFixture[str], path: str, text: str, expected: tuple[object, object, str]
) -> None:
    (task / path).write_text(text)
    for _ in range(2):  # what is bad is not kept
        code, (found,) = check(capsys, task)
        assert (code, found["gold"], found["empty"], found["flaky"]) == (1, *expected[:2], False)
        assert expected[2] in found["problem"]


def test_a_test_that_is_not_found_is_named(task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (task / HIDDEN).write_text((task / HIDDEN).read_text().replace("def test_clamp(", "def test_other("))
    code, (found,) = check(capsys, task)
    assert (code, found["verdict"], found["missing_tests"]) == (1, "bad", ["tests/test_calc.py::test_clamp"])
    assert "tests were not found: tests/test_calc.py::test_clamp" in found["problem"]


def test_a_task_without_a_solution_is_not_proven(task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(task, task.parent / "proven")
    shutil.rmtree(task / "solution")
    code, (found,) = check(capsys, task)
    assert (code, found["verdict"], found["gold"], found["empty"], found["problem"]) == (
        1,
        "not proven",
        None,
        0.0,
        "",
    )
    assert check(capsys, task)[1] == [found]  # kept
    assert main(["check-tasks", str(task.parent)]) == 0
    said = capsys.readouterr().out
    assert "1 of 2 tasks are good, 1 not proven (no solution to try)" in said


def test_a_task_that_needs_no_change(task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tests = (task / HIDDEN).read_text()
    (task / HIDDEN).write_text(tests.replace("assert total(values) == sum(values)", "assert True"))
    code, (found,) = check(capsys, task)
    assert (code, found["gold"], found["empty"], found["problem"]) == (1, 1.0, 1.0, "no change at all gets 1")


def test_a_flaky_task_is_listed(
    task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tests pass every other time; a local sandbox without namespaces lets them count."""
    monkeypatch.setattr("polar_trl.sandbox.local.can_enclose", lambda: False)
    counter = tmp_path / "counter"
    counter.touch()
    tests = (task / HIDDEN).read_text()
    count = f"    with open({str(counter)!r}, 'a+') as file:\n        assert file.write('x') and file.tell() % 2\n"
    (task / HIDDEN).write_text(tests.replace("def test_clamp():\n", f"def test_clamp():\n{count}"))
    code, (found,) = check(capsys, task, "--sandbox", "local")
    assert (code, found["gold"], found["flaky"]) == (1, 0.0, True)
    assert found["problem"] == "the solution gets 1, 0, 1; 1 of 5 tests failed: tests/test_calc.py::test_clamp"


def test_why_tasks_are_bad_is_counted(task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (task / HIDDEN).write_text("def test_total():\n    assert 1 == 2\n")
    shutil.copytree(task, task.parent / "other")
    assert main(["check-tasks", str(task.parent)]) == 1
    said = capsys.readouterr().out
    assert "why tasks are bad" in said and "the solution gets 0, 0, 0" in " ".join(said.split())
    assert "0 of 2 tasks are good, 2 bad" in said


def test_tasks_with_one_problem_are_counted_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their tests need pytest, which no Python of a sandbox has. At 80 columns all is there to be read."""
    monkeypatch.setenv("COLUMNS", "80")
    name = "tests/test_" + 30 * "long_" + "name.py::test_it"
    (tmp_path / "w").mkdir()
    (tmp_path / "h" / "tests").mkdir(parents=True)
    (tmp_path / "h" / name.partition("::")[0]).write_text("def test_it(): pass\n")
    tests = {"fail_to_pass": [name], "folder": "h", "files": [name.partition("::")[0]], "paths": ["tests"]}
    rows = [{"id": f"t{i}", "instruction": "x", "workspace": "w", "tests": tests} for i in range(3)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({**row, "build_context": "."}) + "\n" for row in rows))
    (tmp_path / "Dockerfile").write_text(f"FROM {IMAGE}\n")
    code, found = check(capsys, tmp_path / "t.jsonl", "--sandbox", "bwrap")
    problems = {checked["problem"] for checked in found}
    assert code == 1 and len(problems) == 1
    assert re.fullmatch(r"'python3' cannot run pytest there: .* has no pytest; install pytest .*", problems.pop())
    assert main(["check-tasks", str(tmp_path / "t.jsonl"), "--sandbox", "bwrap"]) == 1
    said = capsys.readouterr()
    assert said.err.count("the Dockerfiles of 3 tasks are not used in bwrap sandboxes: give tests.requirements") == 1
    (row,) = [line for line in said.out.splitlines() if re.search(r"│ 3 +│ ", line)]
    assert row.startswith("│ 'python3'") and "…" not in said.out
    assert "checking" not in said.err  # no progress bar where nobody looks


def test_a_problem_with_the_id_inside_is_one_problem() -> None:
    checked = [Checked(id=name, problem=f"solve.sh of task {name} ended with exit code 3: 'x'") for name in ("a", "b")]
    assert {_name_problem(one) for one in checked} == {"solve.sh of task ... ended with exit code 3"}


def test_a_table(task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-tasks", str(task)]) == 0
    said = capsys.readouterr().out
    assert "calc" in said and "1 of 1 tasks are good" in said


def test_wrong_questions(tmp_path: Path, task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.jsonl").write_text('{"id": "a", "instruction": "x", "grader": "true"}\n')
    for arguments, message in (
        ([str(tmp_path / "nope.jsonl")], "no task file at"),
        ([str(tmp_path / "t.jsonl")], "has tests or a verifier; there is nothing to check"),
        ([str(task), "--jobs", "0"], "--jobs is 0"),
        ([str(task), "--limit", "0"], "limit is 0"),
        (
            [str(task), "--sandbox", "local", "--sandbox_image", "x"],
            "sandbox_image is read by the docker and bwrap sandboxes",
        ),
    ):
        assert main(["check-tasks", *arguments]) == 2
        assert message in capsys.readouterr().err


def test_an_interrupt_leaves_nothing_behind(task: Path, tmp_path: Path) -> None:
    (task / HIDDEN).write_text("import pathlib, time\npathlib.Path('/tmp/started').touch()\ntime.sleep(600)\n")
    (tmp_path / "tmp").mkdir()
    process = subprocess.Popen(
        [find_warm_python(), "-m", "polar_trl", "check-tasks", str(task)],
        env={**os.environ, "TMPDIR": str(tmp_path / "tmp")},
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until(lambda: any(tmp_path.glob("tmp/polar-trl-*/*/disk/tmp/started")))
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=600)
    assert (process.returncode, "polar-trl: stopped" in said) == (130, True), said
    assert [str(path) for path in (tmp_path / "tmp").rglob("work")] == []


def test_a_run_refuses_bad_tasks(task: Path, tmp_path: Path) -> None:
    (task / HIDDEN).write_text("def test_total():\n    assert 1 == 2\n")
    config = tmp_path / "run.yaml"
    config.write_text(
        f"tasks: {task}\nagent_command: 'true'\nmodel_name_or_path: no/such/model\nuse_cpu: true\nbf16: false\n"
    )
    said = []
    for arguments in ([], ["--check_tasks", "false"]):
        done = subprocess.run(
            [find_warm_python(), "scripts/train.py", "--config", config, "--output_dir", tmp_path / "run", *arguments],
            capture_output=True,
            text=True,
            timeout=600,
            cwd=ROOT,
        )
        assert done.returncode == 1
        said.append(done.stderr)
    assert (
        "train: 1 of 1 tasks fail the check of their solutions" in said[0]
        and "\n  calc: the solution gets 0" in said[0]
    )
    assert "no model at 'no/such/model'" in said[1]


HARBOR_TOML = f"""\
[environment]
network_mode = "no-network"
docker_image = "{IMAGE}"
workdir = "/workspace"
"""
HARBOR_TEST = """\
mkdir -p /logs/verifier
cat answer.txt 2>/dev/null | grep -q 42 && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt
"""


@pytest.mark.containers
def test_a_verifier_and_a_script_that_solves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "harbor"
    for path, text in (
        ("task.toml", HARBOR_TOML),
        ("instruction.md", "Write 42 to answer.txt.\n"),
        ("environment/Dockerfile", f"FROM {IMAGE}\n"),
        ("tests/test.sh", HARBOR_TEST),
        ("solution/solve.sh", "echo 42 > answer.txt\n"),
    ):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    code, (found,) = check(capsys, folder, "--sandbox", "docker")
    assert (code, found["gold"], found["empty"], found["problem"]) == (0, 1.0, 0.0, "")
    (folder / "solution" / "solve.sh").write_text("echo broken >&2\nexit 3\n")
    code, (found,) = check(capsys, folder, "--sandbox", "docker")
    assert (code, found["gold"]) == (1, None)
    assert found["problem"].startswith("solve.sh of task harbor ended with exit code 3: 'broken")


@pytest.mark.containers
def test_a_rebuilt_task_in_containers(task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    requirements = task / "environment" / "requirements.txt"
    requirements.write_text("pytest  # of this test\n")
    install_pytest(requirements)
    code, (found,) = check(capsys, task, "--sandbox", "docker", "--sandbox_image", IMAGE)
    assert (code, found["gold"], found["empty"], found["problem"]) == (0, 1.0, 0.0, "")
    # it asks for 4096 MB
    given = ["--sandbox", "docker", "--sandbox_image", IMAGE, "--sandbox_memory_mb", "2000"]
    assert main(["check-tasks", str(task), *given]) == 2
    assert (
        "task 'calc' asks for memory_mb 4096, and a sandbox has 2000: set sandbox_memory_mb" in capsys.readouterr().err
    )


@pytest.mark.containers
@pytest.mark.parametrize("sandbox", ["auto", "bwrap"])
def test_a_row_of_swe_bench_without_an_engine(
    sandbox: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    archive, base_commit = swe_repository.save_swe_image(tmp_path)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(swe_repository.build_row(base_commit, image=archive)))
    monkeypatch.delenv("DOCKER_HOST")
    monkeypatch.setattr(client, "SOCKETS", ())
    code, (found,) = check(capsys, rows, "--sandbox", sandbox)
    assert (code, found["gold"], found["empty"], found["verdict"]) == (0, 1.0, 0.0, "good")
