"""Tag sandboxes with the process that owns them, and remove those of dead owners.

A process id alone is used again by the system; together with the time that the process started, the machine's boot
and the namespace of the id, it names one process for ever. A process that cannot be seen from here is never called
dead: one of another machine, whose engine is shared, or of another container on this one.
"""

import hashlib
import logging
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from polar_trl.errors import SandboxError
from polar_trl.sandbox.folder import remove_tree

logger = logging.getLogger(__name__)

OWNER_FILE = "owner"
HELPER_FILE = "helper"
"""File of a session folder with the tag of a process that must not outlive the session."""
UNOWNED_LIFE_S = 60.0


def build_owner_tag(pid: int | None = None) -> str:
    """Build the tag of a process of this machine; None is this process."""
    pid = os.getpid() if pid is None else pid
    return ":".join((_read_machine(), _read_boot_id(), _read_pid_namespace(), str(pid), _read_start_ticks(pid)))


def is_running(tag: str) -> bool:
    """Return whether the tag's process runs here; False as well for one that cannot be seen from here."""
    pid = tag.rsplit(":", 2)[-2] if tag.count(":") == 4 else ""
    return pid.isdigit() and tag == build_owner_tag(int(pid)) and not tag.endswith(":")


def is_dead(tag: str) -> bool:
    """Return whether the tag's process ran here and is no more, or this machine was booted since."""
    machine, _, rest = tag.partition(":")
    boot_id, _, rest = rest.partition(":")
    namespace, _, rest = rest.partition(":")
    pid, _, start_ticks = rest.partition(":")
    if not pid.isdigit() or machine != _read_machine():
        return False
    if boot_id != _read_boot_id():
        return True
    return namespace == _read_pid_namespace() and _read_start_ticks(int(pid)) != start_ticks


def find_state_folder() -> Path:
    """Return the folder that holds this user's sandboxes while they live."""
    return Path(tempfile.gettempdir()) / f"polar-trl-{os.getuid()}"


def make_session_folder(root: Path, session_id: str) -> Path:
    """Make a fresh folder with this process's tag in it. Raises `SandboxError`."""
    label = re.sub(r"[^A-Za-z0-9_.-]", "_", session_id)[:60]
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    if root.stat().st_uid != os.getuid():
        raise SandboxError(f"{root} belongs to another user; set TMPDIR to a folder of your own")
    folder = Path(tempfile.mkdtemp(prefix=f"{label}-", dir=root)).resolve()
    (folder / OWNER_FILE).write_text(build_owner_tag())
    return folder


def note_helper(folder: Path, pid: int) -> None:
    """Record a process that is killed when the session folder is reaped."""
    (folder / HELPER_FILE).write_text(build_owner_tag(pid))


def remove_session_folder(folder: Path) -> None:
    """Unmount whatever is mounted below it, then remove it. Raises `SandboxError` if it cannot be removed."""
    for mount in reversed(list_mounts(folder)):
        subprocess.run(["umount", "-l", "--", mount], capture_output=True, check=False)
    remove_tree(folder)


def reap_session_folders(root: Path) -> list[str]:
    """Remove the session folders of dead processes, and kill their helpers; the folders' names."""
    reaped = []
    for folder in sorted(root.glob("*")):
        try:
            if _is_left(folder):
                _kill_helper(folder)
                remove_session_folder(folder)
                reaped.append(folder.name)
        except (OSError, SandboxError) as error:  # one that resists keeps nobody from working
            logger.warning("%s was left by a process that is dead, and could not be removed: %s", folder, error)
    return reaped


def count_session_folders(root: Path) -> int:
    """Count session folders, of dead and living owners."""
    return len(list(root.glob(f"*/{OWNER_FILE}")))


def _is_left(folder: Path) -> bool:
    try:
        return is_dead((folder / OWNER_FILE).read_text())
    except FileNotFoundError:  # killed before it could write that, or about to
        return folder.is_dir() and not any(folder.iterdir()) and time.time() - folder.stat().st_mtime > UNOWNED_LIFE_S


def _kill_helper(folder: Path) -> None:
    with suppress(FileNotFoundError, ProcessLookupError, ValueError):
        tag = (folder / HELPER_FILE).read_text()
        pid = int(tag.split(":")[-2])
        if tag == build_owner_tag(pid):
            os.kill(pid, signal.SIGKILL)


def list_mounts(folder: Path) -> Sequence[str]:
    """List mount points below a folder, outer ones first."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        # field 5 of proc(5), with blanks and backslashes written in octal
        point = line.split(" ")[4].encode().decode("unicode_escape")
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
