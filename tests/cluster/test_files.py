"""Files of tasks on their way to a node."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from small_package import make_task

from polar_trl.cluster.files import find_place, list_roots, move, pack, unpack
from polar_trl.errors import ConfigError
from polar_trl.types import Task


def test_a_task_finds_its_files_where_they_were_laid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = make_task(tmp_path / "one")
    os.chmod(tmp_path / "one/tree/src/pkg/m.py", 0o750)
    os.symlink("src/pkg", tmp_path / "one/tree/link")
    harbor = replace(Task(id="h", instruction="x"), metadata={"harbor": {"folder": str(tmp_path / "one")}, "a": 1})
    beside = replace(harbor, id="b", metadata={}, workspace=str(tmp_path / "one-more"))
    (tmp_path / "one-more").mkdir()
    assert list_roots([task]) == [str(tmp_path / "one/hidden"), str(tmp_path / "one/tree")]
    roots = list_roots([task, harbor, beside])
    assert roots == [str(tmp_path / "one-more"), str(tmp_path / "one")]
    monkeypatch.setenv("POLAR_TRL_CACHE", str(tmp_path / "node"))
    packed = [pack(root) for root in roots]
    for item in (*packed, *packed):  # again does no harm
        unpack(item)
    places = {item.path: find_place(item.path, item.digest) for item in packed}
    moved = move(task, places)
    assert moved.workspace is not None and moved.tests is not None
    module = Path(moved.workspace) / "src/pkg/m.py"
    assert module.is_relative_to(tmp_path / "node")
    before = (tmp_path / "one/tree/src/pkg/m.py").stat()
    assert (module.stat().st_mode, int(module.stat().st_mtime)) == (before.st_mode, int(before.st_mtime))
    assert os.readlink(Path(moved.workspace) / "link") == "src/pkg"
    assert (Path(moved.tests.folder) / "tests/test_m.py").is_file()
    assert moved.tests.gold_patch is None
    assert move(harbor, places).metadata == {"harbor": {"folder": str(places[str(tmp_path / "one")])}, "a": 1}
    assert move(Task(id="plain", instruction="x"), places) == Task(id="plain", instruction="x")


def test_a_folder_that_is_named_by_a_link_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLAR_TRL_CACHE", str(tmp_path / "node"))
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/file").write_text("1")
    (tmp_path / "link").symlink_to("tree")
    packed = pack(str(tmp_path / "link"))
    unpack(packed)
    assert (find_place(packed.path, packed.digest) / "file").read_text() == "1"
    assert not find_place(packed.path, packed.digest).is_symlink()


def test_what_changes_is_sent_anew(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    first = pack(str(tmp_path / "a"))
    assert pack(str(tmp_path / "a")).digest == first.digest
    (tmp_path / "a").write_text("2")
    assert pack(str(tmp_path / "a")).digest != first.digest


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a task's .*gone cannot be read"):
        pack(str(tmp_path / "gone"))
