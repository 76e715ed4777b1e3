"""Make and lock the folder of a run, name its files, write them so that a full disk tears none, and read its log.

A folder has one owner: the process that has a lock (flock(2)) on its `owner.lock`. The kernel takes the lock back when
the process ends, however it ends, so that none is ever stale; one that is stopped keeps it. On NFS the lock holds
between machines where the mount has locks. Standard library only: pages and scripts read it.
"""

import errno
import fcntl
import json
import logging
import os
import shlex
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from polar_trl.errors import ConfigError, DiskError, PolarError

LOG_FILE = "log.jsonl"
SETTINGS_FILE = "settings.json"
RUN_FILE = "run_file.yaml"
"""Copy of the run file of the newest start."""
TRAINED_FILE = "trained.jsonl"
SUMMARY_FILE = "summary.json"
"""Written when a run has made its last step."""
BEST_FILE = "best.json"
"""Which checkpoint did best in an evaluation so far."""
ROWS_FOLDER = "rows"
LOCK_FILE = "owner.lock"
NEEDED_BYTES = 8 << 20
"""Room on a disk that is not called full."""

logger = logging.getLogger(__name__)

_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_OWNED: dict[Path, "FolderLock"] = {}
"""Folders that this process has until it ends."""


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Read a run's log: the last line per (step, kind), in the order of steps. Empty where there is no log.

    The kinds are lines of training, of each evaluation set, and of the run's end.
    """
    path = folder / LOG_FILE
    latest: dict[tuple[int, bool, str], dict[str, Any]] = {}
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        try:
            line = json.loads(text)
            step = int(line["step"])
            # by set, else the line of the end would replace it
            latest[step, "reward" in line, str(find_evaluation(line))] = line | {"step": step}
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):  # {"step": Infinity} overflows
            continue
    return [latest[key] for key in sorted(latest)]


def find_evaluation(metrics: Mapping[str, Any]) -> str | None:
    """Return the evaluation set that a line of the log is about, "" for the only one; None for training."""
    if not any(name.startswith("eval_") for name in metrics):
        return None
    timed = (name for name in metrics if name.startswith("eval_") and name.endswith("_runtime"))
    return next(timed, "").removeprefix("eval_").removesuffix("runtime").removesuffix("_")


def make_output_dir(folder: Path) -> None:
    """Make the folder unless it is there. Raises `ConfigError`."""
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise ConfigError(f"output_dir {folder} is a file; name another output_dir")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:  # of any kind: a name that is too long, a loop of links, a parent that is closed to us
        raise ConfigError(
            f"output_dir {folder} cannot be written ({error.strerror}); name another output_dir"
        ) from error


class FolderLock:
    """The lock of a folder, from now until `release`, or the end of the block; not inherited by children.

    Args:
        folder: Made unless it is there.
        shared: Share it with whoever has called `share`, and write nothing about this process.

    Raises `ConfigError` that names the process which has the folder, or says why the folder cannot be written.
    """

    def __init__(self, folder: Path, *, shared: bool = False) -> None:
        make_output_dir(folder)
        self._path = path = Path(os.path.realpath(folder)) / LOCK_FILE
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                self._lock(fcntl.LOCK_SH if shared else fcntl.LOCK_EX, folder)
                if not shared:
                    os.ftruncate(self._file, 0)
                    os.pwrite(self._file, _describe_process(), 0)
                    os.fsync(self._file)  # other machines read it, too
            except BaseException:
                os.close(self._file)
                raise
        except OSError as error:
            raise ConfigError(f"{path} cannot be written ({error.strerror}); name another output_dir") from error
        # a process that is forked and outlives this one would keep the folder
        os.register_at_fork(after_in_child=self.release)

    def __enter__(self) -> "FolderLock":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def share(self) -> None:
        """Let processes in that ask for their share; others stay out."""
        fcntl.flock(self._file, fcntl.LOCK_SH)

    def release(self) -> None:
        """Let others have the folder. May be called twice."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def holds(self) -> bool:
        """Return whether this process has the folder: not where it was released, or the folder removed meanwhile."""
        try:
            return os.path.samestat(os.fstat(self._file), os.stat(self._path))
        except OSError:
            return False

    def _lock(self, kind: int, folder: Path) -> None:
        try:
            fcntl.flock(self._file, kind | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = _read_owner(self._file)
            is_this = (owner.get("pid"), owner.get("host")) == (os.getpid(), socket.gethostname())
            whose = "this very" if is_this else "another"
            raise ConfigError(
                f"output_dir {folder} is being written by {whose} process{_describe_owner(owner)}; wait for its "
                "end, end it, or name another output_dir"
            ) from error
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
                raise
            logger.warning("%s: this file system has no locks: nothing keeps a second run out of it", folder)


def own_folder(folder: Path) -> None:
    """Lock the folder for the rest of this process, unless that has been done. Raises as `FolderLock`."""
    key = Path(os.path.realpath(folder))  # raises nothing, whatever the folder is
    if key not in _OWNED or not _OWNED[key].holds():
        _OWNED[key] = FolderLock(folder)


def _describe_process() -> bytes:
    command = shlex.join([Path(sys.executable).name, *sys.argv])
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    about = {"pid": os.getpid(), "host": socket.gethostname(), "since": since, "command": command}
    return json.dumps(about).encode() + b"\n"


def _read_owner(file: int) -> dict[str, Any]:
    """Read what the process that has the lock says of itself; nothing where something has kept it from saying so."""
    text = b""
    for _ in range(10):
        if text := os.pread(file, 1 << 16, 0):
            break
        time.sleep(0.1)  # it has the lock, and is about to say who it is
    try:
        about = json.loads(text)
        return {"pid": int(about["pid"]), **{name: str(about[name]) for name in ("host", "since", "command")}}
    except (ValueError, KeyError, TypeError, OverflowError):
        return {}


def _describe_owner(owner: Mapping[str, Any]) -> str:
    """Describe it in parentheses; "" where nothing is known."""
    if not owner:
        return ""
    pid, host = owner["pid"], owner["host"]
    try:
        is_stopped = host == socket.gethostname() and "\nState:\tT" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        is_stopped = False
    stopped = f"; it is stopped, and kill -CONT {pid} lets it go on" if is_stopped else ""
    return f" (process {pid} on {host}, since {owner['since']}: {owner['command'][:200]}{stopped})"


def append_lines(path: Path, lines: bytes, *, sync: bool = False) -> None:
    """Append whole lines to a file. On a full disk none of them is there, and `OSError` is raised.

    A line that a kill has torn gets its end, so that the next one is read.

    Args:
        sync: Return only when the disk has them.
    """
    with path.open("a+b", buffering=0) as file:
        start = os.fstat(file.fileno()).st_size
        if start and os.pread(file.fileno(), 1, start - 1) != b"\n":
            lines = b"\n" + lines
        rest = memoryview(lines)
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            file.truncate(start)
            raise
        if sync:
            os.fsync(file.fileno())


def write_whole(path: Path, content: bytes) -> None:
    """Write a file in the place of an earlier one: after a kill or on a full disk the earlier one is there."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(content)
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def require_room(*folders: Path) -> None:
    """Raise `DiskError` for a folder whose disk takes no more: full, out of inodes, over a quota, or read-only."""
    for folder in folders:
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                os.posix_fallocate(file.fileno(), 0, NEEDED_BYTES)
        except OSError as error:
            if error.errno in _DISK_ERRORS:
                raise DiskError(f"{folder} cannot be written: {error.strerror}") from error


@contextmanager
def disk_errors(*folders: Path) -> Iterator[None]:
    """Raise `DiskError` in the place of whatever a library raises inside the block because a disk takes no more.

    Args:
        folders: Where the block writes.
    """
    try:
        yield
    except PolarError:
        raise
    except Exception as error:
        if found := find_disk_error(error, *folders):
            raise found from error
        raise


def find_disk_error(error: BaseException, *folders: Path) -> DiskError | None:
    """Find the full or read-only disk behind an error; None where there is none."""
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, OSError) and link.errno in _DISK_ERRORS:
            return DiskError(f"{link.filename or folders[0]} cannot be written: {os.strerror(link.errno)}")
        link = link.__cause__ or link.__context__
    # libraries in C++ and Rust have types of their own; safetensors, tokenizers and torch's old format say the reason
    for reason in map(os.strerror, _DISK_ERRORS):
        if reason in str(error):
            return DiskError(f"{folders[0]} cannot be written: {reason}")
    if "inline_container.cc" not in str(error):
        return None
    try:  # torch.save does not say it
        require_room(*folders)
    except DiskError as found:
        return found
    return DiskError(f"{folders[0]} cannot be written: the disk is full or broken")
