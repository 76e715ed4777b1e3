"""Attack a sandbox from inside: run there as `python3 attack.py NAME JSON`, with the standard library only.

The last line is `TRIED` and a JSON list of what succeeded, in words. Nothing is harmed where an attack succeeds, not
even without a sandbox: limits are passed by a little, settings are opened and not written, the only processes that are
signalled and the only files that are changed are those that the caller made for it.
"""

import contextlib
import ctypes
import errno
import glob
import json
import os
import re
import resource
import signal
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)
REFUSED = (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT, errno.EROFS)
NAMESPACES = {
    "user": 0x10000000,
    "mount": 0x20000,
    "cgroup": 0x2000000,
    "network": 0x40000000,
    "process": 0x20000000,
    "host name": 0x4000000,
    "IPC": 0x8000000,
}
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
Given = dict[str, Any]


def call(given: Given, name: str, *arguments: Any) -> int:
    """Return 0 where the system call was let through, even if its arguments were no good; else its error."""
    number = given["numbers"].get(name)
    if number is None:
        return errno.ENOSYS
    ctypes.set_errno(0)
    words = [ctypes.c_long(word) if isinstance(word, int) else word for word in arguments]
    result = LIBC.syscall(ctypes.c_long(number), *words)
    if result >= 0:
        return 0
    return ctypes.get_errno() if ctypes.get_errno() in REFUSED else 0


def in_child(act: Callable[[], bool]) -> bool:
    """Return what `act` says in a process of its own, and False where it dies."""
    pid = os.fork()
    if pid == 0:
        ok = False
        with contextlib.suppress(BaseException):
            ok = act()
        os._exit(0 if ok else 1)
    return os.waitpid(pid, 0)[1] == 0


def namespaces(given: Given) -> list[str]:
    """Make or enter a namespace, by every call that can."""
    got = [f"a {name} namespace" for name, flag in NAMESPACES.items() if in_child(partial(_unshare, flag))]
    clone = given["numbers"]["clone"]
    pid = LIBC.syscall(ctypes.c_long(clone), ctypes.c_long(NAMESPACES["user"] | signal.SIGCHLD), 0, 0, 0, 0)
    if pid == 0:
        os._exit(0)
    if pid > 0:
        os.waitpid(pid, 0)
        got.append("a user namespace by clone")
    if in_child(lambda: _clone3(given)):
        got.append("a user namespace by clone3")
    return got


def _unshare(flags: int) -> bool:
    return bool(LIBC.unshare(flags) == 0)


def _clone3(given: Given) -> bool:
    arguments = (ctypes.c_uint64 * 8)(NAMESPACES["user"], 0, 0, 0, signal.SIGCHLD, 0, 0, 0)
    pid = LIBC.syscall(ctypes.c_long(given["numbers"]["clone3"]), arguments, ctypes.c_long(64))
    if pid == 0:
        os._exit(0)
    if pid > 0:
        os.waitpid(pid, 0)
    return bool(pid > 0)


def mounts(given: Given) -> list[str]:
    """Mount, remount writable, write outside of the session's folders."""
    got = _mount()
    enter_user_namespace()
    got += _mount()
    for name in ("fsopen", "open_tree", "pivot_root", "chroot", "mount_setattr"):
        if not call(given, name, b"", b"", 0, 0, 0):
            got.append(f"the call {name}")
    for folder in ("/", "/usr", "/etc", "/bin", "/root", "/opt", "/var", *given["shown"]):
        path = os.path.join(folder, ".polar-trl-probe")
        with contextlib.suppress(OSError):
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
            os.unlink(path)
            got.append(f"wrote in {folder}")
    with contextlib.suppress(OSError):
        Path(given["canary"]).write_text("harmed")
    return got


def _mount() -> list[str]:
    got, place = [], tempfile.mkdtemp().encode()
    for words, what in {
        (b"none", place, b"tmpfs", 0, None): "mounted a tmpfs",
        (b"proc", place, b"proc", 0, None): "mounted a proc",
        (b"/", place, None, 0x1000, None): "bound / elsewhere",
    }.items():
        if LIBC.mount(*words) == 0:
            got.append(what)
            LIBC.umount2(place, 2)
    for name in ("/", "/usr", "/proc/sys"):
        if os.statvfs(name).f_flag & os.ST_RDONLY and LIBC.mount(b"none", name.encode(), None, 0x1020, None) == 0:
            got.append(f"made {name} writable")
    return got


def control_groups(given: Given) -> list[str]:
    """Mount or open control groups: what they limit, freeze and kill is the machine's."""
    return [what for what in lift_limits(given) if "control group" in what]


def memory(given: Given) -> list[str]:
    """Lift the limits, then hold more memory than is allowed, in several processes."""
    got = lift_limits(given)
    size = given["limits"]["memory_mb"] * 2 // 3
    holders = [_start_holder(lambda: bytearray(size << 20)) for _ in range(3)]
    held = sum(_read_ready(pipe) for _, pipe in holders)
    time.sleep(HOLD_S)
    _end([pid for pid, _ in holders])
    return [*got, f"held {held * size} MB"] if held * size > given["limits"]["memory_mb"] else got


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
    for folder in (".", os.environ["HOME"], tempfile.gettempdir()):
        for number in range(3):
            with contextlib.suppress(OSError), open(f"{folder}/big-{number}", "wb", buffering=0) as file:
                for _ in range(given["limits"]["disk_mb"] // 2):
                    written += file.write(CHUNK)
    for folder in (".", os.environ["HOME"], tempfile.gettempdir()):
        for number in range(3):
            with contextlib.suppress(OSError):
                os.unlink(f"{folder}/big-{number}")
    return [f"wrote {written >> 20} MB"] if written > allowed else []


def other_processes(given: Given) -> list[str]:
    """Find, signal and trace processes that are not the session's."""
    got, pids = [], list(given["victims"])
    for path in glob.glob("/proc/[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if given["victim_mark"].encode() in Path(path).read_bytes():
                pids.append(int(path.split("/")[2]))
                got.append("sees another's process")
    for pid in set(pids):
        buffer = ctypes.create_string_buffer(64)
        if LIBC.ptrace(0x4206, pid, None, None) == 0:
            got.append("traced another's process")
        vector = (ctypes.c_uint64 * 2)(ctypes.addressof(buffer), 8)
        if _is_there(pid) and not call(given, "process_vm_readv", pid, vector, 1, vector, 1, 0):
            got.append("may read another's memory")
        for number in (signal.SIGCONT, signal.SIGKILL):
            with contextlib.suppress(OSError):
                os.kill(pid, number)
                got.append(f"sent {number.name} to another's process")
    return got


def secrets(given: Given) -> list[str]:
    """Read environments and command lines for secrets and paths of the trainer's."""
    got = []
    for path in ["/proc/self/environ", *glob.glob("/proc/[0-9]*/environ"), *glob.glob("/proc/[0-9]*/cmdline")]:
        with contextlib.suppress(OSError):
            for found in re.findall(rb"POLAR_PROBE_SECRET=(\w+)", Path(path).read_bytes()):
                got.append(f"{found.decode()} in {path}")
    return got


def files(given: Given) -> list[str]:
    """Read and change files of the user, of other sessions and keys of the machine."""
    got = []
    for name in given["files"]:
        with contextlib.suppress(OSError):
            got.append(f"read {Path(name).read_text()} in {name}")
        with contextlib.suppress(OSError), open(name, "r+") as file:
            file.write("harmed")
    for name in [*glob.glob("/etc/ssl/private/*.key"), *glob.glob("/etc/ssh/ssh_host_*_key")]:
        with contextlib.suppress(OSError):
            if "PRIVATE" in Path(name).read_text():
                got.append(f"read {name}")
    return got


def network(given: Given) -> list[str]:
    """Reach the machine's own ports, and any route that leads away."""
    got = []
    for host in given["hosts"]:
        with contextlib.suppress(OSError):
            socket.create_connection((host, given["port"]), 2).close()
            got.append(f"reached {host}")
    for family, host in ((socket.AF_INET, "203.0.113.1"), (socket.AF_INET6, "2001:db8::1")):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 53))  # sends nothing: it only looks for a route
            got.append(f"has a route to {host}")
    return got


def unix_sockets(given: Given) -> list[str]:
    """Reach Unix sockets of the machine, by name and by path."""
    got = []
    ends = ["\0" + given["abstract"], given["socket"], "/run/docker.sock", "/var/run/docker.sock"]
    ends += glob.glob("/run/**/*.sock", recursive=True) + glob.glob("/run/dbus/*") + glob.glob("/tmp/.X11-unix/*")
    for end in dict.fromkeys(ends):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as client:
            client.settimeout(2)
            client.connect(end)
            got.append(f"connected to {end.lstrip(chr(0))}")
    return got


def devices(given: Given) -> list[str]:
    """Open or make device nodes that reach further than this process."""
    got = []
    harmless = {"null", "zero", "full", "random", "urandom", "tty", "ptmx", "console"}
    for folder, folders, names in os.walk("/dev"):
        folders[:] = [name for name in folders if name not in ("pts", "shm", "fd")]
        for name in set(names) - harmless:
            path = os.path.join(folder, name)
            with contextlib.suppress(OSError):
                if stat.S_ISBLK(mode := os.lstat(path).st_mode) or stat.S_ISCHR(mode):
                    os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))
                    got.append(f"opened {path}")
    place = f"{tempfile.mkdtemp()}/node"
    for kind, number, what in ((stat.S_IFBLK, os.makedev(7, 0), "loop"), (stat.S_IFCHR, os.makedev(1, 11), "kmsg")):
        with contextlib.suppress(OSError):
            os.mknod(place, 0o600 | kind, number)
            os.close(os.open(place, os.O_RDONLY | os.O_NONBLOCK))
            got.append(f"made the {what} device")
        with contextlib.suppress(OSError):
            os.unlink(place)
    return got


def kernel_calls(given: Given) -> list[str]:
    """Try calls that belong to the machine: each with arguments that could do nothing."""
    tries: dict[str, tuple[Any, ...]] = {
        "keyctl": (0, -4, 1),
        "add_key": (b"user", b"polar-trl-probe", None, 0, -1),
        "request_key": (b"user", b"polar-trl-probe", None, 0),
        "bpf": (0, None, 0),
        "perf_event_open": (None, 0, -1, -1, 0),
        "userfaultfd": (-1,),
        "init_module": (None, 0, b""),
        "finit_module": (-1, b"", 0),
        "delete_module": (b"polar-trl-probe", 0x800),
        "kexec_load": (0, 1, None, -1),
        "open_by_handle_at": (-1, None, 0),
        "syslog": (10, None, 0),
        "settimeofday": (None, None),
        "swapoff": (b"/polar-trl-probe",),
        "quotactl": (0, None, 0, None),
        "fanotify_init": (-1, 0),
        "move_pages": (1, 0, None, None, None, 0),
    }
    return [f"the call {name}" for name, words in tries.items() if not call(given, name, *words)]


def kernel_surface(given: Given) -> list[str]:
    """Try parts of the kernel that agents have no use for, and that break out of sandboxes time and again."""
    got = ["the call io_uring_setup"] if not call(given, "io_uring_setup", 0, None) else []
    for name, family, kind, protocol in (
        *(("packet", 17, socket.SOCK_RAW, 0), ("raw", 2, socket.SOCK_RAW, 1), ("vsock", 40, socket.SOCK_STREAM, 0)),
        *(("alg", 38, socket.SOCK_SEQPACKET, 0), ("netfilter", 16, socket.SOCK_RAW, 12)),
        *(("audit", 16, socket.SOCK_RAW, 9), ("bluetooth", 31, socket.SOCK_RAW, 1), ("key", 15, socket.SOCK_RAW, 2)),
    ):
        with contextlib.suppress(OSError):
            socket.socket(family, kind, protocol).close()
            got.append(f"a {name} socket")
    return got


def kernel_settings(given: Given) -> list[str]:
    """Open for writing what sets the kernel, without writing."""
    names = [
        f"/proc/sys/{name}" for name in ("kernel/core_pattern", "kernel/modprobe", "vm/swappiness", "fs/file-max")
    ]
    names += ["/proc/sysrq-trigger", "/proc/kcore", "/proc/kmsg", "/proc/irq/default_smp_affinity", "/dev/kmsg"]
    names += ["/proc/sys/kernel/ns_last_pid", "/proc/sys/fs/binfmt_misc/register"]
    names += [
        "/sys/power/state",
        "/sys/kernel/uevent_helper",
        "/sys/kernel/mm/ksm/run",
        *glob.glob("/sys/block/*/uevent"),
    ]
    got = []
    for name in names:
        how = os.O_RDONLY if name.endswith(("kcore", "kmsg")) else os.O_WRONLY
        with contextlib.suppress(OSError):
            fd = os.open(name, how | os.O_NONBLOCK)
            # a file of an image, or /dev/null laid over the place, is not the kernel's
            if os.fstatvfs(fd).f_flag & os.ST_RDONLY == 0 and not os.path.samestat(os.fstat(fd), os.stat("/dev/null")):
                got.append(f"opened {name}")
            os.close(fd)
    return got + (["sees debugfs"] if glob.glob("/sys/kernel/debug/*") else [])


def privileges(given: Given) -> list[str]:
    """Have, get or use a privilege."""
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
    got = ["has capabilities"] if int(status["CapEff"], 16) or int(status["CapPrm"], 16) else []
    got += ["may gain privileges by setuid programs"] if status["NoNewPrivs"] != "1" else []
    libc_tries: dict[str, Callable[[], object]] = {
        "lowered its nice value": lambda: os.setpriority(os.PRIO_PROCESS, 0, -5),
        "got a real-time priority": lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)),
        "became another user": lambda: os.setuid(os.getuid() + 1),
        "gave a file away": _give_away,
        "changed the host name": lambda: socket.sethostname(socket.gethostname()),
        "is spared when memory is short": lambda: Path("/proc/self/oom_score_adj").write_text("-999"),
        "raised its limit of memory locks": lambda: _raise_limit(resource.RLIMIT_MEMLOCK),
    }
    for what, act in libc_tries.items():
        if in_child(partial(_works, act)):
            got.append(what)
    return got


def terminal(given: Given) -> list[str]:
    """Type into the trainer's terminal."""
    import fcntl

    got, fds = [], [0, 1, 2]
    with contextlib.suppress(OSError):
        fds.append(os.open("/dev/tty", os.O_RDWR))
        got.append("opened the terminal")
    for fd in fds:
        with contextlib.suppress(OSError):
            fcntl.ioctl(fd, 0x5412, b" ")
            got.append(f"typed into file {fd}")
    return got


def shared_ipc(given: Given) -> list[str]:
    """Find the machine's shared memory and open files that were meant for others."""
    got = []
    if LIBC.shmget(given["shm_key"], 0, 0) >= 0:
        got.append("a System V segment of the machine's")
    if os.path.exists(given["shm_file"]):
        got.append("a file in the machine's /dev/shm")
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if not target.startswith(("pipe:", "/dev/null", "/proc/")):
                got.append(f"the open file {target}")
    return got


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


def lift_limits(given: Given) -> list[str]:
    """Try everything against one's own limits."""
    got = _lift_groups(given["lifts"])
    enter_user_namespace()
    got += _lift_groups(given["lifts"])
    for name in ("RLIMIT_NPROC", "RLIMIT_DATA", "RLIMIT_AS", "RLIMIT_FSIZE"):
        with contextlib.suppress(OSError, ValueError):
            _raise_limit(getattr(resource, name))
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


def enter_user_namespace() -> None:
    """Become root of a user namespace with mounts and control groups of its own, where one can be made."""
    uid, gid = os.getuid(), os.getgid()
    if LIBC.unshare(NAMESPACES["user"]) == 0:
        LIBC.unshare(NAMESPACES["mount"] | NAMESPACES["cgroup"])
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
            with contextlib.suppress(OSError):
                Path(f"/proc/self/{name}").write_text(text)


def _works(act: Callable[[], object]) -> bool:
    act()
    return True


def _raise_limit(kind: int) -> None:
    if resource.getrlimit(kind)[1] == resource.RLIM_INFINITY:
        raise ValueError("it has none")
    resource.setrlimit(kind, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def _give_away() -> None:
    fd, path = tempfile.mkstemp()
    os.close(fd)
    try:
        os.chown(path, os.getuid() + 1, -1)
    finally:
        os.unlink(path)


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


def _read_ready(pipe: int) -> int:
    return len(os.read(pipe, 1))  # nothing where the holder has died


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


def _is_there(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


def main() -> None:
    name, given = sys.argv[1], json.loads(sys.argv[2])
    got: list[str] = globals()[name](given)
    print("TRIED", json.dumps(list(dict.fromkeys(got))), flush=True)


if __name__ == "__main__":
    main()
