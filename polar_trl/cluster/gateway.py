"""The trainer's gateway: one TCP port, at which the nodes' relays show a session's token and get to its socket.

A connection that shows no known token within `TOKEN_TIMEOUT_S` is closed. The port is bound to one address; beyond
the loopback it speaks TLS.
"""

import asyncio
import hmac
import itertools
import secrets
import socket
import ssl
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from polar_trl.cluster.relay import Address, Loop, join, set_probes
from polar_trl.errors import ConfigError

TOKEN_TIMEOUT_S = 5.0
_NAME_BYTES, _SECRET_BYTES = 16, 32
"""A token is a name, by which its route is found, and a secret, which is compared in constant time."""


@dataclass(eq=False, slots=True)
class Route:
    """What a token leads to: a unix socket that the proxy serves, or a line that says when a node is lost."""

    token: bytes
    path: Path | None = None
    on_end: Callable[[], None] | None = None
    writers: set[asyncio.StreamWriter] = field(default_factory=set)

    def listen(self) -> socket.socket:
        """Listen where its connections come out; the caller closes it."""
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self.path))
        listener.listen(128)
        return listener


class Gateway:
    """Listens at one address for the nodes' connections.

    Args:
        host: Address of this machine that the nodes reach.
        tls: None on the loopback.

    Raises `ConfigError` if the address cannot be listened on.
    """

    def __init__(self, host: str, tls: ssl.SSLContext | None) -> None:
        self._routes: dict[bytes, Route] = {}
        self._numbers = itertools.count()
        try:
            listener = socket.create_server((host, 0), backlog=1024)
        except OSError as error:
            raise ConfigError(f"sandbox_cluster: cannot listen on {host} for the nodes ({error.strerror})") from error
        self._folder = tempfile.TemporaryDirectory(prefix="polar-gateway-")
        self._loop = Loop("polar-gateway")
        self.address: Address = (host, listener.getsockname()[1])
        self._server = self._loop.run(self._start(listener, tls))

    def open_route(self) -> Route:
        """Make a route for a session."""
        route = Route(secrets.token_bytes(_NAME_BYTES + _SECRET_BYTES))
        route.path = Path(self._folder.name, str(next(self._numbers)))  # short: a socket's path has 107 bytes
        self._routes[route.token[:_NAME_BYTES]] = route
        return route

    def open_line(self, on_end: Callable[[], None]) -> Route:
        """Make a route for a node's line; `on_end` is called on the gateway's thread once that ends by itself."""
        route = Route(secrets.token_bytes(_NAME_BYTES + _SECRET_BYTES), on_end=on_end)
        self._routes[route.token[:_NAME_BYTES]] = route
        return route

    def shut(self, route: Route) -> None:
        """Close a route and the connections through it. Twice does no harm."""
        self._routes.pop(route.token[:_NAME_BYTES], None)
        route.on_end = None
        self._loop.run(self._close(route))
        if route.path is not None:
            route.path.unlink(missing_ok=True)

    def stop(self) -> None:
        """Close the port and every route."""
        for route in list(self._routes.values()):
            self.shut(route)
        self._loop.run(self._end())
        self._folder.cleanup()

    async def _start(self, listener: socket.socket, tls: ssl.SSLContext | None) -> asyncio.Server:
        handshake_s = None if tls is None else TOKEN_TIMEOUT_S
        return await asyncio.start_server(self._serve, sock=listener, ssl=tls, ssl_handshake_timeout=handshake_s)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            set_probes(writer.get_extra_info("socket"))
            route = await self._find_route(reader)
            if route is None:
                return
            route.writers.add(writer)
            try:
                await self._pass(route, reader, writer)
            finally:
                route.writers.discard(writer)
        except OSError:
            pass  # the session's socket is closed: it has ended
        finally:
            writer.close()

    async def _find_route(self, reader: asyncio.StreamReader) -> Route | None:
        try:
            async with asyncio.timeout(TOKEN_TIMEOUT_S):
                token = await reader.readexactly(_NAME_BYTES + _SECRET_BYTES)
        except (TimeoutError, asyncio.IncompleteReadError):
            return None
        route = self._routes.get(token[:_NAME_BYTES])
        return route if route is not None and hmac.compare_digest(route.token, token) else None

    async def _pass(self, route: Route, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if route.path is not None:
            await join((reader, writer), await asyncio.open_unix_connection(route.path))
            return
        with suppress(OSError):
            await reader.read(1)
        if route.on_end is not None:
            route.on_end()

    async def _close(self, route: Route) -> None:
        for writer in list(route.writers):
            writer.close()

    async def _end(self) -> None:
        self._server.close()
