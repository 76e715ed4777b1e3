"""Agents from npm and PyPI, at exact versions, into a cache that sandboxes only read.

It refuses a registry's substitute: npm installs an older release without a word where a package's `engines` do not
match, so what was installed is read back from its own metadata.
"""

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from polar_trl.errors import ConfigError

CACHE_VARIABLE = "POLAR_TRL_CACHE"
INSTALL_TIMEOUT_S = 1200


class Package(Protocol):
    """A program from a registry."""

    @property
    def name(self) -> str:
        """As in the registry."""
        ...

    @property
    def version(self) -> str:
        """Exact."""
        ...

    @property
    def folder(self) -> Path:
        """Where it is installed, or would be."""
        ...

    def find_version(self) -> str | None:
        """The version that is installed; None where it is not."""
        ...

    def install(self) -> None:
        """Install it unless it is there. Raises `ConfigError`."""
        ...


def find_cache() -> Path:
    """Where agents are installed: $POLAR_TRL_CACHE, else the user's cache folder."""
    root = os.environ.get(CACHE_VARIABLE) or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "polar-trl"
    )
    return Path(root) / "agents"


@dataclass(frozen=True, kw_only=True, slots=True)
class NpmPackage:
    """A package of the npm registry, alone in a folder of its own.

    Args:
        name: Such as "@openai/codex".
        version: Exact.
        binary: The program's name in node_modules/.bin.
    """

    name: str
    version: str
    binary: str

    @property
    def folder(self) -> Path:
        return find_cache() / f"{_slug(self.name)}-{self.version}"

    @property
    def program(self) -> Path:
        return self.folder / "node_modules" / ".bin" / self.binary

    def find_version(self) -> str | None:
        try:
            text = (self.folder / "node_modules" / self.name / "package.json").read_text(encoding="utf-8")
        except OSError:
            return None
        return str(json.loads(text)["version"])

    def install(self) -> None:
        npm = shutil.which("npm")
        if npm is None and self.find_version() is None:
            raise ConfigError(f"{self.name} needs npm to be installed; install Node.js 20 or newer")
        command = [str(npm), "install", "--no-audit", "--no-fund", "--no-update-notifier", "--loglevel=error"]
        with _installing(self) as folder:
            if folder is not None:
                _run([*command, "--prefix", str(folder), f"{self.name}@{self.version}"], self)


@dataclass(frozen=True, kw_only=True, slots=True)
class PyPIPackage:
    """A package of PyPI, with a virtual environment of its own (made with the Python that runs this).

    Args:
        name: As on PyPI.
        version: Exact.
        binary: The program's name in the environment's bin.
        constraints: Further requirements, such as "openai>=3,<4".
    """

    name: str
    version: str
    binary: str
    constraints: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        return find_cache() / f"{_slug(self.name)}-{self.version}"

    @property
    def program(self) -> Path:
        return self.folder / "bin" / self.binary

    def find_version(self) -> str | None:
        name = re.sub(r"[-_.]+", "_", self.name).lower()
        for folder in self.folder.glob(f"lib/python3*/site-packages/{name}-*.dist-info"):
            return folder.name.removesuffix(".dist-info").partition("-")[2]
        return None

    def install(self) -> None:
        with _installing(self) as folder:
            if folder is not None:
                _run([sys.executable, "-m", "venv", str(folder)], self)
                python = str(folder / "bin" / "python")
                command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
                _run([*command, f"{self.name}=={self.version}", *self.constraints], self)


NODE = NpmPackage(name="node", version="22.23.3", binary="node")
"""Node.js for the agents that need 22 where the machine's own is older."""


@contextmanager
def _installing(package: Package) -> Iterator[Path | None]:
    """The folder to install into, or None where the right version is there. One process at a time; a folder that an
    interrupted installation left is removed first, since only a finished one has its mark."""
    folder = package.folder
    mark = folder / ".installed"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = open(folder.parent / f".{folder.name}.lock", "w")  # noqa: SIM115 - held over the yield
    except OSError as error:
        raise ConfigError(
            f"cannot install {package.name} under {folder.parent} ({error.strerror}); "
            f"set {CACHE_VARIABLE} to a folder that can be written"
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if mark.exists() and package.find_version() == package.version:
            yield None
            return
        shutil.rmtree(folder, ignore_errors=True)
        # in its final place: virtual environments hold absolute paths
        folder.mkdir()
        print(f"installing {package.name} {package.version} into {folder} ...", file=sys.stderr, flush=True)
        yield folder
        found = package.find_version()
        if found != package.version:
            raise ConfigError(f"{package.name}: asked for {package.version}, the registry gave {found}")
        mark.touch()


def _run(command: list[str], package: Package) -> None:
    with tempfile.TemporaryFile() as log:
        try:
            subprocess.run(
                command,
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
            raise ConfigError(f"{package.name} {package.version} could not be installed: {error}; {said}") from error


def _build_env() -> Mapping[str, str]:
    # a virtual environment that is active here must not be the one that pip installs into
    return {
        name: value for name, value in os.environ.items() if name not in ("PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV")
    }


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-")
