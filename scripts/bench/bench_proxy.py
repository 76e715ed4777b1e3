#!/usr/bin/env python3
"""Measure what the proxy adds to a model call: latency and requests per second of sessions that grow to a size.

Each request is an agent's: the whole conversation again, a tool call and its result longer than the one before. The
last fifth of each session is measured, from a client in a process of its own. "direct" is the same prompt ids given
to the same engine in-process. No model runs: the engine is scripted. Turns are encoded by a real tokenizer and its
chat template, or without one by a renderer that makes a token of every four bytes. Calls are recorded on disk. A
failed request, or a prompt that continued no earlier call, ends the measurement.
"""

import argparse
import asyncio
import json
import math
import os
import platform
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from functools import partial
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

from polar_trl.engine.base import GenerationParams
from polar_trl.engine.scripted import ScriptedEngine
from polar_trl.proxy import Proxy
from polar_trl.recording.log import SessionLog
from polar_trl.recording.session import SessionLimits
from polar_trl.tokens.base import Renderer
from polar_trl.tokens.bytes import ByteRenderer
from polar_trl.types import Message, TokenIds, Tool, ToolCall

EXAMPLES = """examples:
  python scripts/bench/bench_proxy.py
  python scripts/bench/bench_proxy.py --requests 500 --concurrency 8 --json proxy.json
  python scripts/bench/bench_proxy.py --body-kb 100 --requests 50
  python scripts/bench/bench_proxy.py --tokenizer none
"""
DEFAULT_TOKENIZER = Path(".cache/models/SmolLM2-135M-Instruct")
ARGUMENTS = '{"command":"sed -n 1,40p module.py"}'
REPLY = Message(
    role="assistant",
    text="I will look at the next part of the file.",
    tool_calls=(ToolCall(id="", name="bash", arguments=ARGUMENTS),),
)
REPLY_TEXT = f'{REPLY.text}\n<tool_call>\n{{"name": "bash", "arguments": {ARGUMENTS}}}\n</tool_call>'
"""The same reply as models spell it."""
PARAMS = GenerationParams(max_tokens=512)
MEASURED_FROM = 0.8
"""Requests are measured from this share of the body size on."""


def build_bodies(body_kb: int) -> list[bytes]:
    """The requests of one session, each the one before and a turn more, up to `body_kb`."""
    line = "    value = compute(value, index)  # a line of some file\n"
    result = line * (40 if body_kb >= 50 else 1)
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You are a coding agent."},
        {"role": "user", "content": "Fix the bug."},
    ]
    bodies = [json.dumps({"model": "policy", "messages": messages}).encode()]
    while len(bodies[-1]) < body_kb * 1024:
        call_id = f"call_{len(bodies) - 1}_0"
        tool_call = {"id": call_id, "type": "function", "function": {"name": "bash", "arguments": ARGUMENTS}}
        messages.append({"role": "assistant", "content": REPLY.text, "tool_calls": [tool_call]})
        messages.append({"role": "tool", "tool_call_id": call_id, "content": f"{len(bodies)}\n{result}"})
        bodies.append(json.dumps({"model": "policy", "messages": messages}).encode())
    return bodies


def count_measured(bodies: list[bytes]) -> int:
    return sum(len(body) >= MEASURED_FROM * len(bodies[-1]) for body in bodies)


class FourByteRenderer(ByteRenderer):
    """A token per four bytes of a turn: as many tokens as a real tokenizer makes, in no time."""

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> TokenIds:
        return _pack(super().render(messages, tools))

    def extend(
        self, prompt_ids: TokenIds, completion_ids: TokenIds, new_messages: Sequence[Message], tools: Sequence[Tool]
    ) -> TokenIds:
        return prompt_ids + (completion_ids + _pack(super().render(new_messages, ())))

    def parse(self, prompt_ids: TokenIds, completion_ids: TokenIds, tools: Sequence[Tool]) -> Message:
        ids = chain.from_iterable(_unpack(token_id) for token_id in completion_ids)
        return super().parse((), tuple(ids), tools)

    def spell(self, message: Message) -> TokenIds:
        return _pack(super().spell(message))


def _pack(ids: TokenIds) -> TokenIds:
    packed: list[int] = []
    for start in range(0, len(ids), 4):
        group = ids[start : start + 4]
        # the marks are above 255 and stay as they are, and so does what shares their four places
        packed += group if len(group) < 4 or max(group) > 255 else [1000 + int.from_bytes(bytes(group), "little")]
    return tuple(packed)


def _unpack(token_id: int) -> Iterable[int]:
    return (token_id,) if token_id < 1000 else (token_id - 1000).to_bytes(4, "little")


# The client's process: a job per line in, a line of seconds out


class AgentConnection:
    """One session's connection: as little work per request as a socket allows."""

    def __init__(self, origin: str, api_key: str) -> None:
        host, port = origin.removeprefix("http://").split(":")
        self._socket = socket.create_connection((host, int(port)))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {api_key}\r\n"

    def post(self, body: bytes) -> float:
        """Seconds from the first byte sent to the last byte read."""
        request = f"{self._head}content-length: {len(body)}\r\n\r\n".encode() + body
        start = time.perf_counter()
        self._socket.sendall(request)
        reply = self._socket.recv(1 << 16)
        while b"\r\n\r\n" not in reply:
            reply += self._socket.recv(1 << 16)
        head, _, rest = reply.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        while len(rest) < length:
            rest += self._socket.recv(1 << 16)
        seconds = time.perf_counter() - start
        if not head.startswith(b"HTTP/1.1 200") or ARGUMENTS not in json.dumps(json.loads(rest)).replace("\\", ""):
            raise SystemExit(f"a request failed: {head.splitlines()[0].decode()} {rest[:300].decode()}")
        return seconds


def run_sessions(
    connections: list[AgentConnection], bodies: list[bytes], ready: threading.Barrier, seconds: list[float]
) -> None:
    """Grow every session, wait for the other threads, then measure into `seconds`."""
    num_measured = count_measured(bodies)
    for connection in connections:
        for body in bodies[:-num_measured]:
            connection.post(body)
    ready.wait()
    seconds += [connection.post(body) for connection in connections for body in bodies[-num_measured:]]
    ready.wait()


def run_client() -> None:
    """Answer jobs {"origin", "body_kb", "threads": a list of keys per thread} with {"seconds", "wall_s"}."""
    for line in sys.stdin:
        job = json.loads(line)
        bodies = build_bodies(job["body_kb"])
        ready = threading.Barrier(len(job["threads"]) + 1)
        seconds: list[float] = []
        threads = []
        for keys in job["threads"]:
            connections = [AgentConnection(job["origin"], key) for key in keys]
            threads.append(threading.Thread(target=partial(run_sessions, connections, bodies, ready, seconds)))
            threads[-1].start()
        ready.wait()
        start = time.perf_counter()
        ready.wait()
        wall_s = time.perf_counter() - start
        for thread in threads:
            thread.join()
        print(json.dumps({"seconds": seconds, "wall_s": wall_s}), flush=True)


# The proxy's process


class Bench:
    """A proxy, a client process, and the sessions that one job opens."""

    def __init__(self, proxy: Proxy, client: "subprocess.Popen[str]", folder: Path) -> None:
        self._proxy = proxy
        self._client = client
        self._folder = folder
        self._num_sessions = 0

    def run_job(self, body_kb: int, num_threads: int, sessions_per_thread: int) -> tuple[dict[str, Any], SessionLog]:
        """Return what the client measured, and the record of one session."""
        logs = [self._open_log() for _ in range(num_threads * sessions_per_thread)]
        keys = [self._proxy.open_session(log, SessionLimits(max_calls=1 << 30)).api_key for log in logs]
        threads = [keys[start::num_threads] for start in range(num_threads)]
        job = {"origin": self._proxy.origin, "body_kb": body_kb, "threads": threads}
        assert self._client.stdin is not None and self._client.stdout is not None
        self._client.stdin.write(json.dumps(job) + "\n")
        self._client.stdin.flush()
        answer = self._client.stdout.readline()
        for key in keys:
            self._proxy.close_session(key)
        if not answer:
            raise SystemExit("the client failed; its message is above")
        return json.loads(answer), logs[0]

    def _open_log(self) -> SessionLog:
        self._num_sessions += 1
        session_id = f"session-{self._num_sessions}"
        path = self._folder / f"{session_id}.jsonl"
        return SessionLog(session_id=session_id, task_id="bench", group_id="bench", path=path)


async def time_direct(engine: ScriptedEngine, prompts: list[TokenIds]) -> list[float]:
    seconds = []
    for prompt_ids in prompts:
        start = time.perf_counter()
        await engine.generate(prompt_ids, PARAMS)
        seconds.append(time.perf_counter() - start)
    return seconds


def percentile_ms(seconds: list[float], share: float) -> float:
    ordered = sorted(seconds)
    return round(1000 * ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)], 3)


def measure(bench: Bench, engine: ScriptedEngine, body_kb: int, num_requests: int, concurrency: int) -> dict[str, Any]:
    """One row: latency with one session at a time, then throughput with `concurrency` at once."""
    bodies = build_bodies(body_kb)
    num_measured = count_measured(bodies)
    proxy: list[float] = []
    direct: list[float] = []
    while len(proxy) < num_requests:
        answer, log = bench.run_job(body_kb, 1, 1)
        proxy += answer["seconds"]
        if any(call.parent != call.index - 1 for call in log.calls[1:]):
            raise SystemExit("a prompt was rendered anew: the bench measures continuations")
        direct += asyncio.run(time_direct(engine, [call.prompt_ids for call in log.calls[-num_measured:]]))
    sessions_per_thread = math.ceil(num_requests / (num_measured * concurrency))
    answer, _ = bench.run_job(body_kb, concurrency, sessions_per_thread)
    row = {
        "body_kb": body_kb,
        "prompt_tokens": len(log.calls[-1].prompt_ids),
        "messages": 2 * len(bodies),
        "requests": len(proxy),
        "direct_p50_ms": percentile_ms(direct, 0.5),
        "direct_p95_ms": percentile_ms(direct, 0.95),
        "proxy_p50_ms": percentile_ms(proxy, 0.5),
        "proxy_p95_ms": percentile_ms(proxy, 0.95),
        "concurrency": concurrency,
        "requests_per_s": round(len(answer["seconds"]) / answer["wall_s"], 1),
    }
    for name in ("p50_ms", "p95_ms"):
        row[f"added_{name}"] = round(row[f"proxy_{name}"] - row[f"direct_{name}"], 3)
    return row


def load_policy(tokenizer: str) -> tuple[Renderer, TokenIds, str]:
    """A renderer, the ids of the scripted reply, and what to call the renderer."""
    if tokenizer == "none":
        renderer = FourByteRenderer()
        return renderer, renderer.spell(REPLY), "a token per four bytes"
    # slow to import, and of no use to the client's process
    from transformers import AutoTokenizer

    from polar_trl.tokens.load import load_renderer

    loaded = AutoTokenizer.from_pretrained(tokenizer)
    model_renderer = load_renderer(loaded, tokenizer)
    ids = loaded.encode(REPLY_TEXT, add_special_tokens=False)
    name = f"{type(model_renderer).__name__} of {Path(tokenizer).name}"
    return model_renderer, (*ids, model_renderer.stop_token_ids[0]), name


def describe_machine() -> dict[str, Any]:
    names = [line.split(": ")[1] for line in _read_cpuinfo() if line.startswith("model name")]
    return {"system": platform.platform(), "cpu": names[0] if names else platform.processor(), "cores": os.cpu_count()}


def _read_cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    parser.add_argument("--requests", type=int, default=100, help="measured requests per size (default 100)")
    parser.add_argument("--concurrency", type=int, default=4, help="sessions at once for requests/s (default 4)")
    parser.add_argument(
        "--body-kb", type=int, nargs="+", default=[1, 300], help="sizes of the last request (default 1 300)"
    )
    parser.add_argument(
        "--tokenizer",
        metavar="FOLDER",
        default=str(DEFAULT_TOKENIZER) if DEFAULT_TOKENIZER.is_dir() else "none",
        help=f"a model's folder, or none (default {DEFAULT_TOKENIZER} where it is there)",
    )
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if min([options.requests, options.concurrency, *options.body_kb]) < 1:
        parser.error("--requests, --concurrency and --body-kb must be at least 1")
    if options.tokenizer != "none" and not Path(options.tokenizer).is_dir():
        parser.error(f"--tokenizer: {options.tokenizer} is no folder; name a model's folder, or none")
    return options


def print_row(row: dict[str, Any]) -> None:
    pairs = [f"{row[f'{who}_p50_ms']:.2f}/{row[f'{who}_p95_ms']:.2f} ms" for who in ("direct", "proxy", "added")]
    print(
        f"{row['body_kb']:>4} KB {row['prompt_tokens']:>8} {pairs[0]:>16} {pairs[1]:>16} {pairs[2]:>16}  "
        f"{row['requests_per_s']} with {row['concurrency']} sessions at once"
    )


def main() -> None:
    options = read_options()
    if options.client:
        run_client()
        return
    renderer, reply_ids, renderer_name = load_policy(options.tokenizer)
    engine = ScriptedEngine(lambda _: reply_ids, max_model_len=1 << 30)
    command = [sys.executable, __file__, "--client"]
    rows = []
    with (
        tempfile.TemporaryDirectory() as folder,
        Proxy(engine, renderer, params=PARAMS) as proxy,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client,
    ):
        bench = Bench(proxy, client, Path(folder))
        print(
            f"{'body':>7} {'tokens':>8} {'direct p50/p95':>16} {'proxy p50/p95':>16} {'added p50/p95':>16}  requests/s"
        )
        for body_kb in options.body_kb:
            rows.append(measure(bench, engine, body_kb, options.requests, options.concurrency))
            print_row(rows[-1])
        assert client.stdin is not None
        client.stdin.close()
    packages = ["polar-trl", "uvicorn", "uvloop", "httptools", "starlette", "orjson"]
    packages += ["tokenizers", "transformers"] if options.tokenizer != "none" else []
    result = {
        "rows": rows,
        "engine": "scripted",
        "renderer": renderer_name,
        "machine": describe_machine(),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in packages},
    }
    print("\n".join(f"{name}: {result[name]}" for name in ("engine", "renderer", "machine", "versions")))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
