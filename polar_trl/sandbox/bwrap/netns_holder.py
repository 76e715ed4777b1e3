"""Hold a network namespace open from a process of its own, and hand out a socket that listens in it.

Run as a script: `python -I -S netns_holder.py HOST PORT SOCKET_FD [LAYERS OPTIONS MERGED] MARK`. The listening socket
is sent through SOCKET_FD, and the process lives until the other end of that is closed. Standard library only. Without
root it makes a user namespace first, in which its user is root: that is what a sandbox without privileges may enter.

An overlay takes no privilege there: with OPTIONS of one, whose lower folders are relative to LAYERS, the process also
has mounts of its own, and the overlay at MERGED.
"""

import array
import ctypes
import fcntl
import os
import socket
import struct
import sys

LIBC = ctypes.CDLL(None, use_errno=True)
CLONE_NEWUSER, CLONE_NEWNET, CLONE_NEWNS = 0x10000000, 0x40000000, 0x20000
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 0x1


def unshare(flags: int) -> None:
    """Call unshare(2). Raises `OSError`."""
    _check(LIBC.unshare(flags))


def mount_overlay(layers: str, options: str, merged: str) -> None:
    """Mount an overlay in a mount namespace of our own. Raises `OSError`."""
    unshare(CLONE_NEWNS)
    os.chdir(layers)
    _check(LIBC.mount(b"overlay", os.fsencode(merged), b"overlay", 0, os.fsencode(options)), "overlay: ")


def _check(result: int, what: str = "") -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}{os.strerror(code)}")


def enter_namespaces() -> None:
    """Enter a network namespace of our own, with its loopback interface up."""
    uid, gid = os.getuid(), os.getgid()
    if uid != 0:
        unshare(CLONE_NEWUSER)
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    unshare(CLONE_NEWNET)
    with socket.socket() as probe:
        request = struct.pack("16sh22x", b"lo", 0)
        flags = struct.unpack("16sh22x", fcntl.ioctl(probe, SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(probe, SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", flags | IFF_UP))


def main() -> None:
    host, port, fd = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    channel = socket.socket(fileno=fd)
    enter_namespaces()
    if len(sys.argv) > 5:
        mount_overlay(*sys.argv[4:7])
    listener = socket.create_server((host, port), backlog=128)
    channel.sendmsg([b"ok"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [listener.fileno()]))])
    listener.close()
    channel.recv(1)


if __name__ == "__main__":
    main()
