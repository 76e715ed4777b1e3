"""Be the agents of the cost measurement, in a process of their own; standard library only.

A job per line in: {"origin", "threads": a list of lists of keys, "turns", "new_bytes", "measured"}. The sessions go on
until only the last `measured` turns are left, "ready" is said, a line is waited for, the rest is measured, and a line
of {"seconds", "wall_s"} is said. Each request is the conversation before with the reply as it came and a result of
`new_bytes` more.
"""

import json
import socket
import sys
import threading
import time
from typing import Any

LINE = "    value = compute(value, index)  # a line of some file\n"


class Agent:
    """One session over one connection."""

    def __init__(self, origin: str, key: str, new_bytes: int, tools: str) -> None:
        self._host, port = origin.removeprefix("http://").split(":")
        self._port = int(port)
        self._socket: socket.socket | None = None
        self._last_s = 0.0
        self._head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: {self._host}\r\nauthorization: Bearer {key}\r\n"
            "content-type: application/json\r\n"
        )
        self._result = (LINE * (new_bytes // len(LINE) + 1))[:new_bytes]
        self._number = 0
        self._tail = f'],"tools":{tools}}}'.encode()
        messages = [
            {"role": "system", "content": "You are a coding agent."},
            {"role": "user", "content": "Fix the bug."},
        ]
        self._body = bytearray(b'{"model":"policy","messages":[' + json.dumps(messages)[1:-1].encode())

    def take_turn(self) -> float:
        """Send the conversation, and append the reply and a result; returns the seconds until the last byte."""
        body = bytes(self._body) + self._tail
        request = f"{self._head}content-length: {len(body)}\r\n\r\n".encode() + body
        connection = self._connect()
        start = time.perf_counter()
        connection.sendall(request)
        reply = self._receive(connection)
        while b"\r\n\r\n" not in reply:
            reply += self._receive(connection)
        head, _, rest = reply.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        parts = [rest]
        size = len(rest)
        while size < length:
            parts.append(self._receive(connection))
            size += len(parts[-1])
        seconds = time.perf_counter() - start
        self._last_s = time.monotonic()
        self._append(head, b"".join(parts))
        return seconds

    def _connect(self) -> socket.socket:
        """Connect, unless the connection is fresh: servers close those that are idle for five seconds."""
        if self._socket is None or time.monotonic() - self._last_s > 2:
            self.close()
            self._socket = socket.create_connection((self._host, self._port), timeout=120)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self._socket

    @staticmethod
    def _receive(connection: socket.socket) -> bytes:
        data = connection.recv(1 << 18)
        if not data:
            raise ConnectionError("the server closed the connection before its answer")
        return data

    def _append(self, head: bytes, text: bytes) -> None:
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"a request failed: {head.splitlines()[0].decode()} {text[:600].decode()}")
        message: dict[str, Any] = json.loads(text)["choices"][0]["message"]
        if not message.get("tool_calls"):
            raise RuntimeError(f"a reply has no tool call: {text[-600:].decode()}")
        kept = {name: message[name] for name in ("role", "content", "tool_calls")}
        self._number += 1
        content = f"{self._number}\n{self._result}"
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": content}
        self._body += b"," + json.dumps(kept).encode() + b"," + json.dumps(result).encode()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()


def run_sessions(job: dict[str, Any], keys: list[str], gate: threading.Barrier, seconds: list[float]) -> None:
    agents = [Agent(job["origin"], key, job["new_bytes"], job["tools"]) for key in keys]
    try:
        for agent in agents:
            for _ in range(job["turns"] - job["measured"]):
                agent.take_turn()
        gate.wait()
        gate.wait()
        for agent in agents:
            seconds += [agent.take_turn() for _ in range(job["measured"])]
        gate.wait()
    except BaseException:
        gate.abort()
        raise
    for agent in agents:
        agent.close()


def main() -> None:
    for line in sys.stdin:
        job = json.loads(line)
        gate = threading.Barrier(len(job["threads"]) + 1)
        seconds: list[float] = []
        threads = [threading.Thread(target=run_sessions, args=(job, keys, gate, seconds)) for keys in job["threads"]]
        for thread in threads:
            thread.start()
        try:
            gate.wait()
            print("ready", flush=True)
            sys.stdin.readline()
            start = time.perf_counter()
            gate.wait()
            gate.wait()
        except threading.BrokenBarrierError:
            raise SystemExit("a session failed; its message is above") from None
        wall_s = time.perf_counter() - start
        for thread in threads:
            thread.join()
        print(json.dumps({"seconds": seconds, "wall_s": wall_s}), flush=True)


if __name__ == "__main__":
    main()
