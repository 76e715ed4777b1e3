"""Turn one session's requests into recorded calls: recognize a retry, build the prompt, sample, record.

Runs on the proxy's event loop. A request that is sent again because its answer was lost is not sampled again, and
every answer is on record.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar, get_args

from polar_trl.engine.base import Engine, GenerationParams, TextReply
from polar_trl.engine.gate import Gate, GateStats
from polar_trl.errors import (
    ContextOverflowError,
    EngineBusyError,
    EngineError,
    LawError,
    RenderError,
    WireError,
)
from polar_trl.recording.bounds import BUDGET_TEXT, SessionBounds
from polar_trl.recording.live import LiveReply
from polar_trl.recording.log import SessionLog
from polar_trl.recording.reader import ReadRequest, RequestReader, count_bytes
from polar_trl.recording.refusals import Refusals
from polar_trl.recording.turn import Turn, Turns
from polar_trl.tokens.base import Renderer
from polar_trl.tokens.continuation import Continuations, Prompt
from polar_trl.types import Call, ChatRequest, Completion, Message, Purpose, share_ids
from polar_trl.wire.base import Dialect, Incoming, ParsedRequest, ReplyHead

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
Classify = Callable[[ChatRequest], Purpose]
"""Tells the policy at its task from an agent's side business, such as a title for its window."""

INLINE_BODY_BYTES = 64 << 10
"""Smaller bodies are worked on in the event loop: that takes less time than a hop to a thread and back."""
ENCODING_WEIGHT = 8
"""A byte that is new to the session is encoded (about 3 MB/s): this many times the work of one that is only read."""
RECORD_BYTES_PER_TOKEN = 12
"""A token on record is its id and its text, about six bytes each."""
BYTES_PER_TOKEN = 4
"""Rough bytes of a request per token, where its tokens are another server's."""
MAX_BUDGET_REQUEST_CHARACTERS = 1000
NO_TOKENS = Completion(token_ids=(), logprobs=(), finish_reason="stop")


def always_policy(request: ChatRequest) -> Purpose:
    """Every request is the policy's."""
    return "policy"


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionLimits:
    """The budget of one session, after which each reply is a final message that is never trained, and its bounds."""

    max_calls: int = 200
    max_sampled_tokens: int | None = None
    max_connections: int = 128
    """Open at once. This and what follows ends a session that goes past it: no agent comes near."""
    max_body_bytes_held: int = 128 << 20
    """Bodies of requests that are being read or answered."""
    max_record_bytes: int = 256 << 20
    """Of the record on disk; the calls in memory grow with it. See `compute_max_record`."""

    def compute_max_record(self, max_model_len: int) -> int:
        """Compute the bytes that a record may have: all that agents need which rewrite their history at every call."""
        return max(self.max_record_bytes, self.max_calls * max_model_len * RECORD_BYTES_PER_TOKEN)

    @property
    def max_requests(self) -> int:
        """Requests and connections in all: retries, counts of tokens, and what comes after the last call."""
        return 200 + 20 * self.max_calls

    def are_used_up(self, num_calls: int, num_sampled_tokens: int) -> bool:
        """Tell whether the budget is."""
        limit = self.max_sampled_tokens
        return num_calls >= self.max_calls or (limit is not None and num_sampled_tokens >= limit)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelBackend:
    """The engine, the renderer and the sampling settings that all sessions share."""

    engine: Engine
    renderer: Renderer
    params: GenerationParams
    model: str
    workers: ThreadPoolExecutor
    live: bool = False
    """Streams tell text while it is sampled, and not whole answers."""
    gate: Gate = field(init=False)
    """Passed by every call on its way to the engine."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "gate", Gate(self.engine.cache_tokens))
        if self.engine.own_renderer not in (None, self.renderer):
            raise ValueError("the engine is its own renderer: another one would record ids that no engine saw")

    def open_live(self, prompt: Prompt, params: GenerationParams) -> LiveReply | None:
        """Open the reply to a prompt for who reads along; None where streams tell whole answers."""
        if not self.live or self.engine.own_renderer is not None:
            return None
        tools = prompt.request.tools
        parse = partial(self.renderer.parse, prompt.ids, tools=tools)
        return LiveReply(parse, stops=params.stop, has_tools=bool(tools))

    async def work(self, num_bytes: int, function: Callable[[], _T]) -> _T:
        """Run plain work where it does not hold up the event loop."""
        if num_bytes < INLINE_BODY_BYTES:
            return function()
        return await asyncio.get_running_loop().run_in_executor(self.workers, function)


@dataclass(frozen=True, kw_only=True, slots=True)
class _TurnSettings:
    """The settings of a turn, fixed before its prompt is sampled from."""

    dialect_name: str
    purpose: Purpose
    params: GenerationParams
    limit: str
    """What bounds the answer's length, as a counter names it; "" for the backend's own `max_tokens`."""
    num_new_bytes: int


_Answer = Callable[[Turn], Coroutine[Any, Any, Call]]


class Session:
    """One session's calls, from a request to a recorded call. Used on the event loop only."""

    def __init__(
        self,
        backend: ModelBackend,
        log: SessionLog,
        limits: SessionLimits,
        classify: Classify = always_policy,
        gate_stats: GateStats | None = None,
    ) -> None:
        self._backend = backend
        self._gate_stats = gate_stats or GateStats()
        self._classify = classify
        self._log = log
        self.count = log.count
        self.limits = limits
        self.bounds = SessionBounds(log, self._stop, max_requests=limits.max_requests)
        self.refusals = Refusals(log)
        self._reader = RequestReader(backend.engine.max_model_len)
        self._continuations = Continuations(backend.renderer)
        # an agent's sub-agents call concurrently: building a prompt and recording a call happen one at a time
        self._lock = asyncio.Lock()
        self._turns = Turns(log)
        self._running: set[Turn] = set()
        self._num_turns = 0
        self._num_known_bytes = 0
        """Of the longest body so far: what it holds need not be encoded again."""
        self._num_sampled = 0
        self._sent_back: set[bytes] = set()
        """What the policy asked of an engine that was too busy, and has not been answered since."""
        self.broken_law: LawError | None = None

    async def begin_turn(self, dialect: Dialect, incoming: Incoming) -> tuple[Turn, ParsedRequest]:
        """Find the turn that answers this request, or begin one.

        The caller must `leave` it. Raises `WireError` for a request that cannot be served.
        """
        async with self._lock, self.refusals.noting(is_call=True):
            if self._log.num_bytes > self.limits.compute_max_record(self._backend.engine.max_model_len):
                self.bounds.exceed("record")
            self.bounds.check_open()
            read = await self._read(dialect, incoming)
            parsed, question, num_bytes = read.parsed, read.question, read.num_bytes
            num_calls = self._log.num_calls + len(self._running) + self._turns.num_replays
            is_used_up = self.limits.are_used_up(num_calls, self._num_sampled)
            purpose: Purpose = "policy"
            turn = self._turns.find(question, is_budget_used_up=is_used_up)
            if turn is None and is_used_up:
                self.bounds.count_budget_message()
                answer = partial(self._answer_over_budget, dialect.name, parsed.request)
                turn = self._start(answer, question, 0)
                self._turns.forget(turn)  # it needs no recognition: the next one hears the same
            elif turn is None:
                if open_calls := parsed.request.messages[-1].tool_calls:
                    ids = ", ".join(tool_call.id for tool_call in open_calls)
                    raise WireError(dialect.open_calls_error.format(ids=ids))
                prompt = await self._work_out_prompt(parsed.request, num_bytes)
                num_new_bytes = num_bytes - self._num_known_bytes
                self._num_known_bytes = max(self._num_known_bytes, num_bytes)
                if len(prompt.ids) >= self._backend.engine.max_model_len:
                    raise ContextOverflowError(len(prompt.ids), self._backend.engine.max_model_len)
                if prompt.forked:
                    self._log.count("prompts_forked")
                purpose = self._classify(parsed.request) if parsed.purpose == "policy" else parsed.purpose
                if purpose not in get_args(Purpose):  # a class of the user's: its record could not be read back
                    raise TypeError(f"the agent's classify gives {purpose!r}, and not 'policy' or 'auxiliary'")
                params, length_limit = self._build_params(prompt)
                settings = _TurnSettings(
                    dialect_name=dialect.name,
                    purpose=purpose,
                    params=params,
                    limit=length_limit,
                    num_new_bytes=num_new_bytes,
                )
                live = None
                # a parser that has changed its mind once is not read along again
                if parsed.request.stream and "streams_taken_back" not in self._log.counters:
                    live = self._backend.open_live(prompt, settings.params)
                answer = partial(self._answer, prompt, settings)
                turn = self._start(answer, question, _count_tokens(prompt, num_bytes), live)
            turn.num_waiting += 1
            if purpose == "policy":
                self.refusals.go_on()
        if self.bounds.has_ended:
            self._abort(turn)
        return turn, parsed

    async def count_prompt_tokens(self, dialect: Dialect, incoming: Incoming) -> int:
        """Count the tokens that this request's prompt would have. Samples nothing and records nothing."""
        async with self._lock, self.refusals.noting(is_call=False):
            self.bounds.check_open()
            read = await self._read(dialect, incoming)
            prompt = await self._work_out_prompt(read.parsed.request, read.num_bytes)
        return _count_tokens(prompt, read.num_bytes)

    def leave(self, turn: Turn) -> None:
        """Note that a connection has its answer, or has hung up. The last one to hang up aborts the generation."""
        turn.num_waiting -= 1
        turn.was_given = turn.was_given or turn.task.done()
        if turn.num_waiting == 0:
            self._abort(turn)

    async def close(self) -> None:
        """Abort what is in flight and wait until all of it has ended."""
        self.bounds.is_closed = True  # a prompt that is being built is aborted when it is there
        running = list(self._running)
        self._stop()
        await asyncio.gather(*(turn.task for turn in running), return_exceptions=True)
        if self._sent_back:
            self._log.count("calls_never_taken", len(self._sent_back))
            self._sent_back.clear()
        self._backend.gate.forget(self._gate_stats)

    def _stop(self) -> None:
        self._reader.forget()
        for turn in list(self._running):
            self._abort(turn)

    def note_fault(self, error: BaseException) -> None:
        """Put a fault of ours into the log and on the session's record; a broken law is kept for whoever closes it."""
        _log.error("session %s: a model call failed", self._log.session_id, exc_info=error)
        self._log.count_failure("internal_errors", error)
        if isinstance(error, LawError):
            self.broken_law = self.broken_law or error

    def describe(self, turn: Turn, parsed: ParsedRequest) -> ReplyHead:
        """Build the head of a reply to this request."""
        return ReplyHead(
            id=f"{self._log.session_id}-{turn.number}",
            model=parsed.request.model or self._backend.model,
            created_s=turn.started_s,
            num_prompt_tokens=turn.num_prompt_tokens,
            options=parsed.reply_options,
        )

    def _start(self, answer: _Answer, question: bytes, num_prompt_tokens: int, live: LiveReply | None = None) -> Turn:
        turn = Turn(
            number=self._num_turns,
            question=question,
            started_s=time.time(),
            num_prompt_tokens=num_prompt_tokens,
            live=live,
        )
        self._num_turns += 1
        self._turns.add(turn)
        self._running.add(turn)
        turn.task = asyncio.create_task(answer(turn))
        turn.task.add_done_callback(partial(self._end, turn))
        return turn

    def _end(self, turn: Turn, task: "asyncio.Task[Call]") -> None:
        self._running.discard(turn)
        turn.live = None  # the call has it
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or error is not None:
            self._turns.forget(turn)  # what failed may be tried again
        # here, since nobody may be left who waits for the turn
        if isinstance(error, WireError):
            self.refusals.note(error, is_call=True)
        elif error is not None:
            self.note_fault(error)

    def _abort(self, turn: Turn) -> None:
        if turn.sampled or turn.task.done() or turn.task.cancelling():
            return
        self._log.count("calls_aborted")
        self._turns.forget(turn)
        turn.task.cancel()

    async def _read(self, dialect: Dialect, incoming: Incoming) -> ReadRequest:
        return await self._backend.work(count_bytes(incoming), partial(self._reader.read, dialect, incoming))

    async def _work_out_prompt(self, request: ChatRequest, num_bytes: int) -> Prompt:
        weight = max(num_bytes, ENCODING_WEIGHT * (num_bytes - self._num_known_bytes))
        return await self._backend.work(weight, partial(self._build_prompt, request))

    def _build_prompt(self, request: ChatRequest) -> Prompt:
        if request.tool_choice == "none" and request.tools:
            # the only way to keep a model from calling tools is not to show it any
            request = replace(request, tools=(), unread=(*request.unread, "tools"))
        try:
            return self._continuations.build_prompt(request)
        except RenderError as error:
            raise WireError(str(error), reason="template") from error

    def _build_params(self, prompt: Prompt) -> tuple[GenerationParams, str]:
        params, limit = self._backend.params, self.limits.max_sampled_tokens
        asked = prompt.request.sampling
        room = {"": params.max_tokens, "window": self._backend.engine.max_model_len - len(prompt.ids)}
        room |= {} if asked.max_tokens is None else {"asked_max_tokens": asked.max_tokens}
        room |= {} if limit is None else {"max_session_tokens": limit - self._num_sampled}
        name = min(room, key=lambda name: room[name])
        changed = replace(
            params,
            max_tokens=room[name],
            stop=(*params.stop, *asked.stop),
            stop_token_ids=tuple(dict.fromkeys((*params.stop_token_ids, *self._backend.renderer.stop_token_ids))),
        )
        return changed, name

    async def _answer(self, prompt: Prompt, settings: "_TurnSettings", turn: Turn) -> Call:
        engine, gate_stats = self._backend.engine, self._gate_stats
        try:
            async with self._backend.gate.passing(gate_stats, prompt.ids):
                if gate_stats.first_policy_version is None:
                    gate_stats.first_policy_version = engine.policy_version
                so_far = None if turn.live is None else turn.live.token_ids
                reply = await engine.answer(prompt.request, prompt.ids, settings.params, so_far)
        except EngineBusyError as error:
            self._log.count("calls_sent_back")
            if settings.purpose == "policy":
                self._sent_back.add(turn.question)
            raise WireError(str(error), status=429, kind="overloaded", retry_after_s=error.retry_after_s) from error
        except EngineError as error:
            self._log.count_failure("engine_errors", error)
            raise WireError(str(error), status=503, kind="overloaded") from error
        turn.sampled = True
        self._sent_back.discard(turn.question)
        async with self._lock:
            return await self._backend.work(
                settings.num_new_bytes, partial(self._finish, turn, settings, prompt, reply)
            )

    def _finish(self, turn: Turn, settings: "_TurnSettings", prompt: Prompt, reply: Completion | TextReply) -> Call:
        if isinstance(reply, TextReply):
            completion, stop_text = reply.completion or replace(NO_TOKENS, finish_reason=reply.finish_reason), None
            message, num_sampled = reply.message, len(completion.token_ids) or reply.num_sampled_tokens
            prompt = prompt.rendered_as(reply.prompt_ids)
            if reply.completion is None:
                self._log.count("tokens_by_server", num_sampled)
        else:
            completion, num_sampled = reply, len(reply.token_ids)
            parsed = self._backend.renderer.parse_reply(prompt.ids, completion.token_ids, prompt.request.tools)
            message, stop_text = _cut_at_stop(parsed.message, settings.params.stop)
            for name, num_lost in parsed.losses.items():
                self._log.count(name, num_lost)
        call = self._record(
            turn,
            settings.dialect_name,
            prompt,
            completion,
            message,
            purpose=settings.purpose,
            stop_text=stop_text,
            text_only=isinstance(reply, TextReply) and reply.completion is None,
        )
        self._continuations.add(call, prompt.ids)
        if completion.finish_reason == "length" and settings.purpose == "policy" and settings.limit:
            self._log.count(f"answers_cut_at_{settings.limit}")
        if num_malformed := sum(tool_call.parse_status == "malformed" for tool_call in message.tool_calls):
            self._log.count("tool_calls_malformed", num_malformed)
        self._num_sampled += num_sampled
        return call

    async def _answer_over_budget(self, dialect_name: str, request: ChatRequest, turn: Turn) -> Call:
        turn.sampled = True
        # an agent that never stops asking must not fill the disk with its history
        last = request.messages[-1]
        last = Message(role=last.role, text=last.text[:MAX_BUDGET_REQUEST_CHARACTERS])
        request = ChatRequest(messages=(last,), stream=request.stream, model=request.model)
        prompt = Prompt(ids=(), parent=None, forked=False, request=request)
        async with self._lock:
            return self._record(turn, dialect_name, prompt, NO_TOKENS, Message(role="assistant", text=BUDGET_TEXT))

    def _record(
        self,
        turn: Turn,
        dialect_name: str,
        prompt: Prompt,
        completion: Completion,
        message: Message,
        *,
        purpose: Purpose = "policy",
        stop_text: str | None = None,
        text_only: bool = False,
    ) -> Call:
        index = self._log.num_calls
        # a renderer knows no session: tool calls that the model gave no id get one that is unique in it
        tool_calls = [
            replace(tool_call, id=tool_call.id or f"call_{index}_{position}")
            for position, tool_call in enumerate(message.tool_calls)
        ]
        call = Call(
            session_id=self._log.session_id,
            index=index,
            dialect=dialect_name,
            request=prompt.request,
            prompt_ids=share_ids(prompt.ids, prompt.parent_ids),
            completion=completion,
            message=replace(message, tool_calls=tuple(tool_calls)),
            stop_text=stop_text,
            parent=prompt.parent,
            purpose=purpose,
            text_only=text_only,
            started_s=turn.started_s,
            duration_s=time.time() - turn.started_s,
        )
        self._log.append(call)
        return call


def _count_tokens(prompt: Prompt, num_bytes: int) -> int:
    """Count a prompt's tokens; roughly, by the size of the request, where its tokens are another server's."""
    return len(prompt.ids) or num_bytes // BYTES_PER_TOKEN


def _cut_at_stop(message: Message, stops: tuple[str, ...]) -> tuple[Message, str | None]:
    """Cut off the stop text that ended a message and what follows, as clients expect it; the message and that text."""
    found = [(position, stop) for stop in stops if (position := message.text.find(stop)) >= 0]
    if not found:
        return message, None
    position, stop = min(found)
    return replace(message, text=message.text[:position]), stop
