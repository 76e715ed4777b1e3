"""Attacks on the real bubblewrap sandbox are held, and the same attacks are found out where nothing holds them."""

import os
import signal
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from serving import wait_until

from polar_trl.sandbox import cgroup
from polar_trl.sandbox.base import Sandbox
from polar_trl.sandbox.bwrap import backend as bwrap
from polar_trl.sandbox.bwrap import options
from polar_trl.sandbox.local import LocalSandboxBackend
from polar_trl.tools.security.check import LIMITS, MODULE, check_backend, list_files, run_probe
from polar_trl.tools.security.probes import PROBES, Probe
from polar_trl.tools.security.victims import Victims
from polar_trl.types import Task

ATTACKS = {probe.attack: probe for probe in PROBES}
ALLOW_ALL = struct.pack("=HBBI", 0x06, 0, 0, 0x7FFF0000)


class Arena:
    """A backend, its victims, and an attacker's sandbox."""

    def __init__(self, root: Path) -> None:
        self.backend = bwrap.BwrapSandboxBackend(limits=LIMITS, root=root)
        self.victims = Victims(self.backend)

    def __enter__(self) -> "Arena":
        self.victims.__enter__()
        self.box: Sandbox = self.backend.create(Task(id="attacker", instruction=""), "attacker")
        for path, content in list_files().items():
            self.box.put(f"~/{path}", content)
        return self

    def __exit__(self, *error: object) -> None:
        self.box.destroy()
        self.victims.__exit__(None, None, None)

    def attack(self, name: str) -> list[str]:
        return run_probe(ATTACKS[name], self.box, self.victims)


@pytest.fixture(scope="module")
def arena(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    with Arena(tmp_path_factory.mktemp("state")) as arena:
        yield arena


@pytest.fixture
def weak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Arena]:
    """Yield bubblewrap as it was: root without capabilities, and nothing against a user namespace."""
    monkeypatch.setattr(options, "NO_USER_NAMESPACES", ())
    monkeypatch.setattr(bwrap, "build_filter", lambda: ALLOW_ALL)
    with Arena(tmp_path / "state") as arena:
        yield arena


@pytest.mark.parametrize("name", ATTACKS)
def test_bubblewrap_holds(arena: Arena, name: str) -> None:
    assert arena.attack(name) == []


@pytest.mark.parametrize(
    ("name", "reached"),
    [
        ("namespaces", "a user namespace by clone3"),
        ("mounts", "mounted a tmpfs"),
        ("control_groups", "joined another control group"),
        ("memory", "MB were held at a limit of 256"),
        ("processes", "processes were alive at a limit of 64"),
        ("kernel_calls", "the call keyctl"),
        ("kernel_surface", "the call io_uring_setup"),
    ],
)
def test_without_filter_and_user_namespace_it_does_not(weak: Arena, name: str, reached: str) -> None:
    assert reached in "; ".join(weak.attack(name))


def test_the_filter_alone_holds_where_there_are_no_user_namespaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "NO_USER_NAMESPACES", ("--no-such-option",))  # a start that fails, as there
    with Arena(tmp_path / "state") as arena:
        assert not arena.backend._setup.has_userns
        for name in ("namespaces", "mounts", "control_groups", "memory", "processes", "privileges", "kernel_calls"):
            assert arena.attack(name) == [], name


@pytest.mark.skipif(cgroup.ROOT.joinpath("cgroup.controllers").exists(), reason="version 2 counts them as memory")
def test_memory_in_buffers_of_sockets_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "_limit_sockets", lambda folder: None)
    with Arena(tmp_path / "state") as arena:
        assert "in buffers of sockets" in "; ".join(arena.attack("memory"))


def test_the_local_sandbox_does_not_hold(tmp_path: Path) -> None:
    rows = {row.name: row for row in check_backend("local", LocalSandboxBackend(root=tmp_path / "state"))}
    assert rows.keys() == {probe.name for probe in PROBES}
    for name in ("files of the user and of other sessions", "network", "memory hog", "fork bomb", "full disk"):
        row = rows[name]
        assert (row.held, row.backend) == (False, "local") and row.detail and "--sandbox bwrap" in row.advice, row
    for name in ("other processes", "writing outside, mounts", "namespaces", "control groups", "kernel calls"):
        assert rows[name].held, rows[name]
    assert "could not run" not in "".join(row.detail for row in rows.values())
    assert list((tmp_path / "state").iterdir()) == []


def test_an_attack_that_cannot_run_is_not_held(arena: Arena) -> None:
    (fault,) = run_probe(Probe(name="x", attack="no_such_attack", advice=""), arena.box, arena.victims)
    assert fault.startswith("could not run: ") and "KeyError" in fault


def test_an_attacker_that_says_nothing_is_not_believed(arena: Arena) -> None:
    path = f"{MODULE.replace('.', '/')}.py"
    arena.box.put(f"~/{path}", b"import time; time.sleep(0.5)")
    try:
        for probe in (ATTACKS["memory"], ATTACKS["devices"]):
            (fault,) = run_probe(probe, arena.box, arena.victims)
            assert fault.startswith("could not run: ")
    finally:
        arena.box.put(f"~/{path}", list_files()[path])


def test_harm_is_seen_from_outside_and_mended(arena: Arena) -> None:
    assert arena.victims.find_harm() == []
    told = arena.victims.describe()
    (victim,) = told["victims"]
    os.kill(victim, signal.SIGSTOP)
    wait_until(lambda: "T" in Path(f"/proc/{victim}/stat").read_text().rpartition(")")[2])
    for name in told["files"]:
        Path(name).write_text("harmed")
    harm = arena.victims.find_harm()
    assert harm[0] == "a process of this machine was ended or stopped"
    assert harm[1:] == [f"{name} was changed" for name in told["files"]]
    assert arena.victims.find_harm() == []


def test_what_a_backend_does_not_claim_to_limit_is_not_held(tmp_path: Path) -> None:
    backend = bwrap.BwrapSandboxBackend(limits=LIMITS, root=tmp_path / "state")
    backend.capabilities = replace(backend.capabilities, limits_memory=False)
    rows = {row.name: row for row in check_backend("bwrap", backend)}
    assert {name for name, row in rows.items() if not row.held} == {"memory hog", "CPU hog"}
    assert rows["CPU hog"].detail == "this user's sandbox does not limit it, by its own account"
