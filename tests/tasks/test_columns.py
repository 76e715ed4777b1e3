"""Rows of any form: what a mapping makes of them, and the sets of docs/tasks.md, each graded on a row made up here."""

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import yaml
from swe_repository import FIX, TEST_PATCH, build_row, make_repository

from polar_trl.errors import ConfigError, SandboxError, TaskError
from polar_trl.grade.base import Grade
from polar_trl.grade.command import CommandGrader
from polar_trl.grade.swebench import SwebenchGrader, check_row
from polar_trl.grade.tests import TestsGrader
from polar_trl.sandbox.local import LocalSandboxBackend
from polar_trl.setup.check_tasks import has_solution, solve
from polar_trl.tasks.load import load_task_set
from polar_trl.types import Task

PAGE = Path(__file__).parents[2] / "docs" / "tasks.md"
BLOCKS: dict[str, dict[str, Any]] = {
    block["tasks"]: block["columns"]
    for text in re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    if "columns" in (block := yaml.safe_load(text))
}
GOLD = f"git apply - <<'END'\n{FIX}END"
UNDO = GOLD.replace("git apply", "git apply -R")
BUG = FIX.replace("-    return x\n+    return x + 1", "-    return x + 1\n+    return x")


def write_rows(path: Path, *rows: Mapping[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load_row(folder: Path, columns: Mapping[str, Any], row: Mapping[str, Any]) -> Task:
    """The row's task with the repository in `folder` in the place of its image."""
    (task,) = load_task_set(write_rows(folder / "rows.jsonl", row), columns=columns)
    assert task.image is not None
    env = {"PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"}
    return replace(task, image=None, workspace=str(folder / "testbed"), env={**env, **task.env})


def grade(task: Task, folder: Path, command: str) -> Grade:
    """Grade what a command makes of the work folder."""
    backend = LocalSandboxBackend(folder / "boxes")
    graders = {"swebench": SwebenchGrader, "pytest": TestsGrader}
    grader = graders[task.tests.runner](backend) if task.tests else CommandGrader(backend=backend)
    sandbox = backend.create(task, "agent")
    try:
        done = sandbox.run(command, env=task.env, timeout_s=60)
        assert done.exit_code == 0, done.stderr
        return grader.grade(task, sandbox, timeout_s=120)
    finally:
        sandbox.destroy()


def require_graded(task: Task, folder: Path, gold: str) -> None:
    assert grade(task, folder, gold).reward == 1.0
    assert grade(task, folder, "true").reward == 0.0
    assert grade(task, folder, "rm -r tests; echo 'def f(x): return 0' > src/flask/tiny.py").reward == 0.0


def test_swe_rebench(tmp_path: Path) -> None:
    base = make_repository(tmp_path / "testbed")
    of_set = {
        "docker_image": "swerebench/sweb.eval.x86_64.someone_1776_tiny-7",
        "install_config": {"log_parser": "parse_log_pytest", "test_cmd": "pytest -rA", "python": "3.9"},
        "FAIL_TO_FAIL": [],
        "FAIL_TO_PASS": ["tests/test_tiny.py::test_f"],
        "PASS_TO_PASS": ["tests/test_tiny.py::test_kind"],
        "meta": {"is_lite": True},
    }
    row = {**build_row(base, repo="someone/tiny", instance_id="someone__tiny-7", version="0.1"), **of_set}
    task = load_row(tmp_path, BLOCKS["nebius/SWE-rebench:filtered"], row)
    assert "f must add one." in task.instruction
    require_graded(task, tmp_path, GOLD)


def test_a_log_parser_that_nobody_has(tmp_path: Path) -> None:
    row = build_row("abc", repo="someone/tiny", version="0", log_parser="parse_log_js_4", eval_script="true")
    (task,) = load_task_set(write_rows(tmp_path / "rows.jsonl", row), columns={"image": "x"})
    with pytest.raises(
        TaskError, match=r"task 'pallets__flask-5063': swebench 4.1 has no log parser 'parse_log_js_4'"
    ):
        check_row(task)


def test_swe_bench_pro(tmp_path: Path) -> None:
    base = make_repository(tmp_path / "testbed")
    row: dict[str, Any] = build_row(base, repo="someone/tiny", instance_id="instance_someone__tiny-abc")
    del row["FAIL_TO_PASS"], row["PASS_TO_PASS"], row["version"], row["environment_setup_commit"]
    row |= {
        "dockerhub_tag": "someone.tiny-someone__tiny-abc",
        "repo_language": "python",
        "fail_to_pass": "['tests/test_tiny.py::test_f']",  # Python, as the set has it
        "pass_to_pass": "['tests/test_tiny.py::test_kind']",
        "selected_test_files_to_run": "['tests/test_tiny.py']",
        "before_repo_set_cmd": "git reset --hard abc",
    }
    (loaded,) = load_task_set(write_rows(tmp_path / "pro.jsonl", row), columns=BLOCKS["ScaleAI/SWE-bench_Pro:test"])
    assert (loaded.image, loaded.workdir) == ("jefzda/sweap-images:someone.tiny-someone__tiny-abc", "/app")
    require_graded(load_row(tmp_path, BLOCKS["ScaleAI/SWE-bench_Pro:test"], row), tmp_path, GOLD)


def test_swe_smith(tmp_path: Path) -> None:
    """The bug is in the work folder, alone and without a history; what the tests that are there say decides."""
    make_repository(tmp_path / "testbed")
    for patch in (FIX, TEST_PATCH):
        subprocess.run(["git", "apply", "-"], cwd=tmp_path / "testbed", input=patch, text=True, check=True)
    row = {
        "instance_id": "someone__tiny.abc.lm_rewrite__1",
        "repo": "swesmith/someone__tiny.abc",
        "image_name": "jyangballin/swesmith.x86_64.someone_1776_tiny.abc",
        "patch": BUG,
        "FAIL_TO_PASS": ["tests/test_tiny.py::test_f"],
        "PASS_TO_PASS": ["tests/test_tiny.py::test_kind"],
        "problem_statement": "f must add one.",
    }
    columns = BLOCKS["SWE-bench/SWE-smith-py"]
    task = load_row(tmp_path, {**columns, "tests": {**columns["tests"], "python": sys.executable}}, row)
    require_graded(task, tmp_path, UNDO.replace(FIX, BUG))
    assert has_solution(task)
    sandbox = LocalSandboxBackend(tmp_path / "boxes").create(task, "agent")
    try:
        seen = sandbox.run("cat src/flask/tiny.py; git log --oneline --all -p | grep -c 'x + 1'; git status --short",
                           env={}, timeout_s=60)  # fmt: skip
        assert seen.stdout == "def f(x):\n    return x\n0\n"
        solve(task, sandbox)
        assert sandbox.run("cat src/flask/tiny.py", env={}, timeout_s=60).stdout == "def f(x):\n    return x + 1\n"
    finally:
        sandbox.destroy()
    stale = replace(task, start_patch=FIX.replace("return x", "return y"))
    with pytest.raises(SandboxError, match=r"task someone__tiny.*: start_patch: git apply failed"):
        LocalSandboxBackend(tmp_path / "boxes").prepare([stale])


def test_r2e_gym(tmp_path: Path) -> None:
    make_repository(tmp_path / "testbed")
    (tmp_path / "testbed" / "run_tests.sh").write_text("python -m pytest -rA r2e_tests\n")
    (tmp_path / "testbed" / "image" / "r2e_tests").mkdir(parents=True)
    (tmp_path / "testbed" / "image" / "r2e_tests" / "test_1.py").write_text(
        "import sys; sys.path.insert(0, 'src'); from flask.tiny import f\n"
        "class TestF:\n    def test_f(self): assert f(1) == 2\n    def test_not(self): assert f(1) == 3\n"
    )
    row = {
        "repo_name": "tiny",
        "docker_image": "namanjain12/tiny_final:abc",
        "commit_hash": "abc",
        "problem_statement": "[ISSUE]\nf must add one.\n[/ISSUE]",
        "expected_output_json": json.dumps({"TestF.test_f": "PASSED", "TestF.test_not": "FAILED"}),
    }
    task = load_row(tmp_path, BLOCKS["R2E-Gym/R2E-Gym-Subset"], row)
    assert task.grader is not None
    task = replace(task, grader=task.grader.replace(" /r2e_tests", " image/r2e_tests"))
    assert grade(task, tmp_path, GOLD).reward == 1.0
    assert grade(task, tmp_path, "true").reward == 0.0


def test_all_sets_of_the_page_are_here() -> None:
    tested = {
        "nebius/SWE-rebench:filtered",
        "ScaleAI/SWE-bench_Pro:test",
        "SWE-bench/SWE-smith-py",
        "R2E-Gym/R2E-Gym-Subset",
    }
    assert set(BLOCKS) == tested


def test_fields_of_a_task(tmp_path: Path) -> None:
    """One placeholder gives the value as it is, lists are read from text, other text is filled in, a shell's stays."""
    row = {"key": 7, "ask": "[a] {b}", "name": "x", "level": 2, "deep": '{"a": {"b": "c"}}', "tests": '["t.py::a"]',
           "gone": None, "odd name": 3, "flat.name": "y"}  # fmt: skip
    columns = {
        "id": "row-{key}",
        "instruction": "{ask}",
        "files": {"a.txt": "{deep.a.b} ${name} {name}{gone}!", "b.txt": "no column"},
        "grader": "{ask}",
        "agent_timeout_s": "{key}",
        "tests": {"fail_to_pass": "{tests}"},
        "metadata": {
            "level": "{level}",
            "row": "{tests}",
            "many": ["{key}", "{name}"],
            "odd": "{odd name}",
            "flat": "{flat.name}",
        },
    }
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "train-0.parquet")
    (task,) = load_task_set(tmp_path, columns=columns, split="train")
    assert (task.id, task.instruction, task.grader, task.agent_timeout_s) == ("row-7", "[a] {b}", "[a] {b}", 7)
    assert task.files == {"a.txt": "c ${name} x!", "b.txt": "no column"}
    assert task.tests is not None and (task.tests.fail_to_pass, task.tests.paths) == (("t.py::a",), ("t.py",))
    assert task.metadata == {"level": 2, "row": '["t.py::a"]', "many": [7, "x"], "odd": 3, "flat": "y"}


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"id": "{nope}", "instruction": "x"}, r"row 0: columns.id: there is no column 'nope'; the columns are a, b"),
        ({"id": "{b.y}", "instruction": "x"}, r"columns.id: 'b.y' is not there; 'b' has x"),
        ({"id": "{a.y}", "instruction": "x"}, r"columns.id: 'a.y' is not there; 'a' has no entries, being 'one'"),
        ({"id": "{a}", "instruction": "{b}"}, r"'instruction' must be text"),
        ({"id": "same", "instruction": "x"}, r"row 1: the id 'same' is there twice"),
        ({"instruction": "x"}, r"row 0: 'id' is missing or empty"),
        ({"id": "{a}", "instruction": "x", "tests": {"fail_to_pass": "{a}"}}, r"'tests.fail_to_pass' must be a list"),
        ({"image": "{a}"}, r"row 0: 'instance_id' must be text, not None"),
    ],
)
def test_a_mapping_that_does_not_fit(tmp_path: Path, columns: dict[str, Any], message: str) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", {"a": "one", "b": {"x": 1}}, {"a": "two", "b": {"x": 2}})
    with pytest.raises(TaskError, match=message):
        load_task_set(rows, columns=columns)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"instruction": "x", "grade": "y"}, "columns: 'grade' is unknown; a task has agent, agent_timeout_s"),
        ({"imagename": "x"}, "columns: 'imagename' is unknown; without `instruction`, there are FAIL_TO_PASS"),
    ],
)
def test_unknown_keys(tmp_path: Path, columns: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_task_set(write_rows(tmp_path / "rows.jsonl", {"a": "x"}), columns=columns)


def test_the_example(tmp_path: Path) -> None:
    """Its rows are tasks whose own command tells the answer from another."""
    folder = Path(__file__).parents[2] / "examples" / "columns"
    run = yaml.safe_load((folder / "run.yaml").read_text(encoding="utf-8"))
    tasks = load_task_set(folder / "rows.jsonl", columns=run["columns"])
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [task.instruction for task in tasks] == [row["question"] for row in rows]
    for task, row in list(zip(tasks, rows, strict=True))[:2]:
        answer = row["answer"]
        assert grade(task, tmp_path, f"echo '{answer['text']}' > {answer['file']}").reward == 1.0
        assert grade(task, tmp_path, f"echo other > {answer['file']}").reward == 0.0
