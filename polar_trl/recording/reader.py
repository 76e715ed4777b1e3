"""Read a session's requests: unpack, parse, and give each an identity by which a retry is recognized.

Keeps the last request, since the next one begins with it, and of all others a digest.
"""

from dataclasses import dataclass, replace
from hashlib import sha256

import orjson

from polar_trl.errors import ContextOverflowError, WireError
from polar_trl.types import ChatRequest, Message, Tool
from polar_trl.wire.base import (
    MAX_BODY_BYTES,
    Dialect,
    Incoming,
    ItemMemo,
    ParsedRequest,
    check_labels,
    has_more_values,
)
from polar_trl.wire.compression import decode_body

MAX_CHARACTERS_PER_TOKEN = 32
"""Text has three or four, on the average of a whole conversation. A megabyte takes half a second to encode."""
MAX_REMEMBERED_VALUES = 250_000
"""The last request is kept if its body has no more JSON values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadRequest:
    """A request, as a session needs it."""

    parsed: ParsedRequest
    question: bytes
    """Digest of the dialect and all that is asked. Whether it streams is no part of it: agents whose stream broke ask
    again without."""
    num_bytes: int
    """Length of the body, unpacked."""


def count_bytes(incoming: Incoming) -> int:
    """Count a body's bytes; where it is packed, the most that it may unpack to."""
    return MAX_BODY_BYTES if "content-encoding" in incoming.headers else len(incoming.body)


class RequestReader:
    """Reads the requests of one session, one at a time.

    Args:
        max_model_len: Tokens of a prompt and its answer: what cannot fit is refused without being encoded.
    """

    def __init__(self, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        self._memo = ItemMemo()
        self._memo_of = ""
        """The dialect of the last request: the same JSON is read as something else in another one."""
        self._tools: tuple[bytes, tuple[Tool, ...]] = (b"", ())
        """The tools of the last request, as sorted JSON and parsed: calls with the same tools share them in memory,
        and write their keys in one order."""
        self._walked: list[tuple[Message, bytes]] = []
        """The messages of the last request, each with the digest of the conversation up to it."""

    def forget(self) -> None:
        """Let go of the last request."""
        self._memo.forget()
        self._tools, self._walked = (b"", ()), []

    def read(self, dialect: Dialect, incoming: Incoming) -> ReadRequest:
        """Read a request. Raises `WireError` for one that cannot be served, which is not kept."""
        try:
            return self._read(dialect, incoming)
        except WireError:
            self.forget()
            raise

    def _read(self, dialect: Dialect, incoming: Incoming) -> ReadRequest:
        if encoding := incoming.headers.get("content-encoding"):
            incoming = replace(incoming, body=decode_body(incoming.body, encoding, MAX_BODY_BYTES))
        if dialect.name != self._memo_of:
            self._memo.forget()
            self._memo_of = dialect.name
        parsed = dialect.parse(incoming, self._memo)
        request = check_labels(parsed.request)
        self._check_size(request)
        if has_more_values(incoming.body, MAX_REMEMBERED_VALUES):
            self._memo.forget()
        try:
            tools = orjson.dumps(request.tools, option=orjson.OPT_SORT_KEYS)
        except orjson.JSONEncodeError as error:
            raise WireError(f"tools: {error}; nest the parameters less deeply") from error
        if tools == self._tools[0]:
            request = replace(request, tools=self._tools[1])
        self._tools = (tools, request.tools)
        question = self._digest(dialect.name, request, tools)
        return ReadRequest(parsed=replace(parsed, request=request), question=question, num_bytes=len(incoming.body))

    def _check_size(self, request: ChatRequest) -> None:
        num_characters = sum(len(message.text) for message in request.messages)
        num_tokens = len(request.messages) + num_characters // MAX_CHARACTERS_PER_TOKEN
        if num_tokens >= self._max_model_len:
            raise ContextOverflowError(num_tokens, self._max_model_len, at_least=True)

    def _digest(self, dialect_name: str, request: ChatRequest, tools: bytes) -> bytes:
        known, self._walked = self._walked, []
        is_known, digest = True, b""
        for index, message in enumerate(request.messages):
            is_known = is_known and index < len(known) and known[index][0] is message
            digest = known[index][1] if is_known else sha256(digest + _spell(message)).digest()
            self._walked.append((message, digest))
        rest = orjson.dumps((dialect_name, replace(request, messages=(), tools=(), stream=False)))
        return sha256(digest + sha256(rest).digest() + tools).digest()


def _spell(message: Message) -> bytes:
    """Write a message so that the order of the keys in tool arguments is no difference."""
    calls = tuple(replace(call, arguments=_sort_keys(call.arguments)) for call in message.tool_calls)
    return orjson.dumps(replace(message, tool_calls=calls) if calls else message)


def _sort_keys(arguments: str) -> str:
    try:
        return orjson.dumps(orjson.loads(arguments), option=orjson.OPT_SORT_KEYS).decode()
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        return arguments
