"""Sandboxes that agents run in. `build_backend` makes a backend by its name, `choose_kind` says what "auto" is."""

from collections.abc import Sequence
from pathlib import Path

from polar_trl.errors import ConfigError, SandboxError
from polar_trl.sandbox.base import Capabilities, SandboxBackend
from polar_trl.sandbox.limits import Limits
from polar_trl.sandbox.local import LocalSandboxBackend, describe_local
from polar_trl.sandbox.python import find_python
from polar_trl.types import Task

KINDS = ("auto", "bwrap", "docker", "local")


def choose_kind(kind: str, *, image: str | None = None, tasks: Sequence[Task] = ()) -> str:
    """Return the kind that "auto" is for these tasks, docker or bwrap; every other name is itself.

    Raises `ConfigError` for an unknown one.
    """
    if kind not in KINDS:
        raise ConfigError(f"sandbox {kind!r} is not known; known are {', '.join(KINDS)}")
    if kind != "auto":
        return kind
    return "docker" if image is not None or any(map(_needs_engine, tasks)) else "bwrap"


def _needs_engine(task: Task) -> bool:
    """Return whether a task asks for what only a container engine has: an image, its root, a network."""
    has_packages = task.workspace is not None and task.tests is not None and task.tests.requirements is not None
    is_built = task.build_context is not None and not has_packages
    return task.image is not None or is_built or task.writable_root or task.network != "none"


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
        kind: "bwrap", "docker", "local" (folders of this user, no boundary), or "auto": docker where an image is
            named, else bwrap.
        image: For tasks that name none; docker only.
        limits: Per session. Defaults that a kind cannot enforce are left out, see its `capabilities`.
        mounts: Folders that they see, read-only at the same path: those of the agent (`Harness.folders`) and those of
            the tests (`tasks.environment.list_environments`).
        run_id: Label of the containers.

    Raises `ConfigError` for an unknown kind, or limits other than the defaults that it cannot enforce, and
    `SandboxError` where it cannot work on this machine.
    """
    kind = choose_kind(kind, image=image)
    if image is not None and kind != "docker":
        raise ConfigError(f"sandbox_image is read by the docker sandbox only, and the sandbox is {kind!r}")
    backend = _build(kind, image, limits, [*mounts, *find_python()], run_id)
    _require_limits(kind, backend.capabilities, limits)
    return backend


def _build(kind: str, image: str | None, limits: Limits, mounts: Sequence[Path], run_id: str) -> SandboxBackend:
    if kind == "docker":
        from polar_trl.sandbox.docker.backend import DockerSandboxBackend

        return DockerSandboxBackend(image=image, limits=limits, mounts=mounts, run_id=run_id)
    if kind == "local":
        return LocalSandboxBackend(mounts=mounts)
    from polar_trl.sandbox.bwrap.backend import BwrapSandboxBackend

    try:
        return BwrapSandboxBackend(limits=limits, mounts=mounts)
    except SandboxError as error:
        raise SandboxError(f"{error}; --sandbox local needs nothing, but {describe_local()}") from error


def _require_limits(kind: str, capabilities: Capabilities, limits: Limits) -> None:
    enforced = {
        "memory_mb": capabilities.limits_memory,
        "cpus": capabilities.limits_memory,  # the same control groups
        "pids": kind == "bwrap" or capabilities.limits_memory,
        "disk_mb": capabilities.limits_disk,
    }
    for name, is_enforced in enforced.items():
        value = getattr(limits, name)
        if not is_enforced and value != getattr(Limits(), name):
            raise ConfigError(
                f"sandbox_{name} is {value}, and the {kind!r} sandbox cannot enforce it for this user here; leave it "
                "out, or use the docker sandbox (as root, where the disk is to be limited)"
            )
