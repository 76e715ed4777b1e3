"""Check every node of a cluster: polar_trl's version, the sandboxes, the agents, and their way to the trainer.

Each agent runs a session of two turns on each node, with the scripted model of `tools.doctor` here: it takes the path
of a training run.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from polar_trl.cluster.backend import RemoteBackend, RemoteSandbox
from polar_trl.errors import ConfigError, PolarError
from polar_trl.harness.base import AgentHarness
from polar_trl.sandbox import build_backend
from polar_trl.sandbox.base import SandboxBackend
from polar_trl.sandbox.limits import Limits
from polar_trl.tools.doctor import Checkup, build_task, find_fault, run_two_turns
from polar_trl.types import Task

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeCheckup:
    """The result for one node; the keys of the JSON report."""

    agents: Mapping[str, Checkup]
    problem: str
    """Why nothing runs there, and what to do; empty where the node is set up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorRecipe:
    """Builds the sandboxes of a node, without an agent. See `cluster.host.Recipe`."""

    kind: str
    image: str | None
    mounts: Sequence[Path]

    def build(self, tasks: Sequence[Task], checked: Sequence[Task]) -> tuple[SandboxBackend, None]:
        """Build them, and fetch the image."""
        backend = build_backend(self.kind, image=self.image, mounts=self.mounts)
        try:
            backend.prepare(tasks)
        except BaseException:
            backend.close()
            raise
        return backend, None


class _OnNode(SandboxBackend):
    """Makes sandboxes on one node."""

    capabilities = RemoteBackend.capabilities

    def __init__(self, remote: RemoteBackend, node_id: str) -> None:
        self._remote = remote
        self._node_id = node_id

    def prepare(self, tasks: Sequence[Task]) -> None:
        return

    def create(self, task: Task, session_id: str) -> RemoteSandbox:
        return self._remote.create(task, session_id, self._node_id)

    def close(self) -> None:
        return

    def do(self, function: Callable[..., _T], *arguments: Any) -> _T:
        """Call a function there."""
        return self._remote.do(self._node_id, function, *arguments)


def check_cluster(
    address: str, harnesses: Mapping[str, AgentHarness], *, kind: str, image: str | None, install: bool, delay_s: float
) -> dict[str, NodeCheckup]:
    """Check the nodes that are marked for a kind of sandbox, by name. Raises `ConfigError` without such nodes.

    Args:
        harnesses: By the names that they were asked for.
        install: Install those that are missing on a node.
        delay_s: See `tools.doctor.check_agent`.
    """
    if kind == "local":
        raise ConfigError("sandbox_cluster: a local sandbox reaches the cluster's ports; take bwrap or docker")
    mounts = list(dict.fromkeys(folder for harness in harnesses.values() for folder in harness.folders))
    recipe = DoctorRecipe(kind=kind, image=image, mounts=mounts)
    backend = RemoteBackend(address, recipe, kind=kind, limits=Limits())
    try:
        found: dict[str, NodeCheckup] = {}
        for node_id, error in backend.set_up_all([build_task(delay_s)]).items():
            name = backend.name_node(node_id)
            name = f"{name} ({node_id[:8]})" if name in found else name  # containers of one host have its name
            if error is not None:
                found[name] = NodeCheckup(agents={}, problem=str(error))
                continue
            there = _OnNode(backend, node_id)
            agents = {
                agent: _check(there, agent, harness, install=install, delay_s=delay_s)
                for agent, harness in harnesses.items()
            }
            found[name] = NodeCheckup(agents=agents, problem="")
        return found
    finally:
        backend.close()


def _check(there: _OnNode, name: str, harness: AgentHarness, *, install: bool, delay_s: float) -> Checkup:
    installed, why = None, ""
    try:
        installed = there.do(_find_version, harness, install)
        if installed is None:
            why = f"{name} is not installed there; run the same with --install"
        else:
            why = find_fault(run_two_turns(harness, build_task(delay_s), delay_s, there))
    except PolarError as error:
        why = str(error)
    return Checkup(installed=installed, verified=harness.verified_version, works=not why, why=why)


def _find_version(harness: AgentHarness, install: bool) -> str | None:
    if install:
        harness.install()
    return harness.find_installed_version()
