"""A folder of this machine -> the tree that agents get: a git repository with no future in it.

A fix leaks through version control: by later commits behind other branches and tags, by reflogs, by objects that
nothing names any more. A folder that is a repository keeps the history of its HEAD and nothing else; one that is none,
or that shares one with other folders, becomes a repository of one commit. The result is a copy in the cache, made
once. It refuses a repository in which anything else is left after that.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from polar_trl.cache import find_cache
from polar_trl.errors import SandboxError
from polar_trl.types import Task

GIT_TIMEOUT_S = 600
_KEPT = frozenset({"HEAD", "config", "index", "info", "objects", "packed-refs", "refs", "shallow"})
"""All else in .git tells of what was done: logs, ORIG_HEAD, COMMIT_EDITMSG, worktrees, ..."""
_IDENTITY = {
    f"GIT_{role}_{name}": value
    for role in ("AUTHOR", "COMMITTER")
    for name, value in (("NAME", "task"), ("EMAIL", "task@localhost"), ("DATE", "2000-01-01T00:00:00Z"))
}


class WorkTrees:
    """Prepared trees by the folder that they were made from; each is made once in the life of this object."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._trees: dict[str, Path] = {}

    def find(self, task: Task) -> Path | None:
        """The tree of a task's `workspace`; None where it has none. Raises `SandboxError` naming the task."""
        if not task.workspace:
            return None
        with self._lock:
            if task.workspace not in self._trees:
                try:
                    self._trees[task.workspace] = prepare_work_tree(Path(task.workspace))
                except SandboxError as error:
                    raise SandboxError(f"task {task.id}: {error}") from error
            return self._trees[task.workspace]


def prepare_work_tree(source: Path) -> Path:
    """A copy of the folder without a future, in the cache. Raises `SandboxError`."""
    if not source.is_dir():
        raise SandboxError(f"the work tree {source} is no folder")
    return make_once(f"{source.name[:40]}-{_digest_listing(source)}", lambda target: _copy(source, target))


def make_once(name: str, fill: Callable[[Path], None]) -> Path:
    """The cache's tree of that name; where it is not there, `fill` is given an empty folder to make it in."""
    folder = find_cache("trees") / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / f".{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder.parent) as scratch:
                made = Path(scratch) / "tree"
                made.mkdir()
                fill(made)
                cut_future(made)
                os.rename(made, folder)
    return folder


def cut_future(tree: Path) -> None:
    """Leave of a repository's history what leads to its HEAD; make a repository of a folder that is none."""
    for nested in tree.glob("*/**/.git"):
        shutil.rmtree(nested) if nested.is_dir() and not nested.is_symlink() else nested.unlink()
    folder = tree / ".git"
    if not _is_whole(folder) or _git(tree, "rev-parse", "--quiet", "--verify", "HEAD^{commit}", check=False) is None:
        _start_over(tree)
        return
    branch = _git(tree, "symbolic-ref", "--quiet", "HEAD", check=False)
    past = set((_git(tree, "for-each-ref", "--merged", "HEAD", "--format=%(refname)", "refs/tags") or "").split())
    for name in (_git(tree, "for-each-ref", "--format=%(refname)") or "").split():
        if name != branch and name not in past:
            _git(tree, "update-ref", "--no-deref", "-d", name)
    for remote in (_git(tree, "remote") or "").split():
        _git(tree, "remote", "remove", remote)
    leftovers = [path for path in folder.iterdir() if path.name not in _KEPT]
    for leftover in [*leftovers, *(folder / "objects" / "pack").glob("*.keep")]:
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink(missing_ok=True)
    _git(tree, "repack", "-a", "-d", "-q")
    (folder / "objects" / "info" / "alternates").unlink(missing_ok=True)
    _git(tree, "gc", "--quiet", "--prune=now")
    (folder / "gc.log").unlink(missing_ok=True)
    _refuse_future(tree)


def _is_whole(folder: Path) -> bool:
    """Whether a repository lies in this folder altogether: what it links to, or shares, is somebody else's."""
    if folder.is_symlink() or not folder.is_dir() or (folder / "commondir").exists():
        return False
    return not any(path.is_symlink() for path in folder.rglob("*"))


def _refuse_future(tree: Path) -> None:
    """Whatever is stored must lead to HEAD, to an earlier tag, or stand in the index."""
    known = (
        _git(tree, "rev-list", "--objects", "--indexed-objects", "--no-object-names", "HEAD", "--tags") or ""
    ).split()
    stored = (_git(tree, "cat-file", "--batch-all-objects", "--batch-check=%(objectname)") or "").split()
    if left := set(stored) - set(known):
        raise SandboxError(f"{len(left)} objects of the repository in {tree} lead nowhere and could not be removed")


def _start_over(tree: Path) -> None:
    folder = tree / ".git"
    shutil.rmtree(folder) if folder.is_dir() and not folder.is_symlink() else folder.unlink(missing_ok=True)
    _git(tree, "init", "--quiet", "--initial-branch=main")
    shutil.rmtree(folder / "hooks", ignore_errors=True)
    _git(tree, "add", "--all")
    _git(tree, "commit", "--quiet", "--allow-empty", "--no-verify", "--message=start")


def _git(tree: Path, *words: str, check: bool = True) -> str | None:
    """What git prints; None if it failed and that is an answer. Raises `SandboxError`."""
    settings = ("safe.directory=*", "core.hooksPath=/dev/null", "core.fsmonitor=false", "core.autocrlf=false")
    command = ["git", *(word for setting in settings for word in ("-c", setting)), *words]
    env = {"PATH": os.environ.get("PATH", os.defpath), "HOME": "/nonexistent", "LC_ALL": "C", **_IDENTITY}
    env |= {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CEILING_DIRECTORIES": str(tree.parent)}
    try:
        done = subprocess.run(
            command, cwd=tree, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=GIT_TIMEOUT_S
        )
    except FileNotFoundError:
        raise SandboxError("work trees are prepared with `git`, which is not installed") from None
    except subprocess.TimeoutExpired:
        raise SandboxError(f"git {words[0]} in {tree} did not end within {GIT_TIMEOUT_S} s") from None
    if done.returncode != 0:
        if not check:
            return None
        raise SandboxError(f"git {words[0]} failed in {tree}: {done.stderr.decode(errors='replace').strip()[-300:]}")
    return done.stdout.decode("utf-8", "surrogateescape").strip()


def _copy(source: Path, target: Path) -> None:
    try:
        shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
    except (OSError, shutil.Error) as error:
        raise SandboxError(f"the work tree {source} cannot be copied: {error}") from error


def _digest_listing(source: Path) -> str:
    """Of every file's name, kind, size and time: a tree that was changed gets a copy of its own."""
    digest = hashlib.sha256(str(source.resolve()).encode())
    for folder, names, files in os.walk(source):
        names.sort()
        for name in sorted([*files, *names]):
            path = os.path.join(folder, name)
            state = os.lstat(path)
            size = state.st_size if name in files else 0
            digest.update(f"{path}\0{state.st_mode}\0{size}\0{state.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:16]
