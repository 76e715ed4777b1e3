"""Sessions in containers of a node's own engine, graded there by SWE-bench's script and by Harbor's verifier."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import docker
import pytest
from ray_nodes import RayNodes, build_jobs, cluster_runner
from short_sessions import CALL
from swe_repository import FIX, build_image, build_task

from polar_trl.tasks.harbor import load_harbor
from polar_trl.types import Task

pytestmark = pytest.mark.containers
IMAGE = "polar-trl-cluster-test:latest"
HARBOR = {
    "task.toml": '[environment]\ndocker_image = "polar-trl-test:latest"\nnetwork_mode = "no-network"\n',
    "instruction.md": "Do it.",
    "tests/test.sh": 'cmp /tests/wanted answer && r=1 || r=0\necho "$r" > /logs/verifier/reward.txt\n',
    "tests/wanted": "done\n",
}


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    cluster = RayNodes()
    try:
        cluster.add(kind="docker")
        yield cluster
    finally:
        cluster.close()


@pytest.fixture(scope="module")
def row(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Task]:
    base = build_image(tmp_path_factory.mktemp("context"), IMAGE)
    yield replace(build_task(base), image=IMAGE)
    client = docker.from_env()
    client.images.remove(IMAGE, force=True)
    client.close()


def run_two(tasks: list[Task], right: str, **settings: Any) -> list[float | None]:
    """Run two sessions whose agents do what is right and nothing; return the rewards."""
    agent = f'{CALL}; if [ "$POLAR_INSTRUCTION" = right ]; then {right}; fi'
    both = [replace(tasks[0], instruction="right"), replace(tasks[0], id="other", instruction="nothing")]
    limits = {"sandbox_memory_mb": 1024, **settings}
    with cluster_runner(both, agent=agent, sandbox="docker", **limits) as runner:
        jobs = [replace(job, rollout_id=task.id) for task in both for job in build_jobs(task, 1)]
        finished = [result.rollout for result in runner.run(jobs)]
    assert all(rollout.error is None for rollout in finished), [rollout.error for rollout in finished]
    return [rollout.reward for rollout in finished]


def test_a_row_of_swe_bench_is_graded_on_the_node(nodes: RayNodes, row: Task) -> None:
    gold = f"git apply - <<'END'\n{FIX}END\n"
    assert run_two([row], f"{gold}true", check_tasks=False) == [1.0, 0.0]


def test_a_task_of_harbor_is_graded_on_the_node(nodes: RayNodes, tmp_path: Path) -> None:
    for name, text in HARBOR.items():
        (tmp_path / "task" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "task" / name).write_text(text)
    assert run_two(load_harbor(tmp_path / "task"), "echo done > answer", sandbox_warm=2) == [1.0, 0.0]
