"""Machines made of Linux namespaces, to test what runs on several of them. As root, on Linux.

Each has its own network (an address in 10.77.0.0/24 on a bridge), host name, boot id, processes, mounts, /tmp,
/dev/shm, /etc/hosts and HOME. They share the kernel, its clock and cores, and the rest of the file system; /mnt is a
folder that machines have in common and others do not, as a network file system would be.

  python scripts/machines/machines.py 2 COMMAND ...    run the command in machine 1, with another machine beside it
"""

import argparse
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

PREFIX = "polar-machines."
BOOT_S = 20.0

_DIE_WITH_US = ("setpriv", "--pdeathsig", "KILL", "--")
"""So that nothing is left when this process is killed: a machine's processes end with its first one."""

_BOOT = r"""
set -e
cd "$FOLDER"  # by its path it cannot be reached once /tmp is another
mount --make-rprivate /
mount --bind hosts /etc/hosts
mount --bind boot_id /proc/sys/kernel/random/boot_id
mount --bind ../share /mnt
case $CHECKOUT in /tmp/*) mkdir -p ".$CHECKOUT"; mount --bind "$CHECKOUT" ".$CHECKOUT" ;; esac
mount --rbind tmp /tmp
mount -t tmpfs -o size=1g tmpfs /dev/shm
hostname "$NAME"
: > ready
trap : CHLD  # bash reaps what is left to it, as a machine's first process does
while :; do sleep 1000 & wait $!; done
"""


class Machines:
    """Machines 1 to `number`, until `close`, the end of the block or of this process. Use it from the main thread.

    Args:
        number: Of machines that are started at once; `start` adds others.
        names_resolve: Whether /etc/hosts of each has the names of all (up to 9).
    """

    def __init__(self, number: int, *, names_resolve: bool = True) -> None:
        remove_leftovers()
        self.folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir="/tmp"))
        self._lock = (self.folder / "lock").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.share = self.folder / "share"
        """What the machines have at /mnt."""
        self.share.mkdir()
        self._names_resolve = names_resolve
        self._launchers: dict[int, subprocess.Popen[bytes]] = {}
        self._firsts: dict[int, int] = {}
        """Process ids of the machines' first processes, as this machine numbers them; 0 is the bridge."""
        self._boot_ids: list[str] = []
        try:
            self._launch(0, ["--net"], 'touch "$FOLDER/ready"; exec sleep infinity')
            self._ip(0, "link", "add", "br0", "type", "bridge")
            self._ip(0, "link", "set", "br0", "up")
            for machine in range(1, number + 1):
                self.start(machine)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, machine: int) -> None:
        """Start a machine, also one that was killed: its /tmp is as it was."""
        folder = self.folder / str(machine)
        (folder / "tmp" / "home").mkdir(parents=True, exist_ok=True)
        (folder / "tmp").chmod(0o1777)
        others = [f"{self.address(other)} {self.name(other)}\n" for other in range(1, 10)] * self._names_resolve
        self._boot_ids.append(str(uuid.uuid4()))
        (folder / "boot_id").write_text(f"{self._boot_ids[-1]}\n")
        (folder / "hosts").write_text("".join(["127.0.0.1 localhost\n", *others]))
        self._launch(machine, ["--net", "--uts", "--mount", "--pid", "--ipc", "--fork", "--mount-proc"], _BOOT)
        ours, bridge = str(self._firsts[machine]), str(self._firsts[0])
        peer = ["netns", bridge, "type", "veth", "peer", "name", "eth0", "netns", ours]
        subprocess.run(["ip", "link", "add", f"to{machine}", *peer], check=True)
        self._ip(0, "link", "set", f"to{machine}", "master", "br0", "up")
        self._ip(machine, "address", "add", f"{self.address(machine)}/24", "dev", "eth0")
        # the same card after a restart, or others would ask for the old one for a while
        self._ip(machine, "link", "set", "eth0", "address", f"02:00:00:00:00:0{machine}")
        for device in ("lo", "eth0"):
            self._ip(machine, "link", "set", device, "up")

    def kill(self, machine: int) -> None:
        """End all processes of a machine at once. Their connections are closed; after `cut`, nobody is told."""
        first, launcher = self._firsts.pop(machine), self._launchers.pop(machine)
        launcher.kill()
        launcher.wait()
        while Path(f"/proc/{first}").exists():  # the first process goes last
            time.sleep(0.02)

    def cut(self, machine: int) -> None:
        """Pull a machine's network cable: nobody is told."""
        self._ip(0, "link", "set", f"to{machine}", "down")

    def heal(self, machine: int) -> None:
        """Put the cable back."""
        self._ip(0, "link", "set", f"to{machine}", "up")

    def popen(self, machine: int, command: Sequence[str], *, env: Mapping[str, str] = {}, **more: Any) -> Any:
        """Start a command in a machine, in this process's folder: `subprocess.Popen` of what its end ends.

        Args:
            env: Beside this process's environment, in which HOME is the machine's own /tmp/home.
        """
        environment = {**os.environ, "HOME": "/tmp/home", **env}
        # nsenter starts the command as a child, which has to end with it
        return subprocess.Popen(
            [*_DIE_WITH_US, *self._enter(machine), *_DIE_WITH_US, *command], env=environment, **more
        )

    def run(self, machine: int, command: Sequence[str], *, timeout_s: float = 60.0, **more: Any) -> str:
        """Run a command in a machine and return what it prints. Raises `subprocess.SubprocessError`."""
        process = self.popen(machine, command, stdout=subprocess.PIPE, text=True, **more)
        try:
            printed, _ = process.communicate(timeout=timeout_s)
        except BaseException:
            process.kill()
            process.wait()
            raise
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, list(command), printed)
        return str(printed)

    def list_processes(self, machine: int) -> list[str]:
        """List the command lines of a machine's processes, but for those that a machine without work has."""
        printed = self.run(machine, ["ps", "-e", "-o", "pid=,args="])
        lines = [line.strip().split(maxsplit=1) for line in printed.splitlines()]
        idle = ("sleep 1000", "ps -e")
        return [words[1] for words in lines if words[0] != "1" and not words[1].startswith(idle)]

    def list_left_behind(self) -> list[str]:
        """List what runs on the machines, their session folders, and the control groups of their sandboxes."""
        machines = [machine for machine in self._firsts if machine]
        groups = [path for path in Path("/sys/fs/cgroup").rglob("polar-trl/*") if path.is_dir()]
        return [
            *(line for machine in machines for line in self.list_processes(machine)),
            *(str(path) for machine in machines for path in self.disk(machine).glob("polar-trl-*/*")),
            *(str(path) for path in groups if any(boot_id in path.name for boot_id in self._boot_ids)),
        ]

    def disk(self, machine: int) -> Path:
        """Return where a machine's /tmp is found from here."""
        return self.folder / str(machine) / "tmp"

    @staticmethod
    def address(machine: int) -> str:
        """Return its address, in a network of which all of them are."""
        return f"10.77.0.{machine}"

    @staticmethod
    def name(machine: int) -> str:
        """Return its host name."""
        return f"node{machine}"

    def close(self) -> None:
        """End all machines, and remove what was on their disks."""
        for machine in list(self._firsts):
            self.kill(machine)
        _remove(self.folder)
        self._lock.close()

    def _launch(self, machine: int, namespaces: Sequence[str], script: str) -> None:
        folder = self.folder / str(machine)
        folder.mkdir(exist_ok=True)
        (folder / "ready").unlink(missing_ok=True)
        kill_child = ["--kill-child"] if "--fork" in namespaces else []
        command = [*_DIE_WITH_US, "unshare", *namespaces, *kill_child, "bash", "-c", script]
        env = {**os.environ, "FOLDER": str(folder), "NAME": self.name(machine), "CHECKOUT": os.getcwd()}
        launcher = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, start_new_session=True)
        self._launchers[machine], self._firsts[machine] = launcher, launcher.pid
        deadline = time.monotonic() + BOOT_S
        while not (folder / "ready").exists():
            if launcher.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"machine {machine} has not started")
            time.sleep(0.02)
        if kill_child:
            children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text()
            self._firsts[machine] = int(children.split()[0])

    def _enter(self, machine: int) -> list[str]:
        namespaces = ["--net"] if machine == 0 else ["--net", "--uts", "--mount", "--pid", "--ipc"]
        wd = [] if machine == 0 else [f"--wdns={os.getcwd()}"]
        return ["nsenter", "--target", str(self._firsts[machine]), *namespaces, *wd, "--"]

    def _ip(self, machine: int, *words: str) -> None:
        subprocess.run([*self._enter(machine), "ip", *words], check=True)


def remove_leftovers() -> None:
    """Remove the folders of machines whose process was killed; their processes ended with it."""
    for folder in Path("/tmp").glob(f"{PREFIX}*"):
        try:
            with (folder / "lock").open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(folder)
        except (BlockingIOError, FileNotFoundError):  # in use, or just being made
            continue


def _remove(folder: Path) -> None:
    # the mounts of machines were in their own namespaces; a folder that is busy for a moment is the next start's
    shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("number", type=int)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    with Machines(args.number) as machines:
        return int(machines.popen(1, args.command).wait())


if __name__ == "__main__":
    sys.exit(main())
