"""Sandboxes that agents run in. `build_backend` makes a backend by its name, `choose_kind` says what "auto" is."""

import os
from collections.abc import Sequence
from pathlib import Path

from polar_trl.errors import ConfigError, SandboxError
from polar_trl.sandbox.base import Capabilities, SandboxBackend
from polar_trl.sandbox.bwrap.backend import BwrapSandboxBackend
from polar_trl.sandbox.limits import Limits
from polar_trl.sandbox.local import LocalSandboxBackend, describe_local
from polar_trl.sandbox.python import find_python
from polar_trl.types import Task

KINDS = ("auto", "bwrap", "docker", "local")


def choose_kind(kind: str, *, image: str | None = None, tasks: Sequence[Task] = ()) -> str:
    """Return the kind that "auto" is for these tasks on this machine, docker or bwrap; every other name is itself.

    Without images it is bwrap. With images it is Docker or Podman where one is there for this user and can do it, and
    bwrap with unpacked images where that can. Raises `ConfigError` for an unknown one.
    """
    if kind not in KINDS:
        raise ConfigError(f"sandbox {kind!r} is not known; known are {', '.join(KINDS)}")
    if kind != "auto":
        return kind
    if image is None and not any(map(_needs_image, tasks)):
        return "bwrap"
    if not all(_can_unpack(task, image) for task in tasks):
        return "docker"
    from polar_trl.sandbox.docker.client import find_host

    is_refused = os.geteuid() != 0 and any(task.writable_root for task in tasks)
    return "bwrap" if is_refused or find_host() is None else "docker"


def _needs_image(task: Task) -> bool:
    """Return whether a task asks for an image, its root, or the network that only an engine has."""
    return task.image is not None or _is_built(task) or task.writable_root or task.network != "none"


def _can_unpack(task: Task, image: str | None) -> bool:
    """Return whether bubblewrap can do such a task in an unpacked image, or needs none."""
    has_image = image is not None or task.image is not None
    return task.network == "none" and (has_image or not (task.writable_root or _is_built(task)))


def _is_built(task: Task) -> bool:
    """Return whether its image is built from a Dockerfile of its own."""
    has_packages = task.workspace is not None and task.tests is not None and task.tests.requirements is not None
    return task.build_context is not None and not has_packages


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
        kind: "bwrap", "docker", "local" (folders of this user, no boundary), or "auto": see `choose_kind`.
        image: For tasks that name none; not of "local".
        limits: Per session. Defaults that a kind cannot enforce are left out, see its `capabilities`.
        mounts: Folders that they see, read-only at the same path: those of the agent (`Harness.folders`) and those of
            the tests (`tasks.environment.list_environments`).
        run_id: Label of the containers.

    Raises `ConfigError` for an unknown kind, or limits other than the defaults that it cannot enforce, and
    `SandboxError` where it cannot work on this machine.
    """
    kind = choose_kind(kind, image=image)
    if image is not None and kind == "local":
        raise ConfigError("sandbox_image is read by the docker and bwrap sandboxes, and the sandbox is 'local'")
    backend = _build(kind, image, limits, [*mounts, *find_python()], run_id)
    _require_limits(kind, backend.capabilities, limits)
    return backend


def describe_kinds() -> dict[str, str]:
    """Say in one line for each way to run agents whether it works on this machine, and what is missing."""
    said = {}
    for kind in ("docker", "bwrap"):
        try:
            backend = _build(kind, None, Limits(), (), "doctor")
        except SandboxError as error:
            said[kind] = f"no: {error}"
            continue
        can = backend.capabilities
        lacks = ["memory"] * (not can.limits_memory) + ["disk"] * (not can.limits_disk)
        said[kind] = "yes" + (f", without a limit of {' and '.join(lacks)}" if lacks else "")
        if kind == "docker" and os.geteuid() != 0:
            said[kind] += ", and not for tasks that write to their image's root (SWE-bench, Harbor)"
        if isinstance(backend, BwrapSandboxBackend):
            try:
                backend.try_images()
                said["bwrap with images"] = said[kind]
            except SandboxError as error:
                said["bwrap with images"] = f"no: {error}"
        backend.close()
    return {**said, "local": f"yes, but {describe_local()}"}


def _build(kind: str, image: str | None, limits: Limits, mounts: Sequence[Path], run_id: str) -> SandboxBackend:
    if kind == "docker":
        from polar_trl.sandbox.docker.backend import DockerSandboxBackend

        return DockerSandboxBackend(image=image, limits=limits, mounts=mounts, run_id=run_id)
    if kind == "local":
        return LocalSandboxBackend(mounts=mounts)
    try:
        return BwrapSandboxBackend(limits=limits, mounts=mounts, image=image)
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
