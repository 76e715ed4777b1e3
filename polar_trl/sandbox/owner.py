"""Tag sandboxes with the process that owns them, and remove those of dead owners.

A process id alone is used again by the system; together with the time that the process started, the machine's boot
and the namespace of the id, it names one process for ever. A process that cannot be seen from here is never called
dead: one of another machine, whose engine is shared, or of another container on this one. But the tag's file of a
session folder is locked (flock) while its owner lives, and the kernel keeps that lock for all containers: so what an
earlier life of a container left on a disk that was kept is removed as well.

The tag of a session folder is a file beside the part that agents see (`folder.DISK`). Nothing is killed because a file
says so: helpers are found by their own command lines, which name the session.
"""

import fcntl
import hashlib
import logging
import os
import re
import secrets
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from polar_trl.errors import SandboxError

logger = logging.getLogger(__name__)

OWNER_FILE = "owner"
UNOWNED_LIFE_S = 60.0
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OCTAL = re.compile(rb"\\([0-7]{3})")
MAX_TAG_BYTES = 256
_LOCKS: dict[Path, BinaryIO] = {}
"""Open files of the session folders of this process."""
_TAG = re.compile(
    r"(?P<machine>[0-9a-f]{12}):(?P<boot>[0-9a-f-]+):(?P<space>[0-9]+):(?P<pid>[0-9]{1,9}):(?P<start>[0-9]+)"
)


def build_owner_tag(pid: int | None = None) -> str:
    """Build the tag of a process of this machine; None is this process."""
    pid = os.getpid() if pid is None else pid
    return ":".join((_read_machine(), _read_boot_id(), _read_pid_namespace(), str(pid), _read_start_ticks(pid)))


def is_running(tag: str) -> bool:
    """Return whether the tag's process runs here; False as well for one that cannot be seen from here."""
    found = _TAG.fullmatch(tag)
    return found is not None and tag == build_owner_tag(int(found["pid"]))


def is_dead(tag: str) -> bool:
    """Return whether the tag's process ran here and is no more, or this machine was booted since."""
    found = _TAG.fullmatch(tag)
    if found is None or found["machine"] != _read_machine():
        return False
    if found["boot"] != _read_boot_id():
        return True
    return found["space"] == _read_pid_namespace() and _read_start_ticks(int(found["pid"])) != found["start"]


def find_state_folder() -> Path:
    """Return the folder that holds this user's sandboxes while they live."""
    return Path(tempfile.gettempdir()) / f"polar-trl-{os.getuid()}"


def make_session_folder(root: Path, session_id: str) -> Path:
    """Make a fresh folder with this process's tag in it. Raises `SandboxError`."""
    label = re.sub(r"[^A-Za-z0-9_.-]", "_", session_id)[:60]
    try:
        if not os.path.lexists(root):
            root.mkdir(parents=True, exist_ok=True, mode=0o700)
        _require_own(root)
        folder = Path(tempfile.mkdtemp(prefix=f"{label}-", dir=root)).resolve()
        (folder / OWNER_FILE).write_text(build_owner_tag())
        _LOCKS[folder] = lock = (folder / OWNER_FILE).open("rb")
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError as error:
        raise SandboxError(f"cannot make a folder for session {session_id}: {error}") from error
    return folder


def build_helper_mark(folder: Path) -> str:
    """Build the last word on the command line of a process that is killed when the session folder is reaped."""
    return f"--session={folder}"


def remove_session_folder(folder: Path) -> None:
    """Unmount whatever is mounted below it, then remove it. Raises `SandboxError` if it cannot be removed."""
    for mount in reversed(list_mounts(folder)):
        subprocess.run(["umount", "-l", "--", mount], capture_output=True, check=False)
    if left := list_mounts(folder):
        raise SandboxError(f"cannot remove {folder}: {left[0]} is mounted in it and cannot be unmounted")
    if folder.is_dir() and not folder.is_symlink():
        for path in folder.iterdir():
            if path.name != OWNER_FILE:  # last: without it nobody would finish what a kill cuts short
                remove_tree(path)
    remove_tree(folder)
    if lock := _LOCKS.pop(folder, None):
        lock.close()


def remove_tree(base: Path) -> None:
    """Remove a folder that an agent wrote to, there or not. Follows no link. Raises `SandboxError`."""
    try:
        if base.is_symlink() or not base.is_dir():
            base.unlink(missing_ok=True)
            return
        try:
            _remove_levels(base)
        except PermissionError:  # root can make files that not even root can remove
            subprocess.run(["chattr", "-R", "-f", "-i", "-a", "--", str(base)], capture_output=True, check=False)
            _remove_levels(base)
    except OSError as error:
        raise SandboxError(f"cannot remove {base}: {error}") from error


def _remove_levels(base: Path) -> None:
    """Remove a folder in time that grows with its content and not with its depth, which can be 100,000 levels.

    Subfolders are moved into one folder of ours before the folder that they were in is removed.
    """
    name = f".{secrets.token_hex(8)}"
    base.chmod(0o700)
    (base / name).mkdir()
    folder, holding = (os.open(path, _FOLDER) for path in (base, base / name))
    try:
        waiting = _empty(folder, holding, keep=name)
        while waiting:
            below = os.open(waiting[-1], _FOLDER, dir_fd=holding)
            try:
                moved = _empty(below, holding)
            finally:
                os.close(below)
            os.rmdir(waiting.pop(), dir_fd=holding)
            waiting += moved
    finally:
        os.close(folder)
        os.close(holding)
    (base / name).rmdir()
    base.rmdir()


def _empty(folder: int, holding: int, keep: str = "") -> list[str]:
    """Remove a folder's files, and move its subfolders but `keep` into another; their names there."""
    moved: list[str] = []
    while True:
        with os.scandir(folder) as entries:
            block = list(islice((entry for entry in entries if entry.name != keep), 10_000))
        if not block:
            return moved
        for entry in block:
            if entry.is_dir(follow_symlinks=False):
                _open_rights(folder, entry.name)  # one without rights cannot be moved
                moved.append(secrets.token_hex(8))
                os.rename(entry.name, moved[-1], src_dir_fd=folder, dst_dir_fd=holding)
            else:
                os.unlink(entry.name, dir_fd=folder)


def _open_rights(folder: int, name: str) -> None:
    """Give a subfolder to its owner, and not what a link leads to that has come into its place since."""
    below = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        os.chmod(f"/proc/self/fd/{below}", 0o700)
    finally:
        os.close(below)


def reap_session_folders(root: Path) -> list[str]:
    """Remove the session folders of dead processes, and kill their helpers; the folders' names.

    Raises `SandboxError` if the folder that holds them is not this user's alone.
    """
    if not os.path.lexists(root):
        return []
    _require_own(root)
    reaped = []
    for folder in sorted(root.iterdir()):
        try:
            if _is_left(folder):
                _end_helpers(folder.resolve())
                remove_session_folder(folder)
                reaped.append(folder.name)
        except (OSError, SandboxError) as error:  # one that resists keeps nobody from working
            logger.warning("%s was left by a process that is dead, and could not be removed: %s", folder, error)
    return reaped


def count_session_folders(root: Path) -> int:
    """Count session folders, of dead and living owners."""
    return len(list(root.glob(f"*/{OWNER_FILE}")))


def _require_own(root: Path) -> None:
    """Raise `SandboxError` if somebody else could have put something into the folder: its name can be guessed."""
    state = root.lstat()
    if not stat.S_ISDIR(state.st_mode):
        fault = "is no folder"
    elif state.st_uid != os.getuid():
        fault = "belongs to another user"
    elif state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        fault = f"can be written by others (its mode is {stat.S_IMODE(state.st_mode):o}, and 700 is wanted)"
    else:
        return
    raise SandboxError(f"{root}, where sandboxes are kept, {fault}; remove it, or set TMPDIR to a folder of your own")


def _is_left(folder: Path) -> bool:
    state = folder.lstat()
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid():
        return False  # nothing that we made
    try:
        tag = _read_owner(folder)
    except FileNotFoundError:  # killed before it could write that, or about to
        return not any(folder.iterdir()) and time.time() - state.st_mtime > UNOWNED_LIFE_S
    if tag and not _TAG.fullmatch(tag):
        logger.warning("%s stays: its file %r does not say whose it is; remove it if no run does", folder, OWNER_FILE)
    return is_dead(tag) or (_is_of_other_container(tag) and not _is_locked(folder / OWNER_FILE))


def _is_of_other_container(tag: str) -> bool:
    """Return whether a tag is of this machine as it runs now, and its process cannot be seen from here."""
    found = _TAG.fullmatch(tag)
    if found is None or (found["machine"], found["boot"]) != (_read_machine(), _read_boot_id()):
        return False
    return found["space"] != _read_pid_namespace()


def _is_locked(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _read_owner(folder: Path) -> str:
    """Read the tag, whatever lies in its place: in folders of older versions agents could write it."""
    path = folder / OWNER_FILE
    if not stat.S_ISREG(path.lstat().st_mode):
        return "no file"
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        return file.read(MAX_TAG_BYTES).decode("ascii", "replace")


def _end_helpers(folder: Path) -> None:
    mark = build_helper_mark(folder).encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended
            process = os.pidfd_open(int(entry.name))  # first: the number may be another process's later
            try:
                if (entry / "cmdline").read_bytes().split(b"\0")[-2:] == [mark, b""]:
                    signal.pidfd_send_signal(process, signal.SIGKILL)
            finally:
                os.close(process)


def list_mounts(folder: Path) -> Sequence[str]:
    """List mount points below a folder, outer ones first."""
    folder = folder.resolve()
    found = []
    for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
        # field 5 of proc(5), with blanks and backslashes written in octal
        point = os.fsdecode(_OCTAL.sub(lambda match: bytes([int(match[1], 8)]), line.split(b" ")[4]))
        if Path(point).is_relative_to(folder):
            found.append(point)
    return sorted(found)


def _read_machine() -> str:
    # both: machines made from one image have one id, and names are given twice
    path = Path("/etc/machine-id")
    name = f"{os.uname().nodename} {path.read_text().strip() if path.exists() else ''}"
    return hashlib.sha256(name.encode()).hexdigest()[:12]


def _read_pid_namespace() -> str:
    return os.readlink("/proc/self/ns/pid").strip("pid:[]")


def _read_boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _read_start_ticks(pid: int) -> str:
    try:
        # after the command's name, which is in parentheses and may hold anything: field 22 of proc(5)
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        # a zombie is dead, though nobody has asked for its exit code yet
        return "" if state in "ZX" else fields[18]
    except OSError:
        return ""
