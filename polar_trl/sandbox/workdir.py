"""Check the path of a task's work folder: it must not hide the system, nor other folders that a sandbox shows."""

from pathlib import PurePosixPath

from polar_trl.sandbox.base import HOME

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc")
_OWN = (HOME, "/tmp", "/proc", "/sys", "/dev", "/run")
_TAKEN = tuple(map(PurePosixPath, (*_OWN, *_SYSTEM)))
_KERNEL = (("proc",), ("sys",), ("dev",))


def find_workdir_fault(path: str) -> str | None:
    """Return why the work folder cannot be at this path; None where it can."""
    pure = PurePosixPath(path)
    is_taken = any(pure == other or pure in other.parents for other in _TAKEN) or pure.parts[1:2] in _KERNEL
    if pure.is_absolute() and ".." not in pure.parts and "\0" not in path and not is_taken:
        return None
    return (
        f"the work folder cannot be {path!r}: it has to be an absolute path of its own, neither "
        f"{', '.join(map(str, _TAKEN))} nor a folder above one of them"
    )
