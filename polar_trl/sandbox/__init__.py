"""Sandboxes that agents run in. `build_backend` makes a backend by its name."""

from collections.abc import Sequence
from pathlib import Path

from polar_trl.errors import ConfigError
from polar_trl.sandbox.base import Capabilities, SandboxBackend
from polar_trl.sandbox.limits import Limits
from polar_trl.sandbox.python import find_python

KINDS = ("local", "bwrap", "docker")


def build_backend(
    kind: str,
    *,
    image: str | None = None,
    limits: Limits = Limits(),
    mounts: Sequence[Path] = (),
    run_id: str = "run",
) -> SandboxBackend:
    """Build a backend by its name. Its sandboxes see this machine's Python, without packages, and the `mounts`.

    Args:
        kind: "local" (folders of this user, no isolation), "bwrap" or "docker".
        image: For tasks that name none; docker only.
        limits: Per session. Defaults that a kind cannot enforce are left out, see its `capabilities`.
        mounts: Folders that they see, read-only at the same path: those of the agent (`Harness.folders`) and those of
            the tests (`tasks.environment.list_environments`).
        run_id: Label of the containers.

    Raises `ConfigError` for an unknown kind, or limits other than the defaults that it cannot enforce, and
    `SandboxError` where it cannot work on this machine.
    """
    if kind not in KINDS:
        raise ConfigError(f"sandbox {kind!r} is not known; known are {', '.join(KINDS)}")
    if image is not None and kind != "docker":
        raise ConfigError(f"sandbox_image is read by the docker sandbox only, and the sandbox is {kind!r}")
    backend = _build(kind, image, limits, [*mounts, *find_python()], run_id)
    _require_limits(kind, backend.capabilities, limits)
    return backend


def _build(kind: str, image: str | None, limits: Limits, mounts: Sequence[Path], run_id: str) -> SandboxBackend:
    if kind == "docker":
        from polar_trl.sandbox.docker.backend import DockerSandboxBackend

        return DockerSandboxBackend(image=image, limits=limits, mounts=mounts, run_id=run_id)
    if kind == "bwrap":
        from polar_trl.sandbox.bwrap.backend import BwrapSandboxBackend

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
