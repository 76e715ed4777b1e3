"""Install agents from npm and PyPI, at exact versions, into a cache that sandboxes only read.

Refuses another version than the one asked for (`ConfigError`): npm installs an older release without a word where a
package's `engines` do not match, so the version is read back from the installed metadata. The npm packages of our own
versions come with a lock (`locks/`, a package-lock.json each): everything that they pull in is held against its hash.
Install scripts do not run, but for that of a package which does not work without.

    <cache>/<name>-<version>/             one package with all that it needs
    <cache>/<name>-<version>/.installed   written last: a folder without it is an interrupted installation
    <cache>/.<name>-<version>.lock        held by the process that installs
"""

import fcntl
import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from polar_trl.cache import CACHE_VARIABLE, find_cache
from polar_trl.errors import ConfigError

INSTALL_TIMEOUT_S = 1200
LOCKS = Path(__file__).with_name("locks")
"""A package-lock.json for each version that is ours, without the registry that it came from."""
_MARK = ".installed"
_WRITE_BITS = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True, kw_only=True, slots=True)
class Package(ABC):
    """A program from a registry, alone in a folder of its own.

    Args:
        name: As in the registry, such as "@openai/codex".
        version: Exact.
        binary: Name of the program in the package's folder of programs.
    """

    name: str
    version: str
    binary: str

    @property
    def folder(self) -> Path:
        """Folder of its installation, there or not."""
        return find_cache("agents") / f"{_slug(self.name)}-{_slug(self.version)}"

    @property
    @abstractmethod
    def program(self) -> Path:
        """Path of the program."""

    @abstractmethod
    def read_version(self) -> str | None:
        """Read the version from its metadata in `folder`, whole or not; None where there is none."""

    def find_version(self) -> str | None:
        """Return the installed version; None where the installation is missing or was interrupted."""
        return self.read_version() if (self.folder / _MARK).exists() else None

    @abstractmethod
    def install(self) -> None:
        """Install it unless it is there. Raises `ConfigError`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NpmPackage(Package):
    """A package of the npm registry; its programs are in node_modules/.bin.

    Args:
        needs_script: It puts its program in place in an install script of its own, which is then run after all.
    """

    needs_script: bool = False

    @property
    def program(self) -> Path:
        return self.folder / "node_modules" / ".bin" / self.binary

    def read_version(self) -> str | None:
        try:
            text = (self.folder / "node_modules" / self.name / "package.json").read_text(encoding="utf-8")
            return str(json.loads(text)["version"])
        except (OSError, ValueError, KeyError):
            return None

    def install(self) -> None:
        with _installing(self) as folder:
            if folder is not None:
                npm = shutil.which("npm")
                if npm is None:
                    raise ConfigError(f"{self.name} needs npm to be installed; install Node.js 20 or newer")
                quiet = ["--no-audit", "--no-fund", "--no-update-notifier", "--loglevel=error"]
                here = ["--prefix", str(folder)]
                lock = LOCKS / f"{folder.name}.json"
                if lock.exists():
                    root = json.loads(lock.read_text(encoding="utf-8"))["packages"][""]
                    (folder / "package.json").write_text(json.dumps(root), encoding="utf-8")
                    shutil.copy(lock, folder / "package-lock.json")
                    _run([npm, "ci", "--ignore-scripts", *quiet, *here], self)
                else:
                    wanted = f"{self.name}@{self.version}"
                    _run([npm, "install", "--ignore-scripts", *quiet, *here, wanted], self)
                if self.needs_script:
                    _run([npm, "rebuild", *quiet, *here, self.name], self)


@dataclass(frozen=True, kw_only=True, slots=True)
class PyPIPackage(Package):
    """A package of PyPI, in a virtual environment of its own (made with the Python that runs this).

    uv installs it: pip takes minutes for the larger agents on a busy machine. uv compiles it too, since a sandbox that
    only reads would compile it anew for every session. uv has its own settings (UV_DEFAULT_INDEX and so on) and
    reads none of pip's.

    Args:
        installer: pip installs uv itself.
    """

    installer: Literal["uv", "pip"] = "uv"

    @property
    def program(self) -> Path:
        return self.folder / "bin" / self.binary

    def read_version(self) -> str | None:
        if not (self.folder / "bin" / "python").exists():  # a link to a Python that may have gone
            return None
        name = re.sub(r"[-_.]+", "_", self.name).lower()
        for folder in self.folder.glob(f"lib/python3*/site-packages/{name}-*.dist-info"):
            return folder.name.removesuffix(".dist-info").partition("-")[2]
        return None

    def install(self) -> None:
        if self.installer == "uv" and self.find_version() != self.version:
            UV.install()
        requirement = f"{self.name}=={self.version}"
        with _installing(self) as folder:
            if folder is None:
                return
            python = str(folder / "bin" / "python")
            if self.installer == "pip":
                _run([sys.executable, "-m", "venv", str(folder)], self)
                _run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", requirement], self)
            else:
                uv = str(UV.program)
                _run([uv, "venv", "--quiet", "--no-project", "--python", sys.executable, str(folder)], self)
                install = [uv, "pip", "install", "--quiet", "--no-cache", "--compile-bytecode", "--python", python]
                _run([*install, requirement], self)


NODE = NpmPackage(name="node", version="22.23.3", binary="node", needs_script=True)
"""Node.js for the agents that need 22 where the machine's own is older."""
UV = PyPIPackage(name="uv", version="0.13.9", binary="uv", installer="pip")


def put_node_first() -> str:
    """Build the line of an agent's command that puts `NODE` first on PATH."""
    return f'export PATH={shlex.quote(str(NODE.program.parent))}:"$PATH"'


@contextmanager
def _installing(package: Package) -> Iterator[Path | None]:
    """Yield the empty folder to install into, or None where the version is there. One process at a time."""
    if package.find_version() == package.version:
        yield None  # without the lock: a cache that was filled beforehand need not be writable
        return
    folder = package.folder
    with _locked(package):
        if package.find_version() == package.version:
            yield None
            return
        with _naming_the_cache(package):
            _remove(folder)
            # in its final place: virtual environments hold absolute paths
            folder.mkdir()
        print(f"installing {package.name} {package.version} into {folder} ...", file=sys.stderr, flush=True)
        yield folder
        found = package.read_version()
        if found != package.version:
            raise ConfigError(f"{package.name}: asked for {package.version}, the registry gave {found or 'nothing'}")
        with _naming_the_cache(package):
            (folder / _MARK).touch()
            _make_read_only(folder)


@contextmanager
def _locked(package: Package) -> Iterator[None]:
    folder = package.folder
    with _naming_the_cache(package):
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = open(folder.parent / f".{folder.name}.lock", "w")  # noqa: SIM115 - held over the yield
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _naming_the_cache(package: Package) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"cannot install {package.name} under {package.folder.parent} ({error.strerror}); "
            f"set {CACHE_VARIABLE} to a folder that can be written"
        ) from error


def _make_read_only(folder: Path) -> None:
    # in the local sandbox an agent runs as this user: it must not change itself by accident for the sessions after it
    for path, _, names in os.walk(folder):
        for name in (".", *names):
            file = os.path.join(path, name)
            if not os.path.islink(file):
                os.chmod(file, os.stat(file).st_mode & ~_WRITE_BITS)


def _remove(folder: Path) -> None:
    for path, _, _ in os.walk(folder):  # what a folder holds can only be removed from a writable one
        os.chmod(path, 0o700)
    if folder.exists():
        shutil.rmtree(folder)


def _run(command: list[str], package: Package) -> None:
    with tempfile.TemporaryFile() as log:
        try:
            subprocess.run(
                command,
                # settings files of the current folder's project are not meant for agents
                cwd=package.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=INSTALL_TIMEOUT_S,
                env=_build_env(),
                check=True,
            )
        except (OSError, subprocess.SubprocessError) as error:
            log.seek(0, os.SEEK_END)
            log.seek(max(0, log.tell() - 1000))
            said = log.read().decode(errors="replace").strip()
            if re.search(r"npm error code (ETARGET|E404)|there is no version of|No matching distribution", said):
                raise ConfigError(f"{package.name}: the registry has no version {package.version}") from error
            raise ConfigError(f"{package.name} {package.version} could not be installed: {error}; {said}") from error


def _build_env() -> Mapping[str, str]:
    # a virtual environment that is active here must not be the one that is installed into
    return {
        name: value for name, value in os.environ.items() if name not in ("PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV")
    }


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-")
