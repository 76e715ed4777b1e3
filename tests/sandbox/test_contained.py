"""Bubblewrap and Docker sandboxes alike: one network address, limits, and an end.

Needs root and a container engine: `scripts/test.sh` starts one of its own.
"""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from serving import kill_when_up

from polar_trl.errors import SandboxError
from polar_trl.sandbox.base import ExecResult, Sandbox, SandboxBackend
from polar_trl.sandbox.bwrap.backend import BwrapSandboxBackend
from polar_trl.sandbox.docker.backend import DockerSandboxBackend
from polar_trl.sandbox.limits import Limits
from polar_trl.sandbox.owner import list_mounts
from polar_trl.types import Task

pytestmark = pytest.mark.containers

LIMITS = Limits(memory_mb=200, cpus=1.0, pids=64, disk_mb=64)
TASK = Task(id="t", instruction="x", files={"a/b.txt": "hello\n"})
MAKERS: dict[str, Callable[[Path], SandboxBackend]] = {
    "bwrap": lambda root: BwrapSandboxBackend(limits=LIMITS, root=root),
    "docker": lambda root: DockerSandboxBackend(limits=LIMITS, root=root, image="polar-trl-test:latest"),
}


@pytest.fixture(params=MAKERS)
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> SandboxBackend:
    return MAKERS[request.param](tmp_path / "state")


@pytest.fixture
def box(backend: SandboxBackend, tmp_path: Path) -> Iterator[Sandbox]:
    sandbox = backend.create(TASK, "s/1")
    yield sandbox
    sandbox.destroy()
    assert list((tmp_path / "state").iterdir()) == []
    assert list_mounts(tmp_path) == []


def run(box: Sandbox, command: str, timeout_s: float = 20, **env: str) -> ExecResult:
    return box.run(command, env=env, timeout_s=timeout_s)


def test_a_command_runs_in_the_work_folder(box: Sandbox) -> None:
    result = run(box, "pwd; cat a/b.txt; echo $HOME $X; echo err >&2; exit 3", X="1")
    assert (result.exit_code, result.stdout, result.stderr) == (3, "/workspace\nhello\n/home/agent 1\n", "err\n")
    assert not (result.timed_out or result.out_of_memory or result.disk_full)


def test_files_go_in_and_out(box: Sandbox) -> None:
    box.put("sub/x.bin", b"\0\xff")
    box.put("~/.agent/settings", b"s")
    assert run(box, "cat sub/x.bin ~/.agent/settings > both; chmod +x both; ln -s /etc/passwd out").exit_code == 0
    assert box.get("both") == b"\0\xffs"
    assert box.get("out") is None and box.get("missing") is None
    with pytest.raises(SandboxError, match="leads outside"):
        box.get("../x")


def test_the_deadline_kills_what_ignores_signals(box: Sandbox) -> None:
    result = run(box, "trap '' TERM INT HUP; echo started; while :; do sleep 0.1; done", timeout_s=3)
    assert (result.exit_code, result.stdout, result.timed_out) == (None, "started\n", True)
    assert count_processes(box) == 0
    assert run(box, "cat a/b.txt").stdout == "hello\n"


def test_a_daemon_does_not_outlive_its_command(box: Sandbox) -> None:
    daemon = "(setsid sh -c 'while :; do date > alive; sleep 0.05; done' >/dev/null 2>&1 &)"
    result = run(box, f"{daemon}; until [ -s alive ]; do sleep 0.05; done; echo done", 60)
    assert (result.exit_code, result.stdout) == (0, "done\n"), "it waited for the daemon"
    assert count_processes(box) == 0


def test_output_is_cut_from_the_front(box: Sandbox) -> None:
    result = run(box, "head -c 300000 /dev/zero | tr '\\0' x; echo end; head -c 70000 /dev/zero >&2")
    assert len(result.stdout) == 64 << 10 and result.stdout.endswith("xend\n")
    assert len(result.stderr) == 64 << 10


def test_kill_ends_what_runs_and_the_sandbox_goes_on(box: Sandbox) -> None:
    kill_when_up(box)
    result = run(box, "touch up; sleep 600", 300)
    assert result.exit_code in (None, 137) and not result.timed_out
    assert run(box, "echo again").stdout == "again\n"


def test_memory_is_limited_and_said_so(box: Sandbox) -> None:
    result = run(box, "python3 -c 'x = bytearray(500 << 20)'; echo rc $?")
    assert (result.stdout, result.out_of_memory) == ("rc 137\n", True)
    assert not run(box, "true").out_of_memory


def test_the_disk_is_limited_and_said_so(box: Sandbox) -> None:
    result = run(box, "dd if=/dev/zero of=big bs=1M count=500 2>&1 | tail -1; echo; cat a/b.txt")
    assert result.disk_full and result.stdout.endswith("hello\n")
    assert not run(box, "rm big").disk_full
    assert run(box, "dd if=/dev/zero of=/tmp/big bs=1M count=500 2>/dev/null; rm /tmp/big").disk_full is False


def test_a_fork_bomb_is_held_and_dead_at_the_deadline(box: Sandbox) -> None:
    # bounded by pids=64, which is what is tested: the command itself makes at most 200
    result = run(box, "for i in $(seq 200); do sleep 300 & done 2>/dev/null; wait", timeout_s=3)
    assert result.timed_out
    assert count_processes(box) == 0
    assert run(box, "echo fine").stdout == "fine\n"


def test_nothing_but_the_proxy_can_be_reached(box: Sandbox) -> None:
    listener = box.open_listener()
    assert listener is not None

    def serve() -> None:
        with listener:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"from outside")

    thread = threading.Thread(target=serve)
    thread.start()
    try_it = "import socket; print(socket.create_connection(({!r}, {}), 3).recv(100))"
    assert run(box, f'python3 -c "{try_it.format("127.0.0.1", 8080)}"').stdout == "b'from outside'\n"
    thread.join()
    for address in ("10.0.0.1", "169.254.169.254"):
        assert "unreachable" in run(box, f'python3 -c "{try_it.format(address, 80)}"').stderr
    assert "refused" in run(box, f'python3 -c "{try_it.format("127.0.0.1", 22)}"').stderr


def test_there_is_no_privilege(box: Sandbox) -> None:
    assert "CapEff:\t0000000000000000" in run(box, "cat /proc/self/status").stdout
    assert "NoNewPrivs:\t1" in run(box, "cat /proc/self/status").stdout
    assert run(box, "echo x > /usr/planted").exit_code != 0
    assert run(box, "mount -t tmpfs t /mnt").exit_code != 0


def test_root_cannot_write_what_is_the_kernels(box: Sandbox) -> None:
    for name in ("kernel/core_pattern", "vm/swappiness", "fs/file-max"):
        path = f"/proc/sys/{name}"
        result = run(box, f'value=$(cat {path}); printf %s "$value" > {path}')
        assert result.exit_code != 0 and "Read-only" in result.stderr, path
    assert run(box, "[ ! -e /proc/sysrq-trigger ] || [ ! -w /proc/sysrq-trigger ]").exit_code == 0


SOCKETS = """
import socket
held, num_bytes = [], 0
for _ in range(1750):  # 300 MB
    held.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    held[-1].bind(("127.0.0.1", 0))
    held[-1].setblocking(False)
    for _ in range(3):
        try:
            held[-1].sendto(b"x" * 60_000, held[-1].getsockname())
        except OSError:
            pass
for receiver in held:
    try:
        while True:
            num_bytes += len(receiver.recv(65536))
    except BlockingIOError:
        pass
print(num_bytes >> 20)
"""


def test_buffers_of_sockets_have_a_limit(box: Sandbox) -> None:
    # version 1 counts them apart from memory, and the whole machine has a tenth of its memory for them
    box.put("sockets.py", SOCKETS.encode())
    result = run(box, "ulimit -n 4096; python3 sockets.py", timeout_s=60)
    assert result.out_of_memory or 1 < int(result.stdout) < LIMITS.memory_mb, result.stderr


def test_nothing_tells_of_the_trainer(
    backend: SandboxBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret-token")
    sandbox = backend.create(TASK, "s")
    try:
        look = "cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline /proc/mounts 2>/dev/null; env"
        said = run(sandbox, look).stdout
    finally:
        sandbox.destroy()
    assert "HOME=/home/agent" in said
    assert "secret-token" not in said


def test_the_work_tree_below_is_never_written(backend: SandboxBackend, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "pkg").mkdir(parents=True)
    (tree / "pkg" / "m.py").write_text("old\n")
    sandbox = backend.create(Task(id="t", instruction="x", workspace=str(tree)), "s")
    try:
        assert run(sandbox, "echo new > pkg/m.py; echo more > pkg/n.py; cat pkg/m.py").stdout == "new\n"
        assert sandbox.get("pkg/n.py") == b"more\n"
    finally:
        sandbox.destroy()
    assert (tree / "pkg" / "m.py").read_text() == "old\n" and not (tree / "pkg" / "n.py").exists()


def test_a_destroyed_sandbox_says_so(backend: SandboxBackend) -> None:
    sandbox = backend.create(TASK, "s")
    sandbox.destroy()
    sandbox.destroy()
    with pytest.raises(SandboxError, match="destroyed"):
        run(sandbox, "true")


def count_processes(box: Sandbox) -> int:
    """Count the sandbox's own processes that are left, without its first one and those of this very command."""
    names = run(box, "cat /proc/[0-9]*/comm 2>/dev/null").stdout.split()
    ours = {"cat", "bash", "sh", "sleep", "docker-init", "catatonit", "tini", "bwrap"}
    return sum(name not in ours or names.count("sleep") > 1 for name in names)
