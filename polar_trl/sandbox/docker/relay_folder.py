"""Relay the proxy into a container's loopback address without root, through a folder mounted into it.

The folder holds a unix socket, which the proxy serves, a relay to it, which is the container's first process, and a
list of users with this one in it. An image in which neither of the relay's two programs runs raises `SandboxError`.
"""

import os
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from polar_trl.cache import find_cache
from polar_trl.errors import SandboxError
from polar_trl.sandbox.base import HOME
from polar_trl.sandbox.network import PROXY_ADDRESS

PLACE = "/run/polar-trl"
"""Mount point of the folder in the container."""
SOCKET, READY = "proxy.sock", "ready"
SCRIPTS = tuple(Path(__file__).parents[1] / "inside" / name for name in ("relay.py", "relay.js"))
PASSWD = "passwd"
START_TIMEOUT_S = 60.0
COMPLAINT = (
    "it has neither python3 nor node. Add one of them to the image, install an agent that brings a Node.js of its "
    "own, or run as root, which needs no relay"
)


class RelayFolder:
    """Makes the folder, for one container of this user.

    Args:
        user: This user's and group's number in the container, "UID:GID".
    """

    def __init__(self, folder: Path, user: str) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700)
        for script in SCRIPTS:
            shutil.copy(script, folder)
        # programs ask for the name and the home of whom they run as, and some fail where there is none
        lines = [f"agent:x:{user}::{HOME}:/bin/sh", "root:x:0:0::/root:/bin/sh"]
        (folder / PASSWD).write_text("\n".join([*lines, ""]))

    def open_listener(self) -> socket.socket:
        """Listen on the unix socket. Raises `SandboxError`."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            (self.folder / SOCKET).unlink(missing_ok=True)
            # a socket's address has 108 bytes at most, and the folder's path may have more
            listener.bind(f"/proc/self/fd/{fd}/{SOCKET}")
            listener.listen(128)
        except OSError as error:
            listener.close()
            raise SandboxError(f"cannot listen in {self.folder}: {error.strerror}") from error
        finally:
            os.close(fd)
        return listener

    def expect(self) -> None:
        """Forget an earlier relay; call before the container starts."""
        (self.folder / READY).unlink(missing_ok=True)

    def wait(self, is_running: Callable[[], bool], describe: Callable[[], str]) -> None:
        """Wait until the relay listens. Raises `SandboxError`.

        Args:
            is_running: Returns whether the container runs.
            describe: Returns the end of its log.
        """
        deadline = time.monotonic() + START_TIMEOUT_S
        ready, looks = self.folder / READY, 0
        while not ready.exists():
            looks += 1
            has_ended = looks % 10 == 0 and not is_running()
            if has_ended or time.monotonic() > deadline:
                raise SandboxError(f"the relay to the proxy did not start in the container: {describe()}")
            time.sleep(0.03)


def build_command(max_life_s: int) -> list[str]:
    """Build the command of the container's first process: the relay, run by the first program that works there."""
    python = shlex.quote(str(Path(sys.base_prefix, "bin", "python3")))
    nodes = f"{shlex.quote(str(find_cache('agents')))}/node-*/node_modules/.bin/node"
    arguments = shlex.join([*map(str, PROXY_ADDRESS), f"{PLACE}/{SOCKET}", f"{PLACE}/{READY}", str(max_life_s)])
    text = f"""
for python in python3 {python}; do
  if "$python" -I -S -c 'import asyncio' 2>/dev/null; then
    exec "$python" -I -S {PLACE}/relay.py {arguments}
  fi
done
for node in node {nodes}; do
  if "$node" --version >/dev/null 2>&1; then exec "$node" {PLACE}/relay.js {arguments}; fi
done
echo {shlex.quote(COMPLAINT)} >&2
exit 127
"""
    return ["sh", "-c", text]
