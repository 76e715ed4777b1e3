"""A Ray cluster on this machine, and a trainer with a scripted model whose sessions run on it."""

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from serving import wait_until
from short_sessions import CALL, RENDERER, REPLY

import polar_trl
from polar_trl.engine.base import Engine, GenerationParams
from polar_trl.engine.scripted import ScriptedEngine
from polar_trl.proxy import Proxy
from polar_trl.rollout.runner import Job, RolloutConfig, RolloutRunner
from polar_trl.sandbox.cgroup import PARENT, ROOT
from polar_trl.setup.run_setup import RunArguments, RunParts, build_parts
from polar_trl.types import Task

SMALL: dict[str, Any] = {"sandbox_memory_mb": 256, "sandbox_cpus": 1.0, "sandbox_disk_mb": 64, "sandbox_warm": 0}


class RayNodes:
    """A head without sandboxes. `add` has a node join, `remove` kills its processes.

    Nodes have a TMPDIR of their own: what is there, and its processes, are of no other test.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="polar-ray-"))  # short: Ray's sockets lie in it
        self.token = self.folder / "token"
        self.token.write_text(_TOKEN)
        self._environment = pytest.MonkeyPatch()
        for name, value in {"RAY_TMPDIR": str(self.folder), "RAY_AUTH_TOKEN_PATH": str(self.token)}.items():
            self._environment.setenv(name, value)
        from ray.cluster_utils import Cluster  # reads them; more are set in tests/conftest.py

        self._cluster = Cluster()
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.client_port = int(free.getsockname()[1])
        self._add(num_cpus=0, ray_client_server_port=self.client_port, **_SIZES)
        self.address = str(self._cluster.address)
        self._environment.setenv("RAY_ADDRESS", self.address)  # what "auto" is, here and in processes of tests

    def add(self, *, cpus: int = 8, kind: str = "bwrap") -> Any:
        """Have a node join that is marked for a kind of sandbox, with room for so many."""
        return self._add(num_cpus=cpus, resources={kind: 1}, **_SIZES)

    def remove(self, node: Any) -> None:
        """Kill a node."""
        self._cluster.remove_node(node, allow_graceful=False)

    def list_left(self) -> list[str]:
        """List what sessions have on the nodes: folders, control groups and processes."""
        state = self.folder / f"polar-trl-{os.getuid()}"
        groups = [path for path in (*ROOT.glob(f"{PARENT}/*.*"), *ROOT.glob(f"*/{PARENT}/*.*")) if path.is_dir()]
        listed = subprocess.run(["ps", "-eww", "-o", "args"], capture_output=True, text=True, check=True).stdout
        return [
            *map(str, state.glob("*")),
            *(str(path) for path in groups if path.name.startswith(self.folder.name)),
            *(line for line in listed.splitlines() if f"{state}/" in line),
        ]

    def count_sandboxes(self) -> int:
        """Count the sandboxes that agents run in."""
        return sum("netns_holder" in line for line in self.list_left())

    @staticmethod
    def copy_code(folder: Path) -> Path:
        """Copy the package with a comment more; return the folder that it is imported from."""
        copied = folder / "other"
        shutil.copytree(Path(polar_trl.__file__).parent, copied / "polar_trl")
        with (copied / "polar_trl" / "names.py").open("a") as file:
            file.write("# another version\n")
        return copied

    def close(self) -> None:
        """End the cluster."""
        try:
            self._cluster.shutdown()
        finally:
            self._environment.undo()
            shutil.rmtree(self.folder, ignore_errors=True)

    def _add(self, **settings: Any) -> Any:
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("TMPDIR", str(self.folder))
            node = self._cluster.add_node(wait=False, **settings)
        wait_until(lambda: node.node_id in self._cluster.global_state._live_node_ids())
        return node


_TOKEN = secrets.token_hex(32)
"""One for all clusters: Ray reads it once in a process."""
_SIZES = {"memory": 8 << 30, "object_store_memory": 80 << 20, "include_dashboard": False}


def build_cluster_parts(tasks: Sequence[Task], *, agent: str = CALL, **settings: Any) -> RunParts:
    """Build the parts of a run in small bubblewrap sandboxes on the cluster."""
    arguments: dict[str, Any] = {**SMALL, "sandbox": "bwrap", "sandbox_cluster": "auto", **settings}
    run = RunArguments(agent_command=agent, **arguments)
    return build_parts(run, tasks, run_id="test", check_jobs=2)


@contextmanager
def cluster_runner(
    tasks: Sequence[Task],
    *,
    agent: str = CALL,
    engine: Engine | None = None,
    max_agents: int = 32,
    retry_lost_sessions: bool = False,
    **settings: Any,
) -> Iterator[RolloutRunner]:
    """Run sessions of an agent whose model says `REPLY`, unless there is another one."""
    parts = build_cluster_parts(tasks, agent=agent, **settings)
    config = RolloutConfig(max_agents=max_agents, max_preparing=max_agents, retry_lost_sessions=retry_lost_sessions)
    engine = engine or ScriptedEngine(lambda prompt: REPLY)
    try:
        with Proxy(engine, RENDERER, params=GenerationParams(max_tokens=50)) as proxy:
            runner = RolloutRunner(
                proxy=proxy, backend=parts.backend, harness=parts.harness, grader=parts.grader, config=config
            )
            try:
                yield runner
            finally:
                runner.close()
    finally:
        parts.backend.close()


def build_jobs(task: Task, count: int, folder: Path | None = None) -> list[Job]:
    """Build the jobs of one group. Their ids, which sandboxes are named by, say which cluster they are of."""
    ids = [f"{Path(os.environ['RAY_TMPDIR']).name}-{i}" for i in range(count)]
    return [
        Job(rollout_id=name, group_id="g", task=task, record_path=None if folder is None else folder / f"{name}.jsonl")
        for name in ids
    ]


def main() -> None:
    """Run sessions until killed, and print their rewards: `ray_nodes.py ADDRESS COUNT COMMAND`."""
    address, count, command = sys.argv[1:]
    task = Task(id="t", instruction="x", grader="true")
    with cluster_runner([task], agent=command, sandbox_cluster=address) as runner:
        print("ready", flush=True)
        with suppress(KeyboardInterrupt):
            results = runner.run(build_jobs(task, int(count)))
            print([result.rollout.reward for result in results], flush=True)


if __name__ == "__main__":
    main()
