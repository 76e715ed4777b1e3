"""Connect to a Ray cluster, reserve places on its nodes, and keep a `Host` on each.

A place is a placement group of Ray's with the cores and memory of one sandbox, on a node that has the resource which
is named by the kind of sandbox ("bwrap", "docker"). So Ray decides where a session runs, other programs of the cluster
see what is taken, and an autoscaler sees what is waited for.
"""

import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from contextlib import suppress
from ssl import Purpose, SSLContext
from typing import Any

from polar_trl.cluster.gateway import Gateway, Route
from polar_trl.cluster.host import Host
from polar_trl.cluster.relay import build_tls
from polar_trl.errors import ConfigError, PolarError, SandboxError, WorkerLostError

LABEL_SHARE = 0.0001
"""Of the resource that marks a node: the least that Ray counts, so that it limits nothing."""
POLL_S = 0.5
CONTROL_THREADS = 8


class Node:
    """A node of the cluster, and the `Host` on it.

    Args:
        actor: Handle of the Host.
    """

    def __init__(self, name: str, actor: Any) -> None:
        self.name = name
        self.actor = actor
        self.line: Route | None = None
        """By which each side notices the end of the other."""
        self._lost: Future[None] = Future()

    def lose(self) -> None:
        """Have every question that is open, and all later ones, end with `WorkerLostError`."""
        with suppress(InvalidStateError):
            self._lost.set_result(None)

    @property
    def is_lost(self) -> bool:
        """Whether nothing runs on it any more."""
        return self._lost.done()

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the Host, and wait.

        Raises what it raised of `PolarError`, `WorkerLostError` if the node is lost, and `SandboxError` for the rest.
        """
        import ray

        answer = getattr(self.actor, method).remote(*arguments).future()
        wait([answer, self._lost], return_when=FIRST_COMPLETED)
        if not answer.done():
            raise WorkerLostError(self.name, "its connection ended")
        try:
            return answer.result()
        except ray.exceptions.RayTaskError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, PolarError):
                raise cause from None
            raise SandboxError(f"node {self.name}: {cause or error!r}") from error
        except ray.exceptions.RayError as error:
            if missing := re.search(r"No module named '([\w.]+)'", str(error)):
                raise ConfigError(
                    f"node {self.name} cannot import {missing[1]}: install it there, for the Python that runs Ray"
                ) from error
            self.lose()
            raise WorkerLostError(self.name, f"{type(error).__name__}: {str(error).splitlines()[0]}") from error

    def tell(self, method: str, *arguments: Any) -> None:
        """Call a method of the Host; does not wait."""
        getattr(self.actor, method).remote(*arguments)


class Place:
    """Room for one sandbox on a node."""

    def __init__(self, group: Any, node_id: str) -> None:
        self._group = group
        self.node_id = node_id

    def free(self) -> None:
        """Give it back."""
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(self._group)


class Cluster:
    """A connection to a Ray cluster that stands.

    Args:
        address: "auto" for the cluster of this machine, or "ray://host:port" of its client server.
        needs: Ray's resources of one sandbox.
        kind: Of sandbox, by which nodes are marked.

    Raises `ConfigError`: no such cluster, no node for such sandboxes, or a network between them that is not encrypted.
    """

    def __init__(self, address: str, *, needs: Mapping[str, float], kind: str) -> None:
        self._needs = {**needs, kind: LABEL_SHARE}
        self._kind = kind
        self._is_ours = _connect(address)
        try:
            self._require_node()
            host, tls = self._find_address()
            self.gateway = Gateway(host, tls)
        except BaseException:
            self.close()
            raise

    def list_nodes(self) -> dict[str, Mapping[str, Any]]:
        """List the nodes that have room for such a sandbox when they are idle, by their ids."""
        import ray

        alive = (node for node in ray.nodes() if node["Alive"])
        return {
            node["NodeID"]: node
            for node in alive
            if all(node["Resources"].get(name, 0.0) >= amount for name, amount in self._needs.items())
        }

    def name_node(self, node_id: str) -> str:
        """Return a node's host name."""
        import ray

        names = (node["NodeManagerHostname"] for node in ray.nodes() if node["NodeID"] == node_id)
        return str(next(names, node_id[:8]))

    def take_place(self, node_id: str | None, is_given_up: Callable[[], bool]) -> Place:
        """Wait for a place, on this node if one is given. Raises `SandboxError` once it is given up."""
        from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

        where = None if node_id is None else [{"ray.io/node-id": node_id}]
        group = placement_group([self._needs], strategy="STRICT_PACK", bundle_label_selector=where)
        try:
            while not group.wait(POLL_S):
                if is_given_up():
                    raise SandboxError("the session was stopped while it waited for a place on the cluster")
            return Place(group, placement_group_table(group)["bundles_to_node_id"][0])
        except BaseException:
            remove_placement_group(group)
            raise

    def start_host(self, node_id: str) -> Node:
        """Start a Host on a node. It answers once it runs. Raises `WorkerLostError` for a node that is gone."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if (node := self.list_nodes().get(node_id)) is None:
            raise WorkerLostError(node_id[:8], "it left the cluster")
        places = min(int(node["Resources"][name] / amount) for name, amount in self._needs.items())
        actor = ray.remote(Host).options(
            num_cpus=0,
            max_restarts=0,
            max_concurrency=places + CONTROL_THREADS,  # nothing waits for what runs in another place
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        return Node(node["NodeManagerHostname"], actor.remote())

    def end_host(self, node: Node) -> None:
        """End the Host of a node, also of one that was lost: it may run all the same."""
        import ray

        with suppress(PolarError):
            node.ask("close")
        node.lose()
        if node.line is not None:
            self.gateway.shut(node.line)
        ray.kill(node.actor)

    def close(self) -> None:
        """Leave the cluster, which ends what this process started there."""
        import ray

        if hasattr(self, "gateway"):
            self.gateway.stop()
        if self._is_ours:
            ray.shutdown()

    def _require_node(self) -> None:
        import ray

        if self.list_nodes():
            return
        wanted = ", ".join(f"{name} {amount:g}" for name, amount in self._needs.items())
        names = [*self._needs]
        found = "; ".join(
            f"{node['NodeManagerHostname']}: "
            + ", ".join(f"{name} {node['Resources'].get(name, 0.0):g}" for name in names)
            for node in ray.nodes()
            if node["Alive"]
        )
        raise ConfigError(
            f"sandbox_cluster: no node has room for one {self._kind} sandbox ({wanted}): {found}. Mark nodes for them "
            f"with `ray start --resources='{{\"{self._kind}\": 1}}'`, or lower sandbox_cpus and sandbox_memory_mb"
        )

    def _find_address(self) -> tuple[str, SSLContext | None]:
        """Find this machine's address as the nodes know it, and the TLS to speak there; None on the loopback."""
        ways = {}
        for node in self.list_nodes().values():
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing
                probe.connect((node["NodeManagerAddress"], 1))
                ways[node["NodeManagerAddress"]] = str(probe.getsockname()[0])
        others = [own for address, own in ways.items() if own != address]
        if not others:
            return "127.0.0.1", None
        tls = build_tls(Purpose.CLIENT_AUTH)
        if tls is None:
            raise ConfigError(
                "sandbox_cluster: keys and conversations would cross the network in plain text: start Ray and the "
                "trainer with RAY_USE_TLS=1 and RAY_TLS_SERVER_CERT, RAY_TLS_SERVER_KEY and RAY_TLS_CA_CERT"
            )
        return others[0], tls


def _connect(address: str) -> bool:
    """Connect this process to the cluster; return whether it was not connected before."""
    if address != "auto" and not address.startswith("ray://"):
        raise ConfigError(f"sandbox_cluster is {address!r}: give auto or ray://host:port")
    # which would print what happens to nodes among our own output, and take the place of `print` for that
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".*")
    os.environ.setdefault("RAY_TQDM_PATCH_PRINT", "0")
    try:
        import ray
    except ImportError as error:
        raise ConfigError("sandbox_cluster needs Ray: pip install 'polar-trl[ray]'") from error
    if ray.is_initialized():
        return False
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="warning", configure_logging=False)
    except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        ray.shutdown()  # or a next try would find half a connection
        why = (str(error).strip() or type(error).__name__).splitlines()[-1]
        raise ConfigError(f"sandbox_cluster: no cluster answers at {address!r} ({why})") from error
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, before)  # Ray's own would end the run without a word
    return True
