"""Build bubblewrap's options: namespaces, mounts and environment of a sandbox, and the limits of its processes.

Nothing in it can be written but the session's folders and /dev/shm. As far as the kernel allows, its users are those
of a user namespace in which no other can be made: without one there is no capability to be had, and so no mount, no
control group and no network of the sandbox's own making.
"""

import os
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from polar_trl.sandbox.base import HOME
from polar_trl.sandbox.folder import SUBFOLDERS
from polar_trl.sandbox.inside.supervise import PROC_READ_ONLY
from polar_trl.sandbox.python import list_package_folders

ISOLATION = (
    *("--die-with-parent", "--new-session", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup"),
    *("--cap-drop", "ALL", "--clearenv", "--proc", "/proc", "--dev", "/dev"),
)
IMAGE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Of an image that sets none, as Docker has it."""
RUN_BYTES = 16 << 20
NO_USER_NAMESPACES = ("--unshare-user", "--disable-userns", "--assert-userns-disabled")
SHM_BYTES = 64 << 20
"""Of /dev/shm, as Docker's default; only memory as root, where the limit of memory holds for it too."""
SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib64")
# root without capabilities still owns these, as it does what is read-only; so does a container of Docker's
PROC_HIDDEN = (
    *("/proc/acpi", "/proc/asound", "/proc/kcore", "/proc/keys", "/proc/kmsg", "/proc/latency_stats"),
    *("/proc/scsi", "/proc/timer_list"),
)
# not all of /etc/ssl: its private keys are root's, and root may be who this is
SYSTEM_FILES = (
    *("/etc/alternatives", "/etc/ssl/certs", "/etc/ssl/openssl.cnf", "/etc/ld.so.cache"),
    *("/etc/passwd", "/etc/group", "/etc/localtime"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Root:
    """An image in place of the system's own folders."""

    merged: Path
    """Host folder of the whole image, which can be written."""
    env: Mapping[str, str]
    is_writable: bool
    """For the sandbox too."""
    uploads: Mapping[str, Path]
    """Path in the sandbox -> host folder that is shown there and can be written."""


def build_options(
    base: Path,
    workdir: str,
    mounts: Sequence[Path],
    env: Mapping[str, str],
    *,
    has_userns: bool,
    terminals: Path | None,
    root: Root | None = None,
) -> list[str]:
    """Build the words of a command.

    Args:
        base: Host folder of the session's work/, home/ and tmp/.
        workdir: Place of work/ in the sandbox.
        mounts: Host folders shown read-only at the same path.
        env: Variables beside PATH, HOME, TMPDIR and LANG.
        has_userns: Whether the sandbox has a user namespace, the last one.
        terminals: Host folder of the session's own pseudo-terminals; None: bubblewrap's, whose number has no limit.
        root: None shows the system's folders, read-only. In an image the user is root, who owns all of it.
    """
    words = ["--bind", str(root.merged), "/"] if root else []
    words += [*ISOLATION, *(NO_USER_NAMESPACES if has_userns else ())]
    words += ["--uid", "0", "--gid", "0"] if root and has_userns else []
    words += ["--dev-bind", str(terminals), "/dev/pts"] if terminals else []
    words += ["--perms", "1777", "--size", str(SHM_BYTES), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
    for path in filter(os.path.exists, map(os.fsdecode, PROC_READ_ONLY)):
        words += ["--ro-bind", path, path]
    for path in filter(os.path.exists, PROC_HIDDEN):
        words += _build_empty(path) if os.path.isdir(path) else ["--ro-bind", "/dev/null", path]
    words += ["--size", str(RUN_BYTES), "--tmpfs", "/run"] if root else _build_system()
    work, home, tmp = (str(base / name) for name in SUBFOLDERS)
    binds = [("--bind", tmp, "/tmp"), ("--bind", home, HOME), ("--bind", work, workdir)]
    binds += [("--ro-bind", str(mount), str(mount)) for mount in mounts]
    for bind in sorted(binds, key=lambda bind: len(Path(bind[2]).parts)):  # outer ones first: the others may lie below
        words += bind
    for packages in list_package_folders():
        if root is None or any(packages.is_relative_to(mount) for mount in mounts):
            words += _build_empty(str(packages))
    for target, source in root.uploads.items() if root else ():
        words += ["--bind", str(source), target]
    words += [] if root and root.is_writable else ["--remount-ro", "/"]
    words += ["--chdir", workdir]
    path = os.pathsep.join((str(Path(sys.base_prefix, "bin")), "/usr/local/bin", "/usr/bin", "/bin"))
    own = {"PATH": IMAGE_PATH, **root.env} if root else {"PATH": path, "TMPDIR": "/tmp", "LANG": "C.UTF-8"}
    for name, value in {**own, "HOME": HOME, **env}.items():
        words += ["--setenv", name, value]
    return words


def build_limits(sizes: Mapping[str, int]) -> list[str]:
    """Build the words of prlimit(1), which cannot raise what is lower already."""
    words = []
    for name, size in sizes.items():
        _, hard = resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))
        least = size if hard == resource.RLIM_INFINITY else min(size, hard)
        words.append(f"--{name}={least}:{least}")
    return words


def _build_system() -> list[str]:
    """Build the words that show this machine's programs."""
    words = ["--symlink", "/tmp", "/var/tmp"]
    for path in SYSTEM_FOLDERS:
        if os.path.islink(path):
            words += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            words += ["--ro-bind", path, path]
    for path in SYSTEM_FILES:
        words += ["--ro-bind-try", path, path]
    return words


def _build_empty(folder: str) -> list[str]:
    return ["--tmpfs", folder, "--remount-ro", folder]
