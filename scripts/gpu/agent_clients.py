"""Run sessions of given lengths over HTTP from other processes, and note when each call began and ended.

Every session is a connection that asks, gets its answer and asks again with that answer and a new message, as an agent
does whose tools take no time. A slot that ends a session takes the next one, so that as many run at once until all
calls have been begun. The processes share no interpreter lock with the proxy. A call that fails ends them all.
"""

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

CALL_TIMEOUT_S = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientSession:
    """One session to come. Every word is one token."""

    number: int
    api_key: str
    shared_words: int
    """Of the system prompt, which all sessions share."""
    task_words: int
    calls: Sequence[tuple[int, int]]
    """Per call: tokens to sample, and words of the message that follows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientCall:
    """One answered call. Times are seconds of the system's monotonic clock, which processes share."""

    session: int
    index: int
    begun_s: float
    ended_s: float


class Connection:
    """One session's HTTP connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def post(self, api_key: str, body: bytes) -> dict[str, Any]:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: proxy\r\nauthorization: Bearer {api_key}\r\n"
        self._writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        answer = await self._reader.readuntil(b"\r\n\r\n")
        length = int(answer.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        content = await self._reader.readexactly(length)
        if not answer.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"a call failed: {answer.splitlines()[0].decode()} {content[:300].decode()}")
        reply: dict[str, Any] = json.loads(content)
        return reply

    def close(self) -> None:
        self._writer.close()


class _Slots:
    """The sessions of one process: `num_slots` at once, until `num_calls` have been begun."""

    def __init__(self, origin: str, words: Sequence[str], sessions: Sequence[ClientSession], num_calls: int) -> None:
        self._host, port = origin.removeprefix("http://").split(":")
        self._port = int(port)
        self._words = words
        self._sessions: Iterator[ClientSession] = iter(sessions)
        self._num_left = num_calls
        self.calls: list[ClientCall] = []

    async def run(self, num_slots: int) -> None:
        await asyncio.gather(*(self._run_slot() for _ in range(num_slots)))

    async def _run_slot(self) -> None:
        while self._num_left:
            session = next(self._sessions, None)
            if session is None:
                raise SystemExit("there are fewer sessions than the calls need")
            await self._run_session(session)

    async def _run_session(self, session: ClientSession) -> None:
        connection = Connection(*await asyncio.open_connection(self._host, self._port))
        own = random.Random(session.number)
        parts = [
            _render_message("system", self._draw(random.Random("shared"), session.shared_words)),
            _render_message("user", self._draw(own, session.task_words)),
        ]
        for index, (num_sampled, num_observed) in enumerate(session.calls):
            if not self._num_left:
                break
            self._num_left -= 1
            body = f'{{"model":"policy","max_tokens":{num_sampled},"messages":[{",".join(parts)}]}}'.encode()
            begun_s = time.monotonic()
            async with asyncio.timeout(CALL_TIMEOUT_S):
                reply = await connection.post(session.api_key, body)
            ended_s = time.monotonic()
            self.calls.append(ClientCall(session=session.number, index=index, begun_s=begun_s, ended_s=ended_s))
            parts.append(_render_message("assistant", reply["choices"][0]["message"]["content"]))
            parts.append(_render_message("user", self._draw(own, num_observed)))
        connection.close()

    def _draw(self, source: random.Random, num_words: int) -> str:
        return " ".join(source.choices(self._words, k=num_words))


def _render_message(role: str, content: str) -> str:
    return json.dumps({"role": role, "content": content})


def run_client() -> None:
    """Serve jobs until standard input ends: a line with the path of a job in, a line with its calls out."""
    for line in sys.stdin:
        job = json.loads(Path(line.strip()).read_text())
        sessions = [ClientSession(**session) for session in job["sessions"]]
        slots = _Slots(job["origin"], job["words"], sessions, job["num_calls"])
        asyncio.run(slots.run(job["num_slots"]))
        print(json.dumps([asdict(call) for call in slots.calls]), flush=True)


class Clients:
    """The client processes; `run` has them run sessions."""

    def __init__(self, folder: Path, words: Sequence[str], num_processes: int) -> None:
        self._folder = folder
        self._words = words
        command = [sys.executable, "-c", "from agent_clients import run_client; run_client()"]
        environment = os.environ | {"PYTHONPATH": f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._processes = [subprocess.Popen(command, env=environment, **pipes) for _ in range(num_processes)]

    def run(self, origin: str, sessions: Sequence[ClientSession], num_slots: int, num_calls: int) -> list[ClientCall]:
        """All calls, in no order. The sessions, slots and calls are dealt out to the processes."""
        used = self._processes[:num_slots]
        for rank, process in enumerate(used):
            job = {
                "origin": origin,
                "words": self._words,
                "sessions": [asdict(session) for session in sessions[rank :: len(used)]],
                "num_slots": len(range(rank, num_slots, len(used))),
                "num_calls": len(range(rank, num_calls, len(used))),
            }
            path = self._folder / f"job-{rank}.json"
            path.write_text(json.dumps(job))
            assert process.stdin is not None
            process.stdin.write(f"{path}\n")
            process.stdin.flush()
        calls: list[ClientCall] = []
        for process in used:
            assert process.stdout is not None
            answer = process.stdout.readline()
            if not answer:
                raise RuntimeError("a client process failed; its message is above")
            calls += [ClientCall(**call) for call in json.loads(answer)]
        return calls

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
