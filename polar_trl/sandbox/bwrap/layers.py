"""Unpack a layer of a container image into a folder of its own, for an overlay over the layers below it.

Everything becomes this user's: the sandbox has one user, who is root inside. What this user could not write or remove
is made writable, programs lose their setuid bits, and devices and FIFOs are left out. A file that a layer deletes
(`.wh.NAME` in the OCI image specification, "Layers") becomes the overlay's own mark of it, which needs no root (Linux
5.8). Refuses members that lead outside of the folder, by their names or through links.
"""

import gzip
import hashlib
import os
import stat
import tarfile
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import zstandard

WHITEOUT, OPAQUE = ".wh.", ".wh..wh..opq"
GZIP_MAGIC, ZSTD_MAGIC = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


class _Hashed:
    """A file whose bytes are hashed as they are read."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()

    def read(self, size: int) -> bytes:
        block: bytes = self._file.read(size)
        self.sha256.update(block)
        return block


def unpack_layer(file: BinaryIO, digest: str, target: Path) -> None:
    """Unpack a tar archive, plain or compressed, into an empty folder. Raises `OSError`, `tarfile.TarError`.

    Args:
        digest: "sha256:..." of the archive before it was compressed.
    """
    magic = file.read(4)
    file.seek(0)
    plain: Any = file
    if magic.startswith(GZIP_MAGIC):
        plain = gzip.GzipFile(fileobj=file)
    elif magic == ZSTD_MAGIC:
        plain = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
    hashed = _Hashed(plain)
    _unpack(hashed, target.resolve())
    while hashed.read(1 << 20):  # the end of an archive may be padded
        pass
    if (found := f"sha256:{hashed.sha256.hexdigest()}") != digest:
        raise tarfile.ReadError(f"a layer is {found} and should be {digest}")


def _unpack(stream: Any, target: Path) -> None:
    deleted: list[str] = []
    with tarfile.open(fileobj=stream, mode="r|") as tar:
        for member in tar:
            path = _require_inside(target, member.name)
            if path == target:
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.name.startswith(WHITEOUT):
                deleted.append(member.name)
                continue
            if path.is_symlink() or path.is_file():
                path.unlink()  # and not written through, or given another mode
            if member.islnk():
                os.link(_require_inside(target, member.linkname), path, follow_symlinks=False)
            elif member.isreg() or member.isdir() or member.issym():
                writable = 0o700 if member.isdir() else 0o600
                own = member.replace(
                    name=str(path.relative_to(target)),
                    mode=member.mode & 0o777 | writable,
                    uid=os.geteuid(),
                    gid=os.getegid(),
                    deep=False,
                )
                tar.extract(own, target, numeric_owner=True, filter="fully_trusted")
    for name in deleted:
        _delete(_require_inside(target, name))


def _delete(mark: Path) -> None:
    """Hide what the layers below have in the place that `mark` names."""
    if mark.name == OPAQUE:
        os.setxattr(mark.parent, "user.overlay.opaque", b"y")
        return
    path = mark.parent / mark.name.removeprefix(WHITEOUT)
    if path.parent != mark.parent or path.name == "..":
        raise tarfile.OutsideDestinationError(tarfile.TarInfo(mark.name), str(path))
    if path.is_dir() and not path.is_symlink():
        os.setxattr(path, "user.overlay.opaque", b"y")
    elif not os.path.lexists(path):
        os.mknod(path, stat.S_IFCHR, 0)


def _require_inside(target: Path, name: str) -> Path:
    """Return the place of a member, whose folders are no links out. Raises `tarfile.FilterError`."""
    pure = PurePosixPath(name.lstrip("/"))
    path = target / pure
    if ".." in pure.parts or not (path == target or path.parent.resolve().is_relative_to(target)):
        raise tarfile.OutsideDestinationError(tarfile.TarInfo(name), str(path.resolve()))
    return path
