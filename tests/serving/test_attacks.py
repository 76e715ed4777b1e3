"""What agents do to use up the trainer: memory, disk and files stay bounded, and another session is answered."""

import os
import time
from collections.abc import Iterator

import attacks
import pytest
from attacks import ATTACKS, Target, ask
from bench_attacks import Child, clear_peak

MAX_GROWTH_MB = 800
"""Of bodies, 128 MiB may be on their way, and one at a time is unpacked and parsed; the rest is the allocator's."""


@pytest.fixture(scope="module")
def server() -> Iterator[Child]:
    attacks.build_bombs()
    server = Child("--serve", "--tokenizer", "none")
    yield server
    server.end()


def aim(server: Child, num_calls: int) -> Target:
    opened = server.tell(f"open {num_calls}")
    return Target(address=tuple(opened["address"]), key=opened["key"])


def count_files(server: Child) -> int:
    return len(os.listdir(f"/proc/{server.pid}/fd"))


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_uses_nothing_up(server: Child, monkeypatch: pytest.MonkeyPatch, attack: str) -> None:
    monkeypatch.setattr(attacks, "MAX_S", 2.0)
    other = aim(server, 1000)
    num_files, before_mb = count_files(server), server.read_mb("VmRSS")
    clear_peak(server)
    ATTACKS[attack](aim(server, 8))
    assert other.post(ask(attack)) == 200
    assert server.read_mb("VmHWM") < before_mb + MAX_GROWTH_MB
    row = server.tell("close")
    assert row["calls"] <= 8 + 20 and row["record_mb"] < 0.2
    assert not row["counters"].keys() & {"internal_errors", "engine_errors"}, row["failure"]
    for _ in range(700):  # a connection that says nothing is closed after a minute
        server.tell("collect")
        if count_files(server) <= num_files:
            break
        time.sleep(0.1)
    assert count_files(server) <= num_files
    assert other.post(ask(attack + " again")) == 200


@pytest.mark.parametrize(
    ("attack", "limit"),
    [
        ("open_connections", "connections"),
        ("repeat_one_request", "requests"),
        ("send_many_bodies_at_once", "memory"),
    ],
)
def test_a_session_past_its_bounds_ends(server: Child, attack: str, limit: str) -> None:
    ATTACKS[attack](aim(server, 2))
    assert server.tell("close")["ended"] == limit
