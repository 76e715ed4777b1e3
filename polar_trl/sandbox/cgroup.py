"""Limit memory, CPU and processes with control groups, on version 1 and version 2 hierarchies.

A group's name carries its owner: "NAME.OWNER", with the owner's tag (see `owner`). Needs root. Formats: the kernel's
admin guide, "cgroup-v1/memory", "cgroup-v1/pids" and "cgroup-v2".

In version 2 a group other than the machine's own first one either has processes or hands controllers to groups below
it ("no internal process constraint"). In a container, `ROOT` is such a group, and what runs there is moved into one
below it first. `memory.oom.group` stays off: a tool that asks for too much dies, and its agent goes on.
"""

import errno
import logging
import os
import signal
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from polar_trl.errors import SandboxError
from polar_trl.sandbox.owner import build_owner_tag, is_dead

logger = logging.getLogger(__name__)

ROOT = Path("/sys/fs/cgroup")
PARENT = "polar-trl"
VACATED = "polar-trl-rest"
"""Group for the processes of `ROOT` where it can have none of its own."""
CONTROLLERS = ("memory", "cpu", "pids")
PERIOD_US = 100_000
SOCKET_BYTES = 64 << 20
"""Of TCP and UDP buffers, which version 1 counts apart from memory. The whole machine has a tenth of its memory."""


class Cgroup:
    """A control group with limits.

    Args:
        name: Unique on this machine.
        memory_mb: Swap included.
        cpus: Cores.
        pids: Processes and threads.

    Raises `SandboxError` where the hierarchy cannot be written or lacks a controller.
    """

    def __init__(self, name: str, *, memory_mb: int, cpus: float, pids: int) -> None:
        self._is_v2 = (ROOT / "cgroup.controllers").exists()
        controllers = [""] if self._is_v2 else CONTROLLERS
        full_name = f"{name}.{build_owner_tag()}"
        self._folders = [ROOT / controller / PARENT / full_name for controller in controllers]
        try:
            if self._is_v2:
                _hand_down(ROOT)
                _hand_down(ROOT / PARENT)
            for folder in self._folders:
                folder.mkdir(parents=True)
            self._set_limits(memory_mb << 20, int(cpus * PERIOD_US), pids)
        except OSError as error:
            self.remove()
            raise SandboxError(
                f"no limits can be set under {ROOT} ({error}); run as root on a machine of your own"
            ) from error

    @property
    def join_files(self) -> list[str]:
        """A process joins by writing its id into each of these."""
        return [str(folder / "cgroup.procs") for folder in self._folders]

    def count_oom_kills(self) -> int:
        """Count processes of the group that were killed at the memory limit so far. Raises `SandboxError`."""
        name = "memory.events" if self._is_v2 else "memory.oom_control"
        try:
            return _read_oom_kills(self._folders[0] / name)
        except OSError as error:
            raise SandboxError(f"the sandbox's control group is gone: {error}") from error

    def remove(self) -> None:
        """Kill the processes in the group, and remove it."""
        for folder in self._folders:
            _remove(folder)

    def _set_limits(self, memory: int, cpu_us: int, pids: int) -> None:
        if self._is_v2:
            (folder,) = self._folders
            limits = {
                "memory.max": memory,
                "memory.swap.max": 0,
                "cpu.max": f"{cpu_us} {PERIOD_US}",
                "pids.max": pids,
            }
            for name, value in limits.items():
                if name != "memory.swap.max" or (folder / name).exists():  # kernels without swap lack it
                    (folder / name).write_text(str(value))
            return
        in_memory, in_cpu, in_pids = self._folders
        (in_memory / "memory.limit_in_bytes").write_text(str(memory))
        with suppress(OSError):  # kernels without swap accounting lack it
            (in_memory / "memory.memsw.limit_in_bytes").write_text(str(memory))
        _limit_sockets(in_memory)
        (in_cpu / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (in_cpu / "cpu.cfs_quota_us").write_text(str(cpu_us))
        (in_pids / "pids.max").write_text(str(pids))


def _hand_down(folder: Path) -> None:
    """Make a group of version 2, and hand its controllers to those below it. Raises `OSError`."""
    folder.mkdir(exist_ok=True)
    wanted = " ".join(f"+{name}" for name in CONTROLLERS)
    switch = folder / "cgroup.subtree_control"
    if set(CONTROLLERS) <= set(switch.read_text().split()):
        return
    try:
        switch.write_text(wanted)
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        _vacate(folder)
        switch.write_text(wanted)


def _vacate(folder: Path) -> None:
    """Move the processes of a group into one below it. Those that are made meanwhile are met in the next round."""
    rest = folder / VACATED
    rest.mkdir(exist_ok=True)
    for _ in range(20):
        pids = (folder / "cgroup.procs").read_text().split()
        for pid in pids:
            with suppress(ProcessLookupError):
                (rest / "cgroup.procs").write_text(pid)
        if not pids:
            return


def count_oom_kills(pid: int) -> int:
    """Count processes killed at the memory limit of the group that a process is in. Raises `OSError`."""
    folder, is_v2 = _find_memory_group(pid)
    return _read_oom_kills(folder / ("memory.events" if is_v2 else "memory.oom_control"))


def limit_sockets(pid: int, name: str) -> None:
    """Limit socket buffers of a process's group, where this is root and the group has this name: engines do not."""
    with suppress(OSError):  # there is no such process, or none of this machine
        folder, is_v2 = _find_memory_group(pid)
        if not is_v2 and name in folder.name:
            _limit_sockets(folder)


def _find_memory_group(pid: int) -> tuple[Path, bool]:
    """Find the group that limits a process's memory, and whether it is one of version 2."""
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return ROOT / "memory" / path.lstrip("/"), False
    return ROOT / path.lstrip("/"), True


def _limit_sockets(folder: Path) -> None:
    with suppress(OSError):  # of another user's, or a kernel that counts them as memory
        (folder / "memory.kmem.tcp.limit_in_bytes").write_text(str(SOCKET_BYTES))


def _read_oom_kills(file: Path) -> int:
    for line in file.read_text().splitlines():
        key, _, value = line.partition(" ")
        if key == "oom_kill":
            return int(value)
    return 0


def can_limit() -> bool:
    """Return whether this process may make control groups with these limits."""
    if os.geteuid() != 0:
        return False
    try:
        Cgroup("probe", memory_mb=64, cpus=1.0, pids=8).remove()
    except SandboxError as error:
        logger.warning("sandboxes have no limits: %s", error)
        return False
    return True


def reap_cgroups(folders: Collection[str] = ()) -> list[str]:
    """Kill processes in the groups of dead owners, and remove the groups; their names.

    Args:
        folders: Session folders that were just reaped, whose groups have the same names: of an owner that is dead,
            though it cannot be seen from here.
    """
    reaped: dict[str, None] = {}  # a group has a folder for each controller
    for folder in [*ROOT.glob(f"{PARENT}/*"), *ROOT.glob(f"*/{PARENT}/*")]:
        name, _, owner = folder.name.rpartition(".")
        if folder.is_dir() and (is_dead(owner) or name in folders) and _remove(folder):
            reaped[name] = None
    return list(reaped)


def _remove(folder: Path) -> bool:
    """Kill and remove a group, retrying for five seconds: the kernel takes a moment to let go of the dead."""
    error: OSError | None = None
    for _ in range(250):
        try:
            if (kill := folder / "cgroup.kill").exists():  # version 2, Linux 5.14: also what forks meanwhile
                kill.write_text("1")
            for pid in map(int, (folder / "cgroup.procs").read_text().split()):
                with suppress(ProcessLookupError):
                    if pid > 0:  # 0 stands for a process of another namespace, and would be our own group
                        os.kill(pid, signal.SIGKILL)
            folder.rmdir()
        except FileNotFoundError:
            return True
        except OSError as failure:
            error = failure
            time.sleep(0.02)
        else:
            return True
    logger.warning("the control group %s could not be removed: %s", folder, error)
    return False
