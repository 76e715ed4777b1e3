"""Build the parts of a run whose sandboxes are on the nodes of a cluster (`sandbox_cluster`).

Refuses sandboxes from which an agent would reach the cluster's own ports (`ConfigError`).
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from polar_trl.cache import find_cache
from polar_trl.cluster.backend import RemoteBackend, RemoteGrader
from polar_trl.errors import ConfigError, TaskError
from polar_trl.grade.base import Grader
from polar_trl.grade.by_task import NOBODY, GraderByTask, find_kind
from polar_trl.sandbox.base import SandboxBackend
from polar_trl.serving.connections import raise_open_file_limit
from polar_trl.setup.run_setup import MachineRecipe, RunArguments, RunParts, build_limits, find_sandbox_kind
from polar_trl.tasks.build.suite import install_environment
from polar_trl.types import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRecipe:
    """Builds the parts of a node. See `cluster.host.Recipe`."""

    machine: MachineRecipe

    def build(self, tasks: Sequence[Task], checked: Sequence[Task]) -> tuple[SandboxBackend, Grader | None]:
        """Build what these tasks need, with a grader where anything says how to grade."""
        raise_open_file_limit()  # of the process that has the connections of all agents of the node
        _install_environments(tasks)
        parts = self.machine.build(tasks, checked)
        if parts.grader is None and any(map(find_kind, tasks)):
            return parts.backend, GraderByTask(parts.backend)
        return parts.backend, parts.grader


def _install_environments(tasks: Sequence[Task]) -> None:
    """Install the packages of tasks' tests where the trainer has them, see `tasks.environment.provide_python`."""
    cache, done = find_cache("environments"), set()
    for task in tasks:
        tests = task.tests
        if tests is None or not Path(tests.python).is_relative_to(cache) or tests.python in done:
            continue
        own = str(install_environment(Path(tests.requirements or "")))
        if own != tests.python:
            raise ConfigError(
                f"task {task.id!r}: its tests run with {tests.python}, and here it would be {own}: the trainer has "
                f"another build of Python than {sys.version}"
            )
        done.add(own)


def build_cluster_parts(recipe: MachineRecipe, tasks: Sequence[Task]) -> RunParts:
    """Connect to the cluster, and have every node made ready for these tasks. Raises `ConfigError`, `SandboxError`."""
    run = recipe.run
    kind = find_sandbox_kind(run, tasks)
    _refuse_reach(kind, tasks)
    kinds = [find_kind(task) for task in tasks]
    if run.grader is None and any(kinds) and not all(kinds):
        raise TaskError(f"task {tasks[kinds.index(None)].id!r} cannot be graded: {NOBODY}")
    on_node = replace(recipe, run=replace(run, sandbox=kind, sandbox_cluster=None), is_first=False)
    backend = build_cluster_backend(run, NodeRecipe(machine=on_node), kind)
    try:
        if recipe.is_first:
            print(f"preparing the nodes of {run.sandbox_cluster} ...", file=sys.stderr, flush=True)
        backend.prepare(tasks)
        if recipe.is_first:
            print(f"sandboxes are on {', '.join(backend.list_names())}", file=sys.stderr, flush=True)
    except BaseException:
        backend.close()
        raise
    grader = RemoteGrader() if run.grader is not None or any(kinds) else None
    return RunParts(harness=recipe.harness, backend=backend, grader=grader)


def build_cluster_backend(run: RunArguments, recipe: NodeRecipe, kind: str) -> RemoteBackend:
    """Connect to the cluster of a run. Raises `ConfigError`."""
    return RemoteBackend(str(run.sandbox_cluster), recipe, kind=kind, limits=build_limits(run))


def _refuse_reach(kind: str, tasks: Sequence[Task]) -> None:
    if kind == "local":
        raise ConfigError("sandbox_cluster: a local sandbox reaches the cluster's ports; take bwrap or docker")
    if public := [task.id for task in tasks if task.network == "public"]:
        raise ConfigError(
            f"sandbox_cluster: task {public[0]!r} asks for the public network, from which the cluster's ports are "
            "reached; take it out, or run without sandbox_cluster"
        )
