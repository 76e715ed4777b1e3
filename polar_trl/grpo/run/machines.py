"""Check what the ranks of a run must have in common before anything is loaded: network, folder, versions, settings.

A rank that fails alone would leave the others waiting in their next collective, for as long as `ddp_timeout`. Here all
of them end, and each says which machine it was.
"""

import hashlib
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from accelerate.utils import broadcast_object_list, gather_object

from polar_trl.errors import ConfigError
from polar_trl.grpo.logs.redact import Redactor
from polar_trl.grpo.logs.settings_log import list_versions, read_arguments
from polar_trl.run_folder import LOCK_FILE, own_folder

_INTERFACE = "GLOO_SOCKET_IFNAME"
NUM_LOOKS = 10
"""A second apart: a network file system may show a file of another machine late."""
_SHOWN = 100
"""Characters of a value."""
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""Of an object in memory, which no two processes have alike."""


def choose_interface() -> None:
    """Have gloo use the network by which this machine reaches the first one. Call before the ranks are connected.

    By itself gloo takes the address that the host's own name resolves to. Where that is none, or 127.0.1.1 as Debian
    sets it up, it is the loopback's, to which no other machine connects: their ranks fail, and this one waits.

    Raises `ConfigError` where only the loopback leads there.
    """
    if int(os.environ.get("GROUP_WORLD_SIZE", "1")) < 2 or _INTERFACE in os.environ:  # torch's launcher sets the first
        return
    first = os.environ["MASTER_ADDR"]
    try:
        kind, *_, target = socket.getaddrinfo(first, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing
            own = probe.getsockname()[0]
    except OSError as error:
        raise ConfigError(
            f"the first machine, {first}, cannot be reached from {socket.gethostname()}: {error}"
        ) from None
    interfaces = psutil.net_if_addrs().items()
    name = next((name for name, found in interfaces if any(each.address == own for each in found)), "lo")
    if name == "lo":
        raise ConfigError(
            f"{first} is the loopback on {socket.gethostname()}, which other machines do not reach: give the first "
            f"machine's address as --main_process_ip, or set {_INTERFACE}"
        )
    os.environ[_INTERFACE] = name


@contextmanager
def failing_together() -> Iterator[None]:
    """End all ranks where one of them fails inside the block (a collective).

    That one raises what it raised, and the others `ConfigError` with its machine and its message.
    """
    failed: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001 - raised below, once the others know
        failed = error
    problems = gather_object(
        [None if failed is None else f"{socket.gethostname()}: {failed or type(failed).__name__}"]
    )
    if failed is not None:
        raise failed
    for rank, problem in enumerate(problems):
        if problem is not None:
            raise ConfigError(f"rank {rank} on {problem}")


def require_same_run(*arguments: Any, **facts: Any) -> None:
    """Raise `ConfigError` on all ranks where versions, arguments or facts of the run are not the same on all.

    Args:
        arguments: Dataclasses.
    """
    versions = {f"the version of {name}": value for name, value in list_versions().items() if name != "system"}
    whole, _ = read_arguments(arguments)
    require_alike(versions | Redactor(whole).redact(whole) | facts)


def require_alike(facts: Mapping[str, Any], advice: str = "give all machines the same") -> None:
    """Raise `ConfigError` on all ranks where a fact is another one on one of them (a collective).

    Args:
        facts: By names that the message has.
    """
    shown = {name: _show(value) for name, value in facts.items()}
    (first_host, first), *others = gather_object([(socket.gethostname(), shown)])
    for rank, (host, own) in enumerate(others, 1):
        differing = [name for name in first | own if own.get(name) != first.get(name)]
        if differing:
            name, *rest = differing
            more = f" (and {', '.join(rest)} differ)" if rest else ""
            raise ConfigError(
                f"{name} is {own.get(name)} on {host} (rank {rank}) and {first.get(name)} on {first_host} (rank 0)"
                f"{more}: {advice}"
            )


def own_output_dir(args: Any) -> None:
    """Lock the run's folder until this process ends: rank 0 has it for all (a collective).

    Raises `ConfigError` on all ranks if another process has it, or if it is not one folder on all machines.
    """
    folder = Path(args.output_dir)
    with failing_together():
        if args.process_index == 0:
            own_folder(folder)
    marks = [_read_mark(folder) if args.process_index == 0 else None, socket.gethostname()]
    mark, host = broadcast_object_list(marks)
    with failing_together():
        _require_mark(folder, mark, host)


def _require_mark(folder: Path, mark: bytes, first_host: str) -> None:
    for _ in range(NUM_LOOKS):
        if _read_mark(folder) == mark:
            return
        time.sleep(1)
    raise ConfigError(
        f"output_dir {folder.resolve()} is not the folder that rank 0 has on {first_host}: put it on a file system "
        "that all machines share"
    )


def _read_mark(folder: Path) -> bytes:
    """Read what the process that has a folder says of itself there: no other start says the same."""
    try:
        return (folder / LOCK_FILE).read_bytes()
    except OSError:
        return b""


def _show(value: Any) -> str:
    text = _ADDRESS.sub("", str(value))
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... (digest {digest})"
