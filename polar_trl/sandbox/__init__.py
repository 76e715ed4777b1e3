"""Where agents run. `build_backend` makes one of the kinds by its name."""

import sys
from pathlib import Path

from polar_trl.cache import VISIBLE, find_cache
from polar_trl.errors import ConfigError
from polar_trl.sandbox.base import Capabilities, SandboxBackend
from polar_trl.sandbox.limits import Limits

KINDS = ("local", "bwrap", "docker")


def build_backend(
    kind: str, *, image: str | None = None, limits: Limits = Limits(), run_id: str = "run"
) -> SandboxBackend:
    """A backend by its name. Its sandboxes see the installed agents and test environments, and the Python of this one.

    Args:
        kind: "local" (folders of this user, no isolation), "bwrap" or "docker".
        image: For tasks that name none; docker only.
        limits: Per session. Defaults that a kind cannot enforce are left out, which its `capabilities` say.
        run_id: Label of what is made.

    Raises `ConfigError` for an unknown kind, or limits other than the defaults that it cannot enforce, and
    `SandboxError` where it cannot work on this machine.
    """
    if kind not in KINDS:
        raise ConfigError(f"sandbox {kind!r} is not known; known are {', '.join(KINDS)}")
    if image is not None and kind != "docker":
        raise ConfigError(f"sandbox_image is read by the docker sandbox only, and the sandbox is {kind!r}")
    backend = _build(kind, image, limits, run_id)
    _require_limits(kind, backend.capabilities, limits)
    return backend


def _build(kind: str, image: str | None, limits: Limits, run_id: str) -> SandboxBackend:
    mounts = [*(find_cache(part) for part in VISIBLE), *find_python()]
    if kind == "docker":
        from polar_trl.sandbox.docker import DockerSandboxBackend

        return DockerSandboxBackend(image=image, limits=limits, mounts=mounts, run_id=run_id)
    if kind == "bwrap":
        from polar_trl.sandbox.bwrap import BwrapSandboxBackend

        return BwrapSandboxBackend(limits=limits, mounts=mounts)
    from polar_trl.sandbox.local import LocalSandboxBackend

    return LocalSandboxBackend()


def _require_limits(kind: str, capabilities: Capabilities, limits: Limits) -> None:
    enforced = {
        "memory_mb": capabilities.limits_memory,
        "cpus": capabilities.limits_memory,  # the same control groups
        "pids": kind != "local",
        "disk_mb": capabilities.limits_disk,
    }
    for name, is_enforced in enforced.items():
        value = getattr(limits, name)
        if not is_enforced and value != getattr(Limits(), name):
            raise ConfigError(
                f"sandbox_{name} is {value}, and the {kind!r} sandbox cannot enforce it for this user here; leave it "
                "out, or use the docker sandbox (as root, where the disk is to be limited)"
            )


def find_python() -> list[Path]:
    """Where the Python that runs this lies; empty where it is the system's, which an image has its own of."""
    return [path for path in (Path(sys.base_prefix),) if not path.is_relative_to("/usr")]
