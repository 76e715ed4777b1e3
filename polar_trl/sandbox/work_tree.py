"""Prepare work trees for agents: git repositories without the commits after HEAD, in which a fix could be looked up.

A fix leaks through version control: by later commits behind other branches and tags, by reflogs, by unreachable
objects. A folder that is a repository keeps the history of its HEAD and nothing else; one that is none, or that shares
one with other folders, becomes a repository of one commit. The result is a copy in the cache, made once. Refuses a
repository in which an object is left that HEAD, its tags and the index do not reach (`SandboxError`).
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from polar_trl.cache import find_cache
from polar_trl.errors import SandboxError
from polar_trl.sandbox.owner import remove_tree
from polar_trl.types import Task

GIT_TIMEOUT_S = 600
_KEPT = frozenset({"HEAD", "config", "index", "info", "objects", "packed-refs", "refs", "shallow"})
"""Entries of .git that stay. The others tell of earlier work: logs, ORIG_HEAD, COMMIT_EDITMSG, worktrees, ..."""
_IDENTITY = {
    f"GIT_{role}_{name}": value
    for role in ("AUTHOR", "COMMITTER")
    for name, value in (("NAME", "task"), ("EMAIL", "task@localhost"), ("DATE", "2000-01-01T00:00:00Z"))
}


class WorkTrees:
    """Prepared work trees by source folder; each is made once in the life of this object."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._trees: dict[str, Path] = {}

    def find(self, task: Task) -> Path | None:
        """Prepare the tree of a task's `workspace`; None where it has none. Raises `SandboxError` naming the task.

        Without the task's `start_patch`.
        """
        if not task.workspace:
            return None
        with self._lock:
            if task.workspace not in self._trees:
                try:
                    self._trees[task.workspace] = prepare_work_tree(Path(task.workspace))
                except SandboxError as error:
                    raise SandboxError(f"task {task.id}: {error}") from error
            return self._trees[task.workspace]


def apply_start_patch(task: Task, tree: Path | None) -> Path | None:
    """Return the tree that a task's `start_patch` makes of another, in the cache; without a patch the other itself.

    Raises `SandboxError` naming the task where the patch does not apply.
    """
    if task.start_patch is None:
        return tree
    if tree is None:
        raise SandboxError(
            f"task {task.id}: start_patch has nothing to apply to: give a workspace, or a workdir of image"
        )
    patch = task.start_patch.encode("utf-8", "surrogateescape")
    digest = hashlib.sha256(os.fsencode(tree.name) + b"\0" + patch).hexdigest()[:16]

    def fill(target: Path) -> None:
        _copy(tree, target)
        _remove(target / ".git")
        file = target.parent / "start.patch"
        file.write_bytes(patch if patch.endswith(b"\n") else patch + b"\n")
        _git(target, "apply", "--whitespace=nowarn", str(file))

    try:
        return make_once(f"patched-{digest}", fill)
    except SandboxError as error:
        raise SandboxError(f"task {task.id}: start_patch: {error}") from error


def prepare_work_tree(source: Path) -> Path:
    """Copy a folder into the cache, without commits after HEAD. Raises `SandboxError`."""
    if not source.is_dir():
        raise SandboxError(f"the work tree {source} is no folder")
    return make_once(f"{source.name[:40]}-{_digest_listing(source)}", lambda target: _copy(source, target))


def make_once(name: str, fill: Callable[[Path], None]) -> Path:
    """Return the cache's tree of that name; where it is missing, `fill` is called with an empty folder for it."""

    def fill_and_drop(target: Path) -> None:
        fill(target)
        drop_commits_after_head(target)

    plain = re.sub(r"[^A-Za-z0-9_.-]", "_", name)  # in the options of a mount, ":" and "," end a folder's name
    return make_folder_once(find_cache("trees") / plain, fill_and_drop)


def make_folder_once(folder: Path, fill: Callable[[Path], None]) -> Path:
    """Return a folder, whole: where it is missing, `fill` is called with an empty one that takes its place."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / f".{folder.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            for left in folder.parent.glob(f".{folder.name}-*"):  # of a process that was killed
                remove_tree(left)
            with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
                made = Path(scratch) / "made"
                made.mkdir()
                fill(made)
                os.rename(made, folder)
    return folder


def drop_commits_after_head(tree: Path) -> None:
    """Remove refs and objects that HEAD does not reach; make a repository of one commit of a folder that is none."""
    folder = tree / ".git"
    for parent, names, files in os.walk(tree):  # and no glob, which follows links to folders of somebody else
        if ".git" in names or ".git" in files:
            if ".git" in names:
                names.remove(".git")
            if Path(parent) != tree:
                _remove(Path(parent, ".git"))
    if _is_whole(folder):
        _drop_programs(folder)
    if not _is_whole(folder) or _git(tree, "rev-parse", "--quiet", "--verify", "HEAD^{commit}", check=False) is None:
        _start_over(tree)
        return
    _drop_refs(tree)
    for leftover in [path for path in folder.iterdir() if path.name not in _KEPT]:
        _remove(leftover)
    for keep in (folder / "objects" / "pack").glob("*.keep"):
        keep.unlink()
    _git(tree, "repack", "-a", "-d", "-q")
    (folder / "objects" / "info" / "alternates").unlink(missing_ok=True)
    _git(tree, "gc", "--quiet", "--prune=now")
    (folder / "gc.log").unlink(missing_ok=True)
    _require_only_head(tree)


def _drop_programs(folder: Path) -> None:
    """Drop settings by which git gc runs a program (gc.recentObjectsHook), and those that name further files of them.

    The repository may be out of an image that nobody has looked into, and git runs here outside of any sandbox.
    """
    config = ("config", "--file", str(folder / "config"))
    names = _git(folder.parent, *config, "--null", "--name-only", "--list", check=False) or ""
    for name in set(names.split("\0")):
        if name.startswith(("gc.", "include.", "includeif.")):
            _git(folder.parent, *config, "--unset-all", name)


def _drop_refs(tree: Path) -> None:
    """Delete remotes, and all refs but the branch that is checked out and tags that it reaches."""
    kept = set(_list_words(tree, "for-each-ref", "--merged", "HEAD", "--format=%(refname)", "refs/tags"))
    kept.add(_git(tree, "symbolic-ref", "--quiet", "HEAD", check=False) or "")
    for name in _list_words(tree, "for-each-ref", "--format=%(refname)"):
        if name not in kept:
            _git(tree, "update-ref", "--no-deref", "-d", name)
    for remote in _list_words(tree, "remote"):
        _git(tree, "remote", "remove", remote)


def _is_whole(folder: Path) -> bool:
    """Return whether a repository lies in this folder altogether, without links and parts shared with others."""
    if folder.is_symlink() or not folder.is_dir() or (folder / "commondir").exists():
        return False
    return not any(path.is_symlink() for path in folder.rglob("*"))


def _require_only_head(tree: Path) -> None:
    """Raise `SandboxError` unless every stored object is reached from HEAD, an earlier tag or the index."""
    known = _list_words(tree, "rev-list", "--objects", "--indexed-objects", "--no-object-names", "HEAD", "--tags")
    stored = _list_words(tree, "cat-file", "--batch-all-objects", "--batch-check=%(objectname)")
    if left := set(stored) - set(known):
        raise SandboxError(f"{len(left)} objects of the repository in {tree} lead nowhere and could not be removed")


def _start_over(tree: Path) -> None:
    folder = tree / ".git"
    _remove(folder)
    _git(tree, "init", "--quiet", "--initial-branch=main")
    shutil.rmtree(folder / "hooks", ignore_errors=True)
    _git(tree, "add", "--all")
    _git(tree, "commit", "--quiet", "--allow-empty", "--no-verify", "--message=start")


def _remove(path: Path) -> None:
    """Remove a folder, a file or a link, there or not."""
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)


def _list_words(tree: Path, *words: str) -> list[str]:
    return (_git(tree, *words) or "").split()


def _git(tree: Path, *words: str, check: bool = True) -> str | None:
    """Run git and return its output. Where it fails: None without `check`, else `SandboxError`."""
    settings = ("safe.directory=*", "core.hooksPath=/dev/null", "core.fsmonitor=false", "core.autocrlf=false")
    command = ["git", *(word for setting in settings for word in ("-c", setting)), *words]
    env = {"PATH": os.environ.get("PATH", os.defpath), "HOME": "/nonexistent", "LC_ALL": "C", **_IDENTITY}
    # a clone that left objects out would fetch them, by a program that its own settings may name
    env |= {"GIT_NO_LAZY_FETCH": "1", "GIT_ALLOW_PROTOCOL": "none"}
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
    """Hash every file's name, kind, size and time: a tree that was changed gets a copy of its own."""
    digest = hashlib.sha256(str(source.resolve()).encode())
    for folder, names, files in os.walk(source):
        names.sort()
        for name in sorted([*files, *names]):
            path = os.path.join(folder, name)
            state = os.lstat(path)
            size = state.st_size if name in files else 0
            digest.update(f"{path}\0{state.st_mode}\0{size}\0{state.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:16]
