"""Sessions on the nodes of a real Ray cluster on this machine, in bubblewrap, with a scripted model."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from ray_nodes import RayNodes, build_cluster_parts, build_jobs, cluster_runner
from records import read_session
from serving import GatedEngine, wait_until
from short_sessions import CALL
from small_package import make_task

from polar_trl.cli import main
from polar_trl.cluster.backend import RemoteBackend
from polar_trl.cluster.nodes import Cluster
from polar_trl.errors import ConfigError, TaskError
from polar_trl.types import Task

TASK = Task(id="t", instruction="x", grader="test -s out.txt")
SECRET = "a-secret-of-the-trainer"


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    cluster = RayNodes()
    try:
        yield cluster
    finally:
        cluster.close()


@pytest.fixture(scope="module", autouse=True)
def node(nodes: RayNodes) -> Any:
    """Is there in every test."""
    return nodes.add()


def wait_until_nothing_is_left(nodes: RayNodes) -> None:
    left: list[str] = []

    def is_gone() -> bool:
        left[:] = nodes.list_left()
        return not left

    try:
        wait_until(is_gone)
    except AssertionError:
        raise AssertionError(left) from None


def test_sessions_on_a_node_are_graded_and_on_record(
    nodes: RayNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLAR_TEST_SECRET", SECRET)
    agent = f"{CALL}; echo hello > out.txt; env > env.txt; cat /proc/*/environ >> env.txt"
    with cluster_runner([TASK], agent=agent) as runner:
        finished = runner.run(build_jobs(TASK, 4, tmp_path))
    for result in finished:
        rollout = result.rollout
        assert (rollout.reward, rollout.stop_reason, len(rollout.calls)) == (1.0, "completed", 1), rollout.error
        assert len(result.reconstruction.trajectories) == 1
        assert "+hello" in (rollout.changes or "")
        assert SECRET not in (rollout.changes or "") and "RAY_" not in (rollout.changes or "")
        assert read_session(tmp_path / f"{rollout.id}.jsonl") == rollout
    assert main(["replay", str(tmp_path / f"{finished[0].rollout.id}.jsonl")]) == 0
    wait_until_nothing_is_left(nodes)


def test_an_agent_reaches_the_proxy_and_nothing_of_the_cluster(nodes: RayNodes) -> None:
    """It looks for Ray's ports and token, for the trainer's gateway, and another session's relay."""
    import ray

    engine = GatedEngine()
    with cluster_runner([TASK], agent=f"python3 -I -S look.py; {CALL}", engine=engine) as runner:
        assert isinstance(runner.backend, RemoteBackend)
        gateway = runner.backend._cluster.gateway
        ports = {nodes.client_port, int(nodes.address.rpartition(":")[2]), gateway.address[1]}
        ports |= {node[name] for node in ray.nodes() for name in ("NodeManagerPort", "ObjectManagerPort")}
        hosts = ("127.0.0.1", nodes.address.rpartition(":")[0])
        assert ports == {port for _, port in find_open(product(hosts, ports))}  # for who is not in a sandbox
        paths = [str(nodes.token), gateway._folder.name]
        assert all(map(os.path.exists, paths))
        look = f"""
import glob, json, socket
found = [path for path in {paths} if glob.glob(path)]
found += [path for path in glob.glob("/proc/[0-9]*/cmdline") if "ray" in open(path).read()]
for address in {[*product(hosts, ports), (hosts[1], 8080), ("127.0.0.1", 8080)]}:
    try:
        socket.create_connection(address, timeout=5).close()
        found.append(address)
    except OSError:
        pass
json.dump(found, open("out.txt", "w"))
"""
        runner.start(build_jobs(replace(TASK, files={"look.py": look}), 2))
        for _ in range(2):  # both have looked while the other was there
            assert engine.entered.acquire(timeout=120)
        engine.gate.set()
        results = runner.take(1)
    assert [result.rollout.reward for result in results] == [1.0] * 2
    for result in results:
        (line,) = [line for line in (result.rollout.changes or "").splitlines() if line.startswith("+[")]
        assert json.loads(line[1:]) == [["127.0.0.1", 8080]]


def find_open(addresses: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    found = []
    for address in addresses:
        with suppress(ConnectionRefusedError):
            socket.create_connection(address, timeout=60).close()
            found.append(address)
    return found


def test_a_trainer_outside_of_the_cluster_uses_its_client_server(nodes: RayNodes) -> None:
    """`ray://` is another way into Ray for everything that is asked of nodes."""
    with start_trainer(f"ray://127.0.0.1:{nodes.client_port}", 2, CALL) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "[1.0, 1.0]\n"
    wait_until_nothing_is_left(nodes)


def test_hidden_tests_and_files_of_a_task_are_sent_and_graded_on_the_node(tmp_path: Path) -> None:
    task = make_task(tmp_path, more={"data.bin": "x"})
    (tmp_path / "gold.patch").write_text(
        "--- a/src/pkg/m.py\n+++ b/src/pkg/m.py\n@@ -1,2 +1,2 @@\n def f():\n-    return 1\n+    return 2\n"
    )
    assert task.tests is not None
    task = replace(task, tests=replace(task.tests, gold_patch=str(tmp_path / "gold.patch")))
    folders = list(dict.fromkeys([sys.prefix, str(Path(pytest.__file__).parents[4])]))
    fix = "sed -i 's/return 1/return 2/' src/pkg/m.py"
    agent = f'{CALL}; test -s data.bin && if [ "$POLAR_INSTRUCTION" = fix ]; then {fix}; fi'
    right, wrong = replace(task, instruction="fix"), replace(task, id="u", instruction="leave it")
    with cluster_runner([right, wrong], agent=agent, agent_folders=folders, sandbox_warm=2) as runner:
        finished = runner.run([*build_jobs(right, 2), *(replace(j, rollout_id="w") for j in build_jobs(wrong, 1))])
    assert [r.rollout.reward for r in finished] == [1.0, 1.0, 0.0], [r.rollout.error for r in finished]
    assert finished[0].rollout.grading is not None and finished[0].rollout.grading.num_passed == 2


def test_a_bad_solution_is_found_on_the_node(tmp_path: Path) -> None:
    task = make_task(tmp_path)
    (tmp_path / "gold.patch").write_text(
        "--- a/src/pkg/m.py\n+++ b/src/pkg/m.py\n@@ -1,2 +1,2 @@\n def f():\n-    return 1\n+    return 3\n"
    )
    assert task.tests is not None
    bad = replace(task, tests=replace(task.tests, gold_patch=str(tmp_path / "gold.patch")))
    folders = list(dict.fromkeys([sys.prefix, str(Path(pytest.__file__).parents[4])]))
    with pytest.raises(ConfigError, match=r"node .*: 1 of 1 tasks fail the check of their solutions"):
        build_cluster_parts([bad], agent_folders=folders)


@pytest.mark.parametrize(
    ("settings", "task", "message"),
    [
        ({"sandbox": "local"}, TASK, "sandbox_cluster: a local sandbox reaches the cluster's ports"),
        ({"sandbox": "docker"}, replace(TASK, network="public"), "asks for the public network"),
        ({"sandbox": "docker", "sandbox_image": "x"}, TASK, "no node has room for one docker sandbox"),
        ({"sandbox_cpus": 64.0}, TASK, r"no node has room for one bwrap sandbox \(CPU 64"),
        ({"sandbox_cluster": "10.0.0.1"}, TASK, "sandbox_cluster is '10.0.0.1': give auto or ray://host:port"),
        ({"agent_folders": ["/usr/share"], "grader": "no_such_module:grade"}, TASK, "node .*there is no module"),
    ],
)
def test_what_cannot_work_is_refused(settings: dict[str, Any], task: Task, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_cluster_parts([task], **settings)


def test_a_cluster_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("INITIAL_TIMEOUT_SEC", "MAX_TIMEOUT_SEC"):
        monkeypatch.setattr(f"ray.util.client.worker.{name}", 0.1)
    with pytest.raises(
        ConfigError, match=r"sandbox_cluster: no cluster answers at 'ray://127\.0\.0\.1:1' \(.*timeout"
    ):
        build_cluster_parts([TASK], sandbox_cluster="ray://127.0.0.1:1")


def test_a_network_in_plain_text_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node is at an address that is not the one from which this machine reaches it."""
    list_nodes = Cluster.list_nodes
    other = {"NodeManagerAddress": "127.0.0.2"}
    monkeypatch.setattr(Cluster, "list_nodes", lambda self: {k: {**v, **other} for k, v in list_nodes(self).items()})
    with pytest.raises(ConfigError, match="keys and conversations would cross the network in plain text"):
        build_cluster_parts([TASK])


def test_tasks_of_which_only_some_say_how_they_are_graded_are_refused() -> None:
    with pytest.raises(TaskError, match="task 'u' cannot be graded"):
        build_cluster_parts([TASK, Task(id="u", instruction="x")])


def test_a_full_cluster_waits() -> None:
    """Nine sessions at once on eight places: the ninth begins when a place is free, and fails not."""
    engine = GatedEngine()
    with cluster_runner([TASK], agent=f"{CALL}; echo hello > out.txt", engine=engine) as runner:
        runner.start(build_jobs(TASK, 9))
        for _ in range(8):
            assert engine.entered.acquire(timeout=120)
        assert not engine.entered.acquire(timeout=1)
        engine.gate.set()
        finished = runner.take(1)
    assert [r.rollout.reward for r in finished] == [1.0] * 9
    assert max(r.rollout.seconds["prepare"] for r in finished) > 1.0


@pytest.mark.parametrize("retry", [False, True])
def test_a_lost_node_takes_its_sessions_and_a_new_one_is_used(nodes: RayNodes, tmp_path: Path, retry: bool) -> None:
    """Eight sessions stay on the first node, two on one that is killed; with retries these run on a third."""
    second = nodes.add(cpus=2)
    engine = GatedEngine()
    agent = f"{CALL}; echo hello > out.txt"
    with cluster_runner([TASK], agent=agent, engine=engine, retry_lost_sessions=retry) as runner:
        runner.start(build_jobs(TASK, 10, tmp_path))
        for _ in range(10):
            assert engine.entered.acquire(timeout=120)
        nodes.remove(second)
        if retry:
            third = nodes.add(cpus=2)
            for _ in range(2):
                assert engine.entered.acquire(timeout=120)
        else:
            wait_until(lambda: engine.num_aborted == 2)
        engine.gate.set()
        finished = [result.rollout for result in runner.take(1)]
    lost = [rollout for rollout in finished if rollout.stop_reason == "worker_lost"]
    assert [rollout.reward for rollout in finished if rollout not in lost] == [1.0] * (10 - len(lost))
    if retry:
        nodes.remove(third)
        assert not lost
        assert sum(rollout.counters.get("retried_after_loss", 0) for rollout in finished) == 2
        assert len(list(tmp_path.glob("*.lost"))) == 2
    else:
        assert [(rollout.reward, rollout.error_kind) for rollout in lost] == [(None, "worker_lost")] * 2
        name = os.uname().nodename
        assert all(rollout.counters[f"lost_on_{name}"] == 1 for rollout in lost)
        assert all((rollout.error or "").startswith(f"node {name} was lost: ") for rollout in lost)
    wait_until_nothing_is_left(nodes)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_trainer_that_is_stopped_leaves_nothing_on_the_node(nodes: RayNodes, how: signal.Signals) -> None:
    """Ten sessions, of which two wait for a place."""
    with start_trainer("auto", 10, "sleep 600") as trainer:
        wait_until(lambda: nodes.count_sandboxes() == 8)
        trainer.send_signal(how)
        trainer.wait(120)
    wait_until_nothing_is_left(nodes)


@contextmanager
def start_trainer(address: str, count: int, command: str) -> "Iterator[subprocess.Popen[str]]":
    """Start one that runs so many sessions; it has prepared the nodes."""
    script = Path(__file__).parents[1] / "helpers" / "ray_nodes.py"
    words = [sys.executable, str(script), address, str(count), command]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as trainer:
        bound = threading.Timer(300, trainer.kill)  # so that nothing is waited for longer
        bound.start()
        try:
            assert trainer.stdout is not None and trainer.stdout.readline() == "ready\n"
            yield trainer
        finally:
            bound.cancel()
            trainer.kill()


def test_doctor_tries_agents_on_every_node(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["doctor", "pi", "codex@0.0.1", "--sandbox_cluster", "auto", "--json"]
    assert main(words) == 1
    (node,) = json.loads(capsys.readouterr().out)["nodes"].values()
    assert node["problem"] == ""
    assert node["agents"]["pi"]["works"], node["agents"]["pi"]["why"]
    assert not node["agents"]["codex@0.0.1"]["works"]
    assert "is not installed there" in node["agents"]["codex@0.0.1"]["why"]


def test_another_version_of_the_code_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: RayNodes
) -> None:
    """The node's copy differs by a comment."""
    other = RayNodes.copy_code(tmp_path)
    monkeypatch.chdir(tmp_path)  # Ray has its workers look in the folders of the driver, too
    monkeypatch.setenv("PYTHONPATH", f"{other}{os.pathsep}{os.environ['PYTHONPATH']}")
    node = nodes.add(cpus=1)
    try:
        with pytest.raises(ConfigError, match=r"node .*: polar_trl is .* in .*other/polar_trl, and .* where"):
            build_cluster_parts([TASK])
    finally:
        nodes.remove(node)
