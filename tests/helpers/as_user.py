"""Run a Python script of ours as an ordinary user, for tests that run as root.

The user may be kept from the Python and the checkout by folders on the way that are root's alone; in a mount namespace
of its own it finds them open. The script's output and exit status are the test's affair.
"""

import os
import shlex
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

UID = 65534
ROOT = Path(__file__).resolve().parents[2]


def start(
    script: str, *arguments: str, home: Path, engine: Path | None = None, env: Mapping[str, str] = {}
) -> "subprocess.Popen[str]":
    """Start `python -c script`.

    Args:
        home: Given to the user; holds its cache, state and temporary files.
        engine: A container engine's socket that the user may talk to, as a member of the socket's group.
    """
    (home / "tmp").mkdir(exist_ok=True)
    for path in (home, home / "tmp"):
        os.chown(path, UID, UID)
    lines = ["set -e", f"mount -t tmpfs tmpfs {shlex.quote(str(home / 'tmp'))}"]
    for number, folder in enumerate(_find_closed_folders()):
        # an overlay's root has the mode of its upper folder, and what is below stays as it is
        upper, work = (shlex.quote(f"{home}/tmp/{name}-{number}") for name in ("upper", "work"))
        lines += [f"mkdir -m 755 {upper} {work}"]
        lines += [
            f"mount -t overlay overlay -o lowerdir={shlex.quote(str(folder))},upperdir={upper},workdir={work} "
            f"{shlex.quote(str(folder))}"
        ]
    groups = "--clear-groups"
    if engine is not None:
        own = home / "engine.sock"
        own.touch()
        lines += [f"mount --bind {shlex.quote(str(engine))} {shlex.quote(str(own))}"]
        groups = f"--groups {engine.stat().st_gid}"
        env = {"DOCKER_HOST": f"unix://{own}", **env}
    lines += [f'exec setpriv --reuid {UID} --regid {UID} {groups} --inh-caps=-all "$@"']
    clean = {
        "HOME": str(home),
        "TMPDIR": str(home),
        "POLAR_TRL_CACHE": str(home / "cache"),
        "PATH": os.environ["PATH"],
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'helpers'}",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return subprocess.Popen(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", "\n".join(lines), "sh",
         sys.executable, "-c", script, *arguments],
        env={**clean, **env}, cwd="/", stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def _find_closed_folders() -> list[Path]:
    needed = [Path(path).absolute() for path in (sys.prefix, sys.base_prefix, ROOT)]
    folders = {folder for path in needed for folder in (path, *path.parents)}
    return sorted(folder for folder in folders if not folder.stat().st_mode & stat.S_IXOTH)
