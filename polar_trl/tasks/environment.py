"""Tasks whose tests need packages -> the same tasks, with a Python that has them, for graders and agents alike.

An image that was built for a task has its packages already; every other sandbox sees an environment of this machine,
at the same path. It refuses to install into anything but the cache.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from polar_trl.tasks.suite import install_environment
from polar_trl.types import Task

SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"


def provide_python(tasks: Sequence[Task], *, builds_images: bool = False) -> list[Task]:
    """Install what the tests of these tasks require, once for each requirements file, and have the tasks use it.

    Args:
        builds_images: The run makes a task's image from its own `build_context`, which then has the packages.

    Raises `ConfigError` where it cannot be installed.
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
        # first on PATH: `python` is what the agent is told to run the tests with
        env = {"PATH": f"{python.parent}:{SYSTEM_PATH}", **task.env}
        provided.append(replace(task, env=env, tests=replace(task.tests, python=str(python))))
    return provided


def _has_own_image(task: Task, builds_images: bool) -> bool:
    return task.image is not None or (builds_images and task.build_context is not None)
