"""The process of a node: it makes sandboxes there, runs agents and graders in them, and keeps them by session.

A Ray actor, one for each node and trainer. It ends with its trainer, whichever way that ends (`relay.hold_line`), and
what a Host that was killed leaves is removed by a process that waits for its end.
"""

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from ssl import Purpose
from typing import Any, Protocol

import polar_trl
from polar_trl.cache import CACHE_VARIABLE
from polar_trl.cluster.files import Packed, find_place, move, unpack
from polar_trl.cluster.relay import Address, Loop, Relay, build_tls, hold_line
from polar_trl.errors import ConfigError, GradeError, PolarError, SandboxError
from polar_trl.grade.base import Grade, Grader
from polar_trl.sandbox.base import ExecResult, Sandbox, SandboxBackend
from polar_trl.types import Call, Task
from polar_trl.user_code import describe_error, format_trace

_REAP = 'exec 3<&0; { read -r word <&3 || exec "$0" -m polar_trl clean; } > /dev/null 2>&1 &'


class Recipe(Protocol):
    """Builds a node's sandboxes and grader. Pickled, and so of a class that the node can import."""

    def build(self, tasks: Sequence[Task], checked: Sequence[Task]) -> tuple[SandboxBackend, Grader | None]:
        """Build what these tasks need, and check the solutions of `checked`. Raises `PolarError`.

        The grader is None where sessions are not graded.
        """
        ...


@dataclass(eq=False, slots=True)
class _Session:
    task: Task
    sandbox: Sandbox
    relay: Relay
    is_ordered: bool


class Host:
    """See the module. Methods are called by Ray, on threads of its own."""

    def __init__(self) -> None:
        self._sessions: dict[str, _Session] = {}
        self._places: dict[str, Path] = {}
        self._is_closed = False

    def greet(self, code: str, cache: str) -> None:
        """Take the trainer's path of the cache, which agents' commands hold.

        Raises `ConfigError` where the code is another one: what is pickled must mean the same on both sides.
        """
        os.environ[CACHE_VARIABLE] = cache
        if (own := identify_code()) != code:
            raise ConfigError(
                f"polar_trl is {own} in {Path(polar_trl.__file__).parent}, and {code} where the trainer is: install "
                "the same on every machine"
            )

    def list_missing(self, digests: Mapping[str, str]) -> list[str]:
        """Note what the trainer's tasks name, and list what is not here (paths there)."""
        self._places = {path: find_place(path, digest) for path, digest in digests.items()}
        return [path for path, place in self._places.items() if not place.parent.is_dir()]

    def receive(self, packed: Packed) -> None:
        """Take a file or folder of tasks."""
        unpack(packed)

    def set_up(
        self, recipe: Recipe, tasks: Sequence[Task], checked: Sequence[Task], gateway: Address, token: bytes
    ) -> None:
        """Get ready for these tasks: install the agent, prepare images and work trees. Raises `PolarError`.

        Args:
            checked: Those whose solutions are tried here.
            token: Of this node's line to the trainer.
        """
        with suppress(OSError):  # Ray gives its workers less of the processor than other programs have
            os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, os.getppid()))
        self._gateway, self._tls, self._loop = gateway, build_tls(Purpose.SERVER_AUTH), Loop("polar-relay")
        try:
            hold_line(gateway, token, self._tls, self._end)
        except OSError as error:
            raise SandboxError(f"the trainer cannot be reached at {gateway[0]}:{gateway[1]} ({error})") from error
        self._reaper = _start_reaper()
        moved = ([move(task, self._places) for task in some] for some in (tasks, checked))
        self._backend, self._grader = recipe.build(*moved)

    def open(self, task: Task, session_id: str, token: bytes) -> str:
        """Make a sandbox that reaches the proxy behind the gateway; return the path of its work folder inside."""
        task = move(task, self._places)
        sandbox = self._backend.create(task, session_id)
        try:
            listener = sandbox.open_listener()
            if listener is None:
                raise SandboxError("the sandbox shares the node's network, which reaches the cluster")
            relay = Relay(self._loop, listener, self._gateway, token, self._tls)
            if self._grader is not None:
                self._grader.order(task)
        except BaseException:
            sandbox.destroy()
            raise
        self._sessions[session_id] = _Session(task, sandbox, relay, self._grader is not None)
        return sandbox.workdir

    def run(self, session_id: str, command: str, env: Mapping[str, str], timeout_s: float) -> ExecResult:
        """See `Sandbox.run`. Raises `SandboxError` as well where a connection did not get to the trainer."""
        session = self._find(session_id)
        result = session.sandbox.run(command, env=env, timeout_s=timeout_s)
        if session.relay.failure:
            raise SandboxError(f"a connection of the agent did not get to the trainer ({session.relay.failure})")
        return result

    def put(self, session_id: str, path: str, content: bytes, executable: bool) -> None:
        """See `Sandbox.put`."""
        self._find(session_id).sandbox.put(path, content, executable=executable)

    def get(self, session_id: str, path: str, max_bytes: int) -> bytes | None:
        """See `Sandbox.get`."""
        return self._find(session_id).sandbox.get(path, max_bytes=max_bytes)

    def call(self, session_id: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """See `Sandbox.call`."""
        return function(self._find(session_id).sandbox, *arguments)

    def do(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in this process."""
        return function(*arguments)

    def kill(self, session_id: str) -> None:
        """See `Sandbox.kill`; a session that has ended stays so."""
        if session := self._sessions.get(session_id):
            session.sandbox.kill()

    def is_alive(self, session_id: str) -> bool:
        """See `Sandbox.is_alive`."""
        return self._find(session_id).sandbox.is_alive()

    def grader_takes_calls(self, session_id: str) -> bool:
        """Tell whether the grader looks at a session's model calls."""
        return self._grader is not None and self._grader.takes_calls

    def grade(self, session_id: str, timeout_s: float, calls: Sequence[Call] = ()) -> Grade:
        """See `Grader.grade_session`.

        What a user's own grader raises comes back as `GradeError`: the type may be unknown.
        """
        session = self._find(session_id)
        assert self._grader is not None
        session.is_ordered = False  # from here on the grader takes it back itself
        try:
            return self._grader.grade_session(session.task, session.sandbox, calls, timeout_s=timeout_s)
        except PolarError:
            raise
        except Exception as error:  # noqa: BLE001 - the grader's own, see above
            raise GradeError(describe_error(error), output=format_trace(error)) from None

    def destroy(self, session_id: str) -> None:
        """See `Sandbox.destroy`."""
        if (session := self._sessions.pop(session_id, None)) is None:
            return
        session.relay.close()
        if session.is_ordered and self._grader is not None:
            self._grader.withdraw(session.task)
        session.sandbox.destroy()

    def close(self) -> None:
        """Remove every sandbox, those that were made ahead, too."""
        for session_id in list(self._sessions):
            self.destroy(session_id)
        self._backend.close()
        self._is_closed = True
        assert self._reaper.stdin is not None
        self._reaper.stdin.write(b"nothing\n")
        self._reaper.stdin.close()

    def _end(self) -> None:
        """End at once where the trainer has ended, or cannot be reached; the reaper does the rest."""
        if not self._is_closed:
            os._exit(1)

    def _find(self, session_id: str) -> _Session:
        try:
            return self._sessions[session_id]
        except KeyError:
            raise SandboxError(f"session {session_id} has no sandbox on this node") from None


def identify_code() -> str:
    """Name the version of polar_trl that this process has, with a digest of its source."""
    folder = Path(polar_trl.__file__).parent
    digest = hashlib.sha256(f"{sys.version_info[:2]}".encode())
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return f"{polar_trl.__version__} ({digest.hexdigest()[:8]})"


def _start_reaper() -> "subprocess.Popen[bytes]":
    """Start a process that waits for the end of this one, then removes what that left."""
    process = subprocess.Popen(["sh", "-c", _REAP, sys.executable], stdin=subprocess.PIPE, start_new_session=True)
    process.wait()  # the shell has gone, and what it put in the background is nobody's child that Ray could end
    return process
