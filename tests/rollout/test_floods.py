"""Agents that flood the proxy from their sandbox end by their own doing; the run and the other sessions go on."""

import os
import subprocess
import sys
from pathlib import Path

from faults import ASK, LIMITS, REPLY

from polar_trl.engine.base import GenerationParams
from polar_trl.engine.scripted import ScriptedEngine
from polar_trl.grade.function import FunctionGrader
from polar_trl.harness.shell import ShellHarness
from polar_trl.proxy import Proxy
from polar_trl.recording.session import SessionLimits
from polar_trl.rollout.runner import Job, RolloutConfig, RolloutResult, RolloutRunner
from polar_trl.sandbox.base import SandboxBackend
from polar_trl.sandbox.bwrap.backend import BwrapSandboxBackend
from polar_trl.tokens.bytes import ByteRenderer
from polar_trl.types import Task

CONNECT = """
import os, socket, time, urllib.parse
address = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
held = []
for _ in range(600):
    try:
        held.append(socket.create_connection((address.hostname, address.port), timeout=3))
    except OSError:
        pass  # a full queue of the system's: it empties
time.sleep({seconds})
"""
FLOOD = """
import os, urllib.request
for number in range(30):
    text = "a" * (10 << 20) if number > 2 else ""
    body = ('{"messages": [{"role": "user", "content": "%d %s"}]}' % (number, text)).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    try:
        urllib.request.urlopen(request, timeout=60).read()
    except OSError:
        pass
"""
ATTACK = "python3 ~/ask.py; python3 ~/attack.py"


def run(backend: SandboxBackend, attack: str, scripts: list[str], folder: Path) -> list[RolloutResult]:
    """One session for each script, all in a group of its own; records in the folder."""
    engine = ScriptedEngine(lambda _: REPLY)
    with Proxy(engine, ByteRenderer(), params=GenerationParams(max_tokens=50)) as proxy:
        runner = RolloutRunner(
            proxy=proxy,
            backend=backend,
            harness=ShellHarness("bash -c {instruction}", files={"ask.py": ASK, "attack.py": attack}),
            grader=FunctionGrader(lambda task, box: 1.0),
            config=RolloutConfig(max_preparing=2, limits=SessionLimits(max_calls=2)),
        )
        jobs = [
            Job(
                rollout_id=f"r{number}",
                group_id=f"g{number}",
                task=Task(id=f"t{number}", instruction=script, agent_timeout_s=120.0),
                record_path=folder / f"r{number}.jsonl",
            )
            for number, script in enumerate(scripts)
        ]
        return runner.run(jobs)


def test_connections_without_end_are_the_agents_own_end(tmp_path: Path) -> None:
    backend = BwrapSandboxBackend(limits=LIMITS, root=tmp_path / "state")
    try:
        flood, other = run(backend, CONNECT.format(seconds=100), [ATTACK, "python3 ~/ask.py"], tmp_path)
    finally:
        backend.close()
    assert (flood.rollout.stop_reason, flood.rollout.reward) == ("limit_exceeded", 1.0)
    assert flood.rollout.counters["connections_exceeded"] == 1
    assert len(flood.rollout.calls) == len(flood.reconstruction.trajectories) == 1
    assert (other.rollout.stop_reason, other.rollout.reward) == ("completed", 1.0)


def test_a_flood_out_of_budget_leaves_a_small_record(tmp_path: Path) -> None:
    backend = BwrapSandboxBackend(limits=LIMITS, root=tmp_path / "state")
    try:
        (flood,) = run(backend, FLOOD, [ATTACK], tmp_path)
    finally:
        backend.close()
    assert flood.rollout.reward == 1.0 and flood.rollout.error is None
    assert sum(call.is_answered for call in flood.rollout.calls) == 2
    assert (tmp_path / "r0.jsonl").stat().st_size < 20_000


def test_a_run_with_few_files_survives_an_agent_that_takes_all(tmp_path: Path) -> None:
    """Local agents share a listener, so the flood belongs to nobody: it ends with its agent's time."""
    result = subprocess.run(
        [sys.executable, __file__, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "XDG_CACHE_HOME": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["completed 1.0"] * 6, result.stderr


def run_with_few_files(folder: Path) -> None:
    import resource

    from polar_trl.sandbox.local import LocalSandboxBackend

    resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))
    scripts = [ATTACK, *["python3 ~/ask.py; sleep 3; python3 ~/ask.py"] * 5]
    for result in run(LocalSandboxBackend(root=folder / "state"), CONNECT.format(seconds=8), scripts, folder):
        print(result.rollout.stop_reason, result.rollout.reward)
        print(result.rollout.error, dict(result.rollout.counters), file=sys.stderr)


if __name__ == "__main__":
    run_with_few_files(Path(sys.argv[1]))
