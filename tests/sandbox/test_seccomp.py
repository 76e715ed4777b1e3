"""The system call filter: its program run by hand for both machines, its numbers, and real calls in a real sandbox."""

import ctypes
import errno
import json
import os
import signal
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from polar_trl.errors import SandboxError
from polar_trl.sandbox import build_backend, local, seccomp
from polar_trl.sandbox.base import Sandbox
from polar_trl.types import Task

ALLOW, ERRNO = 0x7FFF0000, 0x00050000
ALLOW_ALL = struct.pack("=HBBI", 0x06, 0, 0, ALLOW)
MACHINES = tuple(seccomp.AUDIT_ARCHES)
TABLES = {
    **{name: (numbers, errno.EPERM) for name, numbers in seccomp.DENIED.items()},
    **{name: (numbers, errno.ENOSYS) for name, numbers in seccomp.UNKNOWN.items()},
}


@pytest.fixture(scope="module", params=["bwrap", "local"])
def box(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    sandbox = build_backend(request.param).create(Task(id="t", instruction=""), "s")
    yield sandbox
    sandbox.destroy()


def ask(machine: str, number: int, *arguments: int, arch: int | None = None) -> int:
    """Run the program of a machine on one call, as the kernel does; return the error, 0 where it is let through."""
    full = [*arguments, *([0] * (6 - len(arguments)))]
    arch = seccomp.AUDIT_ARCHES[machine] if arch is None else arch
    data = struct.pack("<iIQ6Q", number if number < 1 << 31 else number - (1 << 32), arch, 0, *full)
    program = list(struct.iter_unpack("=HBBI", seccomp.build_filter(machine)))
    at, word = 0, 0
    while True:
        code, if_true, if_false, k = program[at]
        at += 1
        if code == 0x20:
            (word,) = struct.unpack_from("<I", data, k)
        elif code == 0x06:
            assert k == ALLOW or k & ~0xFFFF == ERRNO
            return 0 if k == ALLOW else int(k & 0xFFFF)
        else:
            is_met = {0x15: word == k, 0x25: word > k, 0x45: bool(word & k)}[code]
            at += if_true if is_met else if_false


@pytest.mark.parametrize("machine", MACHINES)
def test_what_is_denied_and_what_is_not(machine: str) -> None:
    column = MACHINES.index(machine)
    for name, (numbers, code) in TABLES.items():
        if (number := numbers[column]) is not None:
            assert ask(machine, number) == code, name
    denied = {numbers[column] for numbers, _ in TABLES.values()}
    checked = {
        table[column]
        for table in (seccomp.CLONE, seccomp.PERSONALITY, seccomp.IOCTL, seccomp.SOCKET, seccomp.SOCKETPAIR)
    }
    for number in set(range(seccomp.LAST_KNOWN + 1)) - denied - checked:
        assert ask(machine, number) == 0, number


@pytest.mark.parametrize("machine", MACHINES)
def test_numbers_that_nobody_has_looked_at_are_unknown(machine: str) -> None:
    for number in (seccomp.LAST_KNOWN + 1, 0x40000000, 0x40000000 + 165, 0x7FFFFFFF, 0xFFFFFFFF):
        assert ask(machine, number) == errno.ENOSYS, number
    for arch in (0x40000003, 0x40000028, 0, 0xFFFFFFFF, *(set(seccomp.AUDIT_ARCHES.values()) - {arch_of(machine)})):
        assert ask(machine, 1, arch=arch) == errno.ENOSYS, arch


def arch_of(machine: str) -> int:
    return seccomp.AUDIT_ARCHES[machine]


@pytest.mark.parametrize("machine", MACHINES)
def test_calls_that_depend_on_their_arguments(machine: str) -> None:
    column = MACHINES.index(machine)
    high = 0xABCD << 32  # the kernel reads the low half
    clone, personality, ioctl = seccomp.CLONE[column], seccomp.PERSONALITY[column], seccomp.IOCTL[column]
    for bit in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert ask(machine, clone, bit | 17) == ask(machine, clone, high | bit) == errno.EPERM
    assert ask(machine, clone, 17) == ask(machine, clone, 0x3D0F00) == ask(machine, clone, high | 17) == 0
    assert ask(machine, personality, 0xFFFFFFFF) == ask(machine, personality, 0) == 0
    assert ask(machine, personality, 0x0100000) == errno.EPERM
    assert ask(machine, ioctl, 0, 0x5412) == ask(machine, ioctl, 0, high | 0x541C) == errno.EPERM
    assert ask(machine, ioctl, 0, 0x5413) == 0
    for number in (seccomp.SOCKET[column], seccomp.SOCKETPAIR[column]):
        for family in range(64):
            expected = 0 if family in (1, 2, 10, 16) else errno.EAFNOSUPPORT
            assert ask(machine, number, family, 1, 0) == ask(machine, number, high | family, 1, 0) == expected
        assert ask(machine, number, 2, 1, 6) == 0
        for protocol in (9, 12, 15, 16):
            assert ask(machine, number, 16, 3, protocol) == errno.EAFNOSUPPORT


def test_the_numbers_are_those_of_the_kernel() -> None:
    resolve = ctypes.CDLL("libseccomp.so.2").seccomp_syscall_resolve_name_arch
    resolve.argtypes = [ctypes.c_uint32, ctypes.c_char_p]
    newer = {"statmount", "listmount"}  # than Debian 12's library
    single = {
        "clone": seccomp.CLONE,
        "personality": seccomp.PERSONALITY,
        "ioctl": seccomp.IOCTL,
        "socket": seccomp.SOCKET,
        "socketpair": seccomp.SOCKETPAIR,
    }
    for name, numbers in {**seccomp.DENIED, **seccomp.UNKNOWN, **single}.items():
        for arch, number in zip(seccomp.AUDIT_ARCHES.values(), numbers, strict=True):
            known = resolve(arch, name.encode())
            assert known == number or (known < 0 and (number is None or name in newer)), name


def test_another_machine_is_refused() -> None:
    with pytest.raises(SandboxError, match="no system call filter for riscv64; use the docker sandbox"):
        seccomp.build_filter("riscv64")


CALLS = """
import ctypes, errno, json, sys
libc = ctypes.CDLL(None, use_errno=True)
found = {}
for name, number in json.load(open("numbers.json")).items():
    ctypes.set_errno(0)
    found[name] = [libc.syscall(ctypes.c_long(number), *[ctypes.c_long(-1)] * 6), ctypes.get_errno()]
print(json.dumps(found))
"""


def test_the_kernel_applies_it(box: Sandbox) -> None:
    numbers = {name: number for name, number in seccomp.list_numbers().items() if name != "clone"}
    box.put("numbers.json", json.dumps({**numbers, "newer": seccomp.LAST_KNOWN + 1, "x32": 0x40000000 + 39}).encode())
    box.put("calls.py", CALLS.encode())
    found = json.loads(box.run("python3 calls.py", env={}, timeout_s=60).stdout)
    column = MACHINES.index("x86_64") if numbers["ioperm"] else MACHINES.index("aarch64")
    for name, (both, code) in TABLES.items():
        assert both[column] is None or found[name] == [-1, code], name
    assert found["newer"] == found["x32"] == [-1, errno.ENOSYS]


ORDINARY = r"""
import ctypes, errno, fcntl, os, pty, signal, socket, subprocess, threading, time
libc = ctypes.CDLL(None, use_errno=True)
thread = threading.Thread(target=lambda: print("thread"))
thread.start(); thread.join()
print(subprocess.run(["sh", "-c", "echo process"], capture_output=True, text=True).stdout.strip())
for family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6):
    socket.socket(family).close()
socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0).close()
ours, theirs = pty.openpty()
print("size", len(fcntl.ioctl(theirs, 0x5413, b"x" * 8)))
try:
    fcntl.ioctl(theirs, 0x5412, b"x")
except OSError as error:
    print("typing", errno.errorcode[error.errno])
child = os.fork()
if child == 0:
    time.sleep(60)
print("traced", libc.ptrace(16, child, None, None), os.WIFSTOPPED(os.waitpid(child, 0)[1]))
os.kill(child, signal.SIGKILL)
"""


def test_agents_may_do_what_is_theirs(box: Sandbox) -> None:
    box.put("ordinary.py", ORDINARY.encode())
    result = box.run("python3 ordinary.py", env={}, timeout_s=60)
    said = "thread\nprocess\nsize 8\ntyping EPERM\ntraced 0 True\n"
    assert (result.stdout, result.exit_code) == (said, 0), result.stderr


# mov eax, 20 (getpid of 32 bits); int 0x80; ret
OLD = r"""
import ctypes, mmap
code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
code.write(bytes.fromhex("b814000000cd80c3"))
print(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))())
"""


@pytest.mark.skipif("x86_64" not in str(list(Path("/lib").glob("*-linux-gnu"))), reason="a way of x86 into the kernel")
def test_the_32_bit_interface_leads_nowhere(box: Sandbox) -> None:
    box.put("old.py", OLD.encode())
    result = box.run("python3 old.py", env={}, timeout_s=60)
    # where the kernel was built without it, the process dies of SIGSEGV
    assert (result.exit_code, result.stdout) in ((0, f"-{errno.ENOSYS}\n"), (139, "")), result.stderr


KILL_GROUP = r"""
import ctypes, os, sys
libc, (name,) = ctypes.CDLL(None, use_errno=True), sys.argv[1:]
user, mount_and_cgroup = 0x10000000, 0x2020000
here = os.getcwd()
print(libc.unshare(user), libc.unshare(mount_and_cgroup), libc.mount(b"none", here.encode(), b"cgroup2", 0, None))
os.chdir(here)
open(name + "/cgroup.kill", "w").write("1")
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """Make a group of version 2 below that of this process."""
    mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines() if " - cgroup2 " in line]
    (own,) = [line[4:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::/")]
    if os.geteuid() != 0 or not mounts:
        pytest.fail("needs root and a hierarchy of version 2; CONTAINERS=no leaves this out")
    folder = Path(mounts[0][4], own, f"polar-trl-test-{os.getpid()}")
    folder.mkdir()
    yield folder
    folder.rmdir()


@pytest.mark.containers
@pytest.mark.parametrize("is_filtered", [True, False])
def test_an_agent_of_a_local_sandbox_ends_nobody_by_control_groups(
    group: Path, is_filtered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_filtered:
        monkeypatch.setattr(local, "build_filter", lambda: ALLOW_ALL)
    box = build_backend("local").create(Task(id="t", instruction=""), "s")
    victim = subprocess.Popen(["sleep", "1000"])
    try:
        (group / "cgroup.procs").write_text(str(victim.pid))
        box.put("kill.py", KILL_GROUP.encode())
        result = box.run(f"python3 kill.py {group.name}; grep NoNewPrivs /proc/self/status", env={}, timeout_s=60)
        made = "-1 -1 -1" if is_filtered else "0 0 0"
        assert result.stdout == f"{made}\nNoNewPrivs:\t1\n", result.stderr
        if is_filtered:
            assert victim.poll() is None
        else:
            assert victim.wait(timeout=600) == -signal.SIGKILL
    finally:
        victim.kill()
        victim.wait()
        box.destroy()


def test_no_alarm_of_the_kernels_can_be_set(box: Sandbox) -> None:
    # one for each open file, in memory that no limit counts, and each is looked at every two seconds
    command = "[ ! -e /proc/pressure/memory ] || [ ! -w /proc/pressure/memory ]"
    assert box.run(command, env={}, timeout_s=20).exit_code == 0


def test_a_session_cannot_use_up_the_terminals_of_all(box: Sandbox) -> None:
    count = "import os\nfor _ in range(60): os.openpty()\nprint(60)\nwhile True: os.openpty()"
    result = box.run(f"python3 -c '{count}'; script -qec 'tty' /dev/null", env={}, timeout_s=30)
    assert result.stdout.split()[0] == "60" and "/dev/pts/0" in result.stdout, result.stderr
    assert "No space left" in result.stderr
