"""Task files: bad rows are named, and every ladder task is solvable and not solved by doing nothing."""

import json
from pathlib import Path
from typing import Any

import pytest

from polar_trl.errors import ConfigError, TaskError
from polar_trl.sandbox.local import LocalSandboxBackend
from polar_trl.tasks.jsonl import load_tasks, save_tasks
from polar_trl.tasks.shell_kinds import KINDS
from polar_trl.tasks.shell_ladder import FAMILIES, build_tasks, grade, main
from polar_trl.types import Task


def test_round_trip(tmp_path: Path) -> None:
    tasks = build_tasks(list(KINDS), 10, seed=3)
    save_tasks(tmp_path / "t.jsonl", tasks)
    assert load_tasks(tmp_path / "t.jsonl") == tasks
    assert load_tasks(tmp_path / "t.jsonl", limit=2) == tasks[:2]


def test_separators_of_unicode_and_windows_files_keep_their_rows(tmp_path: Path) -> None:
    tasks = [Task(id="a", instruction="one\u2028two\x85three\r\n", files={"é": "\u2029"}, agent_timeout_s=2.5)]
    save_tasks(tmp_path / "t.jsonl", tasks)
    assert load_tasks(tmp_path / "t.jsonl") == tasks
    (tmp_path / "w.jsonl").write_bytes(b'\xef\xbb\xbf{"id": "a", "instruction": "x"}\r\n\r\n')
    assert load_tasks(tmp_path / "w.jsonl") == [Task(id="a", instruction="x")]


def test_paths_are_relative_to_the_task_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("set/tree", "set/hidden"):
        Path(name).mkdir(parents=True)
    Path("set/hidden/test_a.py").write_text("")
    Path("set/gold.patch").write_text("")
    row: dict[str, Any] = {
        "id": "a",
        "instruction": "x",
        "workspace": "tree",
        "build_context": str(tmp_path / "set"),
        "tests": {
            "fail_to_pass": ["test_a.py::a"],
            "folder": "hidden",
            "files": ["test_a.py"],
            "paths": ["test_a.py"],
        },
    }
    row["tests"]["gold_patch"] = "gold.patch"
    Path("set/t.jsonl").write_text(json.dumps(row))
    for path in (Path("set/t.jsonl"), tmp_path / "set" / "t.jsonl"):
        (task,) = load_tasks(path)
        assert task.tests is not None
        named = (task.workspace, task.build_context, task.tests.folder, task.tests.gold_patch, task.tests.requirements)
        assert named == (*(str(tmp_path / "set" / name) for name in ("tree", ".", "hidden", "gold.patch")), None)
    Path("set/t.jsonl").write_text(json.dumps(row | {"workspace": "set/tree"}))
    with pytest.raises(TaskError, match=r"'workspace': there is no folder '.*/set/set/tree' on this machine"):
        load_tasks(Path("set/t.jsonl"))


def test_a_limit_below_one_is_refused(tmp_path: Path) -> None:
    save_tasks(tmp_path / "t.jsonl", [Task(id="a", instruction="x")])
    with pytest.raises(ConfigError, match="limit is 0; it must be at least 1"):
        load_tasks(tmp_path / "t.jsonl", limit=0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no task"),
        ("{", r":1: not valid JSON"),
        ("[]", r":1: a task is a JSON object, not list"),
        ('{"id": "a"}', r"\(task 'a'\): 'instruction' is missing or empty"),
        ('{"instruction": "x"}', r":1: 'id' is missing or empty"),
        ('{"id": "a", "instruction": "x", "instructoin": "y"}', "did you mean 'instruction'"),
        ('{"id": "a", "instruction": 3}', "'instruction' must be text, not 3"),
        ('{"id": "a", "instruction": "x", "files": {"p": 1}}', "'files' must be an object of texts"),
        ('{"id": "a", "instruction": "x", "agent_timeout_s": -1}', "'agent_timeout_s' must be a number of seconds"),
        (
            '{"id": "a", "instruction": "x", "agent_timeout_s": Infinity}',
            "'agent_timeout_s' must be a number of seconds",
        ),
        ('{"id": "a", "instruction": "x"}\n\n{"id": "a", "instruction": "y"}', r":3: the id 'a' is there twice"),
    ],
)
def test_bad_rows(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(TaskError, match=message):
        load_tasks(path)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="no task file at"):
        load_tasks(tmp_path / "none.jsonl")


@pytest.mark.parametrize("kind", list(KINDS))
def test_gold_solves_and_nothing_does_not(tmp_path: Path, kind: str) -> None:
    for task in build_tasks([kind], 3, seed=1):
        sandbox = LocalSandboxBackend(tmp_path).create(task, "s")
        assert grade(task, sandbox) <= 0.0
        assert sandbox.run(task.metadata["gold"], env={}, timeout_s=20).exit_code == 0
        assert grade(task, sandbox) == 1.0
        # deleting or changing an input is not part of any solution
        if task.files:
            sandbox.run("for f in $(find . -type f); do echo more >> $f; done", env={}, timeout_s=20)
            assert grade(task, sandbox) < 0.5
        sandbox.destroy()


@pytest.mark.parametrize(
    ("kind", "command", "reward"),
    [
        ("rename", "cp {0} {1}", 0.2),  # the old name is still there
        ("move_into", "mkdir {1} && cp {0} {1}", 0.2),
        ("join", "cat {0} > {1}", 0.3),
        ("find_lines", "cat {0} > found.txt", 0.3),
        ("find_file", "grep . *.txt > found.out", 0.2),
        ("count_matches", "wc -l < {0} > found.txt", 0.3),
        ("replace", "echo more >> {0}", 0.1),
        ("write_over", "rm {0}", 0.0),
        ("delete_line", "touch {0}", 0.0),
        ("run_script", "cat {0} > out.txt", 0.3),
        ("repair", "echo true > {0}", 0.1),
        ("repair_and_run", "sh {0} > out.txt 2> /dev/null", 0.1),
    ],
)
def test_a_wrong_solution_earns_little(tmp_path: Path, kind: str, command: str, reward: float) -> None:
    for task in build_tasks([kind], 5, seed=2):
        sandbox = LocalSandboxBackend(tmp_path).create(task, "s")
        wanted = next(iter(task.metadata["expected"])).partition("/")[0]
        sandbox.run(command.format(next(iter(task.files)), wanted), env={}, timeout_s=20)
        assert grade(task, sandbox) <= reward + 0.1
        sandbox.destroy()


def test_an_edit_earns_by_what_it_changed(tmp_path: Path) -> None:
    """A file that is nearly right from the start is worth nothing until it is nearer."""
    task = Task(
        id="edit",
        instruction="Replace red by blue",
        files={"sun.txt": "one\nred\ntwo\n"},
        metadata={"expected": {"sun.txt": "one\nblue\ntwo"}},
    )
    sandbox = LocalSandboxBackend(tmp_path).create(task, "s")
    rewards = []
    for text in ("one\nred\ntwo\n", "one\nred\ntwo\nthree\n", "one\nblu\ntwo\n", "one\nblue\ntwo\n"):
        sandbox.put("sun.txt", text.encode())
        rewards.append(round(grade(task, sandbox), 2))
    assert rewards[0] == 0.0 and rewards[1] == 0.1 and 0.2 < rewards[2] <= 0.4 and rewards[3] == 1.0
    sandbox.destroy()


def test_a_right_input_that_is_spoiled_is_graded(tmp_path: Path) -> None:
    """Nothing could be gained there, and no reward is not 0."""
    task = Task(
        id="keep",
        instruction="Leave sun.txt and write moon.txt",
        files={"sun.txt": "red\n"},
        metadata={"expected": {"sun.txt": "red", "moon.txt": "blue"}},
    )
    sandbox = LocalSandboxBackend(tmp_path).create(task, "s")
    sandbox.put("sun.txt", b"green\n")
    assert grade(task, sandbox) == pytest.approx(0.05)
    sandbox.destroy()


def test_splits_share_no_task_and_no_answer() -> None:
    """Whatever the seeds: a test set made later is held out from a model that was trained on any training set."""
    found: dict[str, set[str]] = {"train": set(), "test": set()}
    for split in ("train", "test"):
        for seed in range(25):
            for task in build_tasks([*FAMILIES, "copy_file", "count_lines"], 42, seed, split=split):  # type: ignore[arg-type]
                expected = task.metadata["expected"].items()
                found[split] |= {task.instruction, *(text.strip() or path for path, text in expected)}
    assert min(map(len, found.values())) > 1500 and not found["train"] & found["test"]


def test_the_families_have_three_levels_each() -> None:
    assert list(FAMILIES) == ["files", "search", "edit", "fix"]
    assert all([KINDS[name].level for name in names] == [1, 2, 3] for names in FAMILIES.values())


def test_partial_credit_stays_below_half(tmp_path: Path) -> None:
    (task,) = build_tasks(["write_word"], 1, seed=1)
    sandbox = LocalSandboxBackend(tmp_path).create(task, "s")
    ((path, word),) = task.metadata["expected"].items()
    sandbox.put(path, b"")
    empty = grade(task, sandbox)
    sandbox.put(path, word[:-1].encode())
    near = grade(task, sandbox)
    assert 0 < empty < near <= 0.4
    sandbox.destroy()


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_flood_in_the_answer_is_a_wrong_answer(tmp_path: Path, kind: str) -> None:
    """An agent must not be able to escape its reward by writing too much: no reward is not 0."""
    (task,) = build_tasks([kind], 1, seed=1)
    sandbox = LocalSandboxBackend(tmp_path).create(task, "s")
    for path in task.metadata["expected"]:
        flood = f"mkdir -p $(dirname {path}) && head -c 2000000 /dev/zero > {path}"
        assert sandbox.run(flood, env={}, timeout_s=20).exit_code == 0
    assert 0 < grade(task, sandbox) <= 0.4
    sandbox.destroy()


def test_an_unknown_kind() -> None:
    with pytest.raises(ConfigError, match="no task kind 'dance'"):
        build_tasks(["dance"], 1, seed=0)
    with pytest.raises(ConfigError, match="no task kinds given; there are files, search, edit, fix, copy_command, "):
        build_tasks([], 1, seed=0)


def test_the_generator_as_a_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "new" / "t.jsonl"
    options = ["--num", "5", "--seed", "4", "--output", str(output)]
    monkeypatch.setattr("sys.argv", ["shell_ladder", "--kinds", "touch,count_lines", *options])
    main()
    assert load_tasks(output) == build_tasks(["touch", "count_lines"], 5, seed=4)
    monkeypatch.setattr("sys.argv", ["shell_ladder", "--kinds", "edit", "--split", "test", *options])
    main()
    assert load_tasks(output) == build_tasks(["replace", "write_over", "delete_line"], 5, seed=4, split="test")
    monkeypatch.setattr("sys.argv", ["shell_ladder", "--kinds", "dance", *options])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "error: no task kind 'dance'; there are files, search, edit, fix, copy_command" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["shell_ladder", "--kinds", "edit", "--output", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert f"Is a directory: '{tmp_path}" in capsys.readouterr().err


def test_the_committed_set_is_what_its_generator_makes() -> None:
    path = Path(__file__).resolve().parents[2] / "polar_trl" / "configs" / "tasks" / "shell_ladder.jsonl"
    assert load_tasks(path) == build_tasks(["copy_command", "copy_file"], 96, seed=0)
