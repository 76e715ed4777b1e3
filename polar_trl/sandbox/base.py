"""The sandbox protocols: a work folder, commands with a deadline, and nothing left behind."""

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from polar_trl.types import Task

_T = TypeVar("_T")

WORKDIR = "/workspace"
HOME = "/home/agent"
"""Paths of work folder and HOME in sandboxes with a root of their own, unless the task says otherwise."""
# bash where the image has it: agents and graders write bash
SHELL = 'if command -v bash >/dev/null 2>&1; then exec bash -c "$0"; else exec sh -c "$0"; fi'


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecResult:
    """Exit code and output of a command, and the limits that it met."""

    exit_code: int | None
    """None when it was killed at its deadline or by `kill`."""
    stdout: str
    """The last 64 KiB, undecodable bytes replaced."""
    stderr: str
    """The last 64 KiB, undecodable bytes replaced."""
    timed_out: bool
    seconds: float
    out_of_memory: bool = False
    """Whether a process of it was killed at the sandbox's memory limit."""
    disk_full: bool = False
    """Whether the sandbox's disk was full when it ended."""

    def tail(self, max_characters: int = 4000) -> str:
        """Return the end of the output: standard output, then standard error, each with at least half the room."""
        out, error = self.stdout.strip(), self.stderr.strip()
        room = max_characters - 1 if out and error else max_characters
        error = error[-max(room - len(out), room // 2) :]
        return "\n".join(filter(None, (out[-(room - len(error)) :] if len(error) < room else "", error)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """The limits and isolation that a backend can enforce. A run that needs more is refused before it starts."""

    cuts_network: bool
    limits_memory: bool
    limits_disk: bool
    uses_images: bool


class Sandbox(Protocol):
    """One session's work folder and commands. Methods block; the session's own thread calls them, `kill` any."""

    workdir: str
    """Absolute path of the work folder as commands inside see it."""

    @property
    def host_workdir(self) -> Path:
        """Return the host's path of the work folder."""
        ...

    @property
    def host_home(self) -> Path:
        """HOME on this machine."""
        ...

    @property
    def base_tree(self) -> Path | None:
        """Host folder with the original work tree, before `Task.files`; never written to. None: it was empty."""
        ...

    def run(self, command: str, *, env: Mapping[str, str], timeout_s: float) -> ExecResult:
        """Run a shell command in the work folder; at the deadline it and everything it started is killed.

        Raises `SandboxError` if the command could not be started.
        """
        ...

    def put(self, path: str, content: bytes, *, executable: bool = False) -> None:
        """Write a file, making its folders: `path` is relative to the work folder, or to HOME where it starts "~/".

        Raises `SandboxError` for a path that leads outside.
        """
        ...

    def get(self, path: str, *, max_bytes: int = 1 << 20) -> bytes | None:
        """Read a file (`path` as for `put`); None if there is no regular file. Follows no link out of it.

        Raises `FileTooLargeError` if it is larger than `max_bytes`.
        """
        ...

    def upload(self, source: Path, target: str) -> None:
        """Copy a host folder to an absolute path inside, replacing the folder there.

        Raises `SandboxError` where that cannot be written.
        """
        ...

    def call(self, function: Callable[..., _T], *arguments: Any) -> _T:
        """Call a function with this sandbox and the arguments, on the machine that has its folders.

        The function is one that can be imported by its name.
        """
        ...

    def open_listener(self) -> socket.socket | None:
        """Open a socket inside the sandbox's own network, for the proxy to serve; the caller closes it.

        None where the sandbox shares the host's network and reaches the proxy at its own address.
        """
        ...

    def is_alive(self) -> bool:
        """Return whether a command could run in it: neither destroyed nor lost."""
        ...

    def require_whole(self) -> None:
        """Raise `SandboxError` if its folders were removed or changed from outside: a reward would say nothing."""
        ...

    def kill(self) -> None:
        """Kill everything running inside; a `run` in progress returns."""
        ...

    def destroy(self) -> None:
        """Kill and remove everything. Safe to call twice."""
        ...


class SandboxBackend(Protocol):
    """Makes sandboxes of one kind. A base class: one that makes none ahead needs no `order` and no `withdraw`,
    one that is never full no `give_up`."""

    capabilities: Capabilities
    depth: int = 0
    """How many sandboxes are made before they are asked for."""

    def prepare(self, tasks: Sequence[Task]) -> None:
        """Fetch the images and work trees of these tasks, before they are needed.

        Raises `SandboxError` naming the task.
        """
        ...

    def create(self, task: Task, session_id: str) -> Sandbox:
        """Make a fresh sandbox with the task's files in its work folder. Raises `SandboxError`."""
        ...

    def order(self, task: Task) -> None:
        """Have a sandbox for such a task made soon, where sandboxes are made ahead."""
        return

    def withdraw(self, task: Task) -> None:
        """Take an order back."""
        return

    def give_up(self) -> None:
        """End the waiting of every `create` that waits for room, with `SandboxError`. From any thread."""
        return

    def close(self) -> None:
        """Release the backend's own resources. Sandboxes are their owners' to destroy."""
        ...
