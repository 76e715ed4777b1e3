"""Owners of session folders: what is left by the dead goes, whatever is in it, and no file ends a process."""

import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from polar_trl.errors import SandboxError
from polar_trl.sandbox import owner
from polar_trl.sandbox.owner import (
    OWNER_FILE,
    build_helper_mark,
    build_owner_tag,
    is_dead,
    is_running,
    list_mounts,
    make_session_folder,
    reap_session_folders,
    remove_session_folder,
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "state").mkdir(mode=0o700)
    return tmp_path / "state"


@pytest.fixture
def bystander() -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def build_dead_tag() -> str:
    """Build the tag of a process of this machine that has ended."""
    with subprocess.Popen(["sleep", "600"]) as process:
        tag = build_owner_tag(process.pid)
        process.kill()
    assert is_dead(tag)
    return tag


def leave(root: Path, name: str = "left") -> Path:
    """Make the folder of a session whose owner is dead."""
    folder = make_session_folder(root, name)
    (folder / OWNER_FILE).write_text(build_dead_tag())
    return folder


def test_only_the_folders_of_the_dead_are_removed(root: Path) -> None:
    live, left = make_session_folder(root, "live"), leave(root)
    assert reap_session_folders(root) == [left.name]
    assert list(root.iterdir()) == [live]
    assert reap_session_folders(root / "none") == []


def test_what_another_container_left_is_removed_once_it_has_ended(root: Path) -> None:
    """A container is a process namespace here."""
    make = f"print(make_session_folder(Path({str(root)!r}), 's'), flush=True)"
    code = f"from polar_trl.sandbox.owner import *; {make}; input()"
    command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as container:
        assert container.stdout is not None
        folder = Path(container.stdout.readline().strip())
        assert folder.is_dir()
        assert reap_session_folders(root) == []
        container.kill()
        container.wait()
    deadline = time.monotonic() + 30
    while not (reaped := reap_session_folders(root)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert reaped == [folder.name]


@pytest.mark.parametrize("name", ["helper", "owner"])
def test_a_process_is_not_ended_because_a_file_names_it(
    root: Path, bystander: "subprocess.Popen[bytes]", name: str
) -> None:
    """Folders of older versions had both where agents could write them."""
    folder = leave(root)
    (folder / "helper").write_text(build_owner_tag(bystander.pid))
    if name == "owner":
        (folder / OWNER_FILE).write_text(build_owner_tag(bystander.pid))
    assert reap_session_folders(root) == ([] if name == "owner" else [folder.name])
    assert bystander.poll() is None and folder.exists() == (name == "owner")


def test_a_helper_of_a_dead_session_is_ended_and_no_other(root: Path) -> None:
    dead, living = leave(root, "dead"), make_session_folder(root, "living")
    marks = [build_helper_mark(dead), build_helper_mark(living), f"{build_helper_mark(dead)}x"]
    helpers = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", mark]) for mark in marks]
    try:
        for helper, mark in zip(helpers, marks, strict=True):
            while mark not in Path(f"/proc/{helper.pid}/cmdline").read_text():
                time.sleep(0.01)  # it is still a copy of this process
        assert reap_session_folders(root) == [dead.name]
        assert helpers[0].wait(60) == -9
        assert [helper.poll() for helper in helpers[1:]] == [None, None]
    finally:
        for helper in helpers:
            helper.kill()
            helper.wait()


def plant_link(path: Path) -> None:
    path.symlink_to("/dev/zero")


def plant_large(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


@pytest.mark.parametrize(
    "plant",
    [
        os.mkfifo,
        Path.mkdir,
        plant_link,
        plant_large,
        lambda path: path.write_bytes(b"\xff\xfe:\0"),
        lambda path: path.write_text("x:y:z:²:1"),
        lambda path: path.write_text(f"{build_dead_tag().rsplit(':', 2)[0]}:{'9' * 200}:1"),
        lambda path: path.write_text(f"{build_dead_tag()}\n../../etc"),
    ],
)
def test_what_is_no_tag_says_nothing(root: Path, plant: Callable[[Path], None]) -> None:
    folder = leave(root)
    (folder / OWNER_FILE).unlink()
    plant(folder / OWNER_FILE)
    other = leave(root, "other")
    assert reap_session_folders(root) == [other.name]
    assert folder.exists()


@pytest.mark.parametrize("tag", ["", ":::1:1", "a:b:c:d:e", f"{'0' * 12}:0:1:-1:1", "0" * 5000])
def test_tags_that_name_no_process_are_neither_dead_nor_running(tag: str) -> None:
    assert not is_dead(tag) and not is_running(tag)


def test_a_link_or_a_foreign_folder_in_the_place_of_a_session_stays(root: Path, tmp_path: Path) -> None:
    outside = leave(tmp_path / "elsewhere")
    (outside / "precious").touch()
    (root / "link").symlink_to(outside)
    foreign = leave(root, "foreign")
    os.chown(foreign, 12345, 12345)
    assert reap_session_folders(root) == []
    assert (outside / "precious").exists() and foreign.exists()


HARD = {
    "locked": "mkdir -p a/b; touch a/b/c; chmod 000 a/b a",
    "immutable": "mkdir a; touch a/b; chattr +i a/b a",
    "links": "ln -s {outside} a; mkdir b; ln -s {outside} b/c; ln -s / d",
    "odd names": "touch -- '-rf' \"$(printf 'a\\nb')\" \"$(printf '\\xff')\" ' '; mkdir -- '-x'; mkfifo f",
    "mount": "mkdir 'ä b'; mount --bind {outside} 'ä b'; mount --bind {outside} 'ä b'",
    "mount of /": "mkdir r; mount --bind / r; mount --bind {outside} r/mnt",
}


@pytest.mark.parametrize("kind", HARD)
def test_what_resists_is_removed_and_nothing_outside(root: Path, tmp_path: Path, kind: str) -> None:
    outside = tmp_path / "outside"
    (outside / "in").mkdir(parents=True, mode=0o750)
    (outside / "in" / "precious").touch(mode=0o640)
    folder = leave(root)
    try:
        subprocess.run(["bash", "-ec", HARD[kind].format(outside=outside)], cwd=folder, check=True)
        assert reap_session_folders(root) == [folder.name]
        assert list(root.iterdir()) == [] and list_mounts(root) == []
    finally:
        for mount in reversed(list_mounts(root)):  # before pytest removes what is below them
            subprocess.run(["umount", "-l", mount], check=True)
    assert stat.S_IMODE((outside / "in").stat().st_mode) == 0o750
    assert stat.S_IMODE((outside / "in" / "precious").stat().st_mode) == 0o640


def test_a_removal_that_is_cut_short_is_finished_by_the_next_start(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = leave(root)
    for name in ("a", "disk", "z"):
        (folder / name / "work").mkdir(parents=True)
    empty, calls = owner._empty, []

    def empty_once(*args: int, **named: str) -> list[str]:
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return empty(*args, **named)

    monkeypatch.setattr(owner, "_empty", empty_once)
    with pytest.raises(KeyboardInterrupt):
        remove_session_folder(folder)
    assert len(calls) == 2 and folder.exists()
    assert reap_session_folders(root) == [folder.name]
    assert not folder.exists()


def test_a_tree_of_twenty_thousand_levels_is_removed(root: Path) -> None:
    folder = leave(root)
    nest = "import os\nfor _ in range(20_000):\n    os.mkdir('d')\n    os.chdir('d')\n"
    subprocess.run([sys.executable, "-c", nest], cwd=folder, check=True)
    assert reap_session_folders(root) == [folder.name]
    assert list(root.iterdir()) == []


def test_a_folder_that_became_a_link_is_not_followed(root: Path, tmp_path: Path) -> None:
    folder = make_session_folder(root, "s")
    outside = tmp_path / "outside"
    folder.rename(outside)
    outside.chmod(0o500)
    folder.symlink_to(outside)
    remove_session_folder(folder)
    assert list(root.iterdir()) == []
    assert stat.S_IMODE(outside.stat().st_mode) == 0o500 and (outside / OWNER_FILE).exists()


def spoil_by_link(root: Path) -> None:
    root.rename(root.with_name("real"))
    root.symlink_to(root.with_name("real"))


def spoil_by_file(root: Path) -> None:
    root.rmdir()
    root.touch()


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (spoil_by_link, "is no folder"),
        (spoil_by_file, "is no folder"),
        (lambda root: os.chown(root, 12345, 12345), "belongs to another user"),
        (lambda root: root.chmod(0o1777), "can be written by others (its mode is 1777, and 700 is wanted)"),
    ],
)
def test_a_state_folder_that_others_made_is_refused(root: Path, spoil: Callable[[Path], None], fault: str) -> None:
    """Its name can be guessed, and /tmp is everybody's."""
    spoil(root)
    for use in (lambda: make_session_folder(root, "s"), lambda: reap_session_folders(root)):
        with pytest.raises(SandboxError) as raised:
            use()
        assert fault in str(raised.value) and "set TMPDIR to a folder of your own" in str(raised.value)


def test_an_empty_folder_without_a_tag_goes_after_a_while(root: Path) -> None:
    young, old, full = (root / name for name in ("young", "old", "full"))
    for folder in (young, old, full):
        folder.mkdir()
    shutil.copy(__file__, full)
    for folder in (old, full):
        os.utime(folder, (0, 0))
    assert reap_session_folders(root) == ["old"]
    assert sorted(root.iterdir()) == [full, young]


def test_a_link_that_takes_a_folders_place_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (outside := tmp_path / "outside").mkdir(mode=0o755)
    (inside := tmp_path / "base" / "inside").mkdir(parents=True)

    def list_and_swap(entries: Iterator[os.DirEntry[str]], number: int) -> list[os.DirEntry[str]]:
        found = list(entries)
        if found and not inside.is_symlink():
            inside.rmdir()
            inside.symlink_to(outside)
        return found

    monkeypatch.setattr(owner, "islice", list_and_swap)
    with pytest.raises(SandboxError, match="cannot remove"):
        owner.remove_tree(tmp_path / "base")
    assert stat.S_IMODE(outside.stat().st_mode) == 0o755
