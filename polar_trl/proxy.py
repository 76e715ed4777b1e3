"""The model that agents talk to: an HTTP request of a session to a recorded call, and the reply rendered from it.

Runs on a thread with an event loop of its own. Knows no dialect by name and no token by meaning. It refuses to send
a reply that is not on record, and to sample twice for one request.
"""

import asyncio
import hashlib
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import Self, TypeVar

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route as HTTPRoute
from starlette.types import Receive, Scope, Send

from polar_trl.engine.base import Engine, GenerationParams
from polar_trl.errors import ConfigError, ContextOverflowError, EngineError, LawError, RenderError, WireError
from polar_trl.record import SessionLog
from polar_trl.tokens.base import Renderer
from polar_trl.tokens.continuation import Continuations, Prompt
from polar_trl.types import Call, ChatRequest, Completion, Endpoint, Message
from polar_trl.wire import DIALECTS
from polar_trl.wire.base import Dialect, Incoming, ParsedRequest, ReplyHead, Route

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

MAX_BODY_BYTES = 64 << 20
INLINE_BODY_BYTES = 64 << 10
"""Smaller bodies are worked on in the event loop: that takes less time than a hop to a thread and back."""
BUDGET_TEXT = "The budget of this session is used up. Stop here: no further work will be counted."


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionLimits:
    """What one session may use. After that, each reply is a final message that is never trained."""

    max_calls: int = 200
    max_sampled_tokens: int | None = None


class Proxy:
    """Serves every dialect to any number of sessions, each under a random key of its own.

    Args:
        engine: Samples; awaited on the proxy's event loop.
        renderer: The policy's chat format.
        params: How to sample. An agent's request can lower `max_tokens` and add to `stop`, nothing else.
        model: The name that agents are told.
        host: Address to listen on.
        port: 0 lets the system choose.
        ping_interval_s: How often an open stream hears a ping while the engine works.
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
    ) -> None:
        workers = ThreadPoolExecutor(2, thread_name_prefix="polar-proxy-worker")
        self._policy = _Policy(engine=engine, renderer=renderer, params=params, model=model, workers=workers)
        self._address = (host, port)
        self._ping_interval_s = ping_interval_s
        self._sessions: dict[str, _Session] = {}
        self.origin = ""
        """Such as "http://127.0.0.1:41123", once started."""

    def start(self) -> None:
        """Listen, and serve from a thread. Raises `ConfigError` if the address cannot be listened on."""
        host, port = self._address
        try:
            # ours and not uvicorn's: the port is known, and connections queue, before the thread runs
            listener = socket.create_server((host, port), backlog=2048)
        except OSError as error:
            advice = "choose another port, or 0 to let the system choose one"
            raise ConfigError(f"cannot listen on {host}:{port} ({error.strerror}): {advice}") from error
        self.origin = f"http://{host}:{listener.getsockname()[1]}"
        config = uvicorn.Config(
            self._build_app(),
            http="httptools",
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
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
        try:
            for api_key in list(self._sessions):
                self.close_session(api_key)
        finally:
            self._server.should_exit = True
            self._thread.join()
            self._policy.workers.shutdown()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def open_session(self, log: SessionLog, limits: SessionLimits = SessionLimits()) -> Endpoint:
        """A key whose calls are recorded in `log`."""
        api_key = secrets.token_urlsafe(24)
        self._sessions[api_key] = _Session(self._policy, log, limits)
        return Endpoint(origin=self.origin, api_key=api_key, model=self._policy.model)

    def close_session(self, api_key: str) -> None:
        """Abort what is in flight and wait for it to end; later requests get 401. Closing twice does nothing.

        Raises the `LawError` that a call of this session broke, if one did.
        """
        session = self._sessions.pop(api_key, None)
        if session is None:
            return
        asyncio.run_coroutine_threadsafe(session.close(), self._loop).result()
        if session.broken_law is not None:
            raise session.broken_law

    def _serve(self, listener: socket.socket) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._server.serve(sockets=[listener]))
        finally:
            listener.close()
            self._loop.close()

    def _build_app(self) -> Starlette:
        routes = [HTTPRoute("/", _reply_alive, methods=["HEAD"])]
        for dialect in DIALECTS:
            for route in dialect.routes:
                endpoint = _Endpoint(self._sessions, dialect, route.kind, self._policy.model, self._ping_interval_s)
                # an object and not a function: starlette then passes the bare ASGI call on
                routes.append(HTTPRoute(route.path, endpoint, methods=[route.method]))
        return Starlette(routes=routes, exception_handlers={HTTPException: _render_http_error})


@dataclass(frozen=True, kw_only=True, slots=True)
class _Policy:
    """What all sessions share."""

    engine: Engine
    renderer: Renderer
    params: GenerationParams
    model: str
    workers: ThreadPoolExecutor

    async def work(self, num_bytes: int, function: Callable[[], _T]) -> _T:
        """Run plain work where it does not hold up the event loop."""
        if num_bytes < INLINE_BODY_BYTES:
            return function()
        return await asyncio.get_running_loop().run_in_executor(self.workers, function)


@dataclass(eq=False, kw_only=True, slots=True)
class _Turn:
    """One distinct request of a session: the task that answers it, and how many connections wait for it."""

    number: int
    digest: bytes
    started_s: float
    num_prompt_tokens: int
    num_body_bytes: int
    task: "asyncio.Task[Call]" = field(init=False)
    num_waiting: int = 0
    sampled: bool = False
    """From here on it is recorded, whoever hangs up."""

    def result(self) -> Call:
        """The recorded call, or the error that ended the turn."""
        if self.task.cancelled():
            raise _session_ended()
        return self.task.result()


class _Session:
    """One session's calls, from a request to a recorded call. Used on the event loop only."""

    def __init__(self, policy: _Policy, log: SessionLog, limits: SessionLimits) -> None:
        self._policy = policy
        self._log = log
        self._limits = limits
        self._continuations = Continuations(policy.renderer)
        # an agent's sub-agents call concurrently: building a prompt and recording a call happen one at a time
        self._lock = asyncio.Lock()
        self._turns: dict[bytes, _Turn] = {}
        """Digest of a request -> the turn that answers or answered it."""
        self._running: set[_Turn] = set()
        self._num_turns = 0
        self._num_sampled = 0
        self._closed = False
        self.broken_law: LawError | None = None

    async def begin_turn(self, dialect: Dialect, incoming: Incoming) -> tuple[_Turn, ParsedRequest]:
        """The turn that answers this request, begun unless it runs or was answered before.

        The caller must `leave` it. Raises `WireError` for a request that cannot be served.
        """
        num_bytes = len(incoming.body)
        parsed, digest = await self._policy.work(num_bytes, partial(_parse, dialect, incoming))
        async with self._lock:
            if self._closed:
                raise _session_ended()
            turn = self._turns.get(digest)
            if turn is not None:
                self._log.count("retries_replayed" if turn.task.done() else "retries_joined")
            elif self._is_over_budget():
                self._log.count("budget_messages")
                turn = self._new_turn(digest, 0, num_bytes)
                self._run(turn, self._answer_over_budget(turn, dialect.name, parsed.request))
            else:
                prompt = await self._policy.work(num_bytes, partial(self._build_prompt, parsed.request))
                turn = self._new_turn(digest, len(prompt.ids), num_bytes)
                self._run(turn, self._answer(turn, dialect.name, parsed.request, prompt))
            turn.num_waiting += 1
        return turn, parsed

    def leave(self, turn: _Turn) -> None:
        """A connection has its answer, or has hung up. The last one to hang up aborts the generation."""
        turn.num_waiting -= 1
        if turn.num_waiting == 0:
            self._abort(turn)

    async def close(self) -> None:
        """Abort what is in flight and wait until all of it has ended."""
        async with self._lock:
            self._closed = True
        running = set(self._running)
        for turn in running:
            self._abort(turn)
        if running:
            await asyncio.wait({turn.task for turn in running})

    def count(self, name: str) -> None:
        """Count something on the session's record, unless that has ended."""
        if not self._closed:
            self._log.count(name)

    def describe(self, turn: _Turn, parsed: ParsedRequest) -> ReplyHead:
        """What a reply to this request begins with."""
        return ReplyHead(
            id=f"{self._log.session_id}-{turn.number}",
            model=parsed.request.model or self._policy.model,
            created_s=turn.started_s,
            num_prompt_tokens=turn.num_prompt_tokens,
            options=parsed.reply_options,
        )

    def _new_turn(self, digest: bytes, num_prompt_tokens: int, num_body_bytes: int) -> _Turn:
        turn = _Turn(
            number=self._num_turns,
            digest=digest,
            started_s=time.time(),
            num_prompt_tokens=num_prompt_tokens,
            num_body_bytes=num_body_bytes,
        )
        self._num_turns += 1
        return turn

    def _run(self, turn: _Turn, answer: Coroutine[Any, Any, Call]) -> None:
        turn.task = asyncio.create_task(answer)
        self._turns[turn.digest] = turn
        self._running.add(turn)
        turn.task.add_done_callback(partial(self._end, turn))

    def _end(self, turn: _Turn, task: "asyncio.Task[Call]") -> None:
        self._running.discard(turn)
        # what failed may be tried again; the error is read here too, since nobody may be left to read it
        if task.cancelled() or task.exception() is not None:
            self._forget(turn)

    def _abort(self, turn: _Turn) -> None:
        if turn.sampled or turn.task.done() or turn.task.cancelling():
            return
        self._log.count("calls_aborted")
        self._forget(turn)
        turn.task.cancel()

    def _forget(self, turn: _Turn) -> None:
        if self._turns.get(turn.digest) is turn:
            del self._turns[turn.digest]

    def _is_over_budget(self) -> bool:
        limit = self._limits.max_sampled_tokens
        num_calls = len(self._log.calls) + len(self._running)
        return num_calls >= self._limits.max_calls or (limit is not None and self._num_sampled >= limit)

    def _build_prompt(self, request: ChatRequest) -> Prompt:
        shown = replace(request, tools=()) if request.tool_choice == "none" else request
        try:
            prompt = self._continuations.build_prompt(shown)
        except RenderError as error:
            raise WireError(str(error)) from error
        if len(prompt.ids) >= self._policy.engine.max_model_len:
            self._log.count("context_overflows")
            raise ContextOverflowError(len(prompt.ids), self._policy.engine.max_model_len)
        if prompt.forked:
            self._log.count("prompts_forked")
        return prompt

    def _build_params(self, request: ChatRequest, num_prompt_tokens: int) -> GenerationParams:
        params, limit = self._policy.params, self._limits.max_sampled_tokens
        room = [params.max_tokens, self._policy.engine.max_model_len - num_prompt_tokens]
        if request.sampling.max_tokens is not None:
            room.append(request.sampling.max_tokens)
        if limit is not None:
            room.append(limit - self._num_sampled)
        return replace(
            params,
            max_tokens=min(room),
            stop=(*params.stop, *request.sampling.stop),
            stop_token_ids=tuple({*params.stop_token_ids, *self._policy.renderer.stop_token_ids}),
        )

    async def _answer(self, turn: _Turn, dialect_name: str, asked: ChatRequest, prompt: Prompt) -> Call:
        params = self._build_params(asked, len(prompt.ids))
        try:
            completion = await self._policy.engine.generate(prompt.ids, params)
        except EngineError as error:
            raise WireError(str(error), status=503, kind="overloaded") from error
        turn.sampled = True
        async with self._lock:
            return await self._policy.work(
                turn.num_body_bytes,
                partial(self._record, turn, dialect_name, asked, prompt, completion, params.stop),
            )

    async def _answer_over_budget(self, turn: _Turn, dialect_name: str, asked: ChatRequest) -> Call:
        turn.sampled = True
        async with self._lock:
            completion = Completion(token_ids=(), logprobs=(), finish_reason="stop")
            prompt = Prompt(ids=(), parent=None, forked=False, request=asked)
            return self._record(turn, dialect_name, asked, prompt, completion, ())
