"""Write and read the calls of a session as JSON lines, exactly: what is read back equals what was recorded.

A file is a "session" line, one "call" line per call, and an "end" line, which holds the other fields of the `Rollout`
and `extra`; fields of `LATER_FIELDS` are left out where they are None. A call is written as what it adds to its
`parent`, so that a file grows with the session's tokens and not with their square: `new_prompt_ids` and `new_messages`
follow the parent's prompt and answer, and `tools` is left out where it equals the parent's. Where the parent's are no
prefix, the keys are `prompt_ids` and `messages` and hold the whole. A file is never overwritten (`RecordError`).

Text is UTF-8 in which lone surrogates are kept (`surrogatepass`); the standard library's encoder is used because it
also keeps integers of any size and non-finite floats, which orjson turns into something else or refuses.
"""

import json
import math
import threading
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from io import FileIO
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from polar_trl.errors import RecordError
from polar_trl.types import (
    AgentExit,
    Call,
    ChatRequest,
    Completion,
    GradeReport,
    Message,
    RequestedSampling,
    Rollout,
    SharedSequence,
    TokenIds,
    Tool,
    ToolCall,
    begins_with,
    share_ids,
)

_T = TypeVar("_T")

VERSION = 1
LATER_FIELDS = ("agent_exit", "grading", "agent", "call_rewards", "changes")
"""Fields of the end line that records of earlier releases lack; those releases pass over them."""
_FAILURE_LENGTH = 300


class SessionLog:
    """One session's append-only record: kept in memory and, where a path is given, on disk line by line.

    Threads may share it. Raises `RecordError` if `path` exists, and on `append` after `close`.

    Args:
        owner: A tag of the process that writes (`sandbox.owner`): who looks at a session without an end asks whether
            that process is alive.
    """

    def __init__(
        self, *, session_id: str, task_id: str, group_id: str, path: Path | None = None, owner: str | None = None
    ) -> None:
        self.session_id = session_id
        self._task_id = task_id
        self._group_id = group_id
        self._calls: list[Call] = []
        self._counters: Counter[str] = Counter()
        self._closed = False
        self.last_failure = ""
        """What kept a call from its answer, on our side and the last time; "" where nothing has."""
        self.last_refusal = ""
        """The words in which a request was refused (HTTP 4xx) the last time."""
        self.unanswered_refusal = ""
        """The same of a call of the model that any provider would have answered, until another one is accepted."""
        self.exceeded = ""
        """The limit that the session went past, such as "connections"; "" while it is within them."""
        self.num_bytes = 0
        """Length of the record, on disk or not."""
        self._lock = threading.Lock()
        self._file = None if path is None else _create(path)
        ids = {"session_id": session_id, "task_id": task_id, "group_id": group_id}
        whose = {} if owner is None else {"owner": owner}
        try:
            self._write(_encode({"type": "session", "version": VERSION} | ids | whose))
        except OSError:
            if path is not None:
                path.unlink()  # a full disk: a file without a header is no record
            raise

    @property
    def calls(self) -> tuple[Call, ...]:
        """The calls so far, in order."""
        with self._lock:
            return tuple(self._calls)

    @property
    def num_calls(self) -> int:
        """The number of calls so far."""
        return len(self._calls)

    @property
    def counters(self) -> Mapping[str, int]:
        """The named counts so far."""
        with self._lock:
            return dict(self._counters)

    def append(self, call: Call) -> None:
        """Add the next call; the operating system has it before this returns, so a killed process loses nothing.

        Raises `ValueError` for a call of another session, out of turn, or with a parent that is not before it.
        """
        with self._lock:
            if self._closed:
                raise RecordError(f"session {self.session_id} is closed: call {call.index} came too late")
            if call.session_id != self.session_id:
                raise ValueError(f"a call of session {call.session_id!r} in the record of {self.session_id!r}")
            if call.index != len(self._calls):
                raise ValueError(f"session {self.session_id}: call index {call.index}, expected {len(self._calls)}")
            if call.parent is not None and not 0 <= call.parent < call.index:
                raise ValueError(f"session {self.session_id}: call {call.index} has parent {call.parent}")
            self._write(_encode(_render_call(call, self._calls)))
            self._calls.append(call)

    def count(self, name: str, by: int = 1) -> None:
        """Add to a named counter."""
        with self._lock:
            self._counters[name] += by

    def count_failure(self, name: str, error: BaseException) -> None:
        """Count a call that failed on our side, and keep why."""
        self.count(name)
        self.last_failure = f"{type(error).__name__}: {error}"[:_FAILURE_LENGTH]

    def note_exceeded(self, limit: str) -> None:
        """Count the limit that the session went past, and keep which it was: it ends there."""
        self.count(f"{limit}_exceeded")
        self.exceeded = limit

    def close(self, rollout: Rollout, extra: Mapping[str, Any] = {}) -> None:
        """Write the final line: how the session ended, and `extra` (JSON values).

        Raises `ValueError` if the rollout is not this session's or does not hold exactly the recorded calls.
        """
        with self._lock:
            if self._closed:
                raise RecordError(f"session {self.session_id} is closed already")
            ours = (self.session_id, self._task_id, self._group_id)
            theirs = (rollout.id, rollout.task_id, rollout.group_id)
            if ours != theirs:
                raise ValueError(f"the record of (session, task, group) {ours} was closed with a rollout of {theirs}")
            if rollout.calls != tuple(self._calls):
                raise ValueError(
                    f"session {self.session_id}: {len(self._calls)} calls were recorded, "
                    f"but not those {len(rollout.calls)} of its rollout"
                )
            line = {"type": "end"} | _render_value(rollout) | {"extra": extra}
            for name in ("id", "task_id", "group_id", "calls"):
                del line[name]
            for name in LATER_FIELDS:
                if line[name] is None:
                    del line[name]
            self._write(_encode(line))
            self._closed = True
            if self._file is not None:
                self._file.close()

    def _write(self, line: bytes) -> None:
        self.num_bytes += len(line)
        if self._file is None:
            return
        start, rest = self._file.tell(), memoryview(line)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            # A full disk: without half a line the record stays readable, and memory never holds what the file lacks.
            self._file.truncate(start)
            self._file.seek(start)
            raise


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionRecord:
    """The content of a session's file."""

    rollout: Rollout
    extra: Mapping[str, Any]
    """The `extra` of `SessionLog.close`; empty without an end."""
    finished: bool
    """Whether the file has its end line."""


def read_record(path: Path) -> SessionRecord:
    """Read a session's file.

    Without an end line the rollout is "cancelled", has no reward, and its error says so. A last line that was torn
    in mid-write is dropped; any other line that cannot be read raises `RecordError` with file and line number.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RecordError(f"{path}: cannot be read ({error.strerror})") from error
    lines = data.split(b"\n")
    if not _is_whole(lines[-1]):
        lines.pop()
    if not lines:
        raise RecordError(f"{path}: holds no session")
    header: dict[str, Any] = {}
    calls: list[Call] = []
    end: dict[str, Any] | None = None
    for number, text in enumerate(lines, start=1):
        try:
            line = _parse_line(text)
            if end is not None:
                raise ValueError("a line after the end")
            if number == 1:
                header = _check_header(line)
            elif line["type"] == "call":
                calls.append(_parse_call(line, header["session_id"], calls))
            elif line["type"] == "end":
                end = _parse_end(line)
                _build_record(header, tuple(calls), dict(end))
            else:
                raise ValueError(f"unknown type {line['type']!r}")
        except (KeyError, IndexError, TypeError, ValueError, OverflowError, RecursionError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise RecordError(f"{path}, line {number}: {reason}") from error
    return _build_record(header, tuple(calls), end)


def _create(path: Path) -> FileIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        return path.open("xb", buffering=0)
    except FileExistsError as error:
        raise RecordError(f"{path} exists already; a record is never overwritten, use a new run folder") from error


def _encode(line: Mapping[str, Any]) -> bytes:
    text = json.dumps(line, ensure_ascii=False, separators=(",", ":"), default=_render_value)
    return text.encode("utf-8", "surrogatepass") + b"\n"


def _render_value(value: Any) -> dict[str, Any]:
    """For the JSON encoder, which knows no dataclass and no mapping but dict. One level deep: it asks again."""
    if isinstance(value, Mapping):
        return dict(value)
    return {spec.name: getattr(value, spec.name) for spec in fields(value)}


def _render_call(call: Call, earlier: Sequence[Call]) -> dict[str, Any]:
    line = {"type": "call"} | _render_value(call)
    request = line["request"] = _render_value(line.pop("request"))
    del line["session_id"]
    if not call.text_only:
        del line["text_only"]
    parent = _Parent.of(call.parent, earlier)
    for name, fields_of, before, answer in (
        ("prompt_ids", line, parent.prompt_ids, parent.sampled_ids),
        ("messages", request, parent.messages, parent.replies),
    ):
        whole, end = fields_of.pop(name), len(before) + len(answer)
        if begins_with(whole, before) and whole[len(before) : end] == answer:
            line[f"new_{name}"] = whole[end:]
        else:
            line[name] = tuple(whole)
    tools = request.pop("tools")
    return line if tools == parent.tools else line | {"tools": tools}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Parent:
    """The parts of a call that one which continues it begins with."""

    prompt_ids: SharedSequence[int] = field(default_factory=lambda: SharedSequence(()))
    sampled_ids: TokenIds = ()
    messages: SharedSequence[Message] = field(default_factory=lambda: SharedSequence(()))
    replies: tuple[Message, ...] = ()
    tools: tuple[Tool, ...] = ()

    @classmethod
    def of(cls, index: int | None, earlier: Sequence[Call]) -> "_Parent":
        if index is None:
            return cls()
        call = earlier[index]
        return cls(
            prompt_ids=SharedSequence.of(call.prompt_ids),
            sampled_ids=call.completion.token_ids,
            messages=SharedSequence.of(call.request.messages),
            replies=(call.message,),
            tools=call.request.tools,
        )


def _is_whole(last: bytes) -> bool:
    """Tell whether the bytes after the last newline are a line: a torn one lacks its brace and does not parse."""
    try:
        _parse_line(last)
    except (ValueError, RecursionError):
        return False
    return True


def _parse_line(text: bytes) -> dict[str, Any]:
    line = json.loads(text.decode("utf-8", "surrogatepass"))
    if not isinstance(line, dict):
        raise ValueError(f"expected a JSON object, got {type(line).__name__}")
    return line


def _check_header(line: dict[str, Any]) -> dict[str, Any]:
    if line["type"] != "session":
        raise ValueError(f"expected the session line, got type {line['type']!r}")
    if line["version"] != VERSION:
        raise ValueError(f"version {line['version']!r} of the format; this package reads version {VERSION}")
    header = {name: line[name] for name in ("session_id", "task_id", "group_id")}
    if wrong := [name for name, value in header.items() if not isinstance(value, str)]:
        raise ValueError(f"{wrong[0]} is {header[wrong[0]]!r}")
    return header


def _parse_call(line: dict[str, Any], session_id: str, earlier: Sequence[Call]) -> Call:
    if type(line["index"]) is not int or line["index"] != len(earlier):
        raise ValueError(f"call index {line['index']}, expected {len(earlier)}")
    if line["parent"] is not None and not (type(line["parent"]) is int and 0 <= line["parent"] < len(earlier)):
        raise ValueError(f"parent {line['parent']} is not an earlier call")
    parent = _Parent.of(line["parent"], earlier)
    if "prompt_ids" in line:
        prompt_ids = share_ids(_parse_ids(line["prompt_ids"]))
    else:
        added = (*parent.sampled_ids, *_parse_ids(line["new_prompt_ids"]))
        prompt_ids = SharedSequence(array("q", added), parent.prompt_ids)
    if "messages" in line:
        messages = SharedSequence(tuple(map(_parse_message, line["messages"])))
    else:
        new_messages = map(_parse_message, line["new_messages"])
        messages = SharedSequence((*parent.replies, *new_messages), parent.messages)
    tools = tuple(_checked(Tool(**tool)) for tool in line["tools"]) if "tools" in line else parent.tools
    request, sampling, completion = line["request"], line["request"]["sampling"], line["completion"]
    scalars = {name: line[name] for name in ("index", "parent", "dialect", "purpose", "started_s", "duration_s")}
    call = Call(
        session_id=session_id,
        prompt_ids=prompt_ids,
        request=_checked(
            ChatRequest(
                **request
                | {
                    "messages": messages,
                    "tools": tools,
                    "sampling": _checked(RequestedSampling(**sampling | {"stop": tuple(sampling["stop"])})),
                    "unread": tuple(request["unread"]),
                }
            )
        ),
        completion=_checked(
            Completion(
                **completion
                | {
                    "token_ids": _parse_ids(completion["token_ids"]),
                    "logprobs": _parse_logprobs(completion["logprobs"]),
                }
            )
        ),
        message=_parse_message(line["message"]),
        stop_text=line.get("stop_text"),  # records of the first format lack it
        text_only=line.get("text_only", False),
        **scalars,
    )
    return _checked(call)


def _parse_ids(ids: list[int]) -> TokenIds:
    if not set(map(type, ids)) <= {int} or (ids and not 0 <= min(ids) <= max(ids) < 1 << 32):
        raise ValueError("token ids that are not integers, or too large to be any")
    return tuple(ids)


def _parse_logprobs(logprobs: list[float]) -> tuple[float, ...]:
    """Any numbers: which of them can be log-probabilities is law 1's to say."""
    if not set(map(type, logprobs)) <= {int, float}:
        raise ValueError("log-probabilities that are not numbers")
    return tuple(map(float, logprobs))


def _parse_message(line: dict[str, Any]) -> Message:
    message = Message(
        **line
        | {
            "tool_calls": tuple(_checked(ToolCall(**tool_call)) for tool_call in line["tool_calls"]),
            "images": tuple(line["images"]),
        }
    )
    return _checked(message)


def _parse_end(line: dict[str, Any]) -> dict[str, Any]:
    end = {name: line[name] for name in ("stop_reason", "reward", "error", "seconds", "counters", "extra")}
    end |= {name: line.get(name) for name in ("error_kind", *LATER_FIELDS)}
    if isinstance(end["call_rewards"], dict):  # JSON has no other keys than texts
        end["call_rewards"] = {int(index): value for index, value in end["call_rewards"].items()}
    if end["agent_exit"] is not None:
        end["agent_exit"] = _checked(AgentExit(**end["agent_exit"]))
    if (grading := end["grading"]) is not None:
        tests = {name: tuple(grading[name]) for name in ("failed_tests", "missing_tests")}
        end["grading"] = _checked(GradeReport(**grading | tests))
    return end


def _build_record(header: Mapping[str, str], calls: tuple[Call, ...], end: dict[str, Any] | None) -> SessionRecord:
    error = f"the record has no end: the session was killed after {len(calls)} recorded calls"
    ending = end or {"stop_reason": "cancelled", "error": error, "error_kind": "cancelled", "extra": {}}
    extra = ending.pop("extra")
    if not isinstance(extra, dict):
        raise ValueError(f"extra is {extra!r:.60}")
    session_id, task_id, group_id = header["session_id"], header["task_id"], header["group_id"]
    rollout = _checked(Rollout(id=session_id, task_id=task_id, group_id=group_id, calls=calls, **ending))
    if rollout.reward is not None and not math.isfinite(rollout.reward):
        raise ValueError(f"reward is {rollout.reward}")
    return SessionRecord(rollout=rollout, extra=extra, finished=end is not None)


def _checked(value: _T) -> _T:
    """Return a value of ours whose fields have the types that its class declares. Raises `ValueError`."""
    kind: Any = type(value)
    for name, hint in _read_hints(kind).items():
        if not _fits(getattr(value, name), hint):
            raise ValueError(f"{name} is {getattr(value, name)!r:.60}")
    return value


@cache
def _read_hints(kind: type) -> Mapping[str, Any]:
    return get_type_hints(kind)


def _fits(value: Any, hint: Any) -> bool:
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is Literal:
        return isinstance(value, str)
    if origin is Sequence:  # what it holds was checked where it was parsed
        return isinstance(value, SharedSequence)
    if origin is tuple:  # of numbers, all are looked at where they are parsed
        return isinstance(value, tuple) and (parts[0] in (int, float) or all(_fits(item, parts[0]) for item in value))
    if origin is not None:
        return isinstance(value, dict) and (parts[1] is Any or all(_fits(item, parts[1]) for item in value.values()))
    return type(value) in ((int, float) if hint is float else (hint,))
