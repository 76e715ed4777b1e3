"""Resource limits of one session."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits that the kernel enforces, where a backend's `Capabilities` say so."""

    memory_mb: int = 4096
    """Swap included."""
    cpus: float = 2.0
    pids: int = 512
    disk_mb: int = 4096
    """Work folder, HOME and /tmp together."""
