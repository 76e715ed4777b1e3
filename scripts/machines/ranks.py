"""Train with a rank on each of two machines: part c of scripts/test_machines.sh.

The machines have /mnt in common, where output_dir is, and nothing else; their host names do not resolve. A run of two
steps (accelerate launch) is left alone; another one loses its second machine in its second step, and goes on once the
machine is back (torchrun). Their weights are compared. The second run makes two more steps, as a job of SLURM with a
stand-in for srun, with sessions that stay open over steps and that any rank may begin, and is replayed. Last, runs on
machines that have not the same folders are refused.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from machines import Machines

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))
from tiny_qwen import build_tiny_qwen3  # noqa: E402 - from the tests' helpers

SMOLLM2 = ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct"
LAUNCH_S = 300.0
END_S = 120.0
"""Within which the ranks that are left have to end."""
JOB = ROOT / "examples" / "more_machines" / "train.sbatch"
RUN_FILE = ROOT / "scripts" / "machines" / "run.yaml"


def build_accelerate(machine: int) -> list[str]:
    """Build the command of docs/more-gpus.md that starts a machine's rank."""
    return [
        *(sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu"),
        *("--num_machines", "2", "--num_processes", "2", "--machine_rank", str(machine - 1)),
        *("--main_process_ip", Machines.address(1), "--main_process_port", "29500"),
        *("--mixed_precision", "no", "--dynamo_backend", "no"),
    ]


def build_torchrun(machine: int) -> list[str]:
    """Build the other one."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"),
        *("--node-rank", str(machine - 1), "--master-addr", Machines.address(1), "--master-port", "29500"),
    ]


class Run:
    """A training on both machines.

    Args:
        launch: Builds what starts a machine's rank; None: a job of SLURM does.
        flags: Beside those of run.yaml.
    """

    def __init__(self, machines: Machines, name: str, *flags: str, launch: Any = build_accelerate) -> None:
        self.machines = machines
        self.logs = [machines.folder / f"{name}-{machine}.log" for machine in (1, 2)]
        flags = ("--config", str(RUN_FILE), *flags)
        script = str(ROOT / "scripts" / "machines" / "train_rank.py")
        job = read_job(machines, *flags) if launch is None else ([], {})
        self.ranks = []
        for machine, log in zip((1, 2), self.logs, strict=True):
            for moment in ("start", "end"):
                (machines.disk(machine) / f"{moment}.pt").unlink(missing_ok=True)
            command, env = ([*launch(machine), script, *flags], {}) if launch is not None else job
            env = {**env, "SLURM_NODEID": str(machine - 1)}
            with log.open("wb") as file:
                self.ranks.append(machines.popen(machine, command, env=env, stdout=file, stderr=file))

    def wait(self, timeout_s: float) -> list[int]:
        """Return how the ranks ended. Raises `RuntimeError` with their output where one has not."""
        deadline = time.monotonic() + timeout_s
        try:
            return [rank.wait(max(deadline - time.monotonic(), 0.1)) for rank in self.ranks]
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"a rank has not ended within {timeout_s:.0f} s\n{self.read_logs()}") from None

    def require_end(self, timeout_s: float = LAUNCH_S) -> None:
        """Raise `RuntimeError` unless both ranks end well."""
        if any(self.wait(timeout_s)):
            raise RuntimeError(f"a rank has failed\n{self.read_logs()}")

    def read_logs(self) -> str:
        """Return the end of what each rank printed."""
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in self.logs)

    def read_weights(self, moment: str) -> list[dict[str, Any]]:
        """Return what `train_rank.py` wrote on each machine."""
        return [torch.load(self.machines.disk(machine) / f"{moment}.pt") for machine in (1, 2)]


def read_job(machines: Machines, *flags: str) -> tuple[list[str], dict[str, str]]:
    """Return what the job of SLURM in examples/ has srun start on each machine, and its environment."""
    bin, said = machines.folder / "bin", machines.folder / "srun"
    bin.mkdir()
    for name, program in (
        ("scontrol", f"printf '%s\\n' {machines.address(1)} {machines.address(2)}"),
        ("srun", f"printf '%s\\0' FIRST=$FIRST \"$@\" > {said}"),
    ):
        (bin / name).write_text(f"#!/bin/bash\n{program}\n")
        (bin / name).chmod(0o755)
    path = f"{bin}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {"PATH": path, "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "1"}
    subprocess.run(["bash", str(JOB), *flags], env={**os.environ, **env}, check=True)
    first, _option, *command = said.read_text().split("\0")[:-1]
    return command, {**env, "FIRST": first.removeprefix("FIRST=")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["c"])
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    with Machines(2, names_resolve=False) as machines:
        found = prove(machines)
    args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if found["weights_equal"] and found["resumed_equal"] and not found["left_behind"] else 1


def prove(machines: Machines) -> dict[str, Any]:
    """Make the runs, and return what was found."""
    build_tiny_qwen3(SMOLLM2, machines.share / "tiny")
    began = time.monotonic()
    whole = Run(machines, "whole", "--output_dir", "/mnt/whole")
    whole.require_end()
    start, ends = whole.read_weights("start")[0]["weights"], whole.read_weights("end")
    say(f"two steps in {time.monotonic() - began:.0f} s")
    found: dict[str, Any] = {"weights_equal": are_equal(ends), "moved": norm(ends[0]["weights"] - start)}

    killed = Run(machines, "killed")
    await_second_step(machines.share / "run", killed)
    machines.kill(2)
    kill = time.monotonic()
    found["seconds_to_end_after_kill"] = round(wait_after(killed, kill), 1)
    machines.start(2)
    resumed = Run(machines, "resumed", "--resume_from_checkpoint", "auto", launch=build_torchrun)
    resumed.require_end()
    resumes, again = resumed.read_weights("start"), resumed.read_weights("end")
    found["resumed_from"] = [rank["step"] for rank in resumes]
    gap = norm(again[0]["weights"] - ends[0]["weights"]) / found["moved"]
    found["gap"] = gap
    found["resumed_equal"] = found["resumed_from"] == [1, 1] and are_equal(again) and gap < 1e-4
    say(f"resumed: weights differ by {gap:.1e} of their way from those of the run that was left alone")

    longer = ["--max_steps", "4", "--max_policy_lag", "1", "--resume_from_checkpoint", "auto"]
    Run(machines, "carried", *longer, launch=None).require_end()
    machines.run(1, [sys.executable, "-m", "polar_trl", "replay", "/mnt/run"], timeout_s=LAUNCH_S)
    say("replayed on the first machine")
    counted = count_sessions(machines)

    refuse(machines, "unshared", "is not the folder that rank 0 has on node1", "--output_dir", "/tmp/run")
    for machine, run in ((1, "whole"), (2, "run")):
        shutil.copytree(machines.share / run / "checkpoint-1", machines.disk(machine) / "old" / "checkpoint-1")
    old = ["--output_dir", "/mnt/branch", "--resume_from_checkpoint", "/tmp/old/checkpoint-1"]
    refuse(machines, "other-checkpoint", "the checkpoint to go on from is checkpoint-1, written after", *old)
    return {**found, **counted}


def refuse(machines: Machines, name: str, sentence: str, *flags: str) -> None:
    """Raise `RuntimeError` unless both ranks end with this sentence, and no session was begun."""
    began = time.monotonic()
    run = Run(machines, name, *flags)
    is_refused = all(run.wait(LAUNCH_S)) and all(sentence in log.read_text() for log in run.logs)
    if not is_refused or any(machines.share.glob("branch/sessions/*/*")):
        raise RuntimeError(f"this run should have been refused\n{run.read_logs()}")
    say(f"refused after {time.monotonic() - began:.0f} s: ... {sentence} ...")


def await_second_step(output: Path, run: Run) -> None:
    """Return once the second step's sessions are under way on the second machine."""
    deadline = time.monotonic() + LAUNCH_S
    while not (
        (output / "checkpoint-1" / "polar_state.json").exists()
        and any(output.glob("sessions/*rank1/train_00001/*.jsonl"))
    ):
        if time.monotonic() > deadline or any(rank.poll() is not None for rank in run.ranks):
            raise RuntimeError(f"the second step has not begun\n{run.read_logs()}")
        time.sleep(0.05)


def wait_after(run: Run, kill: float) -> float:
    """Return how long the rank that is left took to end (s). Raises `RuntimeError` where it ended well."""
    if not all(run.wait(END_S)):
        raise RuntimeError(f"a rank ended well without the other\n{run.read_logs()}")
    return time.monotonic() - kill


def are_equal(ranks: list[dict[str, Any]]) -> bool:
    """Tell whether ranks of two machines have the same weights, bit by bit."""
    first, second = ranks
    return first["host"] != second["host"] and torch.equal(first["weights"], second["weights"])


def norm(weights: torch.Tensor) -> float:
    """Return the length of a vector."""
    return float(weights.double().norm())


def count_sessions(machines: Machines) -> dict[str, Any]:
    """Count the sessions by machine, and what they left there."""
    paths = list(machines.share.glob("*/sessions/*/*/*.jsonl"))
    per_node = Counter(machines.name(1 + int(path.parents[1].name[-1])) for path in paths)
    left = machines.list_left_behind()
    for line in left:
        say(f"left behind: {line}")
    return {"sessions": len(paths), "per_node": per_node, "left_behind": len(left)}


def say(text: str) -> None:
    """Print a line about the state of things."""
    print(f"ranks: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
