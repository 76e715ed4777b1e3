"""Carry the connections of a node's sandboxes to the trainer's gateway, each behind its session's token.

Both ends probe their connections (TCP keepalive): the kernel answers for a process that is busy or stopped, and a
network that was cut in silence ends them within `SILENCE_S`. Over TLS both sides show a certificate, those that Ray
itself is given (RAY_USE_TLS and RAY_TLS_*).
"""

import asyncio
import os
import socket
import ssl
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from polar_trl.errors import ConfigError

_T = TypeVar("_T")

BLOCK_BYTES = 1 << 16
CONNECT_TIMEOUT_S = 20.0
PROBE_S = 10
SILENCE_S = 4 * PROBE_S
"""Seconds after which a peer that says nothing, not even by its kernel, is lost."""
TLS_VARIABLES = ("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT")

Address = tuple[str, int]


class Loop:
    """An event loop on a thread of its own, which ends with the process."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name=name, daemon=True).start()

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run on the loop, and wait for the result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def build_tls(purpose: ssl.Purpose) -> ssl.SSLContext | None:
    """Build the context of Ray's own certificates; None where Ray uses none. Raises `ConfigError`.

    Args:
        purpose: SERVER_AUTH connects, CLIENT_AUTH listens.
    """
    if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return None
    if missing := [name for name in TLS_VARIABLES if not os.environ.get(name)]:
        raise ConfigError(f"RAY_USE_TLS is set, and {', '.join(missing)} is not: name the files, as for Ray")
    certificate, key, authority = (os.environ[name] for name in TLS_VARIABLES)
    try:
        context = ssl.create_default_context(purpose, cafile=authority)
        context.load_cert_chain(certificate, key)
    except OSError as error:
        raise ConfigError(f"the certificates of RAY_TLS_* cannot be read: {error}") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def set_probes(connection: socket.socket) -> None:
    """Have the kernel end a TCP connection whose other end is silent for `SILENCE_S`."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, PROBE_S),
        (socket.TCP_KEEPINTVL, PROBE_S),
        (socket.TCP_KEEPCNT, SILENCE_S // PROBE_S - 1),
        (socket.TCP_USER_TIMEOUT, 1000 * SILENCE_S),
        (socket.TCP_NODELAY, 1),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


async def join(
    one: tuple[asyncio.StreamReader, asyncio.StreamWriter], other: tuple[asyncio.StreamReader, asyncio.StreamWriter]
) -> None:
    """Carry bytes both ways until one side ends; then both are closed."""
    await asyncio.gather(_pump(one[0], other[1]), _pump(other[0], one[1]))


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):  # the other pump closes its side then
        while block := await reader.read(BLOCK_BYTES):
            writer.write(block)
            await writer.drain()
    writer.close()


class Relay:
    """Accepts connections on a sandbox's listener, and carries each to the gateway. Made on the node.

    Args:
        loop: Shared by the relays of a process.
        listener: Of the sandbox; owned by the relay.
        gateway: The trainer's.
        token: Of the session, which every connection begins with.
    """

    def __init__(
        self, loop: Loop, listener: socket.socket, gateway: Address, token: bytes, tls: ssl.SSLContext | None
    ) -> None:
        self.failure = ""
        """What kept a connection of the agent from the trainer, the last time; "" where nothing has."""
        self._loop = loop
        self._gateway = gateway
        self._token = token
        self._tls = tls
        self._writers: set[asyncio.StreamWriter] = set()
        self._server = loop.run(self._start(listener))

    def close(self) -> None:
        """Stop listening, and close what is open."""
        self._loop.run(self._close())

    async def _start(self, listener: socket.socket) -> asyncio.Server:
        start = asyncio.start_unix_server if listener.family == socket.AF_UNIX else asyncio.start_server
        return await start(self._serve, sock=listener)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                up = await asyncio.open_connection(*self._gateway, ssl=self._tls)
            set_probes(up[1].get_extra_info("socket"))
            up[1].write(self._token)
            self._writers.add(up[1])
            await join((reader, writer), up)
            self._writers.discard(up[1])
        except (OSError, TimeoutError) as error:
            self.failure = f"{type(error).__name__}: {error}"
        finally:
            writer.close()
            self._writers.discard(writer)

    async def _close(self) -> None:
        self._server.close()
        for writer in list(self._writers):
            writer.close()


def hold_line(gateway: Address, token: bytes, tls: ssl.SSLContext | None, on_end: Callable[[], None]) -> None:
    """Connect to the gateway; `on_end` is called once the connection ends: there is no trainer any more.

    Raises `OSError` where it cannot be reached.
    """
    connection = socket.create_connection(gateway, timeout=CONNECT_TIMEOUT_S)
    set_probes(connection)
    if tls is not None:
        connection = tls.wrap_socket(connection, server_hostname=gateway[0])
    connection.sendall(token)
    connection.settimeout(None)

    def watch() -> None:
        with suppress(OSError):
            connection.recv(1)
        on_end()

    threading.Thread(target=watch, name="polar-line", daemon=True).start()
