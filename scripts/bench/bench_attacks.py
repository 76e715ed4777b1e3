#!/usr/bin/env python3
"""Measure what an agent that attacks the proxy does to other sessions, to the trainer's memory, and to its record.

One process serves, as a trainer does: a real tokenizer, a scripted engine, records on disk. A second one is another
session's agent, which asks all the time (1 KB and 30 KB in turns) and times its answers. This one attacks, each time
from a new session with a listener of its own, as agents in bubblewrap and Docker have. "ended" is the limit that the
attacking session went past, if it did; where it stayed within them, it was refused or simply served. The decoy is one
more process that serves: the same attack on it costs the machine as much, and the other session nothing else.
"""

import argparse
import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "helpers"))  # attacks are tests, too

from attacks import ATTACKS, Target, ask, build_bombs, read_status
from bench_proxy import DEFAULT_TOKENIZER, load_policy, percentile_ms

from polar_trl.engine.base import GenerationParams
from polar_trl.engine.scripted import ScriptedEngine
from polar_trl.proxy import Proxy
from polar_trl.recording.log import SessionLog
from polar_trl.recording.session import SessionLimits

CALM_S = 6.0
SMALL, LARGE = 1_000, 30_000
WORDS = "the value of the next line is computed from the one before it, and so is "


def serve(tokenizer: str) -> None:
    """Answer "open NUM_CALLS", "close" (the last one that is open) and "collect" with a line of JSON each."""
    renderer, reply_ids, _ = load_policy(tokenizer)
    engine = ScriptedEngine(lambda _: reply_ids, max_model_len=32768)
    with (
        tempfile.TemporaryDirectory() as folder,
        Proxy(engine, renderer, params=GenerationParams(max_tokens=512)) as proxy,
    ):
        sessions: list[tuple[SessionLog, str, Path]] = []
        for number, line in enumerate(sys.stdin):
            words, answer = line.split(), {}
            if words[0] == "open":
                path = Path(folder) / f"{number}.jsonl"
                log = SessionLog(session_id=f"s{number}", task_id="t", group_id="g", path=path)
                listener = socket.create_server(("127.0.0.1", 0), backlog=128)
                answer["address"] = listener.getsockname()
                answer["key"] = proxy.open_session(
                    log, SessionLimits(max_calls=int(words[1])), listener=listener
                ).api_key
                sessions.append((log, answer["key"], path))
            elif words[0] == "close":
                log, key, path = sessions.pop()
                proxy.close_session(key)
                answer |= {"ended": log.exceeded, "calls": len(log.calls), "record_mb": path.stat().st_size / 1e6}
                answer |= {"counters": log.counters, "failure": log.last_failure}
            else:
                gc.collect()  # what is measured then is kept, and does not wait for the collector
            log = None
            print(json.dumps(answer), flush=True)


def watch(address: list[Any], key: str) -> None:
    """Ask until told to stop; prints the seconds of each answer and when it was asked for."""
    stopped = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.readline(), stopped.set()), daemon=True).start()
    target = Target(address=(address[0], address[1]), key=key)
    connection = target.connect()
    times, number = [], 0
    while not stopped.wait(0.02):
        number += 1
        text = WORDS * (((SMALL, LARGE)[number % 2]) // len(WORDS))
        body = ask(f"{number} {text}")
        start = time.monotonic()
        connection.sendall(target.head(len(body)) + body)
        status = read_status(connection)
        times.append((start, time.monotonic() - start))
        if status != 200:
            raise SystemExit(f"the other session was answered with status {status}")
    print(json.dumps(times))


class Child:
    """This script in a process of its own."""

    def __init__(self, *words: str) -> None:
        command = [sys.executable, __file__, *words]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self._process.pid

    def tell(self, line: str) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"{self._process.args[2:]} failed; its message is above")
        return json.loads(answer)

    def read_mb(self, name: str) -> int:
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith(name)).split()[1]) >> 10

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def clear_peak(server: Child) -> None:
    """Have VmHWM, the largest resident size, count from here."""
    Path(f"/proc/{server.pid}/clear_refs").write_text("5")


def measure(server: Child, decoy: Child, name: str) -> dict[str, Any]:
    """One row: an attack beside another session, then the same attack on another process."""
    watcher = Child("--watch", json.dumps(server.tell("open 1000000")))
    time.sleep(2)  # it has started and is answered
    clear_peak(server)
    row = {"attack": name, "before_mb": server.read_mb("VmRSS")}
    spans = []
    for attacked in (server, decoy):
        opened, started = attacked.tell("open 8"), time.monotonic()
        if name == "none":
            time.sleep(CALM_S)
        else:
            ATTACKS[name](Target(address=tuple(opened["address"]), key=opened["key"]))
        spans.append((started - 0.5, max(time.monotonic(), started + 1.5)))  # short ones have a wake
        time.sleep(max(0.0, spans[-1][1] - time.monotonic()))
        closed = attacked.tell("close")
        if attacked is server:
            row |= closed | {"seconds": spans[0][1] - started}
            row["peak_mb"] = server.read_mb("VmHWM")
    answers = watcher.tell("stop")
    server.tell("close")
    server.tell("collect")
    row["after_mb"] = server.read_mb("VmRSS")
    for who, (start, end) in zip(("attacked", "decoy"), spans, strict=True):
        times = [seconds for asked, seconds in answers if start <= asked <= end]
        row |= {f"{who}_n": len(times), f"{who}_p50_ms": percentile_ms(times, 0.5)}
        row |= {f"{who}_p95_ms": percentile_ms(times, 0.95), f"{who}_max_ms": percentile_ms(times, 1.0)}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attacks", nargs="+", default=list(ATTACKS), choices=list(ATTACKS), metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    parser.add_argument(
        "--tokenizer", default=str(DEFAULT_TOKENIZER), help="a model's folder, or none (default %(default)s)"
    )
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--watch", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(options.tokenizer)
    if options.watch:
        return watch(**options.watch)
    build_bombs()
    server = Child("--serve", "--tokenizer", options.tokenizer)
    decoy = Child("--serve", "--tokenizer", options.tokenizer)
    print(
        "| attack | ended | other's p50 / p95 / max | the same, decoy attacked | RSS before / peak / after | record |"
    )
    print("|---|---|---|---|---|---|")
    rows = []
    for name in ("none", *options.attacks):
        row = measure(server, decoy, name)
        rows.append(row)
        latencies = [
            f"{row[f'{who}_p50_ms']:.0f} / {row[f'{who}_p95_ms']:.0f} / {row[f'{who}_max_ms']:.0f} ms"
            for who in ("attacked", "decoy")
        ]
        print(
            f"| {name.replace('_', ' ')} | {row['ended'] or '–'} | {latencies[0]} | {latencies[1]} "
            f"| {row['before_mb']} / {row['peak_mb']} / {row['after_mb']} MB | {row['record_mb']:.2f} MB |",
            flush=True,
        )
        print(row["counters"], file=sys.stderr)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    server.end()
    decoy.end()
    print(f"\n{os.cpu_count()} cores", file=sys.stderr)


if __name__ == "__main__":
    main()
