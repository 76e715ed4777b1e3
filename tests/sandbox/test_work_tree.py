"""Work trees hold no commit after HEAD, and the source is left alone."""

import os
import subprocess
from pathlib import Path

import pytest

from polar_trl.cache import CACHE_VARIABLE
from polar_trl.errors import SandboxError
from polar_trl.sandbox.local import LocalSandboxBackend
from polar_trl.sandbox.work_tree import WorkTrees, prepare_work_tree
from polar_trl.types import Task

SECRET = "the fix that is asked for"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))


def git(folder: Path, *words: str) -> str:
    env = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    identity = ("-c", "user.name=n", "-c", "user.email=e@localhost", "-c", "safe.directory=*")
    done = subprocess.run(["git", *identity, *words], cwd=folder, env=env, capture_output=True, check=True)
    return done.stdout.decode("latin-1").strip()


def commit(repo: Path, text: str) -> str:
    (repo / "m.py").write_text(text)
    git(repo, "add", "-A")
    git(repo, "commit", "-q", "-m", text)
    return git(repo, "rev-parse", "HEAD")


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """Make two commits, and hide the fix everywhere in history: branches, tags, notes, stash, reflog, a remote."""
    repo, upstream = tmp_path / "repo", tmp_path / "upstream"
    for folder in (repo, upstream):
        folder.mkdir()
        git(folder, "init", "-q", "-b", "main")
    commit(repo, "first")
    git(repo, "tag", "v1")
    base = commit(repo, "base")
    commit(repo, SECRET)
    git(repo, "branch", "later")
    git(repo, "tag", "-a", "v2", "-m", SECRET)
    git(repo, "reset", "-q", "--hard", base)
    git(repo, "notes", "add", "-m", SECRET, base)
    (repo / "m.py").write_text(SECRET + " stashed")
    git(repo, "stash", "-q")
    commit(repo, SECRET + " dropped")
    git(repo, "reset", "-q", "--hard", base)
    commit(upstream, SECRET + " upstream")
    git(repo, "remote", "add", "origin", str(upstream))
    git(repo, "fetch", "-q", "origin")
    git(repo, "pack-refs", "--all")
    git(repo, "repack", "-a", "-d", "-q")
    next((repo / ".git" / "objects" / "pack").glob("*.pack")).with_suffix(".keep").touch()
    return repo


def read_everything(tree: Path) -> str:
    """Read all objects and files of a repository."""
    objects = git(tree, "cat-file", "--batch-all-objects", "--batch", "--buffer", "--unordered")
    files = [path.read_bytes().decode("latin-1") for path in sorted((tree / ".git").rglob("*")) if path.is_file()]
    return "\n".join([objects, *files])


def test_no_commit_after_head_is_left(repo: Path) -> None:
    before = git(repo, "for-each-ref")
    assert SECRET in read_everything(repo)
    tree = prepare_work_tree(repo)
    assert SECRET not in read_everything(tree)
    assert "upstream" not in read_everything(tree)
    assert git(tree, "log", "--all", "--format=%s").splitlines() == ["base", "first"]
    assert git(tree, "reflog") == "" and git(tree, "remote") == "" and git(tree, "stash", "list") == ""
    assert git(tree, "tag") == "v1"
    assert git(tree, "rev-parse", "HEAD") == git(repo, "rev-parse", "HEAD")
    assert git(tree, "status", "--porcelain") == ""
    assert git(repo, "for-each-ref") == before, "the source was touched"


def test_a_detached_head_keeps_its_past_only(repo: Path) -> None:
    git(repo, "checkout", "-q", "v1")
    tree = prepare_work_tree(repo)
    assert git(tree, "log", "--all", "HEAD", "--format=%s").splitlines() == ["first"]
    assert "base" not in git(tree, "cat-file", "--batch-all-objects", "--batch", "--buffer", "--unordered")


def test_what_was_not_committed_stays_as_it_is(repo: Path) -> None:
    (repo / "m.py").write_text("changed")
    (repo / "new.py").write_text("new")
    git(repo, "add", "new.py")
    tree = prepare_work_tree(repo)
    assert (tree / "m.py").read_text() == "changed"
    assert git(tree, "status", "--porcelain").splitlines() == ["M m.py", "A  new.py"]


def test_a_repository_inside_is_no_repository_any_more(repo: Path) -> None:
    inner = repo / "vendor" / "lib"
    inner.mkdir(parents=True)
    git(inner, "init", "-q", "-b", "main")
    commit(inner, SECRET)
    commit(inner, "inner")
    tree = prepare_work_tree(repo)
    assert not (tree / "vendor" / "lib" / ".git").exists()
    assert (tree / "vendor" / "lib" / "m.py").read_text() == "inner"


def test_a_repository_cannot_have_git_run_a_program(repo: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    git(repo, "config", "gc.recentObjectsHook", f"touch {ran}")
    git(repo, "config", "include.path", "../more")
    assert "touch" not in (prepare_work_tree(repo) / ".git/config").read_text()
    assert "../more" not in (prepare_work_tree(repo) / ".git/config").read_text()
    # of a clone that left an object out, which git would fetch in the way that the clone's settings name
    blob = git(repo, "rev-parse", "HEAD:m.py")
    for pack in (repo / ".git/objects/pack").glob("*.pack"):
        pack.rename(tmp_path / "pack")
        with (tmp_path / "pack").open("rb") as file:
            subprocess.run(["git", "unpack-objects", "-q"], cwd=repo, stdin=file, check=True)
    (repo / ".git/objects" / blob[:2] / blob[2:]).unlink()
    (repo / ".git/index").unlink()
    for name, value in {
        "core.repositoryformatversion": "1",
        "extensions.partialclone": "lost",
        "protocol.ext.allow": "always",
        f"url.ext::sh -c touch% {ran} #.insteadOf": "lost",
    }.items():
        git(repo, "config", name, value)
    with pytest.raises(SandboxError, match="git repack failed"):
        prepare_work_tree(repo)
    assert not ran.exists()


def test_a_repository_behind_a_link_in_the_folder_is_left_alone(repo: Path, tmp_path: Path) -> None:
    before = read_everything(repo)
    (tmp_path / "work" / "sub").mkdir(parents=True)
    for link in ("work/link", "work/sub/link"):
        (tmp_path / link).symlink_to(repo)
    tree = prepare_work_tree(tmp_path / "work")
    assert read_everything(repo) == before
    assert (tree / "link").is_symlink() and (tree / "sub" / "link").is_symlink()


@pytest.mark.parametrize("way", ["a link", "a folder of links", "a common folder"])
def test_a_repository_that_lies_elsewhere_is_left_alone(repo: Path, tmp_path: Path, way: str) -> None:
    before, work = read_everything(repo), tmp_path / "work"
    work.mkdir()
    (work / "m.py").write_text("mine")
    if way == "a link":
        (work / ".git").symlink_to(repo / ".git")
    elif way == "a folder of links":
        (work / ".git").mkdir()
        (work / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
        for name in ("refs", "objects", "logs", "config", "packed-refs"):
            (work / ".git" / name).symlink_to(repo / ".git" / name)
    else:
        git(repo, "worktree", "add", "-q", "--detach", str(tmp_path / "other"))
        (work / ".git").mkdir()
        for file in (repo / ".git" / "worktrees" / "other").iterdir():
            if file.is_file():
                (work / ".git" / file.name).write_bytes(file.read_bytes())
        (work / ".git" / "commondir").write_text(f"{repo}/.git\n")
        before = read_everything(repo)
    tree = prepare_work_tree(work)
    assert read_everything(repo) == before
    assert git(tree, "log", "--all", "--format=%s") == "start" and (tree / "m.py").read_text() == "mine"


def test_a_plain_folder_becomes_one_commit(tmp_path: Path) -> None:
    source = tmp_path / "plain"
    (source / "sub").mkdir(parents=True)
    (source / "sub" / "run.sh").write_text("echo")
    (source / "sub" / "run.sh").chmod(0o755)
    (source / "link").symlink_to("sub/run.sh")
    tree = prepare_work_tree(source)
    assert git(tree, "log", "--format=%s %an") == "start task"
    assert git(tree, "status", "--porcelain") == ""
    assert os.access(tree / "sub" / "run.sh", os.X_OK) and (tree / "link").is_symlink()
    assert not (source / ".git").exists()


def test_it_is_made_once_and_again_when_the_source_changes(tmp_path: Path) -> None:
    source = tmp_path / "plain"
    source.mkdir()
    (source / "a").write_text("1")
    first, trees = prepare_work_tree(source), WorkTrees()
    task = Task(id="t", instruction="x", workspace=str(source))
    assert prepare_work_tree(source) == first == trees.find(task)
    (source / "a").write_text("22")
    assert trees.find(task) == first, "one run sees one tree"
    second = prepare_work_tree(source)
    assert second != first and (second / "a").read_text() == "22" and (first / "a").read_text() == "1"


def test_the_agent_gets_such_a_tree(repo: Path, tmp_path: Path) -> None:
    backend = LocalSandboxBackend(tmp_path / "boxes")
    sandbox = backend.create(Task(id="t", instruction="x", workspace=str(repo)), "s")
    try:
        log = sandbox.run("git log --all --format=%s; git reflog | wc -l", env={}, timeout_s=20)
        assert log.stdout == "base\nfirst\n0\n", log.stderr
    finally:
        sandbox.destroy()


def test_what_a_killed_process_left_in_the_cache_is_removed(tmp_path: Path) -> None:
    source, left = tmp_path / "plain", tmp_path / "cache" / "trees"
    source.mkdir()
    (source / "a").write_text("1")
    made = prepare_work_tree(source)
    made.rename(left / f".{made.name}-abc")
    assert prepare_work_tree(source) == made
    assert sorted(path.name for path in left.iterdir()) == [f".{made.name}.lock", made.name]


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="nowhere is no folder"):
        prepare_work_tree(tmp_path / "nowhere")
