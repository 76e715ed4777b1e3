"""What one session may use of its machine."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Enforced by the kernel where a backend can; what it cannot enforce, it declares."""

    memory_mb: int = 4096
    """Swap included."""
    cpus: float = 2.0
    pids: int = 512
    disk_mb: int = 4096
    """Work folder, HOME and /tmp together."""
