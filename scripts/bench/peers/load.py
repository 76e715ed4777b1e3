"""Be the agents of the cost measurement, in a process of their own; standard library only.

A job per line in: {"origin", "threads": a list of lists of keys, "body_kb", "new_bytes", "measured"}. The sessions grow
until only `measured` requests are left, "ready" is said, a line is waited for, the rest is measured, and a line of
{"seconds", "wall_s"} is said. Each request is the conversation before with the reply as it came and a result of
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
        host, port = origin.removeprefix("http://").split(":")
        self._socket = socket.create_connection((host, int(port)))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {key}\r\n"
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

    @property
    def num_bytes(self) -> int:
        return len(self._body) + len(self._tail)

    def take_turn(self) -> float:
        """Send the conversation, and append the reply and a result; returns the seconds until the last byte."""
        body = bytes(self._body) + self._tail
        request = f"{self._head}content-length: {len(body)}\r\n\r\n".encode() + body
        start = time.perf_counter()
        self._socket.sendall(request)
        reply = self._socket.recv(1 << 16)
        while b"\r\n\r\n" not in reply:
            reply += self._socket.recv(1 << 16)
        head, _, rest = reply.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        parts = [rest]
        size = len(rest)
        while size < length:
            parts.append(self._socket.recv(1 << 18))
            size += len(parts[-1])
        seconds = time.perf_counter() - start
        self._append(head, b"".join(parts))
        return seconds

    def _append(self, head: bytes, text: bytes) -> None:
        if not head.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"a request failed: {head.splitlines()[0].decode()} {text[:600].decode()}")
        message: dict[str, Any] = json.loads(text)["choices"][0]["message"]
        if not message.get("tool_calls"):
            raise SystemExit(f"a reply has no tool call: {text[-600:].decode()}")
        kept = {name: message[name] for name in ("role", "content", "tool_calls")}
        self._number += 1
        content = f"{self._number}\n{self._result}"
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": content}
        self._body += b"," + json.dumps(kept).encode() + b"," + json.dumps(result).encode()

    def close(self) -> None:
        self._socket.close()


def count_turns(job: dict[str, Any]) -> int:
    """Count the turns until the body has its size; the reply's part is as long as it is in every system."""
    return int(max(job["measured"], (job["body_kb"] * 1024 - 350) // (job["new_bytes"] + 330)))


def run_sessions(job: dict[str, Any], keys: list[str], gate: threading.Barrier, seconds: list[float]) -> None:
    agents = [Agent(job["origin"], key, job["new_bytes"], job["tools"]) for key in keys]
    try:
        for agent in agents:
            for _ in range(count_turns(job) - job["measured"]):
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
