"""Where agents run. `build_backend` makes one of the kinds by its name."""

from collections.abc import Sequence
from pathlib import Path

from polar_trl.errors import ConfigError
from polar_trl.sandbox.base import SandboxBackend
from polar_trl.sandbox.limits import Limits

KINDS = ("local", "bwrap", "docker")


def build_backend(
    kind: str, *, image: str | None = None, limits: Limits = Limits(), mounts: Sequence[Path] = (), run_id: str = "run"
) -> SandboxBackend:
    """A backend by its name.

    Args:
        kind: "local" (folders of this user, no isolation), "bwrap" or "docker".
        image: For tasks that name none; docker only.
        limits: Per session; "local" has none.
        mounts: Host folders that sandboxes see read-only at the same path.
        run_id: Label of what is made.

    Raises `ConfigError` for an unknown kind, `SandboxError` where it cannot work on this machine.
    """
    if kind not in KINDS:
        raise ConfigError(f"sandbox {kind!r} is not known; known are {', '.join(KINDS)}")
    if image is not None and kind != "docker":
        raise ConfigError(f"sandbox_image is read by the docker sandbox only, and the sandbox is {kind!r}")
    if kind == "docker":
        from polar_trl.sandbox.docker import DockerSandboxBackend

        return DockerSandboxBackend(image=image, limits=limits, mounts=mounts, run_id=run_id)
    if kind == "bwrap":
        from polar_trl.sandbox.bwrap import BwrapSandboxBackend

        return BwrapSandboxBackend(limits=limits, mounts=mounts)
    from polar_trl.sandbox.local import LocalSandboxBackend

    return LocalSandboxBackend()
