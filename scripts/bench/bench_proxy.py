#!/usr/bin/env python3
"""Measure what the proxy adds to a model call: latency and requests per second of sessions that grow to a size.

Each request is an agent's: the whole conversation again, a tool call and its result longer than the one before. The
last fifth of each session is measured, from a client in a process of its own. "direct" is the same prompt ids given
to the same engine in-process. No model runs: the engine is scripted. Turns are encoded by a real tokenizer and its
chat template, or without one by a renderer that makes a token of every four bytes. Calls are recorded on disk. A
failed request, or a prompt that continued no earlier call, ends the measurement.

"CPU" is processor time of the proxy's process per request, all of its threads: on a machine that does other work too
it is the steadier figure. With --repeat every figure is the median of so many rows, which are run in turns.
"""

import argparse
import asyncio
import gc
import json
import math
import os
import platform
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
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
  python scripts/bench/bench_proxy.py --requests 500 --concurrency 1 8 64 --repeat 3 --json proxy.json
  python scripts/bench/bench_proxy.py --body-kb 300 --new-kb 20 --family qwen3
  python scripts/bench/bench_proxy.py --body-kb 100 --requests 50
  python scripts/bench/bench_proxy.py --tokenizer none
  python scripts/bench/bench_proxy.py --body-kb 100 --new-kb 10 --concurrency 64 512 --pause-s 10
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
Size = tuple[int, int]
"""KB of the last request, and KB of new text in each."""
GROWING = threading.BoundedSemaphore(32)
"""Sessions that grow at a time: agents do not begin in one instant."""
MEASURED_FROM = 0.8
"""Requests are measured from this share of the body size on."""


def build_bodies(body_kb: int, new_kb: int) -> list[bytes]:
    """The requests of one session, each the one before and a turn of `new_kb` more (0: a line), up to `body_kb`."""
    line = "    value = compute(value, index)  # a line of some file\n"
    result = line * max(1, new_kb * 1024 // len(line))
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
            if not (more := self._socket.recv(1 << 16)):
                raise SystemExit("the proxy closed a connection")
            reply += more
        head, _, rest = reply.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        while len(rest) < length:
            rest += self._socket.recv(1 << 16)
        seconds = time.perf_counter() - start
        if not head.startswith(b"HTTP/1.1 200") or ARGUMENTS not in json.dumps(json.loads(rest)).replace("\\", ""):
            raise SystemExit(f"a request failed: {head.splitlines()[0].decode()} {rest[:300].decode()}")
        return seconds


def run_sessions(
    origin: str,
    keys: list[str],
    bodies: list[bytes],
    ready: threading.Barrier,
    seconds: list[float],
    pause_s: float,
) -> None:
    """Grow every session, wait for the other threads, then measure into `seconds`.

    Args:
        pause_s: Before each measured request, on average: an agent's own work, and an engine's.
    """
    num_measured = count_measured(bodies)
    connections = []
    for key in keys:
        with GROWING:
            connections.append(AgentConnection(origin, key))
            for body in bodies[:-num_measured]:
                connections[-1].post(body)
    ready.wait()  # all have grown
    ready.wait()  # the proxy's side has read its clock
    for connection in connections:
        for body in bodies[-num_measured:]:
            time.sleep(2 * pause_s * random.random())
            seconds.append(connection.post(body))
    ready.wait()


def run_or_abort(run: Callable[[], None], ready: threading.Barrier) -> None:
    """End the measurement where a session fails; the others would wait for it."""
    try:
        run()
    except BaseException:
        ready.abort()
        raise


def run_client() -> None:
    """Answer jobs with {"seconds", "wall_s"}.

    A job is {"origin", "body_kb", "new_kb", "threads": a list of keys per thread, "pause_s"}. Says "ready" in between,
    and waits for a line.
    """
    for line in sys.stdin:
        job = json.loads(line)
        bodies = build_bodies(job["body_kb"], job["new_kb"])
        ready = threading.Barrier(len(job["threads"]) + 1)
        seconds: list[float] = []
        threads = []
        for keys in job["threads"]:
            run = partial(run_sessions, job["origin"], keys, bodies, ready, seconds, job["pause_s"])
            threads.append(threading.Thread(target=run_or_abort, args=(run, ready)))
            threads[-1].start()
        ready.wait()
        print("ready", flush=True)
        sys.stdin.readline()
        start = time.perf_counter()
        ready.wait()
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

    def run_job(
        self, size: Size, num_threads: int, sessions_per_thread: int, *, pause_s: float = 0.0
    ) -> tuple[dict[str, Any], SessionLog]:
        """Return what was measured, and the record of one session."""
        logs = [self._open_log() for _ in range(num_threads * sessions_per_thread)]
        keys = [self._proxy.open_session(log, SessionLimits(max_calls=1 << 30)).api_key for log in logs]
        threads = [keys[start::num_threads] for start in range(num_threads)]
        job = {"body_kb": size[0], "new_kb": size[1], "threads": threads, "pause_s": pause_s}
        self._tell({"origin": self._proxy.origin, **job})
        self._hear()
        gc.collect()
        cpu_s = time.process_time()
        self._tell("go")
        answer = json.loads(self._hear())
        cpu_s = time.process_time() - cpu_s
        for key in keys:
            self._proxy.close_session(key)
        return answer | {"cpu_s": cpu_s}, logs[0]

    def _tell(self, what: Any) -> None:
        assert self._client.stdin is not None
        self._client.stdin.write(json.dumps(what) + "\n")
        self._client.stdin.flush()

    def _hear(self) -> str:
        assert self._client.stdout is not None
        answer = self._client.stdout.readline()
        if not answer:
            raise SystemExit("the client failed; its message is above")
        return answer

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


def measure(
    bench: Bench,
    engine: ScriptedEngine,
    size: Size,
    num_requests: int,
    concurrencies: Sequence[int],
    pause_s: float = 0.0,
) -> dict[str, Any]:
    """One row: latency with one session at a time, then throughput and latency with so many at once."""
    bodies = build_bodies(*size)
    num_measured = count_measured(bodies)
    alone, log = bench.run_job(size, 1, math.ceil(num_requests / num_measured))
    proxy: list[float] = alone["seconds"]
    if any(call.parent != call.index - 1 for call in log.calls[1:]):
        raise SystemExit("a prompt was rendered anew: the bench measures continuations")
    prompts = [call.prompt_ids for call in log.calls[-num_measured:]]
    direct = asyncio.run(time_direct(engine, prompts * math.ceil(num_requests / num_measured)))
    row = {
        "body_kb": size[0],
        "new_kb": size[1],
        "prompt_tokens": len(log.calls[-1].prompt_ids),
        "messages": 2 * len(bodies),
        "requests": len(proxy),
        "cpu_ms": 1000 * alone["cpu_s"] / len(proxy),
        "direct_p50_ms": percentile_ms(direct, 0.5),
        "direct_p95_ms": percentile_ms(direct, 0.95),
        "proxy_p50_ms": percentile_ms(proxy, 0.5),
        "proxy_p95_ms": percentile_ms(proxy, 0.95),
    }
    for concurrency in concurrencies:
        sessions_per_thread = math.ceil(num_requests / (num_measured * concurrency))
        answer, _ = bench.run_job(size, concurrency, sessions_per_thread, pause_s=pause_s)
        row[f"requests_per_s_{concurrency}"] = len(answer["seconds"]) / answer["wall_s"]
        row[f"p50_ms_{concurrency}"] = percentile_ms(answer["seconds"], 0.5)
        row[f"p95_ms_{concurrency}"] = percentile_ms(answer["seconds"], 0.95)
        row[f"cpu_ms_{concurrency}"] = 1000 * answer["cpu_s"] / len(answer["seconds"])
    for name in ("p50_ms", "p95_ms"):
        row[f"added_{name}"] = row[f"proxy_{name}"] - row[f"direct_{name}"]
    return row


def take_medians(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {name: round(statistics.median(row[name] for row in rows), 3) for name in rows[0]}


def load_policy(tokenizer: str, family: str | None = None) -> tuple[Renderer, TokenIds, str]:
    """A renderer, the ids of the scripted reply, and what to call the renderer.

    A `family` may need special tokens that the tokenizer lacks: Qwen3's are added.
    """
    if tokenizer == "none":
        renderer = FourByteRenderer()
        return renderer, renderer.spell(REPLY), "a token per four bytes"
    # slow to import, and of no use to the client's process
    from transformers import AutoTokenizer

    from polar_trl.tokens.load import load_renderer

    loaded = AutoTokenizer.from_pretrained(tokenizer)
    if family is not None:
        marks = ("think", "tool_call", "tool_response")
        loaded.unk_token = None  # the same as the end of text, which the family wants for itself
        loaded.add_tokens([f"<{slash}{mark}>" for mark in marks for slash in ("", "/")], special_tokens=True)
    model_renderer = load_renderer(loaded, tokenizer, family=family)
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
    parser.add_argument(
        "--concurrency", type=int, nargs="+", default=[4], help="sessions at once for requests/s (default 4)"
    )
    parser.add_argument(
        "--body-kb", type=int, nargs="+", default=[1, 300], help="sizes of the last request (default 1 300)"
    )
    parser.add_argument(
        "--new-kb", type=int, nargs="+", help="new text per turn at each of them (default a line below 50 KB, then 2)"
    )
    parser.add_argument(
        "--pause-s", type=float, default=0.0, help="mean pause before each request of those sessions (default 0)"
    )
    parser.add_argument("--repeat", type=int, default=1, help="rows that a figure is the median of (default 1)")
    parser.add_argument("--family", help="chat format of a family, such as qwen3, with the tokenizer's vocabulary")
    parser.add_argument(
        "--tokenizer",
        metavar="FOLDER",
        default=str(DEFAULT_TOKENIZER) if DEFAULT_TOKENIZER.is_dir() else "none",
        help=f"a model's folder, or none (default {DEFAULT_TOKENIZER} where it is there)",
    )
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if min([options.requests, options.repeat, *options.concurrency, *options.body_kb]) < 1:
        parser.error("--requests, --repeat, --concurrency and --body-kb must be at least 1")
    options.new_kb = options.new_kb or [2 if body_kb >= 50 else 0 for body_kb in options.body_kb]
    if len(options.new_kb) != len(options.body_kb):
        parser.error(f"--new-kb: {len(options.new_kb)} numbers for the {len(options.body_kb)} of --body-kb")
    if options.tokenizer != "none" and not Path(options.tokenizer).is_dir():
        parser.error(f"--tokenizer: {options.tokenizer} is no folder; name a model's folder, or none")
    return options


def print_row(row: dict[str, Any], concurrencies: Sequence[int]) -> None:
    pairs = [f"{row[f'{who}_p50_ms']:.2f}/{row[f'{who}_p95_ms']:.2f} ms" for who in ("direct", "proxy", "added")]
    rates = [
        f"{row[f'requests_per_s_{n}']:.0f} ({row[f'cpu_ms_{n}']:.2f} ms) with {n}, "
        f"{row[f'p50_ms_{n}']:.1f}/{row[f'p95_ms_{n}']:.1f} ms"
        for n in concurrencies
    ]
    print(
        f"{row['body_kb']:>4.0f} KB {row['new_kb']:>3.0f} {row['prompt_tokens']:>8.0f} {pairs[0]:>16} {pairs[1]:>16} "
        f"{pairs[2]:>16} {row['cpu_ms']:>6.2f} ms  {', '.join(rates)}",
        flush=True,
    )


def main() -> None:
    options = read_options()
    if options.client:
        run_client()
        return
    renderer, reply_ids, renderer_name = load_policy(options.tokenizer, options.family)
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
            f"{'body':>7} {'new':>3} {'tokens':>8} {'direct p50/p95':>16} {'proxy p50/p95':>16} {'added p50/p95':>16} "
            f"{'CPU':>9}  requests/s (CPU) with sessions at once, their p50/p95"
        )
        sizes = list(zip(options.body_kb, options.new_kb, strict=True))
        measured: dict[Size, list[dict[str, Any]]] = {size: [] for size in sizes}
        for _ in range(options.repeat):
            for size in sizes:
                measured[size].append(
                    measure(bench, engine, size, options.requests, options.concurrency, options.pause_s)
                )
        for size in sizes:
            rows.append(take_medians(measured[size]))
            print_row(rows[-1], options.concurrency)
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
