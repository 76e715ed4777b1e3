"""Whose a sandbox is: a tag that names one process, so that a later one can tell what a dead one left behind.

A process id alone is used again by the system; together with the time that the process started, and the boot, it
names one process for ever. It refuses to call a process dead that belongs to another machine's boot.
"""

import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from polar_trl.sandbox.folder import remove_tree

OWNER_FILE = "owner"


def build_owner_tag() -> str:
    """This process's tag."""
    return f"{_read_boot_id()}:{os.getpid()}:{_read_start_ticks(os.getpid())}"


def is_dead(tag: str) -> bool:
    """Whether the tag's process ran on this boot of this machine and is no more, or the machine was booted since."""
    boot_id, _, process = tag.partition(":")
    pid, _, start_ticks = process.partition(":")
    if not pid.isdigit():
        return False
    return boot_id != _read_boot_id() or _read_start_ticks(int(pid)) != start_ticks


def find_state_folder() -> Path:
    """Where sandboxes of this user are kept while they live."""
    return Path(tempfile.gettempdir()) / f"polar-trl-{os.getuid()}"


def make_session_folder(root: Path, session_id: str) -> Path:
    """A fresh folder with this process's tag in it."""
    label = re.sub(r"[^A-Za-z0-9_.-]", "_", session_id)[:60]
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder = Path(tempfile.mkdtemp(prefix=f"{label}-", dir=root)).resolve()
    (folder / OWNER_FILE).write_text(build_owner_tag())
    return folder


def remove_session_folder(folder: Path) -> None:
    """Unmount whatever is mounted below it, then remove it. Raises `SandboxError` if it cannot be removed."""
    for mount in reversed(list_mounts(folder)):
        subprocess.run(["umount", "-l", "--", mount], capture_output=True, check=False)
    remove_tree(folder)


def reap_session_folders(root: Path) -> list[str]:
    """Remove the folders of dead processes; their names."""
    reaped = []
    for folder in sorted(root.glob("*")):
        try:
            tag = (folder / OWNER_FILE).read_text()
        except OSError:
            continue
        if is_dead(tag):
            remove_session_folder(folder)
            reaped.append(folder.name)
    return reaped


def list_mounts(folder: Path) -> Sequence[str]:
    """Mount points below a folder, outer ones first."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        # field 5 of proc(5), with blanks and backslashes written in octal
        point = line.split(" ")[4].encode().decode("unicode_escape")
        if Path(point).is_relative_to(folder):
            found.append(point)
    return sorted(found)


def _read_boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _read_start_ticks(pid: int) -> str:
    try:
        # after the command's name, which is in parentheses and may hold anything: field 22 of proc(5)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
