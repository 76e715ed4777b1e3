"""Install the packages that tasks' tests need, and refuse environments that hold a task's answer.

An image that was built for a task has its packages already; every other sandbox sees an environment of this machine,
at the same path. A release of the package under repair without the defect is the answer: in an environment of tests,
or in the agent's own folder, it raises `ConfigError`.
"""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from polar_trl.cache import find_cache
from polar_trl.errors import ConfigError
from polar_trl.names import normalize_package
from polar_trl.tasks.build.suite import install_environment
from polar_trl.types import Task

SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"
_METADATA = re.compile(r"(?P<name>.+?)-(?P<version>\d[^-]*)(?:-py[\d.]+)?\.(?:dist-info|egg-info)")
_PINNED = re.compile(r"^\s*(?P<name>[\w.-]+)==(?P<version>[\w.]+)", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Installed:
    """A release of a package that is installed in a folder."""

    name: str
    """Normalized."""
    version: str
    path: Path
    """Its metadata, or the file that lists a package's vendored ones."""


def provide_python(tasks: Sequence[Task], *, sandbox: str = "bwrap", image: str | None = None) -> list[Task]:
    """Install the requirements of these tasks' tests, once for each file; return the tasks with that Python.

    Args:
        sandbox: The kind of the run's sandboxes.
        image: Of all sandboxes. Without one, Docker builds a task's image from its own `build_context`, with the
            packages.

    Raises `ConfigError` where it cannot be installed, or holds a task's answer.
    """
    builds_images = sandbox == "docker" and image is None
    pythons: dict[str, Path] = {}
    releases: dict[str, list[Installed]] = {}
    provided = []
    for task in tasks:
        if task.tests is None or task.tests.requirements is None or _has_own_image(task, builds_images):
            provided.append(task)
            continue
        requirements = task.tests.requirements
        if requirements not in pythons:
            try:
                pythons[requirements] = install_environment(Path(requirements))
            except ConfigError as error:
                raise ConfigError(f"task {task.id!r}: 'tests.requirements': {error}") from error
            releases[requirements] = list_releases(pythons[requirements].parent.parent)
        python = pythons[requirements]
        if answer := find_answer(task, releases[requirements]):
            raise ConfigError(
                f"task {task.id!r}: {requirements} installs its answer, {answer.name} {answer.version}; "
                "pin an older release"
            )
        # first on PATH: `python` is what the agent is told to run the tests with
        env = {"PATH": f"{python.parent}:{SYSTEM_PATH}", **task.env}
        provided.append(replace(task, env=env, tests=replace(task.tests, python=str(python))))
    return provided


def list_environments(tasks: Sequence[Task]) -> list[Path]:
    """List the host folders that the tests of these tasks run from, which their sandboxes have to show."""
    cache = find_cache("environments")
    pythons = (Path(task.tests.python) for task in tasks if task.tests is not None)
    return list(dict.fromkeys(python.parent.parent for python in pythons if python.is_relative_to(cache)))


def refuse_answers(tasks: Sequence[Task], folders: Sequence[Path]) -> None:
    """Raise `ConfigError` where one of the folders, which every sandbox shows, holds the answer of a task.

    Args:
        folders: Of the agent and of all tests: the answer of one task may be a requirement of another one's tests.
    """
    releases = [release for folder in dict.fromkeys(folders) for release in list_releases(folder)]
    found = [(task, answer) for task in tasks if (answer := find_answer(task, releases))]
    if found:
        task, answer = found[0]
        more = [other.id for other, _ in found[1:]]
        raise ConfigError(
            f"task {task.id!r}: its sandbox shows its answer, {answer.name} {answer.version} ({answer.path}); take it "
            "out of the tasks, or choose another agent if that is the agent's own"
            + (f". The same holds for {len(more)} more: {', '.join(more[:20])}" if more else "")
        )


def list_releases(folder: Path) -> list[Installed]:
    """List the releases that are installed below a folder, vendored ones included."""
    return sorted(_walk_releases(folder), key=lambda release: release.path)


def find_answer(task: Task, releases: Sequence[Installed]) -> Installed | None:
    """Find a release that has the code which a rebuilt task asks for."""
    facts = task.metadata.get("harbor", {}).get("metadata", {})
    package, fixed = facts.get("package"), facts.get("fixed_version")
    if package is None:
        return None
    for release in releases:
        # of a task that an edit made, every release is a good one
        if release.name == normalize_package(package) and (fixed is None or _order(release.version) >= _order(fixed)):
            return release
    return None


def _walk_releases(folder: Path) -> Iterator[Installed]:
    for parent, folders, files in os.walk(folder):
        names = (*folders, *(name for name in files if name.endswith(".egg-info")))
        for match in filter(None, map(_METADATA.fullmatch, names)):
            path = Path(parent, match.string)
            yield Installed(name=normalize_package(match["name"]), version=match["version"], path=path)
        if "vendor.txt" in files:  # pip's
            path = Path(parent, "vendor.txt")
            for match in _PINNED.finditer(path.read_text(encoding="utf-8", errors="replace")):
                yield Installed(name=normalize_package(match["name"]), version=match["version"], path=path)


def _order(version: str) -> list[int]:
    """Return the numbers of a version: good enough to compare releases."""
    return [int(number) for number in re.findall(r"\d+", version)]


def _has_own_image(task: Task, builds_images: bool) -> bool:
    return task.image is not None or (builds_images and task.build_context is not None)
