"""Sessions on the nodes of a real Ray cluster on this machine, in bubblewrap, with a scripted model."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ray_nodes import RayNodes, build_cluster_parts, build_jobs, cluster_runner
from records import read_session
from short_sessions import CALL, REPLY
from small_package import make_task

from polar_trl.cli import main
from polar_trl.errors import ConfigError, TaskError
from polar_trl.rollout.runner import RolloutConfig
from polar_trl.sandbox.cgroup import PARENT, ROOT
from polar_trl.sandbox.owner import find_state_folder
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


def list_left() -> list[str]:
    """List what sessions have on this machine: folders, control groups and processes."""
    folders = [str(path) for path in find_state_folder().glob("*")]
    groups = [str(path) for path in (*ROOT.glob(f"{PARENT}/*.*"), *ROOT.glob(f"*/{PARENT}/*.*")) if path.is_dir()]
    processes = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [*folders, *groups, *(line for line in processes if "netns_holder" in line or line.startswith("bwrap"))]


def wait_until_nothing_is_left(before: list[str], limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while left := [line for line in list_left() if line not in before]:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def test_sessions_on_a_node_are_graded_and_on_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLAR_TEST_SECRET", SECRET)
    before = list_left()
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
    assert main(["replay", str(tmp_path / "r0.jsonl")]) == 0
    wait_until_nothing_is_left(before)


def test_agents_reach_the_proxy_and_no_port_of_the_cluster(tmp_path: Path) -> None:
    import ray

    look = (
        "import json, os, socket; found = {}\n"
        "for host, port in json.loads(os.environ['PORTS']):\n"
        "    try: socket.create_connection((host, port), timeout=5).close(); found[port] = 'open'\n"
        "    except OSError as error: found[port] = 'shut'\n"
        "json.dump(found, open('out.txt', 'w'))"
    )
    with cluster_runner([TASK], agent=f'{CALL}; python3 -I -S -c "$LOOK"') as runner:
        ports = [port for node in ray.nodes() for port in (node["NodeManagerPort"], node["ObjectManagerPort"])]
        address, gcs = os.environ["RAY_ADDRESS"].split(":")
        targets = [(host, port) for port in (*ports, int(gcs)) for host in ("127.0.0.1", address)]
        task = replace(TASK, env={"LOOK": look, "PORTS": json.dumps([*targets, ("127.0.0.1", 8080)])})
        (result,) = runner.run(build_jobs(task, 1))
    (line,) = [line for line in (result.rollout.changes or "").splitlines() if line.startswith("+{")]
    found = json.loads(line[1:])
    assert found.pop("8080") == "open"
    assert found and set(found.values()) == {"shut"}


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


def test_tasks_of_which_only_some_say_how_they_are_graded_are_refused() -> None:
    with pytest.raises(TaskError, match="task 'u' cannot be graded"):
        build_cluster_parts([TASK, Task(id="u", instruction="x")])


def test_a_full_cluster_waits() -> None:
    """Nine sessions at once on eight places: the ninth begins when a place is free, and fails not."""
    config = RolloutConfig(max_agents=9, max_preparing=9)
    agent = f"{CALL}; sleep 1; echo hello > out.txt"
    with cluster_runner([TASK], agent=agent, config=config) as runner:
        finished = runner.run(build_jobs(TASK, 9))
    assert [r.rollout.reward for r in finished] == [1.0] * 9
    assert max(r.rollout.seconds["prepare"] for r in finished) > 1.0


def test_sessions_that_wait_for_a_place_can_be_stopped() -> None:
    config = RolloutConfig(max_agents=20, max_preparing=20)
    started = threading.Event()

    def reply(prompt: tuple[int, ...]) -> tuple[int, ...]:
        started.set()
        return REPLY

    with cluster_runner([TASK], agent=f"{CALL}; sleep 600", reply=reply, config=config) as runner:
        runner.start(build_jobs(TASK, 20))
        assert started.wait(60)
        runner.close()  # hangs, and so does the test, where a session goes on to wait


def test_a_lost_node_takes_its_sessions_and_a_new_one_is_used(nodes: RayNodes, tmp_path: Path) -> None:
    """Eight sessions stay on the first node, two on one that is killed; with retries these run on a third."""
    before = list_left()
    for retry in (False, True):
        second = nodes.add(cpus=2)
        config = RolloutConfig(max_agents=10, max_preparing=10, retry_lost_sessions=retry)
        calls: list[int] = []
        all_called = threading.Event()

        def reply(prompt: Any, calls: list[int] = calls, done: threading.Event = all_called) -> tuple[int, ...]:
            calls.append(1)
            if len(calls) == 10:
                done.set()
            return REPLY

        # those that are left wait until the node is gone
        agent = f"{CALL}; sleep 6; echo hello > out.txt"
        folder = tmp_path / str(retry)
        folder.mkdir()
        with cluster_runner([TASK], agent=agent, reply=reply, config=config) as runner:
            runner.start(build_jobs(TASK, 10, folder))
            assert all_called.wait(60)
            nodes.remove(second)
            third = nodes.add(cpus=2)
            finished = [result.rollout for result in runner.take(1)]
            lost = [rollout for rollout in finished if rollout.stop_reason == "worker_lost"]
            assert [rollout.reward for rollout in finished if rollout not in lost] == [1.0] * (10 - len(lost))
            if retry:
                assert not lost
                assert sum(rollout.counters.get("retried_after_loss", 0) for rollout in finished) == 2
                assert len(list(folder.glob("*.lost"))) == 2
            else:
                assert [(rollout.reward, rollout.error_kind) for rollout in lost] == [(None, "worker_lost")] * 2
                name = os.uname().nodename
                assert all(rollout.counters[f"lost_on_{name}"] == 1 for rollout in lost)
                assert all((rollout.error or "").startswith(f"node {name} was lost: ") for rollout in lost)
        nodes.remove(third)
    wait_until_nothing_is_left(before)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_trainer_that_is_stopped_leaves_nothing_on_the_node(how: signal.Signals) -> None:
    before = list_left()
    script = Path(__file__).parents[1] / "helpers" / "ray_nodes.py"
    command = [sys.executable, str(script), "4", "sleep 600"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None and trainer.stdout.readline() == "ready\n"
        deadline = time.monotonic() + 60
        while len([line for line in list_left() if "netns_holder" in line and line not in before]) < 4:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        trainer.send_signal(how)
        trainer.wait(60)
    wait_until_nothing_is_left(before)


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
        with pytest.raises(ConfigError, match=r"node .*: polar_trl is .* in .*other/polar_trl, and .* here: install"):
            build_cluster_parts([TASK])
    finally:
        nodes.remove(node)
