"""Fetch and unpack releases of PyPI packages, and tell their tests from their sources.

Archives are fetched with pip, so the user's own indexes and mirrors are used, and kept in the cache. Refuses an
archive whose SHA-256 is not the recorded one (`TaskError`).
"""

import hashlib
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from polar_trl.cache import find_cache
from polar_trl.errors import TaskError
from polar_trl.tasks.build.confined import confine, list_python_folders

DOWNLOAD_TIMEOUT_S = 300.0

_TEST_FOLDER = re.compile(r"(tests?|testing|unit_?tests?|.*_tests?)", re.IGNORECASE)
_TEST_FILE = re.compile(r"(test_.*|.*_test|tests?|conftest)\.py")
_SKIPPED = {*(".git", ".github", "docs", "doc", "examples", "example", "benchmarks", "benchmark", "bench", "build")}
_SKIPPED |= {"tasks", "scripts", "tools"}
_CHANGELOG = re.compile(r"(changelog|changes|history|news|release_?notes)(\.\w+)?", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """One version of a package."""

    package: str
    version: str
    sha256: str | None = None
    """Of the source archive; None where it is not known yet."""


def fetch_release(release: Release, pip: Path) -> Path:
    """Return the release's source archive, downloaded unless the cache has it. Raises `TaskError`.

    Args:
        pip: Python of an environment that has the build backends: pip asks a source archive for its metadata.
    """
    folder = find_cache("releases") / release.package / release.version
    archive = _find_archive(folder)
    if archive is None:
        folder.mkdir(parents=True, exist_ok=True)
        _download(release, folder, pip)
        archive = _find_archive(folder)
        if archive is None:
            raise TaskError(f"{release.package} {release.version}: the index has no source archive")
    found = hash_file(archive)
    if release.sha256 is not None and found != release.sha256:
        raise TaskError(
            f"{release.package} {release.version}: the archive {archive} has SHA-256 {found}, "
            f"not {release.sha256}; remove it if it was cut off, otherwise the release is not the recorded one"
        )
    return archive


def hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def unpack_release(archive: Path, target: Path) -> None:
    """Unpack an archive's single folder as `target`. Raises `TaskError` for a broken archive."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        try:
            if archive.suffix == ".zip":
                with zipfile.ZipFile(archive) as zipped:
                    zipped.extractall(scratch)
            else:
                with tarfile.open(archive) as tarred:
                    tarred.extractall(scratch, filter="data")
        except (OSError, EOFError, tarfile.TarError, zipfile.BadZipFile) as error:
            raise TaskError(f"cannot unpack {archive}: {error}; remove it to have it downloaded again") from error
        entries = list(Path(scratch).iterdir())
        if len(entries) != 1 or not entries[0].is_dir():
            raise TaskError(f"{archive} does not hold one folder, as source archives do")
        shutil.move(entries[0], target)


def is_test(path: str) -> bool:
    """Return whether a path relative to the tree belongs to its tests, data files of tests included."""
    *folders, name = path.split("/")
    return any(_TEST_FOLDER.fullmatch(folder) for folder in folders) or _TEST_FILE.fullmatch(name) is not None


def is_changelog(path: str) -> bool:
    """Return whether a file is a changelog, which may tell the solution."""
    return _CHANGELOG.fullmatch(path.rpartition("/")[2]) is not None


def list_files(tree: Path) -> Iterator[str]:
    """Yield the tree's regular files, relative to it, in order, without documentation, tooling and metadata."""
    for folder, folders, names in os.walk(tree):
        relative = os.path.relpath(folder, tree)
        if relative == ".":
            folders[:] = [name for name in folders if name not in _SKIPPED]
        folders[:] = sorted(
            name for name in folders if not name.endswith((".egg-info", ".dist-info")) and name != "__pycache__"
        )
        for name in sorted(names):
            if not os.path.islink(os.path.join(folder, name)):
                yield os.path.normpath(os.path.join(relative, name)).replace(os.sep, "/")


def list_tests(tree: Path) -> list[str]:
    return [path for path in list_files(tree) if is_test(path)]


def list_sources(tree: Path) -> list[str]:
    """List the Python files that are neither tests nor packaging."""
    return [
        path
        for path in list_files(tree)
        if path.endswith(".py") and not is_test(path) and path not in ("setup.py", "conf.py", "noxfile.py", "tasks.py")
    ]


def list_test_roots(tree: Path) -> list[str]:
    """List the topmost test folders and files that hold Python tests, as arguments of a test runner."""
    roots = set()
    for path in list_tests(tree):
        if not path.endswith(".py"):
            continue
        parts = path.split("/")
        depth = next((i for i, part in enumerate(parts[:-1]) if _TEST_FOLDER.fullmatch(part)), len(parts) - 1)
        roots.add("/".join(parts[: depth + 1]))
    return sorted(roots)


def find_import_roots(tree: Path) -> tuple[str, ...]:
    """Return the folders that the package is imported from: "src" where it has modules, then the tree."""
    source = tree / "src"
    has_source = any(source.glob("*.py")) or any(source.glob("*/__init__.py"))
    return ("src", ".") if has_source else (".",)


def add_metadata(tree: Path) -> None:
    """Make the release's own version known to `importlib.metadata` where its archive has no .egg-info in the way."""
    root = tree / find_import_roots(tree)[0]
    info = tree / "PKG-INFO"
    if not info.is_file() or any(root.glob("*.egg-info/PKG-INFO")):
        return
    text = info.read_text(encoding="utf-8", errors="replace")
    fields = dict(re.findall(r"^(Name|Version): *(\S+)", text, re.MULTILINE))
    folder = root / f"{re.sub(r'[-_.]+', '_', fields['Name'])}-{fields['Version']}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(text, encoding="utf-8")
    (folder / "RECORD").write_text("", encoding="utf-8")


def _find_archive(folder: Path) -> Path | None:
    archives = sorted([*folder.glob("*.tar.gz"), *folder.glob("*.zip"), *folder.glob("*.tar.bz2")])
    return archives[0] if archives else None


def _download(release: Release, folder: Path, pip: Path) -> None:
    requirement = f"{release.package}=={release.version}"
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        options = ["--no-binary", ":all:", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
        if release.sha256 is not None:
            # pip compares before it runs anything of the archive
            pinned = Path(scratch) / "pinned.txt"
            pinned.write_text(f"{requirement} --hash=sha256:{release.sha256}\n", encoding="utf-8")
            wanted = ["--require-hashes", "-r", str(pinned)]
        else:
            wanted = [requirement]
        command = [str(pip), "-m", "pip", "download", "--quiet", *options, "--dest", scratch, *wanted]
        confined = confine(command, writable=[Path(scratch)], visible=list_python_folders(pip), network=True)
        try:
            done = subprocess.run(
                confined, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            raise TaskError(f"{requirement}: not downloaded within {DOWNLOAD_TIMEOUT_S:g} s") from None
        archive = _find_archive(Path(scratch))
        if done.returncode != 0 or archive is None:
            lines = [line for line in done.stderr.splitlines() if "ERROR" in line or "error:" in line]
            raise TaskError(
                f"{requirement}: pip could not download it: {' '.join(lines)[-400:] or done.stderr[-400:]}"
            )
        archive.rename(folder / archive.name)
