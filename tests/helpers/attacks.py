"""Attack a proxy as an agent with a session's key would, to use up its memory, disk, files or time.

Each attack ends by itself, once it is refused or after some seconds. Used by tests/proxy/test_attacks.py and by
scripts/bench/bench_attacks.py.
"""

import gzip
import json
import socket
import time
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache

import zstandard

MB = 1 << 20
MAX_S = 6.0
CHAT = "/v1/chat/completions"


@dataclass(frozen=True, kw_only=True)
class Target:
    """A session's address and key."""

    address: tuple[str, int]
    key: str

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=15)

    def head(self, num_bytes: int | None, *more: str, path: str = CHAT, key: str | None = None) -> bytes:
        """The head of a request; its body is chunked without `num_bytes`."""
        length = "Transfer-Encoding: chunked" if num_bytes is None else f"Content-Length: {num_bytes}"
        auth = f"Authorization: Bearer {self.key if key is None else key}"
        return "\r\n".join([f"POST {path} HTTP/1.1", "Host: x", auth, length, *more, "", ""]).encode("latin1")

    def post(self, body: bytes, *more: str, path: str = CHAT, key: str | None = None) -> int:
        """Status of the reply on a connection of its own; 0 where there was none."""
        with suppress(OSError), self.connect() as connection:
            # the reply may come before all was sent
            with suppress(OSError):
                connection.sendall(self.head(len(body), "Connection: close", *more, path=path, key=key) + body)
            return int((connection.recv(64) or b"0 0").split()[1])
        return 0


def ask(text: str = "hi", system: str = "", **fields: object) -> bytes:
    messages = [{"role": "system", "content": system}] if system else []
    return json.dumps({"messages": [*messages, {"role": "user", "content": text}], **fields}).encode()


def read_status(connection: socket.socket) -> int:
    """Read a reply that is no stream to its end; its status, 0 where there was none."""
    reply = b""
    while b"\r\n\r\n" not in reply:
        block = connection.recv(1 << 16)
        if not block:
            return 0
        reply += block
    head, _, body = reply.partition(b"\r\n\r\n")
    missing = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]) - len(body)
    while missing > 0 and (block := connection.recv(missing)):
        missing -= len(block)
    return int(head.split()[1])


def use_up_budget_then_flood(target: Target) -> None:
    """Requests of 20 MB after the session's calls are used up."""
    _repeat(target, (ask(f"{number}" + "a" * (20 * MB * (number > 8))) for number in range(60)))


def change_a_giant_history(target: Target) -> None:
    """Requests of 6 MB that differ in their system prompt."""
    _repeat(target, (ask(system=f"{number}" + "b " * (3 * MB)) for number in range(40)))


def send_giant_labels(target: Target) -> None:
    """20 MB as the name of a model, of a tool, of an unknown field, as a user, as metadata, as stop texts."""
    big = "m" * (20 * MB)
    tool = {"type": "function", "function": {"name": big, "parameters": {}}}
    labels: tuple[dict[str, object], ...] = (
        {"model": big}, {"tools": [tool]}, {big: 1}, {"user": big}, {"metadata": {"a": big}}, {"stop": [big]},
        {"stop": [str(number) for number in range(50_000)]}, {"tool_choice": big},
        {f"x{number}": 1 for number in range(100_000)},
    )  # fmt: skip
    _repeat(target, (ask(f"{number}", **labels[number % len(labels)]) for number in range(45)))


def send_millions_of_values(target: Target) -> None:
    """20 MB of empty objects, and 10 MB of opening brackets."""
    bodies = [b'{"messages":[' + b",".join([b"{}"] * (7 * MB)) + b"]}", b'{"messages":' + b"[" * (10 * MB)]
    _repeat(target, (bodies[number % 2] for number in range(20)))


@cache
def build_bombs() -> list[tuple[str, bytes]]:
    """Bodies that unpack to 300 MB, or are of a million members, with their content codings."""
    big = b'{"messages":[{"role":"user","content":"' + b"a" * (300 * MB)
    packed = gzip.compress(big, 1)
    return [
        ("gzip", packed),
        ("deflate", zlib.compress(big, 1)),
        ("zstd", zstandard.ZstdCompressor().compress(big)),
        ("gzip, gzip", gzip.compress(packed)),
        ("x-gzip", gzip.compress(b"") * 600_000),
    ]


def send_bombs(target: Target, key: str | None = None) -> None:
    """40 bodies, 16 at once, that are small or cheap and unpack to much."""
    jobs = [*build_bombs()] * 8
    with ThreadPoolExecutor(16) as threads:
        list(threads.map(lambda job: target.post(job[1], f"Content-Encoding: {job[0]}", key=key), jobs[:40]))


def send_bombs_without_a_key(target: Target) -> None:
    """The same bombs with a wrong key."""
    send_bombs(target, key="x")


def send_many_bodies_at_once(target: Target) -> None:
    """60 bodies of 15 MB at once, each without its last byte."""
    with ExitStack() as stack, suppress(OSError):
        for _ in range(60):
            connection = stack.enter_context(target.connect())
            connection.sendall(target.head(15 * MB) + b"a" * (15 * MB - 1))


def send_a_body_without_end(target: Target) -> None:
    """Chunks for as long as they are taken."""
    with suppress(OSError), target.connect() as connection:
        connection.sendall(target.head(None))
        for _ in range(1000):
            connection.sendall(b"100000\r\n" + b"a" * MB + b"\r\n")


def send_huge_heads(target: Target) -> None:
    """A header of 20 MB, 100,000 headers, a path of 5 MB."""
    for head in (
        target.head(0, "X-A: " + "y" * (20 * MB)),
        target.head(0, *(f"X-{number}: y" for number in range(100_000))),
        target.head(0, path="/" + "a" * (5 * MB)),
    ) * 5:
        with suppress(OSError), target.connect() as connection:
            connection.sendall(head)
            connection.recv(64)


def send_framing_without_end(target: Target) -> None:
    """A field after the last chunk, chunks of one byte, the name of a chunk's field, zeros before a chunk's size."""
    body = ask()
    whole = b"%x\r\n%b\r\n0\r\n" % (len(body), body)
    for start, rest in ((whole + b"X-A: ", b"y"), (b"", b"1\r\n{\r\n"), (b"1;x=", b"y"), (b"", b"0")):
        with suppress(OSError), target.connect() as connection:
            connection.sendall(target.head(None) + start)
            for _ in range(40):
                connection.sendall(rest * (MB // len(rest)))


def pipeline_thousands(target: Target) -> None:
    """5,000 requests on each of 20 connections, whose replies are not read."""
    with ExitStack() as stack:
        for _ in range(20):
            connection = stack.enter_context(target.connect())
            with suppress(OSError):
                connection.settimeout(0.2)
                connection.sendall((target.head(len(ask())) + ask()) * 5000)


def read_nothing(target: Target) -> None:
    """120 streams of which no reply is read, the same again on each connection."""
    with ExitStack() as stack:
        for number in range(120):
            body = ask(f"{number % 50}", stream=number % 2 == 0, model="m" * 200)
            connection = stack.enter_context(target.connect())
            with suppress(OSError):
                for _ in range(30):
                    connection.sendall(target.head(len(body)) + body)
        time.sleep(2)


def open_connections(target: Target) -> None:
    """2,000 connections that say nothing."""
    deadline = time.monotonic() + MAX_S
    with ExitStack() as stack, suppress(OSError):
        for _ in range(2000):
            stack.enter_context(target.connect())
            if time.monotonic() > deadline:
                return
        time.sleep(1)


def send_half_requests(target: Target) -> None:
    """60 heads and 60 bodies of which a byte comes now and then."""
    with ExitStack() as stack:
        starts = [target.head(100)[:-20], target.head(100_000) + b"{"] * 60
        slow = []
        for start in starts:
            connection = stack.enter_context(target.connect())
            connection.sendall(start)
            slow.append(connection)
        for _ in range(12):
            time.sleep(0.5)
            for connection in slow:
                with suppress(OSError):
                    connection.sendall(b"a")


def repeat_one_request(target: Target) -> None:
    """The same request as fast as it is answered."""
    _keep_asking(target, (ask() for _ in range(20_000)))


def ask_and_hang_up(target: Target) -> None:
    """Connections that are closed as soon as the request was sent."""
    deadline = time.monotonic() + MAX_S
    for number in range(20_000):
        with suppress(OSError), target.connect() as connection:
            connection.sendall(target.head(len(ask(f"{number}"))) + ask(f"{number}"))
        if time.monotonic() > deadline:
            return


ATTACKS: dict[str, Callable[[Target], None]] = {
    attack.__name__: attack
    for attack in (
        use_up_budget_then_flood, change_a_giant_history, send_giant_labels, send_millions_of_values, send_bombs,
        send_bombs_without_a_key, send_many_bodies_at_once, send_a_body_without_end, send_huge_heads,
        send_framing_without_end, pipeline_thousands, read_nothing, open_connections, send_half_requests,
        repeat_one_request, ask_and_hang_up,
    )
}  # fmt: skip


def _repeat(target: Target, bodies: Iterable[bytes]) -> None:
    """Send each body on a connection of its own, four at once."""
    deadline = time.monotonic() + MAX_S
    with ThreadPoolExecutor(4) as threads:
        waiting = []
        for body in bodies:
            waiting.append(threads.submit(target.post, body))
            if len(waiting) >= 4 and waiting.pop(0).result() == 0:
                return
            if time.monotonic() > deadline:
                return


def _keep_asking(target: Target, bodies: Iterable[bytes]) -> None:
    """Send bodies on one connection until it is closed, whatever the replies say."""
    deadline = time.monotonic() + MAX_S
    with suppress(OSError), target.connect() as connection:
        for body in bodies:
            connection.sendall(target.head(len(body)) + body)
            if read_status(connection) == 0 or time.monotonic() > deadline:
                return
