"""Diff two folder trees and apply the changes to a third: an agent's work, without its sandbox.

Works on bytes, so binary files, new files, modes and links come through; ignores version control's own folders. Of an
overlay and the tree below it, only changed files are read. Nothing is written outside of the given folder, whatever
links the trees hold.

Changes that are too many, too large or unreadable raise one of the errors in `UNUSABLE`, as early as that is known:
they are the agent's own loss. Any other error is this machine's (`OSError`), and decides nothing.
"""

import errno
import math
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path, PurePath
from typing import Literal

from polar_trl.errors import FileTooLargeError, GradeError, TreeUnreadableError

MAX_BYTES = 512 << 20
MAX_ENTRIES = 100_000
"""Files, folders and anything else that has a name, beyond as many as the original tree has."""
MAX_DEPTH = 200
"""Nested folders."""
ENDLESS = (b"/dev/", b"/proc/")
"""Where links lead to what has no end, or is of another process."""
IGNORED_FOLDERS = frozenset({".git", ".hg", ".svn", "__pycache__"})
UNUSABLE: Mapping[type[Exception], str] = {
    FileTooLargeError: "changes_too_large",
    TreeUnreadableError: "changes_unreadable",
}
"""Counters of the errors of changes that an agent left: reward 0, the agent's own loss."""
_AGENTS_DOING = frozenset(
    {errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY}
    | {errno.ELOOP, errno.ENAMETOOLONG, errno.ENXIO, errno.EMLINK, errno.EINVAL, errno.EILSEQ}
)
"""Errors of names, kinds and rights. A disk that fails, or files that this process may not open any more, are not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A file or link that was added, changed or removed."""

    kind: Literal["file", "link", "gone"]
    content: bytes = b""
    """Bytes of a file; target of a link."""
    is_executable: bool = False
    is_new: bool = False
    """Whether nothing was at this path before."""
    is_special: bool = False
    """Whether the agent left a FIFO, a socket, a device or a link to one there: gone, since it is not taken over."""


def find_changes(before: Path | None, after: Path, *, deadline: float = math.inf) -> dict[str, Change]:
    """Return changes by relative path, in the order of paths.

    Args:
        before: None: an empty tree.
        deadline: Of `time.monotonic`.

    Raises:
        FileTooLargeError: the agent left more than 512 MiB or 100,000 names, or so much that the deadline passed.
        TreeUnreadableError: they cannot be read.
    """
    closed: set[str] = set()  # to us before the agent came
    old, other, num_old = (
        ({}, frozenset[str](), 0) if before is None else read_tree(before, closed.add, math.inf, math.inf)
    )

    def refuse(folder: str) -> None:
        if folder not in closed:
            raise TreeUnreadableError(f"the agent left a folder that cannot be read, {folder[:200]!r}")

    new, special, _ = read_tree(after, refuse, num_old + MAX_ENTRIES, deadline)
    changes: dict[str, Change] = {}
    size = 0
    special = special - other
    for path in sorted(old.keys() | new.keys() | special):
        _check_time(deadline)
        if path not in new:
            changes[path] = Change(kind="gone", is_special=path in special)
        elif before is None or path not in old or not _is_same(before / path, old[path], after / path, new[path]):
            change = replace(read_file(after / path, new[path]), is_new=path not in old)
            if change.kind == "link" and change.content.startswith(ENDLESS):
                change = Change(kind="gone", is_special=True)
            size += len(change.content)
            if size > MAX_BYTES:
                raise FileTooLargeError(f"the agent changed more than {MAX_BYTES >> 20} MiB")
            changes[path] = change
    return changes


def apply_changes(changes: Mapping[str, Change], folder: Path, *, deadline: float = math.inf) -> None:
    """Apply changes to a tree that nobody runs in. Files in the way of a changed path give way.

    Raises:
        GradeError: a path leads outside by itself.
        FileTooLargeError: the deadline (of `time.monotonic`) passed.
        TreeUnreadableError: a path cannot be had there, such as one that is too long.
    """
    for path in changes:
        if PurePath(path).is_absolute() or ".." in PurePath(path).parts:
            raise GradeError(f"{path!r} leads out of the work folder")
    for path in sorted((path for path, change in changes.items() if change.kind == "gone"), reverse=True):
        target = folder / path
        with _blaming(path):
            if _is_inside(target, folder) and (target.is_symlink() or not target.is_dir()):
                with suppress(FileNotFoundError, NotADirectoryError):
                    target.unlink()
    made: set[str] = set()
    for path, change in changes.items():
        _check_time(deadline)
        if change.kind != "gone":
            with _blaming(path):
                _write(folder, path, change, made)


def list_folders(
    root: Path, refuse: Callable[[str], object], max_entries: float, deadline: float = math.inf
) -> Iterator[tuple[str, list[os.DirEntry[str]]]]:
    """Yield every folder below a tree's root (itself ""), with its entries; links are not followed.

    Args:
        refuse: Called with each folder that is too deep or may not be read.
        max_entries: Of all folders together. The one with which they are more is cut short.
        deadline: Of `time.monotonic`.

    Raises `FileTooLargeError` after the last of `max_entries`, or at the deadline.
    """
    left, num_left = [""], max_entries
    while left:
        _check_time(deadline)
        folder = left.pop()
        try:
            if folder.count("/") > MAX_DEPTH:
                raise OSError(errno.ENAMETOOLONG, "too deep")
            with os.scandir(os.path.join(root, folder)) as entries:
                first = entries if num_left == math.inf else islice(entries, int(num_left) + 1)
                found = sorted(first, key=lambda entry: entry.name)
        except OSError as error:
            if error.errno not in _AGENTS_DOING:
                raise
            refuse(folder)
            continue
        yield folder, found
        num_left -= len(found)
        if num_left < 0:
            raise FileTooLargeError(f"more than {max_entries} files and folders were left")
        left += [
            os.path.join(folder, entry.name)
            for entry in reversed(found)
            if entry.name not in IGNORED_FOLDERS and entry.is_dir(follow_symlinks=False)
        ]


def read_tree(
    root: Path, refuse: Callable[[str], object], max_entries: float, deadline: float
) -> tuple[dict[str, os.stat_result], Set[str], int]:
    """Return the state of files and links by path, the paths of FIFOs and their like, and the number of entries.

    The arguments and errors are those of `list_folders`.
    """
    tree: dict[str, os.stat_result] = {}
    special: set[str] = set()
    num_entries = 0
    for folder, entries in list_folders(root, refuse, max_entries, deadline):
        num_entries += len(entries)
        try:
            states = [(entry.name, entry.stat(follow_symlinks=False)) for entry in entries]
        except OSError as error:
            if error.errno not in _AGENTS_DOING:
                raise
            refuse(folder)  # a folder that can be listed, but not entered
            continue
        for name, state in states:
            path = os.path.join(folder, name)
            if name in IGNORED_FOLDERS or stat.S_ISDIR(state.st_mode):
                continue
            if stat.S_ISREG(state.st_mode) or stat.S_ISLNK(state.st_mode):
                tree[path] = state
            else:
                special.add(path)
    return tree, special, num_entries


def _check_time(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise FileTooLargeError("what the agent left takes longer to copy than its grading may")


@contextmanager
def _blaming(path: str) -> Iterator[None]:
    """Turn errors of the agent's making, in handling this path, into `TreeUnreadableError`."""
    try:
        yield
    except OSError as error:
        if error.errno not in _AGENTS_DOING:
            raise
        reason = os.strerror(error.errno)
        raise TreeUnreadableError(f"the agent left what cannot be read or copied, {path[:200]!r}: {reason}") from error


def _is_same(before: Path, old: os.stat_result, after: Path, new: os.stat_result) -> bool:
    if stat.S_IFMT(old.st_mode) != stat.S_IFMT(new.st_mode) or old.st_size != new.st_size:
        return False
    if _is_executable(old) != _is_executable(new):
        return False
    # an overlay shows an untouched file as the very one below it; nobody can set the time of a file's last change
    if (old.st_mtime_ns, old.st_ctime_ns) == (new.st_mtime_ns, new.st_ctime_ns):
        return True
    return read_file(before, old) == read_file(after, new)


def read_file(path: Path, state: os.stat_result) -> Change:
    """Read a file or link of a tree in which nothing runs. Raises the errors of `find_changes`."""
    with _blaming(path.name):
        if stat.S_ISLNK(state.st_mode):
            return Change(kind="link", content=os.fsencode(os.readlink(path)))
        # it may be another one by now, where something of the agent's could not be killed: no FIFO is waited for
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            content = b"" if state.st_size > MAX_BYTES else file.read(MAX_BYTES + 1)
    if max(state.st_size, len(content)) > MAX_BYTES:
        raise FileTooLargeError(f"the agent left a file of more than {MAX_BYTES >> 20} MiB, {path.name[:200]!r}")
    return Change(kind="file", content=content, is_executable=_is_executable(state))


def _is_executable(state: os.stat_result) -> bool:
    return stat.S_ISREG(state.st_mode) and bool(state.st_mode & stat.S_IXUSR)


def _write(folder: Path, path: str, change: Change, made: set[str]) -> None:
    """Write one change; `made` has the folders that are known to be there, and no links."""
    parts = path.split("/")
    for depth in range(1, len(parts)):
        parent = "/".join(parts[:depth])
        if parent not in made:
            place = folder / parent
            if place.is_symlink() or place.is_file():
                place.unlink()
            place.mkdir(exist_ok=True)
            made.add(parent)
    target = folder / path
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
    return Path(os.path.realpath(target.parent)).is_relative_to(os.path.realpath(folder))
