"""Run sessions that something happens to, stop container engines, and count what is left afterwards.

`Leftovers` counts containers, folders, mounts, disks, control groups and processes.
"""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import docker

from polar_trl.engine.base import GenerationParams
from polar_trl.engine.scripted import ScriptedEngine
from polar_trl.grade.function import FunctionGrader
from polar_trl.harness.shell import ShellHarness
from polar_trl.proxy import Proxy
from polar_trl.rollout.runner import Job, RolloutConfig, RolloutResult, RolloutRunner
from polar_trl.sandbox.base import Sandbox, SandboxBackend
from polar_trl.sandbox.bwrap.backend import BwrapSandboxBackend
from polar_trl.sandbox.cgroup import PARENT, ROOT
from polar_trl.sandbox.docker.backend import OWNER_LABEL, DockerSandboxBackend
from polar_trl.sandbox.limits import Limits
from polar_trl.sandbox.local import LocalSandboxBackend
from polar_trl.sandbox.owner import build_owner_tag, list_mounts
from polar_trl.tokens.bytes import ByteRenderer
from polar_trl.tools.security.check import list_files
from polar_trl.types import Message, Task

IMAGE = "polar-trl-test:latest"
SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
LIMITS = Limits(memory_mb=200, cpus=1.0, pids=64, disk_mb=64)
RENDERER = ByteRenderer()
REPLY = RENDERER.spell(Message(role="assistant", text="done"))
MARK = "POLAR_FAULT_TEST"
"""Environment variable of everything that runs in a test's sandboxes."""
ASK = """
import os, urllib.request
body = b'{"messages": [{"role": "user", "content": "hi"}]}'
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
with urllib.request.urlopen(request, timeout=600) as reply:
    reply.read()
"""
"""The agent's only words to its model. Called as `python3 ~/ask.py`."""
ATTACKS = {path: content.decode() for path, content in list_files().items()}


def build(kind: str, root: Path, *, limits: Limits = LIMITS, **settings: Any) -> SandboxBackend:
    if kind == "local":
        return LocalSandboxBackend(root)
    if kind == "bwrap":
        return BwrapSandboxBackend(limits=limits, root=root)
    return DockerSandboxBackend(limits=limits, root=root, image=IMAGE, **settings)


class Sessions:
    """Runs agents that are bash scripts, and says how far they are.

    Args:
        root: Where the backends of this test keep their sandboxes.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.token = secrets.token_hex(6)
        self.env = {MARK: self.token}
        self._asked = threading.Semaphore(0)
        self._proxy = Proxy(ScriptedEngine(self._reply), RENDERER, params=GenerationParams(max_tokens=50))
        self._threads = ThreadPoolExecutor()

    def __enter__(self) -> "Sessions":
        self._proxy.__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        self._threads.shutdown(wait=True)
        self._proxy.__exit__(*failure)

    def start(
        self,
        backend: SandboxBackend,
        scripts: Mapping[str, str],
        grade: Callable[[Task, Sandbox], Any] = lambda task, box: 1.0,
        **limits: float,
    ) -> "Future[dict[str, RolloutResult]]":
        """One session for each named script, all at once; what became of them, by name."""
        runner = RolloutRunner(
            proxy=self._proxy,
            backend=backend,
            harness=ShellHarness("bash -c {instruction}", files={"ask.py": ASK, **ATTACKS}),
            grader=FunctionGrader(grade),
            config=RolloutConfig(),
        )
        jobs = [
            Job(
                rollout_id=self.name_session(name),
                group_id="g",
                task=Task(id=name, instruction=script, env=self.env, **({"agent_timeout_s": 120.0} | limits)),
            )
            for name, script in scripts.items()
        ]
        return self._threads.submit(lambda: dict(zip(scripts, runner.run(jobs), strict=True)))

    def name_session(self, name: str) -> str:
        return f"{self.token}-{name}"

    def wait_until_asked(self, times: int) -> None:
        """Until the model was asked that often since the last wait."""
        for _ in range(times):
            assert self._asked.acquire(timeout=600), "no agent asked its model"

    def _reply(self, prompt_ids: tuple[int, ...]) -> tuple[int, ...]:
        self._asked.release()
        return REPLY


class OwnEngine:
    """A container engine of the test's own, to be stopped, frozen and started again."""

    def __init__(self) -> None:
        self._state = Path(tempfile.mkdtemp(prefix="polar-trl-fault-"))
        self.host = f"unix://{self._state}/docker.sock"

    def up(self) -> None:
        self._control("up")

    def down(self) -> None:
        self._control("down")
        shutil.rmtree(self._state, ignore_errors=True)

    def load_image(self) -> None:
        """Copy the tests' image from the engine that all tests use."""
        saved = docker.from_env().images.get(IMAGE).save(named=True)
        self.connect().images.load(b"".join(saved))

    def connect(self) -> docker.DockerClient:
        return docker.DockerClient(base_url=self.host)

    def restart(self, number: signal.Signals) -> None:
        """End it by a signal, then start it again."""
        pid_file = self._state / "dockerd.pid"
        state = Path("/proc", pid_file.read_text(), "status")
        self._signal(number)
        for _ in range(600):
            if not state.exists() or "State:\tZ" in state.read_text():
                break
            time.sleep(0.1)
        # an engine that was killed leaves these, and takes the zombies behind them for alive
        for path in (pid_file, self._state / "exec" / "containerd" / "containerd.pid"):
            path.unlink(missing_ok=True)
        self.up()

    def tap(self, request: str, action: Callable[[], None]) -> "Tap":
        return Tap(self._state / f"{secrets.token_hex(4)}.sock", self._state / "docker.sock", request, action)

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        os.kill(int((self._state / "dockerd.pid").read_text()), number)

    def _control(self, word: str) -> None:
        env = {**os.environ, "POLAR_ENGINE": str(self._state)}
        subprocess.run(["bash", str(SCRIPTS / "dev" / "container_engine.sh"), word], env=env, check=True, timeout=600)


class Tap:
    """A socket that passes on what is said to an engine, and does something once before a certain request.

    Args:
        path: Where to listen.
        target: The engine's socket.
        request: Part of the request line, such as "/containers/create".
        action: What is done before that is passed on.
    """

    def __init__(self, path: Path, target: Path, request: str, action: Callable[[], None]) -> None:
        self.host = f"unix://{path}"
        self._target = str(target)
        self._request = request.encode()
        self._action: Callable[[], None] | None = action
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(path))
        self._server.listen(64)
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def was_met(self) -> bool:
        return self._action is None

    def __enter__(self) -> "Tap":
        return self

    def __exit__(self, *failure: Any) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                client, _ = self._server.accept()
                engine = socket.socket(socket.AF_UNIX)
                engine.connect(self._target)
                for ends in ((client, engine), (engine, client)):
                    threading.Thread(target=self._pump, args=ends, daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):  # either side hung up
            while block := source.recv(1 << 16):
                if self._action is not None and self._request in block.partition(b"\r\n")[0]:
                    action, self._action = self._action, None
                    action()
                sink.sendall(block)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class Leftovers:
    """Leftovers of the sandboxes of one test and one process.

    Args:
        root: Where they keep their folders.
        token: What their processes have in their environment, and the names of their sessions begin with.
        engine: Where their containers are.
        owner: Tag of the process that made them.
    """

    def __init__(self, root: Path, token: str, engine: docker.DockerClient, owner: str | None = None) -> None:
        self._root = root
        self._token = token
        self._engine = engine
        self._owner = owner or build_owner_tag()

    def find(self) -> dict[str, list[str]]:
        """Return the names of what is left, by kind; empty where nothing is."""
        found = {
            "containers": [str(container.name) for container in self.list_containers()],
            "folders": [path.name for path in self._root.glob("*") if path.is_dir()],
            "mounts": list(list_mounts(self._root)),
            "disks": [name for name in _list_loop_files() if name.startswith(f"{self._root}/")],
            "cgroups": [str(path) for path in ROOT.glob(f"**/{PARENT}/*{self._token}*")],
            "processes": list_processes(self._token),
        }
        return {kind: names for kind, names in found.items() if names}

    def list_containers(self, part: str = "") -> list[Any]:
        """The containers that have a folder mounted with `part` in its name."""
        own = {"label": f"{OWNER_LABEL}={self._owner}"}
        containers = self._engine.containers.list(all=True, filters=own, ignore_removed=True)
        return [box for box in containers if any(part in mount["Source"] for mount in box.attrs["Mounts"])]


def list_processes(token: str) -> list[str]:
    """Ids of the processes that have the token in their environment, their arguments or their control groups."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            texts = [(folder / name).read_bytes() for name in ("environ", "cmdline", "cgroup")]
        except OSError:
            continue  # it ended
        if any(token.encode() in text for text in texts):
            found.append(folder.name)
    return found


def _list_loop_files() -> list[str]:
    files = []
    for path in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            files.append(path.read_text().strip())
        except OSError:
            continue  # it was let go
    return files
