"""Serve the model to agents over HTTP, in every provider's dialect, and have each session's calls recorded.

Runs on a thread with an event loop of its own. Requests without a session's key are refused (`WireError`, status 401),
and no reply is sent that is not on record. `endpoint` answers a request, `connections` bounds what agents may use.
"""

import asyncio
import os
import secrets
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Self

import uvicorn

from polar_trl.engine.base import Engine, GenerationParams
from polar_trl.engine.gate import GateStats
from polar_trl.errors import ConfigError, LawError
from polar_trl.recording.log import SessionLog
from polar_trl.recording.session import (
    Classify,
    ModelBackend,
    Session,
    SessionLimits,
    always_policy,
)
from polar_trl.sandbox.network import PROXY_ADDRESS
from polar_trl.serving.connections import Connection, Connections, raise_open_file_limit
from polar_trl.serving.endpoint import build_app
from polar_trl.tokens.base import Renderer
from polar_trl.types import Endpoint

BACKLOG = 128
"""Connections that the system accepts before the proxy can count them."""
NewSession = tuple[SessionLog, SessionLimits, Classify]
NUM_WORKERS = max(2, min(8, (os.cpu_count() or 2) // 2))
"""Threads for large bodies. Tokenizers let go of the interpreter's lock while they encode."""


def listen(host: str, port: int) -> socket.socket:
    """Listen; port 0 lets the system choose. Raises `ConfigError` if the address cannot be listened on."""
    try:
        return socket.create_server((host, port), backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        advice = "choose another port, or 0 to let the system choose one"
        reason = "ports are 0 to 65535"
        if isinstance(error, OSError):  # whose own text names the address as well, but for names of hosts
            reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error.strerror)
        raise ConfigError(f"cannot listen on {host}:{port} ({reason}): {advice}") from error


class Proxy:
    """Serves every dialect to any number of sessions, each under a random key of its own.

    Args:
        engine: Samples; awaited on the proxy's event loop.
        renderer: The policy's chat format; that of the engine where it has its own.
        params: How to sample. An agent's request can lower `max_tokens` and add to `stop`, nothing else.
        model: The name that agents are told.
        host: Address to listen on.
        port: 0 lets the system choose.
        ping_interval_s: How often an open stream hears a ping while the engine works.
        live: Streams tell text while it is sampled. In training nobody reads it, so streams carry whole answers.
        begin_session: Called on the event loop with each key that is not known: the session that begins with it, or
            None where it is to stay unknown.
    """

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        *,
        params: GenerationParams,
        model: str = "policy",
        host: str = "127.0.0.1",
        port: int = 0,
        ping_interval_s: float = 10.0,
        live: bool = False,
        begin_session: Callable[[str], NewSession | None] = lambda api_key: None,
    ) -> None:
        workers = ThreadPoolExecutor(NUM_WORKERS, thread_name_prefix="polar-proxy-worker")
        self._backend = ModelBackend(
            engine=engine, renderer=renderer, params=params, model=model, workers=workers, live=live
        )
        self._begin_session = begin_session
        self._address = (host, port)
        self._ping_interval_s = ping_interval_s
        self._sessions: dict[str, Session] = {}
        self._listeners: dict[str, asyncio.Server] = {}
        self.origin = ""
        """Such as "http://127.0.0.1:41123", once started."""

    def start(self) -> None:
        """Listen, and serve from a thread. Raises `ConfigError` if the address cannot be listened on."""
        # ours and not uvicorn's: the port is known, and connections queue, before the thread runs
        listener = listen(*self._address)
        self.origin = f"http://{self._address[0]}:{listener.getsockname()[1]}"
        # half of the files are for sandboxes, records and checkpoints
        self._connections = Connections(max_open=raise_open_file_limit() // 2)
        build_connection: Any = partial(Connection, connections=self._connections)
        config = uvicorn.Config(
            build_app(self._find_session, self._connections, self._backend.model, self._ping_interval_s),
            http=build_connection,
            backlog=BACKLOG,
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            log_level="error",  # a line for each request that is no HTTP would fill the trainer's log
            # agents keep connections open while their tools run; one that closes under a request looks like a crash
            timeout_keep_alive=3600,
            timeout_graceful_shutdown=5,
        )
        self._server = uvicorn.Server(config)
        new_loop = config.get_loop_factory() or asyncio.new_event_loop
        self._loop = new_loop()
        self._thread = threading.Thread(target=self._serve, args=(listener,), name="polar-proxy", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Close every session, then end the thread. Raises the first `LawError` that a session broke."""
        broken: list[LawError] = []
        for api_key in list(self._sessions):
            try:
                self.close_session(api_key)
            except LawError as error:  # the other sessions' calls still have to end
                broken.append(error)
        self._server.should_exit = True
        self._thread.join()
        self._backend.workers.shutdown()
        if broken:
            raise broken[0]

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def open_session(
        self,
        log: SessionLog,
        limits: SessionLimits = SessionLimits(),
        classify: Classify = always_policy,
        listener: socket.socket | None = None,
        gate_stats: GateStats | None = None,
        api_key: str | None = None,
    ) -> Endpoint:
        """Make a key under which calls are served, and recorded in `log`.

        Args:
            log: Of this session.
            limits: What it may use.
            classify: Tells an agent's side requests from the policy's own.
            listener: A listening socket inside the agent's own network, or one that is relayed to from there; served
                and owned by this session.
            gate_stats: Filled with what the gate sees of this session.
            api_key: The key; None makes a random one.
        """
        api_key = api_key or secrets.token_urlsafe(24)
        session = self._sessions[api_key] = Session(self._backend, log, limits, classify, gate_stats)
        origin = self.origin
        if listener is not None:
            # a unix socket stands at the end of a relay, which listens where agents always look
            is_relayed = listener.family == socket.AF_UNIX
            origin = "http://{}:{}".format(*(PROXY_ADDRESS if is_relayed else listener.getsockname()))
            self._listeners[api_key] = asyncio.run_coroutine_threadsafe(
                self._serve_on(listener, session), self._loop
            ).result()
        return replace(self.describe(api_key), origin=origin)

    def describe(self, api_key: str) -> Endpoint:
        """Build what an agent with this key is told."""
        return Endpoint(
            origin=self.origin,
            api_key=api_key,
            model=self._backend.model,
            max_model_len=self.max_model_len,
            max_tokens=self.max_tokens,
        )

    def close_session(self, api_key: str) -> None:
        """Abort what is in flight and wait for it to end; later requests get 401. Closing twice does nothing.

        Raises the `LawError` that a call of this session broke, if one did.
        """
        session = self._sessions.pop(api_key, None)
        if session is None:
            return
        if (listener := self._listeners.pop(api_key, None)) is not None:
            self._loop.call_soon_threadsafe(listener.close)
        asyncio.run_coroutine_threadsafe(session.close(), self._loop).result()
        if session.broken_law is not None:
            raise session.broken_law

    @property
    def max_model_len(self) -> int:
        """The engine's: tokens of a prompt and its answer together."""
        return self._backend.engine.max_model_len

    @property
    def max_tokens(self) -> int:
        """The most tokens of one answer."""
        return self._backend.params.max_tokens

    @property
    def policy_version(self) -> int:
        """The engine's: grows by one whenever the weights change."""
        return self._backend.engine.policy_version

    def hold(self) -> None:
        """Let no further call of any session through to the engine; returns once those in flight have their answers.

        Later calls wait, and their streams are kept alive by pings, until `release`. The weights may change, and the
        engine may sleep, in between. Holding twice is holding once.
        """
        asyncio.run_coroutine_threadsafe(self._backend.gate.hold(), self._loop).result()

    def release(self) -> None:
        """Let calls through again, those first that waited."""
        self._loop.call_soon_threadsafe(self._backend.gate.release)

    def _find_session(self, api_key: str) -> Session | None:
        if api_key not in self._sessions and (begun := self._begin_session(api_key)):
            self.open_session(*begun, api_key=api_key)
        return self._sessions.get(api_key)

    async def _serve_on(self, listener: socket.socket, session: Session) -> asyncio.Server:
        """Serve a session's own socket, as uvicorn does with the one that all share."""
        server = self._server
        while not server.started:
            await asyncio.sleep(0.01)

        def build_protocol() -> asyncio.Protocol:
            return Connection(
                connections=self._connections,
                session=session,
                config=server.config,
                server_state=server.server_state,
                app_state=server.lifespan.state,
            )

        loop = asyncio.get_running_loop()
        if listener.family == socket.AF_UNIX:
            return await loop.create_unix_server(build_protocol, sock=listener)
        return await loop.create_server(build_protocol, sock=listener)

    async def _serve_and_sweep(self, listener: socket.socket) -> None:
        sweeping = asyncio.create_task(self._connections.sweep())
        try:
            await self._server.serve(sockets=[listener])
        finally:
            sweeping.cancel()

    def _serve(self, listener: socket.socket) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve_and_sweep(listener))
        finally:
            listener.close()
            self._loop.close()
