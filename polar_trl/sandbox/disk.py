"""Make a session's disk: a file system of a fixed size in a sparse file, with an overlay of the task's work tree.

The tree below is never written. The agent's changes are the overlay's upper folder; when the disk is full, the agent's
own writes fail, and nobody else's. Needs root.
"""

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from polar_trl.errors import SandboxError
from polar_trl.sandbox.folder import DISK, SUBFOLDERS

UPPER = "upper"
FULL_BYTES = 2 << 20
TERMINALS = "pts"
MAX_TERMINALS = 64
"""Of one session; the whole machine has some thousands."""


def make_disk(folder: Path, tree: Path | None, size_mb: int) -> Path:
    """Make and mount a disk in a session folder; return the mount point, with work/, home/ and tmp/ in it.

    Args:
        tree: First content of the work folder; None: nothing.

    Raises `SandboxError`.
    """
    image, disk = folder / "disk.img", folder / DISK
    disk.mkdir()
    with image.open("wb") as file:
        file.truncate(size_mb << 20)
    _run("mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", "-E", "lazy_itable_init=1", str(image))
    _run("mount", "-o", "loop,nosuid,nodev,noatime", str(image), str(disk))
    shutil.rmtree(disk / "lost+found", ignore_errors=True)
    for name in (*SUBFOLDERS, UPPER, "overlay"):
        (disk / name).mkdir()
    (disk / "tmp").chmod(0o1777)
    if tree is not None:
        shutil.copymode(tree, disk / UPPER)  # the overlay's own folder has the mode of this one
        layers = f"lowerdir={tree},upperdir={disk / UPPER},workdir={disk / 'overlay'}"
        _run("mount", "-t", "overlay", "overlay", "-o", layers, str(disk / "work"))
    return disk


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlay:
    """An image's layers, with what a session writes on top of them."""

    layers: Path
    """Folder that the lower ones are relative to: options have to fit into a page."""
    options: str
    merged: Path
    """Folder that it is to be mounted on."""

    def mount(self) -> None:
        """Mount it, as root. Raises `SandboxError`."""
        _run("mount", "-t", "overlay", "overlay", "-o", self.options, str(self.merged), cwd=self.layers)


def make_overlay(disk: Path, layers: Path, names: Sequence[str]) -> Overlay:
    """Make the folders of an overlay on a session's disk.

    Args:
        names: Of folders in `layers`, the lowest first.
    """
    root = disk / "root"
    for name in ("upper", "work", "merged"):
        (root / name).mkdir(parents=True)
    # the user's own attributes say what is deleted: others take root, and what another namespace wrote is not trusted
    options = f"lowerdir={':'.join(reversed(names))},upperdir={root / 'upper'},workdir={root / 'work'},userxattr"
    return Overlay(layers=layers, options=options, merged=root / "merged")


def mount_terminals(folder: Path) -> Path:
    """Mount pseudo-terminals of a session's own in its folder; return the mount point. Raises `SandboxError`."""
    terminals = folder / TERMINALS
    terminals.mkdir()
    options = f"newinstance,nosuid,noexec,ptmxmode=0666,mode=620,max={MAX_TERMINALS}"
    _run("mount", "-t", "devpts", "-o", options, "devpts", str(terminals))
    return terminals


def make_folders(base: Path, tree: Path | None) -> None:
    """Make the same three folders without a disk and without root: a copy of the work tree, no limit."""
    for name in SUBFOLDERS:
        (base / name).mkdir(parents=True)
    if tree is not None:
        shutil.copytree(tree, base / "work", symlinks=True, dirs_exist_ok=True)


def is_full(disk: Path) -> bool:
    """Return whether less than 2 MiB can be written."""
    state = os.statvfs(disk)
    return state.f_bavail * state.f_frsize < FULL_BYTES


def _run(*command: str, cwd: Path | None = None) -> None:
    # mount(2): by the calls that mount(8) prefers since 2.39, an overlay's layers would have to fit into 256 bytes
    env = {**os.environ, "LIBMOUNT_FORCE_MOUNT2": "always"}
    result = subprocess.run(command, cwd=cwd, env=env, capture_output=True, check=False)
    if result.returncode != 0:
        reason = result.stderr.decode(errors="replace").strip()[-300:]
        raise SandboxError(f"a session's disk could not be made: {command[0]}: {reason}")
