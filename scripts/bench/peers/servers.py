"""Install the peers' released packages, each in an environment of its own, and start their servers."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parents[1]
"""Where the package `peers` is."""
FOLDER = Path(".cache/peers")


class PeerError(Exception):
    """A peer cannot be installed, started or driven."""


@dataclass(frozen=True)
class Peer:
    """One system, and how it is driven."""

    name: str
    packages: tuple[str, ...]
    """Pinned; none for those that are in this environment."""
    has_rows: bool = True
    engine_path: str = "/v1"
    """Of the engine's base URL; "PARSER" stands for the parser of tool calls."""

    @property
    def python(self) -> str:
        return sys.executable if not self.packages else str(self.folder / "bin/python")

    @property
    def folder(self) -> Path:
        return FOLDER.absolute() / f"{self.name}-{self.packages[0].partition('==')[2]}"


PEERS = {
    peer.name: peer
    for peer in (
        Peer("polar_trl", ()),
        Peer("openenv", ("openenv==0.10.0",), engine_path="/PARSER/v1"),
        Peer("verifiers", ("verifiers==0.4.0", "renderers==0.1.12")),
        # 1.107.0 was reported as compromised
        Peer("litellm", ("litellm[proxy]==1.106.12",), has_rows=False),
    )
}


def install(peer: Peer) -> None:
    """Make the peer's environment, unless it is there. Raises `PeerError` with pip's last lines."""
    done = peer.folder / "installed" if peer.packages else None
    if done is None or done.exists():
        return
    print(f"installing {' '.join(peer.packages)} in {peer.folder}", file=sys.stderr, flush=True)
    for command in (
        [sys.executable, "-m", "venv", str(peer.folder)],
        [peer.python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *peer.packages],
    ):
        run = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        if run.returncode != 0:
            last = " / ".join(line for line in run.stderr.splitlines() if "ERROR" in line)[-300:]
            raise PeerError(f"does not install: {last or run.stderr[-300:]}")
    done.touch()


class Server:
    """A peer's server in its process; commands go over its standard input."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        hello = self._read()
        self.origin: str = hello["origin"]
        self._pid: int = hello["pid"]

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerError("its process ended; the message is above")
        return json.loads(line)

    def ask(self, command: str, **words: Any) -> Any:
        """Give a command (`peers/control.py`). Raises `PeerError` if it fails there."""
        assert self._process.stdin is not None
        print(json.dumps({"command": command, **words}), file=self._process.stdin, flush=True)
        found = self._read()
        if "error" in found:
            raise PeerError(found["error"])
        return found["answer"]

    def read_cpu_s(self) -> float:
        """Read the CPU time of the server's process so far."""
        fields = Path(f"/proc/{self._pid}/stat").read_text().rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def start(peer: Peer, *arguments: str) -> Iterator[Server]:
    command = [peer.python, "-m", f"peers.serve_{peer.name}", *arguments]
    root = str(SCRIPTS.parents[1])
    env = {
        **os.environ,
        "PYTHONPATH": f"{SCRIPTS}:{root}" if not peer.packages else str(SCRIPTS),
        "HF_HUB_OFFLINE": "1",
    }
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            yield Server(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
