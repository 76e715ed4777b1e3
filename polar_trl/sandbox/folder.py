"""Read and write a session's host folders (work/, home/ and tmp/) safely, whatever links an agent planted there.

Refuses paths that lead outside, by themselves or through links (`SandboxError`). Notices when somebody else removed or
changed the folders, which would be no agent's doing.
"""

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from polar_trl.errors import FileTooLargeError, SandboxError
from polar_trl.sandbox.owner import OWNER_FILE

_T = TypeVar("_T")

DISK = "disk"
"""The part of a session folder that its agent sees; the owner's tag lies beside it."""
SUBFOLDERS = ("work", "home", "tmp")


class SessionFolder:
    """Files of the three folders below `base`, which exist.

    Args:
        base: The `DISK` of a session folder.
        are_mounted: Whether the agent sees the three as mount points, which it cannot remove or replace.
    """

    def __init__(self, base: Path, *, are_mounted: bool = True) -> None:
        self.base = base
        self._are_mounted = are_mounted
        self._state = self._read_state()

    def require_whole(self) -> None:
        """Raise `SandboxError` if the session folder was removed, emptied, replaced or changed from outside.

        Files inside of the three folders may have been changed by anybody: that cannot be told from the agent's work.
        """
        state = self._read_state()
        harmed = [path for path, known in self._state.items() if state[path] != known]
        if harmed:
            how = "changed" if state[harmed[0]] else "removed"
            raise SandboxError(f"somebody outside of the sandbox {how} {harmed[0]}; what the agent did says nothing")

    def restore(self) -> None:
        """Give an agent back what it removed, or took from itself, of the three folders: it is still graded.

        Raises `OSError`, or `SandboxError` if it was not the agent.
        """
        self.require_whole()
        for path in (self.base / name for name in SUBFOLDERS):
            if path.is_symlink() or not path.is_dir():
                path.unlink(missing_ok=True)
                path.mkdir()
            path.chmod(path.stat().st_mode | 0o700)

    def _read_state(self) -> dict[Path, tuple[int, ...]]:
        """Read what no agent can change: the tag's file altogether, the folders' identities, and who may read them."""
        session = self.base.parent
        state = {path: _identify(path, "st_mode", "st_uid") for path in (session, self.base)}
        state[session / OWNER_FILE] = _identify(session / OWNER_FILE, "st_ctime_ns")
        if self._are_mounted:
            state |= {self.base / name: _identify(self.base / name) for name in SUBFOLDERS}
        return state

    def put(self, path: str, content: bytes, *, executable: bool = False) -> None:
        """Write a file, replacing whatever had its name: a link or a FIFO of the agent's is not written through.

        Raises `SandboxError` for a path that leads outside, by itself or through a linked folder.
        """
        *folders, name = self._resolve(path, follow_last=False)
        temporary = f".polar-{os.urandom(8).hex()}"
        try:
            with _open_folder(self.base, folders, create=True) as folder:
                mode = 0o755 if executable else 0o644
                fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode, dir_fd=folder)
                try:
                    with open(fd, "wb") as file:
                        file.write(content)
                    os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
                except OSError:
                    os.unlink(temporary, dir_fd=folder)
                    raise
        except OSError as error:
            raise SandboxError(f"cannot write {path!r} in the sandbox: {error.strerror}") from error

    def get(self, path: str, *, max_bytes: int = 1 << 20) -> bytes | None:
        """Read a regular file. None if there is none, or none that can be read: that is the agent's doing.

        A link is followed inside the sandbox only. Raises `FileTooLargeError` beyond `max_bytes`, and `SandboxError`
        for a path that leads outside by itself.
        """
        try:
            *folders, name = self._resolve(path, follow_last=True)
            with _open_folder(self.base, folders, create=False) as folder:
                # NONBLOCK: opening a FIFO would wait for a writer
                fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        except (_LinkOutsideError, OSError):
            return None
        if not os.path.isfile(fd):
            os.close(fd)
            return None
        with open(fd, "rb") as file:
            content = file.read(max_bytes + 1)
        if len(content) > max_bytes:
            raise FileTooLargeError(f"{path!r} in the sandbox is larger than {max_bytes} bytes")
        return content

    def _resolve(self, path: str, *, follow_last: bool) -> tuple[str, ...]:
        """Resolve a path to names below the sandbox's own folder, with no link on the way."""
        in_home = path.startswith("~/")
        relative = PurePosixPath(path[2:] if in_home else path)
        if (
            b"\0" in encode_text(path, "a path")
            or relative.is_absolute()
            or not relative.parts
            or ".." in relative.parts
        ):
            raise SandboxError(f"{path!r} leads outside; give a path below the work folder, or below HOME as '~/...'")
        full = self.base / ("home" if in_home else "work") / relative
        resolved = Path(os.path.realpath(full)) if follow_last else Path(os.path.realpath(full.parent), full.name)
        if self.base not in resolved.parents:
            raise _LinkOutsideError(f"{path!r} leads outside of the sandbox, through a link")
        return resolved.relative_to(self.base).parts


class HostFolders:
    """The part of `Sandbox` that is the same for every sandbox whose session folder lies on this machine."""

    _files: SessionFolder

    @property
    def host_workdir(self) -> Path:
        """The work folder on this machine."""
        return self._files.base / "work"

    @property
    def host_home(self) -> Path:
        """HOME on this machine."""
        return self._files.base / "home"

    def put(self, path: str, content: bytes, *, executable: bool = False) -> None:
        """See `SessionFolder.put`."""
        self._files.put(path, content, executable=executable)

    def get(self, path: str, *, max_bytes: int = 1 << 20) -> bytes | None:
        """See `SessionFolder.get`."""
        return self._files.get(path, max_bytes=max_bytes)

    def call(self, function: Callable[..., _T], *arguments: Any) -> _T:
        """See `Sandbox.call`: the folders are here."""
        return function(self, *arguments)

    def upload(self, source: Path, target: str) -> None:
        """Raise `SandboxError`: the sandbox has no root of its own, where it is none of docker's."""
        raise SandboxError("this sandbox has no files of its own outside of the work folder; use docker")

    def require_whole(self) -> None:
        """See `SessionFolder.require_whole`."""
        self._files.require_whole()


class _LinkOutsideError(SandboxError):
    """The agent planted a link that leads out of its sandbox."""


@contextmanager
def _open_folder(base: Path, names: Sequence[str], *, create: bool) -> Iterator[int]:
    """Descend without following links, so that none is taken that was planted since `_resolve`."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    folder = os.open(base, flags)
    try:
        for name in names:
            if create:
                with suppress(FileExistsError):
                    os.mkdir(name, dir_fd=folder)
            below = os.open(name, flags, dir_fd=folder)
            os.close(folder)
            folder = below
        yield folder
    finally:
        os.close(folder)


def check_upload(source: Path, target: str, *, has_writable_root: bool) -> PurePosixPath:
    """Return the place in a sandbox that a folder can be copied to. Raises `SandboxError` where it cannot."""
    path = PurePosixPath(target)
    if not path.is_absolute() or len(path.parts) < 2 or ".." in path.parts or "\0" in target:
        raise SandboxError(f"cannot upload to {target!r}: it is no absolute path of a folder")
    if not has_writable_root:
        raise SandboxError(f"cannot upload to {target}: the task's root is read-only (writable_root is false)")
    if not source.is_dir():
        raise SandboxError(f"cannot upload {source}: it is no folder of this machine")
    return path


def restore_folder(base: Path, path: str) -> None:
    """Make a folder at an absolute path below `base`, in place of links and files of an agent's on the way to it.

    Raises `OSError`.
    """
    flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    folder = os.open(base, flags)
    try:
        for name in PurePosixPath(path).parts[1:]:
            with suppress(FileExistsError):
                os.mkdir(name, dir_fd=folder)
            if not stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                os.unlink(name, dir_fd=folder)
                os.mkdir(name, dir_fd=folder)
            below = os.open(name, flags, dir_fd=folder)
            os.close(folder)
            folder = below
            if os.fstat(folder).st_mode & 0o300 != 0o300:
                os.chmod(f"/proc/self/fd/{folder}", 0o700)
    finally:
        os.close(folder)


def encode_text(text: str, what: str) -> bytes:
    """Encode as UTF-8, whatever the trainer's locale. Raises `SandboxError` for a lone surrogate."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise SandboxError(f"{what} holds a lone surrogate at position {error.start}, which is no text") from error


def _identify(path: Path, *more: str) -> tuple[int, ...]:
    """Return the numbers that tell this file from all others, and these of its state; empty where there is none."""
    try:
        state = path.lstat()
    except OSError:
        return ()
    return tuple(getattr(state, name) for name in ("st_dev", "st_ino", *more))
