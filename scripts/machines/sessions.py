"""Train with sessions on other machines: parts a and b of scripts/test_machines.sh.

Machine 1 is the head of a Ray cluster and trains; agents run on machines 2 and 3, with TLS and a token between them.

  a   two steps of 16 sessions in bubblewrap, then two in containers of an engine on each machine
  b   two steps, in the first of which machine 3 is killed and machine 4 joins; a step in which its cable is pulled;
      trainers that are interrupted and killed
"""

import argparse
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from machines import Machines
from ray_cluster import ENGINE, RayCluster, find_left

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))
from tiny_qwen import build_tiny_qwen3  # noqa: E402 - from the tests' helpers

SMOLLM2 = ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct"
RUN_FILE = ROOT / "scripts" / "machines" / "run.yaml"
TRAIN_S = 400.0
END_S = 60.0
SESSIONS = 16
"""Of a step."""
IMAGE = "polar-trl-test:latest"
NAME = "hostname > machine.txt"
"""In an agent's command: which machine it ran on, read back from the record of its changes."""


class Training:
    """A trainer on machine 1."""

    def __init__(self, cluster: RayCluster, name: str, *flags: str, agent: str) -> None:
        self.folder = cluster.machines.share / name
        self.log = cluster.machines.folder / f"{name}.log"
        command = [
            *(sys.executable, "-m", "polar_trl", "train", "--config", str(RUN_FILE)),
            *("--sandbox_cluster", "auto", "--output_dir", f"/mnt/{name}", "--agent_command", agent),
            *("--per_device_train_batch_size", str(SESSIONS), "--max_agents", str(SESSIONS)),
            *("--sandbox_cpus", "1", "--sandbox_memory_mb", "512", "--sandbox_disk_mb", "64", "--max_preparing", "16"),
            *flags,
        ]
        with self.log.open("wb") as log:
            self.process = cluster.machines.popen(1, command, env=cluster.env(1), stdout=log, stderr=log)

    def read_log(self) -> str:
        """Return the end of what it printed."""
        return self.log.read_text(errors="replace")[-4000:]

    def await_calls(self, count: int) -> None:
        """Wait until so many sessions have a call on record."""

        def have_called() -> bool:
            if self.process.poll() is not None:
                raise RuntimeError(f"the trainer has ended\n{self.read_log()}")
            records = self.folder.glob("sessions/*/train_00000/*.jsonl")
            return sum('"type":"call"' in path.read_text().replace(" ", "") for path in records) >= count

        wait_until(have_called, TRAIN_S, lambda: f"{count} sessions have not called\n{self.read_log()}")

    def require_end(self) -> None:
        """Raise `RuntimeError` unless it ends well."""
        if self.process.wait(TRAIN_S):
            raise RuntimeError(f"the trainer has failed\n{self.read_log()}")

    def signal(self, number: int) -> None:
        """Send a signal to the trainer itself, which is below what entered the machine."""
        pid = self.process.pid
        while children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            pid = int(children[0])
            if b"polar_trl" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                break
        os.kill(pid, number)

    def list_ends(self) -> list[dict[str, Any]]:
        """List the last lines of the sessions' records."""
        records = sorted(self.folder.glob("sessions/*/*/*.jsonl"))
        return [json.loads(path.read_text().splitlines()[-1]) for path in records]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["a", "b"])
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    with Machines(3) as machines:
        build_tiny_qwen3(SMOLLM2, machines.share / "tiny")
        cluster = RayCluster(machines, cpus=SESSIONS)
        found = prove_sessions(cluster) if args.part == "a" else prove_faults(cluster)
    args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if found["holds"] else 1


def prove_sessions(cluster: RayCluster) -> dict[str, Any]:
    """Part a."""
    for machine in (2, 3):
        cluster.start_engine(machine)
        cluster.join(machine, "bwrap", "docker")
    ends = []
    for kind, flags in (("bwrap", ["bwrap"]), ("docker", ["docker", "--sandbox_image", IMAGE])):
        began = time.monotonic()
        training = Training(cluster, kind, "--sandbox", *flags, agent=f"{NAME}; {read_agent()}")
        training.require_end()
        say(f"two steps of {SESSIONS} sessions with {kind} in {time.monotonic() - began:.0f} s")
        ends += training.list_ends()
    found = count_sessions(cluster, ends, [1, 2, 3])
    found["per_node"] += Counter({f"node{machine}": count_containers(cluster, machine) for machine in (2, 3)})
    found["without_reward"] = sum(end["reward"] is None for end in ends)
    found["holds"] = (
        found["sessions"] == sum(found["per_node"].values()) == 4 * SESSIONS
        and found["per_node"].keys() == {"node2", "node3"}
        and found["left_behind"] == found["without_reward"] == 0
    )
    return found


def prove_faults(cluster: RayCluster) -> dict[str, Any]:
    """Part b."""
    machines = cluster.machines
    for machine in (2, 3):
        cluster.join(machine, "bwrap")
    slow = f"{NAME}; {read_agent()}; sleep 15"
    training = Training(cluster, "killed", agent=slow)
    training.await_calls(SESSIONS)
    machines.kill(3)
    say("machine 3 is killed")
    machines.start(4)
    cluster.join(4, "bwrap")
    training.require_end()
    ends = training.list_ends()
    found = count_sessions(cluster, ends, [1, 2, 4])
    lost = [end for end in ends if end["stop_reason"] == "worker_lost"]
    found["lost_by_node"] = Counter(end["error"].partition(" was lost")[0] for end in lost)

    cut = Training(cluster, "cut", "--max_steps", "1", agent=slow)
    cut.await_calls(SESSIONS)
    machines.cut(4)
    began = time.monotonic()
    say("machine 4 is cut off")
    cut.require_end()
    found["seconds_after_cut"] = round(time.monotonic() - began)
    found["lost_by_cut"] = sum(end["stop_reason"] == "worker_lost" for end in cut.list_ends())
    found["left_behind"] += len(await_nothing(machines, [4]))

    for name, how in (("interrupted", signal.SIGINT), ("killed_trainer", signal.SIGKILL)):
        stopped = Training(cluster, name, agent=slow)
        stopped.await_calls(1)
        stopped.signal(how)
        stopped.process.wait(END_S)
        found["left_behind"] += len(await_nothing(machines, [1, 2]))
        say(f"a trainer was ended by {how.name}")
    found["holds"] = (
        found["sessions"] == 2 * SESSIONS
        and found["lost"] > 0
        and found["lost_by_cut"] > 0
        and found["left_behind"] == 0
        and "node4" in found["per_node"]
        and all(end["reward"] is None for end in lost)
        and all(end["reward"] is not None for end in ends if end not in lost)
    )
    return found


def count_sessions(cluster: RayCluster, ends: list[dict[str, Any]], machines: list[int]) -> dict[str, Any]:
    """Count sessions by the machine that they say they ran on, and what is left on machines."""
    changes = [end.get("changes") or "" for end in ends]
    names = [line[1:] for text in changes for line in text.splitlines() if line.startswith("+node")]
    left = await_nothing(cluster.machines, machines)
    lost = sum(end["stop_reason"] == "worker_lost" for end in ends)
    return {"sessions": len(ends), "per_node": Counter(names), "lost": lost, "left_behind": len(left)}


def count_containers(cluster: RayCluster, machine: int) -> int:
    """Count the containers that a machine's engine has made: each has a host name of its own."""
    code = (
        "import docker, time; filters = {'type': 'container', 'event': 'create', 'label': 'polar-trl.run'}; "
        "print(len(list(docker.from_env().events(since=0, until=int(time.time()) + 1, filters=filters))))"
    )
    return int(cluster.machines.run(machine, [sys.executable, "-c", code], env=ENGINE))


def await_nothing(machines: Machines, numbers: list[int]) -> list[str]:
    """Return what is left on machines, once nothing is or time is up."""
    deadline = time.monotonic() + END_S
    while (left := find_left(machines, numbers)) and time.monotonic() < deadline:
        time.sleep(0.5)
    for line in left:
        say(f"left behind: {line}")
    return left


def wait_until(is_so: Callable[[], bool], limit_s: float, describe: Callable[[], str]) -> None:
    """Raise `RuntimeError` where something is not so in time."""
    deadline = time.monotonic() + limit_s
    while not is_so():
        if time.monotonic() > deadline:
            raise RuntimeError(describe())
        time.sleep(0.2)


def read_agent() -> str:
    """Read the agent's command in the run file."""
    lines = RUN_FILE.read_text().splitlines()
    return next(line.partition(": ")[2] for line in lines if line.startswith("agent_command"))


def say(text: str) -> None:
    """Print a line about the state of things."""
    print(f"sessions: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
