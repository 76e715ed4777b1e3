"""The list of attacks, and what to change where one succeeds."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """An attack: its name, and that of its function in `attack`."""

    name: str
    attack: str
    meets_limits: bool = False
    """Whether its processes have to be seen from outside for a verdict, and may be killed for it."""
    capability: str = ""
    """Field of the backend's `Capabilities` without which it holds nothing, whatever was measured."""
    advice: str
    """Where the sandbox is one that should hold this."""


_NAMESPACES = "use bubblewrap 0.8 or newer, or a container engine with its default seccomp profile"
_SECCOMP = "use a newer container engine, with its default seccomp profile, or the bwrap sandbox"
_LIMITS = "run the trainer as root on a machine whose control groups it may write, or use docker"
_DISK = "run the trainer as root, so that each session gets a disk of its own"
_PRIVILEGE = "start no privileged container, and give it neither devices nor sockets of this machine"

PROBES = (
    Probe(name="other processes", attack="other_processes", advice=_PRIVILEGE),
    Probe(name="secrets of the trainer", attack="secrets", advice=_PRIVILEGE),
    Probe(name="files of the user and of other sessions", attack="files", advice=_PRIVILEGE),
    Probe(name="writing outside, mounts", attack="mounts", advice=_NAMESPACES),
    Probe(name="namespaces", attack="namespaces", advice=_NAMESPACES),
    Probe(name="control groups", attack="control_groups", advice=_NAMESPACES),
    Probe(name="memory hog", attack="memory", capability="limits_memory", meets_limits=True, advice=_LIMITS),
    Probe(name="memory file systems", attack="shared_memory", meets_limits=True, advice=_LIMITS),
    Probe(name="fork bomb", attack="processes", meets_limits=True, advice=_LIMITS),
    Probe(name="CPU hog", attack="cpu", capability="limits_memory", meets_limits=True, advice=_LIMITS),
    Probe(name="full disk", attack="disk", capability="limits_disk", advice=_DISK),
    Probe(name="process left behind", attack="daemon", advice=_PRIVILEGE),
    Probe(name="network", attack="network", capability="cuts_network", advice=_PRIVILEGE),
    Probe(name="Unix sockets", attack="unix_sockets", advice=_PRIVILEGE),
    Probe(name="devices", attack="devices", advice=_PRIVILEGE),
    Probe(name="kernel settings", attack="kernel_settings", advice=_PRIVILEGE),
    Probe(name="kernel calls", attack="kernel_calls", advice=_SECCOMP),
    Probe(name="io_uring and rare sockets", attack="kernel_surface", advice=_SECCOMP),
    Probe(name="privileges", attack="privileges", advice=_PRIVILEGE),
    Probe(name="terminal", attack="terminal", advice=_PRIVILEGE),
    Probe(name="shared memory and open files", attack="shared_ipc", advice=_PRIVILEGE),
)
