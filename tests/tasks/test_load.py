"""The form of a source of tasks is recognized by its content; any other source is refused."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from polar_trl.errors import ConfigError, TaskError
from polar_trl.tasks.load import load_task_set

ROW: dict[str, Any] = {
    "instance_id": "org__repo-1",
    "repo": "org/repo",
    "base_commit": "abc",
    "problem_statement": "It breaks.",
    "patch": "diff --git a/a.py b/a.py\n",
    "test_patch": "diff --git a/test_a.py b/test_a.py\n",
    "FAIL_TO_PASS": ["t::a"],
    "PASS_TO_PASS": [],
}
OWN: dict[str, Any] = {"id": "own", "instruction": "Do it."}


def write_lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_harbor(folder: Path) -> Path:
    (folder / "environment" / "workspace").mkdir(parents=True)
    (folder / "tests").mkdir()
    (folder / "tests" / "test.sh").touch()
    (folder / "task.toml").write_text('[environment]\nnetwork_mode = "no-network"\n')
    (folder / "instruction.md").write_text("Do it.\n")
    return folder


def list_ids(source: str | Path, **options: Any) -> list[str]:
    return [task.id for task in load_task_set(source, **options)]


def test_lines_of_either_kind(tmp_path: Path) -> None:
    assert list_ids(write_lines(tmp_path / "own.jsonl", OWN, {**OWN, "id": "next"})) == ["own", "next"]
    assert list_ids(write_lines(tmp_path / "rows.jsonl", ROW)) == ["org__repo-1"]
    # SkyRL puts the row into a column
    assert list_ids(write_lines(tmp_path / "skyrl.jsonl", {"data_source": "x", "instance": ROW})) == ["org__repo-1"]
    assert list_ids(str(tmp_path / "own.jsonl"), limit=1) == ["own"]


def test_files_of_rows_and_folders_of_them(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(json.dumps([ROW]))
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("train", "test"):
        table = pyarrow.Table.from_pylist([{**ROW, "instance_id": name}])
        pyarrow.parquet.write_table(table, folder / f"{name}-00000.parquet")
    assert list_ids(tmp_path / "rows.json") == ["org__repo-1"]
    assert list_ids(folder / "train-00000.parquet") == ["train"]
    assert list_ids(folder) == ["test", "train"]
    assert list_ids(folder, split="train") == ["train"]


def test_harbor_folders(tmp_path: Path) -> None:
    one, _ = make_harbor(tmp_path / "set" / "one"), make_harbor(tmp_path / "set" / "two")
    assert list_ids(one) == ["one"]
    assert list_ids(tmp_path / "set") == ["one", "two"]
    assert list_ids(tmp_path / "set", limit=1) == ["one"]
    # the lines that lie beside them are no tasks
    write_lines(tmp_path / "set" / "notes.jsonl", ROW)
    assert list_ids(tmp_path / "set") == ["one", "two"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**OWN, "colour": 1}, "(task 'own'): unknown field 'colour'"),
        ({**ROW, "base_commit": ""}, "(task 'org__repo-1'): 'base_commit' must be text"),
        ({**ROW, "FAIL_TO_PASS": 3}, "(task 'org__repo-1'): 'FAIL_TO_PASS' must be a list of texts, not 3"),
        ([1], "a task is a JSON object, not list"),
    ],
)
def test_a_bad_row_is_refused_with_its_id_and_field(tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(TaskError) as caught:
        load_task_set(write_lines(tmp_path / "t.jsonl", row))
    assert message in str(caught.value)


def test_what_is_no_source(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"no task file at .*nope\.jsonl"):
        load_task_set(tmp_path / "nope.jsonl")
    with pytest.raises(TaskError, match=r"holds no tasks: neither a task\.toml"):
        load_task_set(tmp_path)
    for name in ("nothing", "a/b/c", "./here/there"):
        with pytest.raises(ConfigError, match="no such file or folder, and no data set of that name"):
            load_task_set(name)
    (tmp_path / "broken.jsonl").write_text("{\n")
    with pytest.raises(TaskError, match=r"broken\.jsonl:1: not valid JSON"):
        load_task_set(tmp_path / "broken.jsonl")
