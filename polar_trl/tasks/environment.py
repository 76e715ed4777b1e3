"""Tasks whose tests need packages -> the same tasks, with a Python that has them, for graders and agents alike.

An image that was built for a task has its packages already; every other sandbox sees an environment of this machine,
at the same path. It refuses an environment that holds the answer: a release of the package under repair in which the
defect is not.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from polar_trl.errors import ConfigError
from polar_trl.tasks.suite import install_environment
from polar_trl.types import Task

SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"


def provide_python(tasks: Sequence[Task], *, builds_images: bool = False) -> list[Task]:
    """Install what the tests of these tasks require, once for each requirements file, and have the tasks use it.

    Args:
        builds_images: The run makes a task's image from its own `build_context`, which then has the packages.

    Raises `ConfigError` where it cannot be installed, or holds a task's answer.
    """
    pythons: dict[str, Path] = {}
    provided = []
    for task in tasks:
        if task.tests is None or task.tests.requirements is None or _has_own_image(task, builds_images):
            provided.append(task)
            continue
        requirements = task.tests.requirements
        if requirements not in pythons:
            pythons[requirements] = install_environment(Path(requirements))
        python = pythons[requirements]
        if answer := find_answer(task, python.parent.parent):
            raise ConfigError(f"task {task.id!r}: {requirements} installs its answer, {answer}; pin an older release")
        # first on PATH: `python` is what the agent is told to run the tests with
        env = {"PATH": f"{python.parent}:{SYSTEM_PATH}", **task.env}
        provided.append(replace(task, env=env, tests=replace(task.tests, python=str(python))))
    return provided


def find_answer(task: Task, folder: Path) -> str | None:
    """A release installed below `folder` that has the code which a rebuilt task asks for."""
    facts = task.metadata.get("harbor", {}).get("metadata", {})
    package, fixed = facts.get("package"), facts.get("fixed_version")
    if package is None:
        return None
    for info in sorted(folder.rglob("*.dist-info")):
        name, _, version = info.name.removesuffix(".dist-info").partition("-")
        # of a task that an edit made, every release is a good one
        if _normalise(name) == _normalise(package) and (fixed is None or _order(version) >= _order(fixed)):
            return info.name.removesuffix(".dist-info")
    return None


def _normalise(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _order(version: str) -> list[int]:
    """Good enough to compare releases."""
    return [int(number) for number in re.findall(r"\d+", version)]


def _has_own_image(task: Task, builds_images: bool) -> bool:
    return task.image is not None or (builds_images and task.build_context is not None)
