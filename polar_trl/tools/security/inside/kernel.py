"""Attack the kernel from inside of a sandbox: namespaces, mounts, devices, rare calls, settings, privileges."""

import contextlib
import ctypes
import glob
import os
import resource
import signal
import socket
import stat
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from polar_trl.tools.security.inside.base import (
    LIBC,
    NAMESPACES,
    Given,
    call,
    enter_user_namespace,
    in_child,
    raise_limit,
)


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
        "process_vm_readv": (os.getpid(), None, 0, None, 0, 0),
        "pidfd_getfd": (-1, 0, 0),
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
    settings = ("kernel/core_pattern", "kernel/modprobe", "kernel/ns_last_pid", "vm/swappiness", "fs/file-max")
    names = [f"/proc/sys/{name}" for name in (*settings, "fs/binfmt_misc/register")]
    names += ["/proc/sysrq-trigger", "/proc/kcore", "/proc/kmsg", "/proc/irq/default_smp_affinity", "/dev/kmsg"]
    names += ["/sys/power/state", "/sys/kernel/uevent_helper", "/sys/kernel/mm/ksm/run"]
    names += glob.glob("/sys/block/*/uevent")
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
    tries: dict[str, Callable[[], object]] = {
        "lowered its nice value": lambda: os.setpriority(os.PRIO_PROCESS, 0, -5),
        "got a real-time priority": lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)),
        "became another user": lambda: os.setuid(os.getuid() + 1),
        "gave a file away": _give_away,
        "changed the host name": lambda: socket.sethostname(socket.gethostname()),
        "is spared when memory is short": lambda: Path("/proc/self/oom_score_adj").write_text("-999"),
        "raised its limit of memory locks": lambda: raise_limit(resource.RLIMIT_MEMLOCK),
    }
    return got + [what for what, act in tries.items() if in_child(act)]


def _give_away() -> None:
    fd, path = tempfile.mkstemp()
    os.close(fd)
    try:
        os.chown(path, os.getuid() + 1, -1)
    finally:
        os.unlink(path)
