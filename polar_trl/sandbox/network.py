"""Listen inside another process's network namespace, and serve the socket from ours.

A sandbox without a network then reaches exactly one thing, the proxy, at one loopback address that is the same in all
sandboxes; every other connection fails at once. Needs root, or a user namespace that we own.
"""

import ctypes
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from polar_trl.errors import SandboxError

PROXY_ADDRESS = ("127.0.0.1", 8080)
"""Address of the proxy in sandboxes with a network of their own."""
HOLDER = Path(__file__).parent / "bwrap" / "netns_holder.py"
_CLONE_NEWNET = 0x40000000


def open_listener(pid: int) -> socket.socket:
    """Open a socket that listens at `PROXY_ADDRESS` in the network namespace of process `pid`. Raises `SandboxError`.

    The namespace's loopback interface has to be up, as container engines leave it.
    """
    result: list[socket.socket] = []
    failure: list[OSError] = []

    def listen() -> None:
        # a namespace belongs to a thread: this one ends, so nothing else ever runs in the foreign network
        try:
            with open(f"/proc/{pid}/ns/net", "rb") as namespace:
                _enter(namespace.fileno())
            # the sandbox is the socket's only way in: no reuse of the address by anybody else
            result.append(socket.create_server(PROXY_ADDRESS, backlog=128))
        except OSError as error:
            failure.append(error)

    thread = threading.Thread(target=listen, name="polar-netns")
    thread.start()
    thread.join()
    if failure:
        raise SandboxError(
            f"cannot listen on port {PROXY_ADDRESS[1]} in the sandbox of process {pid} ({failure[0].strerror}); "
            "this needs root"
        ) from failure[0]
    return result[0]


def _enter(namespace_fd: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace_fd, _CLONE_NEWNET) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


class NetworkHolder:
    """A network namespace of its own, kept by a process that does nothing else. Works without root.

    Args:
        mark: Last word of that process' command line, see `owner.build_helper_mark`.
        overlay: Mounted where only the process sees it, without root: see `bwrap.netns_holder`.

    Raises `SandboxError` where the kernel allows no user namespaces, or no overlay in them.
    """

    def __init__(self, mark: str, overlay: Sequence[str] = ()) -> None:
        ours, theirs = socket.socketpair()
        host, port = PROXY_ADDRESS
        command = [sys.executable, "-I", "-S", str(HOLDER), host, str(port), str(theirs.fileno()), *overlay, mark]
        self._channel = ours
        self._process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        theirs.close()
        message, fds, _, _ = socket.recv_fds(ours, 16, 1)
        if not message or not fds:
            _, complaint = self._process.communicate()
            ours.close()
            reason = complaint.decode(errors="replace").strip().splitlines()[-1:]
            if "overlay" in "".join(reason):
                raise SandboxError(
                    f"an image's layers cannot be mounted here ({''.join(reason)}); that takes Linux 5.11, and a "
                    "temporary folder (TMPDIR) that is on no overlay itself, but on ext4, xfs, btrfs or tmpfs"
                )
            raise SandboxError(
                f"no network namespace can be made here ({''.join(reason)}); without root, the system has to allow "
                "user namespaces (kernel.apparmor_restrict_unprivileged_userns=0 where AppArmor restricts them)"
            )
        self._listener: socket.socket | None = socket.socket(fileno=fds[0])
        self._has_mounts = bool(overlay)

    @property
    def root(self) -> Path:
        """The file system as the process sees it, its own mounts too."""
        return Path(f"/proc/{self._process.pid}/root")

    def open_listener(self) -> socket.socket:
        """Return the socket that listens in the namespace; given out once."""
        listener, self._listener = self._listener, None
        if listener is None:
            raise SandboxError("the sandbox's listener was given out already")
        return listener

    def build_prefix(self) -> list[str]:
        """Build the words that run a command in the namespaces."""
        pid = str(self._process.pid)
        if os.geteuid() == 0:
            return ["nsenter", f"--net=/proc/{pid}/ns/net", "--"]
        mount = ["--mount"] if self._has_mounts else []
        return ["nsenter", "--target", pid, "--user", "--net", *mount, "--preserve-credentials", "--"]

    def is_alive(self) -> bool:
        """Return whether the holder runs."""
        return self._process.poll() is None

    def close(self) -> None:
        """Let the namespace go. Safe to call twice."""
        self._channel.close()
        if self._listener is not None:
            self._listener.close()
        self._process.kill()
        self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()
