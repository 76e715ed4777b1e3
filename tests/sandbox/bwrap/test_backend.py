"""The bubblewrap sandbox from inside: what can be written, what is shown, and how a command ends."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from polar_trl.errors import SandboxError
from polar_trl.sandbox.base import Sandbox
from polar_trl.sandbox.bwrap.backend import BwrapSandboxBackend
from polar_trl.sandbox.limits import Limits
from polar_trl.types import Task

LIMITS = Limits(memory_mb=200, cpus=1.0, pids=64, disk_mb=64)


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    root = tmp_path_factory.mktemp("state")
    sandbox = BwrapSandboxBackend(limits=LIMITS, root=root).create(Task(id="t", instruction=""), "s")
    yield sandbox
    sandbox.destroy()
    assert list(root.iterdir()) == []


def say(box: Sandbox, command: str) -> str:
    return box.run(command, env={}, timeout_s=60).stdout


def test_what_can_be_written_is_the_sessions_and_bounded(box: Sandbox) -> None:
    writable = {}
    for line in say(box, "cat /proc/self/mountinfo").splitlines():
        head, _, tail = line.partition(" - ")
        place, options = head.split()[4:6]
        if options.startswith("rw"):
            writable[place] = tail.split()
    nodes = {f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty")}
    assert writable.keys() - nodes == {"/workspace", "/home/agent", "/tmp", "/dev/shm", "/dev/pts", "/proc"}
    assert "size=65536k" in writable["/dev/shm"][2]
    assert {writable[place][0] for place in ("/workspace", "/home/agent", "/tmp")} == {"ext4"}
    assert "/var/tmp -> /tmp" in say(box, "ls -l /var/tmp")
    assert say(box, "touch /tmp/x /dev/shm/x ~/x x && echo written") == "written\n"


@pytest.mark.parametrize("workdir", ["/home/agent/repo", "{folder}", "{folder}/shown/work"])
def test_folders_below_one_another_are_all_there(tmp_path: Path, workdir: str) -> None:
    """The work folder below HOME, a shown folder below the work folder, and the work folder below a shown one."""
    folder = tmp_path / "outer"
    (folder / "shown" / "work").mkdir(parents=True)
    (folder / "shown" / "file").touch()
    place = workdir.format(folder=folder)
    backend = BwrapSandboxBackend(limits=LIMITS, root=tmp_path / "state", mounts=[folder / "shown"])
    sandbox = backend.create(Task(id="t", instruction="", workdir=place, files={"given": "x"}), "s")
    try:
        command = f"pwd; ls given {folder}/shown/file; touch made ~/made"
        result = sandbox.run(command, env={}, timeout_s=60)
        assert result.stdout.split() == [place, f"{folder}/shown/file", "given"], result.stderr
        assert (sandbox.host_workdir / "made").is_file() and (sandbox.host_home / "made").is_file()
    finally:
        sandbox.destroy()


def test_a_work_tree_may_have_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLAR_TRL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a:b, c").mkdir()
    (tmp_path / "a:b, c" / "file").write_text("x")
    task = Task(id="t", instruction="", workspace=str(tmp_path / "a:b, c"))
    sandbox = BwrapSandboxBackend(limits=LIMITS, root=tmp_path / "state").create(task, "s")
    try:
        assert say(sandbox, "cat file") == "x"
    finally:
        sandbox.destroy()


def test_a_variable_cannot_bring_options_of_bubblewrap(box: Sandbox) -> None:
    with pytest.raises(SandboxError, match="cannot start a command: a NUL character"):
        box.run("true", env={"A": "x\0--bind\0/\0/srv"}, timeout_s=60)


def test_keys_of_the_machine_are_not_shown(box: Sandbox) -> None:
    assert say(box, "ls /etc/ssl").split() == ["certs", "openssl.cnf"]
    assert say(box, "cat /etc/shadow /etc/ssh/*") == ""


def test_the_first_process_tells_nothing_of_the_trainer(box: Sandbox) -> None:
    assert "PWD=/\0" in say(box, "cat /proc/1/environ")
    assert str(Path.cwd()) not in say(box, "cat /proc/1/environ /proc/1/cmdline; ls -l /proc/1/cwd /proc/1/fd")


def test_an_old_bubblewrap_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho bubblewrap 0.6.1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(SandboxError, match=r"bubblewrap is 0\.6 here, and 0\.8 or newer is needed"):
        BwrapSandboxBackend(root=tmp_path / "state")


def test_limits_of_a_process(box: Sandbox) -> None:
    limits = {line[:26].strip(): line[26:].split()[:2] for line in say(box, "cat /proc/self/limits").splitlines()}
    assert limits["Max core file size"] == ["1", "1"]
    assert limits["Max nice priority"] == limits["Max realtime priority"] == ["0", "0"]
    assert limits["Max pending signals"] == ["256", "256"]


END_THE_FIRST = {
    # the kernel kills what is traced with this option when its tracer ends, and the first process of a namespace too
    "exitkill": """
import ctypes
assert ctypes.CDLL(None).ptrace(0x4206, 1, None, ctypes.c_void_p(0x100000)) == 0
""",
    "overwritten": """
for line in open("/proc/1/maps"):
    place, mode, *_ = line.split()
    if "x" in mode and "[v" not in line:
        start, end = (int(part, 16) for part in place.split("-"))
        with open("/proc/1/mem", "r+b", 0) as file:
            file.seek(start)
            file.write(b"\\xcc" * (end - start))
""",
}


@pytest.mark.parametrize("how", END_THE_FIRST)
def test_an_agent_that_ends_the_first_process_has_ended_itself(box: Sandbox, how: str) -> None:
    # its own doing is graded: a `SandboxError` would be no reward
    box.put("end.py", END_THE_FIRST[how].encode())
    result = box.run("python3 end.py; sleep 1; exit 3", env={}, timeout_s=120)
    assert result.exit_code in (128 + 5, 128 + 9) and not result.timed_out, result
    assert say(box, "echo again") == "again\n"
