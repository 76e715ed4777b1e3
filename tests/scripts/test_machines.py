"""Machines made of namespaces are apart from each other, and leave nothing; ranks on two of them find each other.

Whole runs on them are in `bash scripts/test.sh machines`.
"""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launch import ROOT
from machines import PREFIX, Machines, remove_leftovers

pytestmark = pytest.mark.containers

RANK = """
import torch, torch.distributed as dist
from polar_trl.grpo.run.machines import choose_interface
choose_interface()
dist.init_process_group("gloo")
number = torch.tensor(1.0 + dist.get_rank())
dist.all_reduce(number)
print("the sum is", number.item())
"""


@pytest.fixture(scope="module")
def two() -> Iterator[Machines]:
    with Machines(2, names_resolve=False) as machines:
        yield machines


def test_each_machine_has_what_is_its_own(two: Machines) -> None:
    for path in ("/tmp/mine", "/dev/shm/mine"):
        two.run(1, ["touch", path])
        assert subprocess.run([*two._enter(2), "ls", path], capture_output=True).returncode != 0
        assert not Path(path).exists()
    assert (two.disk(1) / "mine").exists()
    names = [two.run(machine, ["hostname"]).strip() for machine in (1, 2)]
    boots = [two.run(machine, ["cat", "/proc/sys/kernel/random/boot_id"]) for machine in (1, 2)]
    assert names == ["node1", "node2"] and len(set(boots)) == 2
    sleeper = two.popen(1, ["sleep", "50"])
    assert two.list_processes(2) == []
    while two.list_processes(1) != ["sleep 50"]:  # it starts
        time.sleep(0.05)
    assert two.list_left_behind() == ["sleep 50"]
    sleeper.kill()
    sleeper.wait()
    while two.list_left_behind():
        time.sleep(0.05)


def test_machines_have_one_folder_in_common(two: Machines) -> None:
    two.run(1, ["touch", "/mnt/ours"])
    two.run(2, ["ls", "/mnt/ours"])


def reaches(machines: Machines) -> bool:
    """Whether the second machine answers the first one: nobody listens there, and it says so."""
    program = f"import socket; print(socket.socket().connect_ex(('{machines.address(2)}', 9)))"
    command = ["timeout", "2", sys.executable, "-I", "-S", "-c", program]
    printed, _ = machines.popen(1, command, stdout=subprocess.PIPE, text=True).communicate()
    return printed.strip() == str(errno.ECONNREFUSED)


def test_a_cable_that_is_pulled_and_a_machine_that_is_killed(two: Machines) -> None:
    assert reaches(two)
    two.cut(2)
    assert not reaches(two)
    two.heal(2)
    assert reaches(two)
    two.run(2, ["touch", "/tmp/kept"])
    two.kill(2)
    assert not reaches(two)
    two.start(2)
    two.run(2, ["ls", "/tmp/kept"])
    assert reaches(two)


def test_ranks_find_each_other_without_names_that_resolve(two: Machines, tmp_path: Path) -> None:
    script = two.share / "rank.py"
    script.write_text(RANK)
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ranks = []
    for machine in (1, 2):
        words = ["--nnodes", "2", "--node-rank", str(machine - 1), "--master-addr", two.address(1)]
        command = [sys.executable, "-m", "torch.distributed.run", *words, "--master-port", "29500", "/mnt/rank.py"]
        ranks.append(two.popen(machine, command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
    for rank in ranks:
        printed, _ = rank.communicate(timeout=120)
        assert b"the sum is 3.0" in printed, printed.decode()


def test_nothing_is_left_of_machines_whose_script_was_killed() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "machines" / "machines.py"), "2", "sleep", "1234.5"]
    script = subprocess.Popen(command)
    while not (sleepers := find_sleepers()):
        time.sleep(0.05)
    (folder,) = {
        Path(f"/tmp/{name}") for name in os.listdir("/tmp") if name.startswith(PREFIX) and is_of(name, sleepers)
    }
    os.kill(script.pid, signal.SIGKILL)
    script.wait()
    while find_sleepers():
        time.sleep(0.05)
    remove_leftovers()
    assert not folder.exists()


def find_sleepers() -> list[int]:
    printed = subprocess.run(["pgrep", "--full", "--exact", "sleep 1234.5"], capture_output=True, text=True).stdout
    return [int(line) for line in printed.split()]


def is_of(name: str, pids: list[int]) -> bool:
    return any(name in Path(f"/proc/{pid}/mountinfo").read_text() for pid in pids)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--help"], "bash scripts/test_machines.sh --json machines.json"),
        (["--json"], "--json needs a file"),
        ([], "--json FILE is needed"),
        (["--json", "x", "d"], "unknown argument d"),
    ],
)
def test_the_script_says_how_it_is_called(words: list[str], sentence: str) -> None:
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "test_machines.sh"), *words], capture_output=True, text=True, timeout=20
    )
    assert sentence in done.stdout + done.stderr
    assert (done.returncode == 0) == (words == ["--help"])


def test_what_the_parts_found_adds_up_and_what_none_counts_is_null(tmp_path: Path) -> None:
    found = {
        "a": {"sessions": 64, "per_node": {"node2": 32, "node3": 32}, "lost": 0, "left_behind": 0},
        "b": {"sessions": 32, "per_node": {"node2": 16, "node4": 8}, "lost": 8, "left_behind": 1},
    }
    (tmp_path / "parts").mkdir()
    for part, counts in found.items():
        (tmp_path / "parts" / f"{part}.json").write_text(json.dumps(counts))
    script = ROOT / "scripts" / "machines" / "join_results.py"
    command = [sys.executable, str(script), str(tmp_path / "parts"), str(tmp_path / "joined.json")]
    subprocess.run(command, check=True, capture_output=True)
    joined = json.loads((tmp_path / "joined.json").read_text())
    assert joined == {
        "sessions": 96,
        "per_node": {"node2": 48, "node3": 32, "node4": 8},
        "lost": 8,
        "left_behind": 1,
        "weights_equal": None,
        "resumed_equal": None,
        "parts": found,
    }
