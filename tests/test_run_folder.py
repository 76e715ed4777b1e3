"""A run's folder: one owner, who is named; files that a full or read-only disk does not tear."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from disks import mounted

from polar_trl.errors import ConfigError, DiskError
from polar_trl.run_folder import (
    LOCK_FILE,
    FolderLock,
    append_lines,
    disk_errors,
    own_folder,
    require_room,
    write_whole,
)

HOLD = """
import sys, time
from pathlib import Path
from polar_trl.run_folder import own_folder
own_folder(Path(sys.argv[1]))
print("mine", flush=True)
time.sleep(600)
"""


@pytest.fixture
def owner(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """A process that has the folder RUN."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "mine\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_another_process_is_named(tmp_path: Path, owner: "subprocess.Popen[str]") -> None:
    before = (tmp_path / "run" / LOCK_FILE).read_bytes()
    for _ in range(2):
        with pytest.raises(ConfigError) as refused:
            FolderLock(tmp_path / "run")
        said = str(refused.value)
        assert said.startswith(
            f"output_dir {tmp_path / 'run'} is being written by another process (process {owner.pid} on "
        )
        assert f": {Path(sys.executable).name} -c {tmp_path / 'run'})" in said
    assert (tmp_path / "run" / LOCK_FILE).read_bytes() == before


def test_a_stopped_process_keeps_its_folder_and_a_killed_one_does_not(
    tmp_path: Path, owner: "subprocess.Popen[str]"
) -> None:
    owner.send_signal(signal.SIGSTOP)
    while "\nState:\tT" not in Path(f"/proc/{owner.pid}/status").read_text():
        time.sleep(0.01)
    with pytest.raises(ConfigError, match=f"it is stopped, and kill -CONT {owner.pid} lets it go on"):
        FolderLock(tmp_path / "run")
    owner.kill()
    owner.wait()
    with FolderLock(tmp_path / "run"):
        pass


@pytest.mark.parametrize("junk", [b"", b"\0\0", b"[]", b'{"pid": "x"}', b"\xff", b'{"pid": 1e999}'])
def test_an_owner_whose_file_says_nothing(tmp_path: Path, junk: bytes) -> None:
    with FolderLock(tmp_path):
        (tmp_path / LOCK_FILE).write_bytes(junk)
        with pytest.raises(ConfigError, match=r"by another process; wait for its end, end it, or name another"):
            FolderLock(tmp_path)


def test_a_child_does_not_keep_the_folder_of_its_parent(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    (reader, writer), (is_there, there) = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.write(there, b"x")
        os.read(reader, 1)  # until the parent lets it go
        os._exit(0)
    os.read(is_there, 1)
    sleeper = subprocess.Popen(["sleep", "600"])
    try:
        lock.release()
        with FolderLock(tmp_path):
            pass
    finally:
        os.write(writer, b"x")
        os.waitpid(child, 0)
        sleeper.kill()
        sleeper.wait()


def test_a_folder_that_was_removed_is_locked_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    own_folder(folder)
    shutil.rmtree(folder)  # as in a notebook, before the next trainer
    own_folder(folder)
    with pytest.raises(ConfigError, match="is being written by this very process"):
        FolderLock(folder)


def test_folders_that_cannot_be_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    (tmp_path / "taken" / LOCK_FILE).mkdir(parents=True)
    os.mkfifo(tmp_path / "fifo")
    for name in ("loop", "nowhere", "taken", "fifo", "x" * 300, "fifo/below"):
        with pytest.raises(ConfigError, match="name another output_dir"):
            own_folder(tmp_path / name)


def test_a_group_may_go_on_with_a_run_of_its_group(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        with FolderLock(tmp_path):
            assert (tmp_path / LOCK_FILE).stat().st_mode & 0o777 == 0o664
    finally:
        os.umask(before)


def test_a_process_may_ask_for_its_own_folder_again(tmp_path: Path) -> None:
    own_folder(tmp_path / "run")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    own_folder(tmp_path / "link")
    with pytest.raises(ConfigError, match=f"this very process \\(process {os.getpid()} on "):
        FolderLock(tmp_path / "run")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", "64k") as disk:
        yield disk


def fill(disk: Path) -> None:
    with (disk / "fill").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass


def test_a_full_disk_tears_no_line_and_no_file(small_disk: Path) -> None:
    log, settings = small_disk / "log.jsonl", small_disk / "settings.json"
    append_lines(log, b"a" * 3000 + b"\n")
    write_whole(settings, b"{}")
    fill(small_disk)
    for write in (lambda: append_lines(log, b"b" * 8000 + b"\n"), lambda: write_whole(settings, b"c" * 8000)):
        with pytest.raises(DiskError, match="cannot be written: No space left on device"), disk_errors(small_disk):
            write()
    assert log.read_bytes() == b"a" * 3000 + b"\n"
    assert settings.read_bytes() == b"{}"
    assert sorted(path.name for path in small_disk.iterdir()) == ["fill", "log.jsonl", "settings.json"]
    with pytest.raises(DiskError, match=f"{small_disk} cannot be written: No space left on device"):
        require_room(small_disk)
    (small_disk / "fill").unlink()
    append_lines(log, b"c\n")
    assert log.read_bytes() == b"a" * 3000 + b"\nc\n"


def test_a_disk_that_has_become_read_only(small_disk: Path) -> None:
    append_lines(small_disk / "log.jsonl", b"a\n")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(DiskError, match="cannot be written: Read-only file system"), disk_errors(small_disk):
        append_lines(small_disk / "log.jsonl", b"b\n")
    with pytest.raises(DiskError, match="cannot be written: Read-only file system"):
        require_room(small_disk)
    with pytest.raises(ConfigError, match="cannot be written"):
        FolderLock(small_disk)


def test_what_libraries_raise_on_a_full_disk(small_disk: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq
    import torch
    from safetensors.torch import save_file

    values = torch.zeros(100_000)
    table = pa.table({"a": values.numpy() + range(100_000)})
    writers = (
        lambda: torch.save(values, small_disk / "a.pt"),
        lambda: torch.save(values, small_disk / "a.pt", _use_new_zipfile_serialization=False),
        lambda: save_file({"a": values}, small_disk / "a.safetensors"),
        lambda: pq.write_table(table, small_disk / "a.parquet"),
    )
    for write in writers:
        with pytest.raises(DiskError, match="cannot be written: No space left on device"), disk_errors(small_disk):
            write()
        for path in small_disk.iterdir():
            path.unlink()
    # what is no disk's fault stays what it is, on a full disk too
    fill(small_disk)
    with pytest.raises(ZeroDivisionError), disk_errors(small_disk):
        _ = 1 / 0


def test_a_quota_that_is_used_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file system with quotas is here: the system's answer is put in its place."""

    def refuse(*_: object) -> None:
        raise OSError(122, os.strerror(122))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(DiskError, match="cannot be written: Disk quota exceeded"):
        require_room(tmp_path)
