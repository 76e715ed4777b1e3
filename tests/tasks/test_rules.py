"""Tasks that are not valid are refused with id and field, and no path leads out of the work folder."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polar_trl.errors import ConfigError, GradeError, SandboxError, TaskError
from polar_trl.grade.tests import TestsGrader
from polar_trl.sandbox.base import Capabilities
from polar_trl.sandbox.inside import run_tests
from polar_trl.sandbox.limits import Limits
from polar_trl.sandbox.local import LocalSandboxBackend
from polar_trl.tasks.jsonl import load_tasks
from polar_trl.tasks.load import load_task_set
from polar_trl.tasks.rules import check_limits
from polar_trl.types import Task, TestSpec

ROW = dict.fromkeys(("instance_id", "repo", "base_commit", "problem_statement", "patch", "test_patch"), "x")
LIMITED = Capabilities(cuts_network=True, limits_memory=True, limits_disk=True, uses_images=False)


@pytest.fixture
def row(tmp_path: Path) -> dict[str, Any]:
    """Build a row of our own form that a run can use."""
    tree, hidden = tmp_path / "tree", tmp_path / "hidden"
    tree.mkdir()
    (tree / "m.py").write_text("def f():\n    return 1\n")
    (tree / "old").mkdir()
    (tree / "old" / "test_old.py").write_text("def test_old(): pass\n")
    hidden.mkdir()
    (hidden / "test_m.py").write_text("from m import f\n\n\ndef test_f(): assert f() == 2\n\n\ndef test_ok(): pass\n")
    return {
        "id": "t",
        "instruction": "x",
        "workspace": str(tree),
        "tests": {
            "fail_to_pass": ["test_m.py::test_f"],
            "pass_to_pass": ["test_m.py::test_ok"],
            "python": sys.executable,
            "folder": str(hidden),
            "files": ["test_m.py"],
            "paths": ["test_m.py"],
            "removed": ["old/test_old.py"],
        },
    }


@pytest.fixture
def load(tmp_path: Path) -> Callable[[dict[str, Any]], Task]:
    def load_one(row: dict[str, Any]) -> Task:
        (tmp_path / "t.jsonl").write_text(json.dumps(row) + "\n")
        (task,) = load_tasks(tmp_path / "t.jsonl")
        return task

    return load_one


Load = Callable[[dict[str, Any]], Task]


@pytest.mark.parametrize("name", ["removed", "files", "paths", "import_roots"])
@pytest.mark.parametrize("path", ["/etc/hostname", "../m.py", "a/../../m.py", "", "a\0b"])
def test_paths_of_tests_stay_in_the_work_folder(row: dict[str, Any], load: Load, name: str, path: str) -> None:
    row["tests"][name] = [path]
    with pytest.raises(TaskError, match=rf"\(task 't'\): 'tests\.{name}': .* must be a path in the work folder"):
        load(row)


def test_the_work_folder_itself_is_a_place_to_import_from_and_no_file(row: dict[str, Any], load: Load) -> None:
    row["tests"] |= {"import_roots": ["."], "paths": ["."]}
    assert load(row).tests is not None
    row["tests"]["removed"] = ["."]
    with pytest.raises(TaskError, match=r"'tests\.removed'"):
        load(row)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"files": {"../a": ""}}, "'files': '../a' must be a path in the work folder"),
        ({"files": {"/a": ""}}, "'files': '/a' must be a path in the work folder"),
        ({"env": {"A=B": "x"}}, "'env': no process can be given the variable 'A=B'"),
        ({"env": {"": "x"}}, "'env': no process can be given the variable ''"),
        ({"env": {"A": "x\0y"}}, "'env': no process can be given the variable 'A'"),
        ({"workspace": "/nonexistent"}, "'workspace': there is no folder '/nonexistent' on this machine"),
        ({"workspace": ""}, "'workspace': there is no folder ''"),
        ({"build_context": "/nonexistent"}, "'build_context': there is no folder"),
        *(
            ({"workdir": path}, f"'workdir': the work folder cannot be {path!r}")
            for path in ("relative", "/", "/usr", "/proc", "/proc/1", "/tmp", "/home", "/etc", "/app/../usr", "")
        ),
        ({"metadata": {"harbor": "x"}}, "metadata.harbor: must be an object"),
        ({"metadata": {"harbor": {}}}, "metadata.harbor: 'folder' must be the task's folder, not None"),
        ({"metadata": {"harbor": {"folder": "/nonexistent"}}}, "metadata.harbor: 'folder': there is no folder"),
        ({"metadata": {"harbor": {"folder": "/usr", "metadata": 5}}}, "metadata.harbor: 'metadata' must be an object"),
        (
            {"metadata": {"harbor": {"folder": "/usr", "metadata": {"package": 5}}}},
            "metadata.harbor: 'metadata.package' must be text, not 5",
        ),
        (
            {"metadata": {"harbor": {"folder": "/usr", "verifier_env": {"A": 1}}}},
            "metadata.harbor: 'verifier_env' must be an object of texts",
        ),
        (
            {"metadata": {"harbor": {"folder": "/usr", "memory_mb": "2G"}}},
            "metadata.harbor: 'memory_mb' must be a number, not '2G'",
        ),
        (
            {"tests": None, "metadata": {"harbor": {"folder": "/usr"}}},
            "metadata.harbor: 'folder': tests/test.sh is missing",
        ),
        ({"metadata": {"swebench": []}}, "metadata.swebench: a row must be an object, not []"),
        ({"metadata": {"swebench": {}}}, "metadata.swebench: 'instance_id' must be text, not None"),
        (
            {"metadata": {"swebench": {**ROW, "version": ["1"]}}},
            "metadata.swebench: 'version' must be text, not ['1']",
        ),
    ],
)
def test_a_field_that_cannot_be(row: dict[str, Any], load: Load, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError) as caught:
        load(row | changes)
    assert f"t.jsonl:1 (task 't'): {message}" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"runner": "nose"}, "'tests.runner' must be one of pytest, swebench, not 'nose'"),
        ({"runner": "swebench"}, "metadata.swebench, the columns of its row, is missing"),
        ({"paths": []}, "'tests.paths', what the runner is given, is missing or empty"),
        ({"files": []}, "'tests.files' is missing or empty; it goes with 'tests.folder'"),
        ({"folder": ""}, "'tests.folder' is missing or empty; it goes with 'tests.files'"),
        ({"folder": "/nonexistent"}, "'tests.folder': there is no folder '/nonexistent'"),
        ({"files": ["other.py"]}, "'tests.files': 'other.py' is not in "),
        ({"requirements": "/nonexistent"}, "'tests.requirements': there is no file '/nonexistent'"),
        ({"gold_patch": "/usr"}, "'tests.gold_patch': there is no file '/usr'"),
    ],
)
def test_tests_that_cannot_be(row: dict[str, Any], load: Load, changes: dict[str, Any], message: str) -> None:
    row["tests"] |= changes
    with pytest.raises(TaskError) as caught:
        load(row)
    assert f"(task 't'): {message}" in str(caught.value)


def test_a_row_of_swebench_in_our_own_form(row: dict[str, Any], load: Load) -> None:
    row["tests"] = {"fail_to_pass": ["a"], "runner": "swebench"}
    row["metadata"] = {"swebench": ROW}
    with pytest.raises(TaskError, match="'workdir' is missing: where the image has the repository"):
        load(row)
    assert load(row | {"workdir": "/testbed"}).metadata == {"swebench": ROW}


def test_a_harbor_folder_removes_nothing_outside(tmp_path: Path) -> None:
    folder = tmp_path / "t"
    for path in ("environment/workspace", "tests/hidden"):
        (folder / path).mkdir(parents=True)
    (folder / "task.toml").touch()
    (folder / "instruction.md").write_text("x\n")
    (folder / "tests" / "hidden" / "test_a.py").touch()
    spec = {"fail_to_pass": ["a"], "paths": ["test_a.py"], "files": ["test_a.py"], "removed": ["../../../x"]}
    (folder / "tests" / "spec.json").write_text(json.dumps(spec))
    with pytest.raises(TaskError, match=r"task 't': 'tests\.removed': '\.\./\.\./\.\./x' must be a path"):
        load_task_set(folder)


def grade(task: Task, command: str, tmp_path: Path) -> float:
    backend = LocalSandboxBackend(tmp_path / "boxes")
    sandbox = backend.create(task, "agent")
    try:
        assert sandbox.run(command, env={}, timeout_s=20).exit_code == 0
        return TestsGrader(backend).grade(task, sandbox, timeout_s=60).reward
    finally:
        sandbox.destroy()


@pytest.mark.parametrize(
    "command",
    [
        "rm -r old; ln -s {victim} old",  # the removed test would be removed there
        "rm -r old; echo x > old",
        "rm old/test_old.py; mkdir old/test_old.py; echo x > old/test_old.py/y",
        "mkdir test_m.py; echo x > test_m.py/x",
        "ln -s {victim}/test_old.py test_m.py",
    ],
)
def test_what_lies_in_the_way_of_hidden_tests(row: dict[str, Any], load: Load, tmp_path: Path, command: str) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "test_old.py").write_text("of this machine")
    command = command.format(victim=victim)
    assert grade(load(row), command, tmp_path) == 0.0
    assert grade(load(row), f"{command}; sed -i s/1/2/ m.py", tmp_path) == 1.0
    assert [(path.name, path.read_text()) for path in victim.iterdir()] == [("test_old.py", "of this machine")]


@pytest.mark.parametrize("name", ["removed", "files"])
@pytest.mark.parametrize("is_absolute", [True, False])
def test_a_task_made_in_code_reaches_nothing_outside(
    row: dict[str, Any], load: Load, tmp_path: Path, name: str, is_absolute: bool
) -> None:
    task, victim = load(row), tmp_path / "victim"
    victim.write_text("of this machine")
    assert task.tests is not None
    # from the work folder of a session, and so from the hidden files, far enough up to be at the root
    path = str(victim) if is_absolute else f"{'../' * 30}{victim.relative_to('/')}"
    task = replace(task, tests=replace(task.tests, **{name: (path,)}))
    with pytest.raises(GradeError, match="leads out of the work folder"):
        grade(task, "true", tmp_path)
    assert victim.read_text() == "of this machine"


@pytest.mark.parametrize("path", ["{victim}", "../victim/test_old.py", "old/test_old.py"])
@pytest.mark.parametrize("name", ["removed", "files"])
def test_a_task_folders_own_runner_reaches_nothing_outside(tmp_path: Path, name: str, path: str) -> None:
    root, victim = tmp_path / "root", tmp_path / "victim"
    root.mkdir()
    victim.mkdir()
    (victim / "test_old.py").write_text("of this machine")
    (root / "old").symlink_to(victim)
    spec = {"removed": [], "files": [], name: [path.format(victim=victim / "test_old.py")]}
    with pytest.raises(ValueError, match="leads out of"):
        run_tests.lay_tests(root, spec, tmp_path)
    assert (victim / "test_old.py").read_text() == "of this machine"


def test_a_work_tree_that_is_not_there_is_named_with_its_task(tmp_path: Path) -> None:
    task = Task(id="lost", instruction="x", workspace=str(tmp_path / "none"))
    with pytest.raises(SandboxError, match=r"task lost: the work tree .*/none is no folder"):
        LocalSandboxBackend(tmp_path / "boxes").prepare([task])


def test_a_task_that_asks_for_more_than_there_is() -> None:
    def ask(task_id: str, **wishes: float) -> Task:
        return Task(id=task_id, instruction="x", metadata={"harbor": {"folder": "/", **wishes}})

    tasks = [
        Task(id="own", instruction="x"),
        ask("a", memory_mb=4096),
        ask("b", memory_mb=8192),
        ask("c", memory_mb=9000),
    ]
    with pytest.raises(
        ConfigError, match=r"task 'b' asks for memory_mb 8192.* has 4096: set sandbox_memory_mb to 9000"
    ):
        check_limits(tasks, Limits(), LIMITED)
    check_limits(tasks, Limits(memory_mb=9000), LIMITED)
    for wish, setting in (("cpus", "sandbox_cpus"), ("storage_mb", "sandbox_disk_mb")):
        with pytest.raises(ConfigError, match=setting):
            check_limits([ask("d", **{wish: 10000})], Limits(), LIMITED)
    # where nothing is limited, everything is there
    nothing = replace(LIMITED, limits_memory=False, limits_disk=False)
    check_limits(tasks, Limits(), nothing)


def test_specs_that_were_always_fine_still_are(row: dict[str, Any], load: Load) -> None:
    """Tests that the agent sees decide as well: its edits of them are dropped."""
    row["tests"] = {"fail_to_pass": ["a"], "paths": ["test_m.py"]}
    assert load(row).tests == TestSpec(fail_to_pass=("a",), paths=("test_m.py",))
