"""Run every attack in every kind of sandbox that works here.

A row says that its attack was held if the attacker says so and nothing outside says otherwise: the victims are as they
were, and no limit was passed by what was seen of its processes. One that could not be run was not held.
"""

import json
import secrets
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from polar_trl.errors import ConfigError, PolarError
from polar_trl.sandbox.base import ExecResult, Sandbox, SandboxBackend
from polar_trl.sandbox.limits import Limits
from polar_trl.sandbox.seccomp import list_numbers
from polar_trl.tools.security.probes import PROBES, Probe
from polar_trl.tools.security.victims import MARK, Victims, Watch
from polar_trl.types import Task

LIMITS = Limits(memory_mb=256, cpus=0.5, pids=64, disk_mb=64)
INSIDE = Path(__file__).with_name("inside")
MODULE = "polar_trl.tools.security.inside.attack"
PROBE_TIMEOUT_S = 30.0
TRIED = "TRIED "
MOST_FAULTS = 5
LOCAL_ADVICE = "use `--sandbox bwrap` (apt-get install bubblewrap) or docker: the local sandbox does not hold this"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """The verdict on one attack in one kind of sandbox; the keys of the JSON report."""

    name: str
    backend: str
    held: bool
    detail: str = ""
    """What succeeded, or why it could not be tried."""
    advice: str = ""


def check_backend(kind: str, backend: SandboxBackend) -> Iterator[Row]:
    """Try all attacks in sandboxes of one kind. Raises `SandboxError` where none can be made."""
    with Victims(backend) as victims:
        box = backend.create(Task(id="attacker", instruction=""), "attacker")
        try:
            for path, content in list_files().items():
                box.put(f"~/{path}", content)
            for probe in PROBES:
                faults = run_probe(probe, box, victims, lifts=kind != "local")
                if probe.capability and not getattr(backend.capabilities, probe.capability):
                    faults.append("this user's sandbox does not limit it, by its own account")  # a busy machine may
                more = [f"and {len(faults) - MOST_FAULTS} more"] if len(faults) > MOST_FAULTS else []
                advice = LOCAL_ADVICE if kind == "local" else probe.advice
                yield Row(
                    name=probe.name,
                    backend=kind,
                    held=not faults,
                    detail="; ".join([*faults[:MOST_FAULTS], *more]),
                    advice=advice if faults else "",
                )
        finally:
            box.destroy()


def run_probe(probe: Probe, box: Sandbox, victims: Victims, *, lifts: bool = True) -> list[str]:
    """Run one attack; return what it reached, nothing where it was held.

    Args:
        lifts: Whether it may change the limits of control groups; false where they could be the trainer's own.
    """
    given = {
        **victims.describe(),
        "limits": {"memory_mb": LIMITS.memory_mb, "pids": LIMITS.pids, "disk_mb": LIMITS.disk_mb},
        "lifts": lifts,
        "numbers": list_numbers(),
        "shown": [str(Path(json.__file__).parent)],
    }
    command = f'PYTHONPATH=~ python3 -S -m {MODULE} {probe.attack} "$(cat ~/given.json)"'
    try:
        box.put("~/given.json", json.dumps(given).encode())
        with Watch(secrets.token_hex(8)) as watch:
            result = box.run(command, env={MARK: watch.token}, timeout_s=PROBE_TIMEOUT_S)
    except PolarError as error:
        return [f"could not run: {error}"]
    faults = [*victims.find_harm(), *watch.find_excess(LIMITS)]
    said = _parse_report(result)
    if said is None and not (probe.meets_limits and result.out_of_memory):
        faults.append(f"could not run: {(result.stderr or result.stdout).strip()[-200:]}")
    if probe.meets_limits and not watch.most_processes:
        faults.append("could not run: its processes cannot be seen from here")
    return [*faults, *(said or ())]


def list_files() -> dict[str, bytes]:
    """List the attacker's files by their path below HOME, where no package's `__init__` is: only they are imported."""
    folder = MODULE.replace(".", "/").rpartition("/")[0]
    return {f"{folder}/{path.name}": path.read_bytes() for path in INSIDE.glob("*.py") if path.stem != "__init__"}


def find_images() -> list[str]:
    """List the container images at hand, those with Python in their name first. Raises `SandboxError`."""
    from polar_trl.sandbox.docker.client import connect

    tags = [tag for image in connect(None).images.list() for tag in image.tags]
    return sorted(tags, key=lambda tag: ("python" not in tag, tag))


def build(kind: str, image: str | None) -> SandboxBackend:
    """Build a backend with limits that are quickly reached. Raises `SandboxError` or `ConfigError`."""
    if kind == "bwrap":
        from polar_trl.sandbox.bwrap import BwrapSandboxBackend

        return BwrapSandboxBackend(limits=LIMITS, image=image)
    if kind == "docker":
        from polar_trl.sandbox.docker import DockerSandboxBackend

        image = image or next(iter(find_images()), None)
        if image is None:
            raise ConfigError("no container image is at hand; name one that has Python with --image")
        return DockerSandboxBackend(limits=LIMITS, image=image)
    from polar_trl.sandbox.local import LocalSandboxBackend

    return LocalSandboxBackend()


def check_security(
    kinds: Sequence[str], image: str | None = None, *, default: str = "bwrap"
) -> tuple[list[Row], dict[str, str]]:
    """Try kinds of sandboxes, all at once; return the rows, and why a kind does not work here.

    Args:
        image: For containers, where None takes one that is at hand; and for bubblewrap, where that is the default.
        default: The kind that a run takes.
    """

    def check(kind: str) -> list[Row] | PolarError:
        try:
            backend = build(kind, image if kind in ("docker", default) else None)
        except PolarError as error:
            return error
        try:
            return list(check_backend(kind, backend))
        finally:
            backend.close()

    rows: list[Row] = []
    missing: dict[str, str] = {}
    with ThreadPoolExecutor(len(kinds)) as threads:
        for kind, result in zip(kinds, threads.map(check, kinds), strict=True):
            if isinstance(result, PolarError):
                missing[kind] = str(result)
            else:
                rows += result
    return rows, missing


def _parse_report(result: ExecResult) -> list[str] | None:
    """Read what the attacker says to have done; None where it says nothing."""
    for line in reversed(result.stdout.splitlines()):
        if line.startswith(TRIED):
            said: list[str] = json.loads(line.removeprefix(TRIED))
            return said
    return None
