"""The fault table of docs/reliability.md, a row a test: the rollout's error, effects on others, leftovers.

Needs root and a container engine: `scripts/test.sh` starts one. Tests that stop or freeze an engine start their own.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import docker
import pytest
from faults import LIMITS, REPLY, Leftovers, OwnEngine, Sessions, build, list_processes

from polar_trl.rollout.runner import RolloutResult
from polar_trl.sandbox.base import Sandbox, SandboxBackend
from polar_trl.sandbox.limits import Limits
from polar_trl.types import Task

pytestmark = pytest.mark.containers

TRAINER = Path(__file__).parents[1] / "helpers" / "doomed_trainer.py"
FINE = "python3 ~/ask.py && echo fine > result"
both_kinds = pytest.mark.parametrize("kind", ["bwrap", "docker"])


@pytest.fixture
def engine() -> docker.DockerClient:
    return docker.from_env()


@pytest.fixture
def sessions(tmp_path: Path, engine: docker.DockerClient) -> Iterator[Sessions]:
    """Yield sessions of which nothing may be left."""
    with Sessions(tmp_path / "state") as sessions:
        yield sessions
    require_nothing_left(Leftovers(sessions.root, sessions.token, engine))


@pytest.fixture(scope="module")
def own_engine() -> Iterator[OwnEngine]:
    engine = OwnEngine()
    try:
        engine.up()
        engine.load_image()
        yield engine
    finally:
        engine.down()


def require_nothing_left(leftovers: Leftovers) -> None:
    """Wait until nothing is left: kernel and engine take a moment to let go of disks, processes and containers."""
    for _ in range(100):
        if not leftovers.find():
            return
        time.sleep(0.2)
    raise AssertionError(f"left behind: {leftovers.find()}")


def read_name(pid: str) -> str:
    """Return the name of a process; "" where it has ended."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def read_result(task: Task, box: Sandbox) -> bool:
    return box.get("result") == b"fine\n"


def require_trained(finished: RolloutResult) -> None:
    """Require that the sampled tokens can be trained on, however the agent ended."""
    assert sum(sum(row.trainable) for row in finished.reconstruction.trajectories) == len(REPLY)


def require_fine(finished: RolloutResult) -> None:
    assert (finished.rollout.stop_reason, finished.rollout.reward) == ("completed", 1.0), finished.rollout.error
    require_trained(finished)


@both_kinds
def test_killed_from_outside_is_no_zero(sessions: Sessions, engine: docker.DockerClient, kind: str) -> None:
    scripts = {"victim": "python3 ~/ask.py; sleep 600", "other": f"sleep 2; {FINE}"}
    running = sessions.start(build(kind, sessions.root), scripts, read_result)
    sessions.wait_until_asked(1)
    victim = sessions.name_session("victim")
    if kind == "docker":
        (container,) = Leftovers(sessions.root, sessions.token, engine).list_containers(victim)
        container.kill()
    else:
        for pid in list_processes(victim):
            if read_name(pid) == "bwrap":
                os.kill(int(pid), signal.SIGKILL)
    results = running.result(timeout=600)
    rollout = results["victim"].rollout
    assert (rollout.stop_reason, rollout.reward, len(rollout.calls)) == ("agent_failed", None, 1)
    assert rollout.error is not None and rollout.error.startswith("SandboxError: ")
    require_fine(results["other"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_engine_that_is_restarted_costs_what_ran_and_nothing_more(
    sessions: Sessions, own_engine: OwnEngine, number: signal.Signals
) -> None:
    backend = build("docker", sessions.root, host=own_engine.host)
    running = sessions.start(backend, {"victim": "python3 ~/ask.py; sleep 600"}, read_result)
    sessions.wait_until_asked(1)
    own_engine.restart(number)
    rollout = running.result(timeout=600)["victim"].rollout
    assert (rollout.stop_reason, rollout.reward, len(rollout.calls)) == ("agent_failed", None, 1)
    assert rollout.error is not None and rollout.error.startswith("SandboxError: ")
    require_fine(sessions.start(backend, {"next": FINE}, read_result).result(timeout=600)["next"])
    backend.close()
    require_nothing_left(Leftovers(sessions.root, sessions.token, own_engine.connect()))


@pytest.mark.parametrize("request_line", ["/containers/create", "/start"])
def test_an_engine_that_hangs_fails_the_session_in_time(
    sessions: Sessions, own_engine: OwnEngine, request_line: str
) -> None:
    with own_engine.tap(request_line, own_engine.freeze) as tap:
        backend = build("docker", sessions.root, host=tap.host, api_timeout_s=2)
        try:
            finished = sessions.start(backend, {"a": FINE}, prepare_timeout_s=4.0).result(timeout=600)["a"]
            assert tap.was_met
        finally:
            own_engine.thaw()
        assert (finished.rollout.stop_reason, finished.rollout.reward) == ("prepare_failed", None)
        assert finished.rollout.error is not None and finished.rollout.error.startswith("SandboxError: ")
        require_fine(sessions.start(backend, {"next": FINE}, read_result).result(timeout=600)["next"])
        backend.close()
    # what it made when it woke up is gone too
    require_nothing_left(Leftovers(sessions.root, sessions.token, own_engine.connect()))


LIFT = """
import os, sys
sys.path.insert(0, os.path.expanduser("~"))
from polar_trl.tools.security.inside.limits import lift_limits
lifted = lift_limits({"lifts": True})
print(lifted, file=open("lifted", "w"))
"""
"""A user namespace, mounts of control groups, writes to every limit, joining other groups, rlimits, oom_score_adj."""
BOMB = f"""
{LIFT}
import signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
held = 0
for number in range(200):  # the limit under test is 64
    try:
        if os.fork() == 0:
            time.sleep(300)
            os._exit(0)
    except BlockingIOError:
        held += 1
print(held, file=open("held", "w"))
"""


@both_kinds
def test_a_fork_bomb_that_lifts_its_limits_first_is_held_and_gone_before_grading(
    sessions: Sessions, kind: str
) -> None:
    def grade(task: Task, box: Sandbox) -> bool:
        if task.id == "bomb":
            # its sleeps have the session's name in their environment
            assert box.get("lifted") == b"[]\n"
            return int(box.get("held") or b"0") >= 200 - LIMITS.pids and list_processes("POLAR_BOMB=") == []
        return read_result(task, box)

    scripts = {"bomb": f"python3 ~/ask.py; POLAR_BOMB=1 python3 -c '{BOMB}'", "other": f"sleep 1; {FINE}"}
    results = sessions.start(build(kind, sessions.root), scripts, grade).result(timeout=600)
    require_fine(results["bomb"])
    require_fine(results["other"])


@both_kinds
def test_a_memory_hog_that_lifts_its_limits_first_is_killed_counted_and_graded(sessions: Sessions, kind: str) -> None:
    hog = f"python3 -c '{LIFT}\nx = bytearray(500 << 20)'"
    scripts = {"tool": f"{FINE}; {hog}; exit 0", "agent": f"{FINE}; exec {hog}", "other": FINE}
    results = sessions.start(build(kind, sessions.root), scripts, read_result).result(timeout=600)
    require_fine(results["tool"])
    require_fine(results["other"])
    assert (results["agent"].rollout.stop_reason, results["agent"].rollout.reward) == ("agent_failed", 1.0)
    require_trained(results["agent"])
    counts = {name: finished.rollout.counters.get("agent_out_of_memory", 0) for name, finished in results.items()}
    assert counts == {"tool": 1, "agent": 1, "other": 0}


@both_kinds
def test_a_full_disk_is_the_sessions_own(sessions: Sessions, tmp_path: Path, kind: str) -> None:
    def grade(task: Task, box: Sandbox) -> bool:
        # the host can write while the session cannot, and the session's disk is no larger than it may be
        (tmp_path / f"note-{task.id}").write_bytes(b"x" * (8 << 20))
        size = sum(path.stat().st_blocks * 512 for path in sessions.root.glob("*/*") if path.is_file())
        return read_result(task, box) and size < 2 * (LIMITS.disk_mb + 2) << 20

    fill = (
        "dd if=/dev/zero of=big bs=1M count=500 2>/dev/null; dd if=/dev/zero of=/tmp/big bs=1M count=500 2>/dev/null"
    )
    scripts = {"filler": f"{FINE}; {fill}; exit 0", "other": f"sleep 2; dd if=/dev/zero of=x bs=1M count=16; {FINE}"}
    results = sessions.start(build(kind, sessions.root), scripts, grade).result(timeout=600)
    require_fine(results["filler"])
    require_fine(results["other"])
    counts = {name: finished.rollout.counters.get("agent_disk_full", 0) for name, finished in results.items()}
    assert counts == {"filler": 1, "other": 0}


@both_kinds
def test_an_agent_that_ignores_signals_ends_at_its_limit_and_is_graded(sessions: Sessions, kind: str) -> None:
    stubborn = "trap '' TERM INT HUP QUIT; while :; do sleep 0.1; done"
    running = sessions.start(
        build(kind, sessions.root), {"a": f"{FINE}; {stubborn}"}, read_result, agent_timeout_s=4.0
    )
    finished = running.result(timeout=600)["a"]
    assert (finished.rollout.stop_reason, finished.rollout.reward) == ("agent_timeout", 1.0), finished.rollout.error
    require_trained(finished)


@both_kinds
def test_an_agent_that_kills_all_that_it_sees_ends_nobody_else(sessions: Sessions, kind: str) -> None:
    # the first process of a sandbox is what keeps it: an agent that could end it would have no reward instead of 0
    kill = "[ $PWD = /workspace ] && { kill -TERM 1; kill -KILL 1; kill -9 -1; sleep 1; }"
    scripts = {"a": f"{FINE}; {kill}; exit 0"}
    require_fine(sessions.start(build(kind, sessions.root), scripts, read_result).result(timeout=600)["a"])


@both_kinds
def test_a_daemon_is_dead_before_grading(sessions: Sessions, kind: str) -> None:
    def grade(task: Task, box: Sandbox) -> bool:
        before = box.get("alive")
        time.sleep(0.5)
        return bool(before) and box.get("alive") == before and list_processes("POLAR_DAEMON=") == []

    daemon = "trap '' TERM HUP; while :; do date +%s%N >> alive; sleep 0.02; done"
    detach = f'POLAR_DAEMON=1 setsid bash -c "(exec >/dev/null 2>&1; {daemon}) &"'
    script = f"python3 ~/ask.py; {detach}; until [ -s alive ]; do sleep 0.05; done"
    require_fine(sessions.start(build(kind, sessions.root), {"a": script}, grade).result(timeout=600)["a"])


@both_kinds
def test_64_sandboxes_at_once(sessions: Sessions, kind: str) -> None:
    backend = build(kind, sessions.root, limits=Limits(memory_mb=48, cpus=0.5, pids=32, disk_mb=8))
    task = Task(id="t", instruction="x")
    with ThreadPoolExecutor(4) as threads:
        making = [threads.submit(backend.create, task, sessions.name_session(str(number))) for number in range(64)]
        boxes = [future.result() for future in making]
        try:
            done = list(threads.map(lambda box: box.run("echo ready", env=sessions.env, timeout_s=60), boxes))
        finally:
            list(threads.map(lambda box: box.destroy(), boxes))
    assert {(result.exit_code, result.stdout, result.stderr) for result in done} == {(0, "ready\n", "")}


def test_what_a_killed_trainer_left_is_gone_at_the_next_start(sessions: Sessions, engine: docker.DockerClient) -> None:
    command = [sys.executable, str(TRAINER), str(sessions.root), sessions.token]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        try:
            assert trainer.stdout is not None
            owner = trainer.stdout.readline().strip()
            assert trainer.stdout.readline() == "running\n"
        finally:
            trainer.kill()
    leftovers = Leftovers(sessions.root, sessions.token, engine, owner)
    there = {"containers", "folders", "mounts", "disks", "cgroups", "processes"}
    assert set(leftovers.find()) == there, "there has to be something of each for this test to mean anything"
    backends: list[SandboxBackend] = [build(kind, sessions.root) for kind in ("bwrap", "docker")]
    require_nothing_left(leftovers)
    for backend in backends:
        require_fine(sessions.start(backend, {"next": FINE}, read_result).result(timeout=600)["next"])
