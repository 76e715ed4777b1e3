"""A Ray cluster on this machine, and a trainer with a scripted model whose sessions run on it."""

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from short_sessions import CALL, RENDERER, REPLY

import polar_trl
from polar_trl.engine.base import GenerationParams
from polar_trl.engine.scripted import ScriptedEngine
from polar_trl.proxy import Proxy
from polar_trl.rollout.runner import Job, RolloutConfig, RolloutRunner
from polar_trl.setup.run_setup import RunArguments, RunParts, build_parts
from polar_trl.types import Task

SMALL: dict[str, Any] = {"sandbox_memory_mb": 256, "sandbox_cpus": 1.0, "sandbox_disk_mb": 64, "sandbox_warm": 0}


class RayNodes:
    """A head without sandboxes. `add` has a node join, `remove` kills its processes."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        # the second: by default Ray takes half a minute to notice that a node is dead
        os.environ |= {"RAY_memory_monitor_refresh_ms": "0", "RAY_health_check_period_ms": "1000"}
        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **_SIZES})
        os.environ["RAY_ADDRESS"] = self._cluster.address  # what "auto" is, here and in processes that tests start

    def add(self, *, cpus: int = 8, kind: str = "bwrap") -> Any:
        """Have a node join that is marked for a kind of sandbox, with room for so many."""
        node = self._cluster.add_node(num_cpus=cpus, resources={kind: 1}, **_SIZES)
        self._cluster.wait_for_nodes()
        return node

    def remove(self, node: Any) -> None:
        """Kill a node."""
        self._cluster.remove_node(node, allow_graceful=False)

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
        del os.environ["RAY_ADDRESS"]
        self._cluster.shutdown()


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
    reply: Callable[..., Any] = lambda prompt: REPLY,
    config: RolloutConfig | None = None,
    **settings: Any,
) -> Iterator[RolloutRunner]:
    """Run sessions of an agent whose model says `reply`."""
    parts = build_cluster_parts(tasks, agent=agent, **settings)
    try:
        with Proxy(ScriptedEngine(reply), RENDERER, params=GenerationParams(max_tokens=50)) as proxy:
            runner = RolloutRunner(
                proxy=proxy,
                backend=parts.backend,
                harness=parts.harness,
                grader=parts.grader,
                config=config or RolloutConfig(),
            )
            try:
                yield runner
            finally:
                runner.close()
    finally:
        parts.backend.close()


def build_jobs(task: Task, count: int, folder: Path | None = None) -> list[Job]:
    """Build the jobs of one group."""
    return [
        Job(
            rollout_id=f"r{i}", group_id="g", task=task, record_path=None if folder is None else folder / f"r{i}.jsonl"
        )
        for i in range(count)
    ]


def main() -> None:
    """Run sessions until killed: `ray_nodes.py COUNT COMMAND`."""
    task = Task(id="t", instruction="x", grader="true")
    with cluster_runner([task], agent=sys.argv[2]) as runner:
        print("ready", flush=True)
        try:
            runner.run(build_jobs(task, int(sys.argv[1])))
        except KeyboardInterrupt:
            print("interrupted", flush=True)


if __name__ == "__main__":
    main()
