"""Remove the sandboxes of dead processes, and return what was removed.

Containers, session folders with what is mounted in them, processes and control groups carry their owner's tag. What
belongs to a process that lives, or that cannot be seen (one of another machine with the same engine), stays.
"""

from dataclasses import dataclass
from pathlib import Path

from polar_trl.errors import SandboxError
from polar_trl.sandbox.cgroup import reap_cgroups
from polar_trl.sandbox.owner import count_session_folders, find_state_folder, reap_session_folders


@dataclass(frozen=True, kw_only=True, slots=True)
class Cleaned:
    """Names of everything removed, and why an engine was not asked; the keys of the JSON report."""

    containers: list[str]
    folders: list[str]
    """Of sessions, with all that was mounted in them."""
    cgroups: list[str]
    live_sessions: int
    """Session folders of processes that are running."""
    engine: str
    """Why no containers were looked for; empty where an engine answered."""


def clean(root: Path | None = None) -> Cleaned:
    """Remove what dead processes of this user left on this machine, and in its container engine.

    Args:
        root: Where session folders are kept; None is the user's state folder.
    """
    # here, so that the rest of the package does without it
    from polar_trl.sandbox.docker.backend import reap_containers
    from polar_trl.sandbox.docker.client import connect

    root = root or find_state_folder()
    containers, engine = [], ""
    try:
        client = connect(None)
        try:
            containers = reap_containers(client)
        finally:
            client.close()
    except SandboxError as error:
        engine = str(error)
    # the containers first: what is mounted in them cannot be removed
    folders = reap_session_folders(root)
    return Cleaned(
        containers=containers,
        folders=folders,
        cgroups=reap_cgroups(folders),
        live_sessions=count_session_folders(root),
        engine=engine,
    )
