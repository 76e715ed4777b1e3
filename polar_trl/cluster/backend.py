"""Sandboxes on the nodes of a Ray cluster. Sessions stay the trainer's: their clocks, records and model calls.

A session's agent reaches the proxy through the node's relay and the trainer's gateway. Its sandbox, grading and the
fresh sandboxes of that are on one node; sandboxes for grading are made ahead there. Where no node has room, a session
waits. A node that joins is set up by the first session that is placed on it.
"""

import logging
import math
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from polar_trl.cache import find_cache
from polar_trl.cluster.files import list_roots, pack
from polar_trl.cluster.gateway import Route
from polar_trl.cluster.host import Recipe, identify_code
from polar_trl.cluster.nodes import Cluster, Node, Place
from polar_trl.errors import PolarError, SandboxError, WorkerLostError
from polar_trl.grade.base import Grade, Grader
from polar_trl.sandbox.base import Capabilities, ExecResult, Sandbox, SandboxBackend
from polar_trl.sandbox.limits import Limits
from polar_trl.types import Call, Task

logger = logging.getLogger(__name__)

MAX_PLACEMENTS = 3
"""Nodes that are tried for one session before its agent starts."""
MAX_SETTING_UP = 16

_T = TypeVar("_T")


class RemoteBackend(SandboxBackend):
    """Makes sandboxes on nodes that have room for them.

    Args:
        address: Of the cluster, see `Cluster`.
        recipe: Builds each node's own backend and grader.
        kind: Of the sandboxes; nodes that are meant for them have a resource of this name.
        limits: Of a sandbox: the cores and memory that are reserved for it.

    Raises `ConfigError`, see `Cluster`.
    """

    capabilities = Capabilities(cuts_network=True, limits_memory=True, limits_disk=True, uses_images=True)
    """None is missing from here: each node holds tasks against its own."""

    def __init__(self, address: str, recipe: Recipe, *, kind: str, limits: Limits) -> None:
        cpus = limits.cpus if limits.cpus < 1 else math.ceil(limits.cpus)  # Ray counts more than one in whole ones
        self._cluster = Cluster(address, needs={"CPU": cpus, "memory": limits.memory_mb << 20}, kind=kind)
        self._recipe = recipe
        self._tasks: Sequence[Task] = ()
        self._digests: dict[str, str] = {}
        """Of the files and folders that tasks name."""
        self._num_given_up = 0
        self._lock = threading.Lock()
        self._nodes: dict[str, Node] = {}
        self._setting_up: dict[str, threading.Lock] = {}

    def prepare(self, tasks: Sequence[Task]) -> None:
        """Set every node up: send it the tasks' files, have the agent installed, images pulled and solutions checked.

        Raises `ConfigError` or `SandboxError` naming the node.
        """
        for error in filter(None, self.set_up_all(tasks).values()):
            if not isinstance(error, WorkerLostError):
                raise error
            logger.warning("%s", error)  # Ray takes a while to notice; what it should have checked is not
        if not self._nodes:
            raise SandboxError("sandbox_cluster: every node was lost while it was set up")

    def set_up_all(self, tasks: Sequence[Task]) -> dict[str, PolarError | None]:
        """Set every node up at once, each with its part of the solutions to check; what failed, by the nodes' ids."""
        self._tasks = tasks
        self._digests = {root: pack(root).digest for root in list_roots(tasks)}
        node_ids = list(self._cluster.list_nodes())

        def set_up(place: int) -> PolarError | None:
            try:
                self._set_up(node_ids[place], tasks[place :: len(node_ids)])
            except PolarError as error:
                return error
            return None

        with ThreadPoolExecutor(MAX_SETTING_UP, thread_name_prefix="polar-node") as setting_up:
            return dict(zip(node_ids, setting_up.map(set_up, range(len(node_ids))), strict=True))

    def name_node(self, node_id: str) -> str:
        """Return a node's host name."""
        return self._cluster.name_node(node_id)

    def do(self, node_id: str, function: Callable[..., _T], *arguments: Any) -> _T:
        """Call a function, one that can be imported by its name, in the Host of a node that is set up."""
        result: _T = self._nodes[node_id].ask("do", function, *arguments)
        return result

    def list_names(self) -> list[str]:
        """List the names of the nodes that are set up."""
        return sorted(node.name for node in self._nodes.values())

    def create(self, task: Task, session_id: str, node_id: str | None = None) -> "RemoteSandbox":
        """Wait for a place, and make a sandbox there. Raises `SandboxError`.

        Args:
            node_id: Of the node where it has to be; None: wherever there is room.
        """
        before = self._num_given_up
        for _ in range(MAX_PLACEMENTS):
            place = self._cluster.take_place(node_id, lambda: self._num_given_up != before)
            route = self._cluster.gateway.open_route()
            try:
                node = self._find(place.node_id)
                workdir = node.ask("open", task, session_id, route.token)
                return RemoteSandbox(node, session_id, workdir, route, partial(self._release, place, route))
            except WorkerLostError as error:  # nothing has begun yet: another node will do
                self._release(place, route)
                lost = error
            except BaseException:
                self._release(place, route)
                raise
        raise lost

    def give_up(self) -> None:
        """See `SandboxBackend.give_up`."""
        self._num_given_up += 1

    def close(self) -> None:
        """Remove what is left on the nodes, and leave the cluster."""
        for node in self._nodes.values():
            self._cluster.end_host(node)
        self._nodes.clear()
        self._cluster.close()

    def _release(self, place: Place, route: Route) -> None:
        self._cluster.gateway.shut(route)
        place.free()

    def _find(self, node_id: str) -> Node:
        """Find a node's Host; one that has none yet, or whose Host was lost, is set up."""
        with self._lock:
            alone = self._setting_up.setdefault(node_id, threading.Lock())
        with alone:
            node = self._nodes.get(node_id)
            if node is not None and node.is_lost:
                self._cluster.end_host(self._nodes.pop(node_id))
            if node_id not in self._nodes:
                self._set_up(node_id, ())
            return self._nodes[node_id]

    def _set_up(self, node_id: str, checked: Sequence[Task]) -> None:
        node = self._cluster.start_host(node_id)
        try:
            node.line = self._cluster.gateway.open_line(node.lose)
            node.ask("greet", identify_code(), str(find_cache("agents").parent.absolute()))
            for root in node.ask("list_missing", self._digests):
                node.ask("receive", pack(root))
            node.ask("set_up", self._recipe, self._tasks, checked, self._cluster.gateway.address, node.line.token)
        except PolarError as error:
            self._cluster.end_host(node)
            if isinstance(error, WorkerLostError):
                raise
            raise type(error)(f"node {node.name}: {error}") from error
        self._nodes[node_id] = node
        logger.info("node %s is set up", node.name)


class RemoteSandbox(Sandbox):
    """A session's sandbox on a node. Every method raises `WorkerLostError` once the node is lost."""

    def __init__(self, node: Node, session_id: str, workdir: str, route: Route, release: Callable[[], None]) -> None:
        self.workdir = workdir
        self._node = node
        self._id = session_id
        self._route = route
        self._release = release
        self._is_destroyed = False

    @property
    def host_workdir(self) -> Path:
        """Raise `SandboxError`: the folders are another machine's; `call` reads them there."""
        raise SandboxError(f"the sandbox's folders are on node {self._node.name}")

    host_home = host_workdir
    base_tree = host_workdir

    def run(self, command: str, *, env: Mapping[str, str], timeout_s: float) -> ExecResult:
        """See `Sandbox.run`."""
        result: ExecResult = self._ask("run", command, dict(env), timeout_s)
        return result

    def put(self, path: str, content: bytes, *, executable: bool = False) -> None:
        """See `Sandbox.put`."""
        self._ask("put", path, content, executable)

    def get(self, path: str, *, max_bytes: int = 1 << 20) -> bytes | None:
        """See `Sandbox.get`."""
        content: bytes | None = self._ask("get", path, max_bytes)
        return content

    def upload(self, source: Path, target: str) -> None:
        """Raise `SandboxError`: only graders upload, and those run on the node."""
        raise SandboxError(f"nothing can be uploaded to node {self._node.name} from here")

    def call(self, function: Callable[..., _T], *arguments: Any) -> _T:
        """See `Sandbox.call`."""
        result: _T = self._ask("call", function, *arguments)
        return result

    def open_listener(self) -> socket.socket:
        """Listen where the node's relay comes out."""
        return self._route.listen()

    def is_alive(self) -> bool:
        """See `Sandbox.is_alive`."""
        return not self._is_destroyed and not self._node.is_lost and bool(self._ask("is_alive"))

    def require_whole(self) -> None:
        """See `Sandbox.require_whole`."""
        self.call(_require_whole)

    def kill(self) -> None:
        """Kill what runs, soon."""
        self._node.tell("kill", self._id)

    def grade(self, timeout_s: float, calls: Sequence[Call]) -> Grade:
        """Grade the session on its node, where the grader is."""
        grade: Grade = self._ask("grade", timeout_s, calls if self._ask("grader_takes_calls") else ())
        return grade

    def destroy(self) -> None:
        """Kill and remove everything, and give the place back. What a lost node has is removed there."""
        if self._is_destroyed:
            return
        self._is_destroyed = True
        try:
            if not self._node.is_lost:
                self._ask("destroy")
        except WorkerLostError:
            pass
        finally:
            self._release()

    def _ask(self, method: str, *arguments: Any) -> Any:
        return self._node.ask(method, self._id, *arguments)


class RemoteGrader(Grader):
    """Has sessions graded where their sandboxes are; orders of fresh sandboxes are made there, too."""

    def grade(self, task: Task, sandbox: Sandbox, *, timeout_s: float) -> Grade:
        """See `Grader.grade`."""
        return self.grade_session(task, sandbox, (), timeout_s=timeout_s)

    def grade_session(self, task: Task, sandbox: Sandbox, calls: Sequence[Call], *, timeout_s: float) -> Grade:
        """See `Grader.grade_session`."""
        assert isinstance(sandbox, RemoteSandbox)
        return sandbox.grade(timeout_s, calls)


def _require_whole(sandbox: Sandbox) -> None:
    sandbox.require_whole()
