"""Diff two folder trees and apply the changes to a third: an agent's work, without its sandbox.

Works on bytes, so binary files, new files, modes and links come through; ignores version control's own folders. Of an
overlay and the tree below it, only changed files are read. Nothing is written outside of the given folder, whatever
links the trees hold.
"""

import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Literal

from polar_trl.errors import FileTooLargeError, GradeError, TreeUnreadableError

MAX_BYTES = 512 << 20
MAX_DEPTH = 200
"""Nested folders."""
IGNORED_FOLDERS = frozenset({".git", ".hg", ".svn", "__pycache__"})
UNUSABLE: Mapping[type[Exception], str] = {
    FileTooLargeError: "changes_too_large",
    TreeUnreadableError: "changes_unreadable",
}
"""Counters of the errors of `find_changes` over a tree that an agent left: reward 0, the agent's own loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A file or link that was added, changed or removed."""

    kind: Literal["file", "link", "gone"]
    content: bytes = b""
    """Bytes of a file; target of a link."""
    is_executable: bool = False
    is_new: bool = False
    """Whether nothing was at this path before."""


def find_changes(before: Path | None, after: Path) -> dict[str, Change]:
    """Return changes by relative path, in the order of paths. FIFOs, sockets and devices are left out.

    Args:
        before: None: an empty tree.

    Raises `FileTooLargeError` if the changes are larger than 512 MiB, `TreeUnreadableError` if they cannot be read.
    """
    closed: set[str] = set()  # to us before the agent came
    old = {} if before is None else dict(_walk(before, closed.add))

    def refuse(folder: str) -> None:
        if folder not in closed:
            raise TreeUnreadableError(f"the agent left a folder that cannot be read, {folder[:200]!r}")

    new = dict(_walk(after, refuse))
    changes: dict[str, Change] = {}
    size = 0
    for path in sorted(old.keys() | new.keys()):
        if path not in new:
            changes[path] = Change(kind="gone")
        elif before is None or path not in old or not _is_same(before / path, old[path], after / path, new[path]):
            change = replace(_read(after / path, new[path]), is_new=path not in old)
            size += len(change.content)
            if size > MAX_BYTES:
                raise FileTooLargeError(f"the agent changed more than {MAX_BYTES >> 20} MiB")
            changes[path] = change
    return changes


def apply_changes(changes: Mapping[str, Change], folder: Path) -> None:
    """Apply changes to a tree that nobody runs in. Files in the way of a changed path give way.

    Raises `GradeError` for a path that leads outside by itself.
    """
    for path in changes:
        if PurePath(path).is_absolute() or ".." in PurePath(path).parts:
            raise GradeError(f"{path!r} leads out of the work folder")
    for path in sorted((path for path, change in changes.items() if change.kind == "gone"), reverse=True):
        target = folder / path
        if _is_inside(target, folder) and (target.is_symlink() or not target.is_dir()):
            with suppress(FileNotFoundError, NotADirectoryError):
                target.unlink()
    for path, change in changes.items():
        if change.kind != "gone":
            _write(folder, path, change)


def list_folders(root: Path, refuse: Callable[[str], object]) -> Iterator[tuple[str, list[os.DirEntry[str]]]]:
    """Yield every folder below a tree's root (itself ""), with its entries; links are not followed.

    Args:
        refuse: Called with each folder that is too deep or may not be read.
    """
    left = [""]
    while left:
        folder = left.pop()
        try:
            if folder.count("/") > MAX_DEPTH:
                raise OSError("too deep")
            with os.scandir(os.path.join(root, folder)) as entries:
                found = sorted(entries, key=lambda entry: entry.name)
        except OSError:
            refuse(folder)
            continue
        yield folder, found
        left += [
            os.path.join(folder, entry.name)
            for entry in reversed(found)
            if entry.name not in IGNORED_FOLDERS and entry.is_dir(follow_symlinks=False)
        ]


def _walk(root: Path, refuse: Callable[[str], object]) -> Iterator[tuple[str, os.stat_result]]:
    for folder, entries in list_folders(root, refuse):
        try:
            states = [(entry.name, entry.stat(follow_symlinks=False)) for entry in entries]
        except OSError:  # a folder that can be listed, but not entered
            refuse(folder)
            continue
        for name, state in states:
            if name not in IGNORED_FOLDERS and (stat.S_ISREG(state.st_mode) or stat.S_ISLNK(state.st_mode)):
                yield os.path.join(folder, name), state


def _is_same(before: Path, old: os.stat_result, after: Path, new: os.stat_result) -> bool:
    if stat.S_IFMT(old.st_mode) != stat.S_IFMT(new.st_mode) or old.st_size != new.st_size:
        return False
    if _is_executable(old) != _is_executable(new):
        return False
    # an overlay shows an untouched file as the very one below it; nobody can set the time of a file's last change
    if (old.st_mtime_ns, old.st_ctime_ns) == (new.st_mtime_ns, new.st_ctime_ns):
        return True
    return _read(before, old) == _read(after, new)


def _read(path: Path, state: os.stat_result) -> Change:
    if state.st_size > MAX_BYTES:
        raise FileTooLargeError(f"the agent left a file of {state.st_size >> 20} MiB, {path.name}")
    try:
        if stat.S_ISLNK(state.st_mode):
            return Change(kind="link", content=os.fsencode(os.readlink(path)))
        return Change(kind="file", content=path.read_bytes(), is_executable=_is_executable(state))
    except PermissionError as error:
        raise TreeUnreadableError(f"the agent left a file that cannot be read, {path.name[:200]!r}") from error


def _is_executable(state: os.stat_result) -> bool:
    return stat.S_ISREG(state.st_mode) and bool(state.st_mode & stat.S_IXUSR)


def _write(folder: Path, path: str, change: Change) -> None:
    target = folder / path
    for parent in reversed(target.relative_to(folder).parents[:-1]):
        place = folder / parent
        if place.is_symlink() or place.is_file():
            place.unlink()
        place.mkdir(exist_ok=True)
    if target.is_dir() and not target.is_symlink():
        return  # a folder whose files were not all the agent's to remove
    target.unlink(missing_ok=True)
    if change.kind == "link":
        os.symlink(os.fsdecode(change.content), target)
        return
    target.write_bytes(change.content)
    target.chmod(0o755 if change.is_executable else 0o644)


def _is_inside(target: Path, folder: Path) -> bool:
    """Return whether no link on the way to `target` leads out of the folder."""
    return target.parent.resolve().is_relative_to(folder.resolve())
