"""A Ray cluster on machines of namespaces, with a token and a certificate for each of them."""

import os
import subprocess
import sys
from pathlib import Path

from machines import Machines

RAY = (sys.executable, "-m", "ray.scripts.scripts")
DEV = Path(__file__).resolve().parents[1] / "dev"
ENGINE = {"DOCKER_HOST": "unix:///tmp/engine/docker.sock"}
START_S = 120.0
_NEW = ("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2")
HEAD_PORT, CLIENT_PORT = 6379, 10001


class RayCluster:
    """Machine 1 is the head, which takes no sandboxes; `join` adds others.

    Args:
        machines: Started.
        session_cpus: Cores that every node says it has.
    """

    def __init__(self, machines: Machines, *, cpus: int) -> None:
        self.machines = machines
        self.cpus = cpus
        self._keys = machines.folder / "keys"
        self._keys.mkdir()
        (self._keys / "token").write_text(os.urandom(16).hex() * 2)
        self._openssl(*_NEW, "-subj", "/CN=polar-test", out="ca")
        self._start(1, "--head", f"--port={HEAD_PORT}", f"--ray-client-server-port={CLIENT_PORT}", "--num-cpus=0")

    def env(self, machine: int) -> dict[str, str]:
        """Return the variables of Ray's programs and of trainers on a machine."""
        keys = self.machines.disk(machine) / "keys"
        if not keys.exists():
            self._make_certificate(machine)
            keys.mkdir()
            for source, target in ((f"{machine}.pem", "own.pem"), (f"{machine}.key", "own.key")):
                (keys / target).write_bytes((self._keys / source).read_bytes())
            for name in ("ca.pem", "token"):
                (keys / name).write_bytes((self._keys / name).read_bytes())
        return {
            "RAY_USE_TLS": "1",
            "RAY_TLS_SERVER_CERT": "/tmp/keys/own.pem",
            "RAY_TLS_SERVER_KEY": "/tmp/keys/own.key",
            "RAY_TLS_CA_CERT": "/tmp/keys/ca.pem",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": "/tmp/keys/token",
            "RAY_memory_monitor_refresh_ms": "0",
            "GRPC_ENABLE_FORK_SUPPORT": "0",
        }

    def start_engine(self, machine: int) -> None:
        """Start a container engine on a machine, with an image of its own, before that joins."""
        env = {"POLAR_ENGINE": "/tmp/engine"}
        self.machines.run(machine, ["bash", str(DEV / "container_engine.sh"), "up"], env=env, timeout_s=START_S)
        self.machines.run(machine, [sys.executable, str(DEV / "make_test_image.py")], env=ENGINE, timeout_s=START_S)

    def join(self, machine: int, *kinds: str) -> None:
        """Have a machine join, marked for these kinds of sandboxes."""
        marks = ", ".join(f'"{kind}": 1' for kind in kinds)
        address = f"--address={self.machines.address(1)}:{HEAD_PORT}"
        self._start(machine, address, f"--num-cpus={self.cpus}", f"--resources={{{marks}}}")

    def _start(self, machine: int, *flags: str) -> None:
        common = [
            *(f"--node-ip-address={self.machines.address(machine)}", "--disable-usage-stats"),
            *("--object-store-memory=100000000", "--memory=8000000000"),
        ]
        command = [*RAY, "start", *flags, *common, *(["--include-dashboard=false"] if "--head" in flags else [])]
        self.machines.run(
            machine, command, env=self.env(machine) | ENGINE, timeout_s=START_S, stderr=subprocess.STDOUT
        )

    def _make_certificate(self, machine: int) -> None:
        names = f"subjectAltName=IP:{self.machines.address(machine)},IP:127.0.0.1,DNS:localhost"
        signed = ("-CA", str(self._keys / "ca.pem"), "-CAkey", str(self._keys / "ca.key"))
        self._openssl(
            *(*_NEW, "-subj", f"/CN=node{machine}"),
            *("-addext", names, "-addext", "basicConstraints=critical,CA:FALSE", *signed),
            out=str(machine),
        )

    def _openssl(self, *words: str, out: str) -> None:
        files = ("-keyout", str(self._keys / f"{out}.key"), "-out", str(self._keys / f"{out}.pem"))
        subprocess.run(["openssl", *words, *files], check=True, capture_output=True)


def find_left(machines: Machines, numbers: list[int]) -> list[str]:
    """List what sessions left on machines: processes that are not Ray's, and folders."""
    found = []
    for machine in numbers:
        is_ray = (
            "ray::",
            "ray/",
            "ray.util",
            "raylet",
            "gcs_server",
            "setup_worker",
            "ray.scripts",
            "_private",
            "dockerd",
            "containerd ",
        )
        processes = machines.list_processes(machine)
        found += [line for line in processes if not any(word in line for word in is_ray)]
        found += [str(path) for path in Path(machines.disk(machine)).glob("polar-trl-*/*")]
    return found
