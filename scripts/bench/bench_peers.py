#!/usr/bin/env python3
"""Compare polar_trl with its peers' released packages: the rows that each makes of the same sessions, and its cost.

Each peer is installed from the package index, at a pinned version, into a virtual environment of its own under
.cache/peers, and its own server is started there in a process of its own. Table A: one scripted agent and one scripted
policy, with a real tokenizer, play sessions of 11 kinds through each; a judge that knows only what the engine got and
sampled counts what is trained once, twice, nowhere, or behind another context. Table B: latency, CPU time of the
server's process, requests per second and memory, on the same bodies, with an engine that answers at once. No model
runs. A peer that does not install or start has its reason in its row.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from peers.engine import ConstantServer, PolicyServer
from peers.policy import Policy, encode_constant_reply, load_tokenizer, save_tokenizer
from peers.servers import FOLDER, PEERS, SCRIPTS, Peer, PeerError, Server, install, start
from peers.sessions import COLUMNS, KINDS, TOOLS, Row, Sample, judge, play_session

EXAMPLES = """examples:
  python scripts/bench/bench_peers.py --json peers.json
  python scripts/bench/bench_peers.py --table rows --only openenv
  python scripts/bench/bench_peers.py --table cost --only polar_trl litellm --repeats 1
"""
MODEL = Path(".cache/models/SmolLM2-135M-Instruct")
TURNS = (8, 11, 14)
MEMORY_TURNS = (48, 96, 193)


# Table A


def post_to(origin: str, key: str) -> Callable[..., dict[str, Any]]:
    connection = HTTPConnection(origin.removeprefix("http://"))

    def post(messages: list[dict[str, Any]], headers: dict[str, str]) -> dict[str, Any]:
        body = json.dumps({"model": "policy", "messages": messages, "tools": TOOLS})
        all_headers = {"authorization": f"Bearer {key}", "content-type": "application/json", **headers}
        connection.request("POST", "/v1/chat/completions", body, all_headers)
        answer = connection.getresponse()
        text = answer.read()
        if answer.status != 200:
            raise PeerError(f"HTTP {answer.status}: {text[:300].decode()}")
        message: dict[str, Any] = json.loads(text)["choices"][0]["message"]
        return message

    return post


Counts = dict[str, Counter[str]]
"""Kind -> the counts of its sessions."""


def count_rows(peer: Peer, tokenizer: str, parser: str, threshold: int | None = None) -> Counts:
    """Play every session through a peer, and judge its rows; with `threshold`, those that TRL makes of its trace."""
    policy = Policy(load_tokenizer(tokenizer))
    totals: Counts = {}
    with PolicyServer(policy) as engine:
        base = engine.origin + peer.engine_path.replace("PARSER", parser)
        arguments = (base, tokenizer) if peer.packages else (tokenizer, "policy")
        with start(peer, *arguments) as server:
            for kind in KINDS:
                totals[kind] = Counter()
                for turns in TURNS:
                    begin = (
                        policy.begin
                        if peer.packages
                        else lambda kind, turns: server.ask("begin", kind=kind, turns=turns)
                    )
                    begin(kind, turns)
                    key = server.ask("open")
                    play_session(kind, turns, post_to(server.origin, key))
                    found = server.ask("rows", key=key)
                    samples = [Sample(**s) for s in found["samples"]] if "samples" in found else policy.samples
                    rows = [Row(**row) for row in found["rows"]]
                    if threshold is not None:
                        rows = build_trl_rows(found, threshold)
                    totals[kind] += judge(samples, rows)
                    server.ask("close", key=key)
    return totals


def build_trl_rows(found: dict[str, Any], threshold: int) -> list[Row]:
    """Let TRL's AsyncGRPO build its rows from the trace that OpenEnv hands to it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl.experimental.async_grpo.async_rollout_worker import TurnRecord, _chain_to_sequences
    if found["turns"] is None:
        raise PeerError(f"OpenEnv gives no training trace: {found['why']}")
    sequences, _ = _chain_to_sequences([TurnRecord(**turn) for turn in found["turns"]], "r", threshold)
    return [Row(row.input_ids, row.completion_mask, row.old_log_probs) for row in sequences]


@dataclass(frozen=True)
class System:
    """A row of table A."""

    title: str
    peer: str
    parser: str = "vllm"
    threshold: int | None = None


SYSTEMS = (
    System("polar_trl", "polar_trl"),
    System("verifiers", "verifiers"),
    System("OpenEnv, parser as vLLM's", "openenv"),
    System("OpenEnv, parser that strips", "openenv", "tidy"),
    System("TRL AsyncGRPO on OpenEnv's trace, threshold 0, as vLLM's", "openenv", "vllm", 0),
    System("the same, parser that strips", "openenv", "tidy", 0),
    System("TRL, threshold 1024, as vLLM's", "openenv", "vllm", 1024),
    System("the same, parser that strips", "openenv", "tidy", 1024),
)


def measure_rows(only: Sequence[str], tokenizer: str) -> list[dict[str, Any]]:
    print("\nTable A: rows of training\n")
    print("| system | " + " | ".join(name.replace("_", " ") for name in COLUMNS) + " |")
    print("|---" * (len(COLUMNS) + 1) + "|")
    results = []
    for system in SYSTEMS:
        if system.peer not in only:
            continue
        try:
            install(PEERS[system.peer])
            totals = count_rows(PEERS[system.peer], tokenizer, system.parser, system.threshold)
        except (PeerError, HTTPException, OSError) as error:
            results.append({"system": system.title, "not_run": str(error)})
            print(f"| {system.title} | not run: {str(error).strip().splitlines()[-1]} |", flush=True)
            continue
        whole: Counter[str] = sum(totals.values(), Counter())
        results.append({"system": system.title, "all": dict(whole), "kinds": {k: dict(c) for k, c in totals.items()}})
        print(f"| {system.title} | " + " | ".join(f"{whole[name]:,}" for name in COLUMNS) + " |", flush=True)
    if "litellm" in only:
        print("| LiteLLM | keeps no token ids: only in table B |")
    print_kinds(results)
    return results


def print_kinds(results: Sequence[dict[str, Any]]) -> None:
    ran = [result for result in results if "kinds" in result]
    print("\nRows of each kind's three sessions; in brackets, tokens lost, twice or drifted\n")
    print("| kind | " + " | ".join(result["system"] for result in ran) + " |")
    print("|---" * (len(ran) + 1) + "|")
    for kind in KINDS:
        cells = []
        for result in ran:
            counts = Counter(result["kinds"][kind])
            wrong = [f"{counts[name]} {name}" for name in ("lost", "twice", "drift", "never") if counts[name]]
            cells.append(f"{counts['rows']}" + (f" ({', '.join(wrong)})" if wrong else ""))
        print(f"| {kind} | " + " | ".join(cells) + " |")


# Table B


class Load:
    """The agents' process."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def run(self, server: Server | None, job: dict[str, Any]) -> tuple[list[float], float, float]:
        """Run a job; returns the seconds of each request, those of all on the clock, and CPU ms per request."""
        assert self._process.stdin is not None and self._process.stdout is not None
        tools = json.dumps(TOOLS)
        print(json.dumps({"tools": tools, **job}), file=self._process.stdin, flush=True)
        if self._process.stdout.readline() != "ready\n":
            raise PeerError("its sessions failed; the message is above")
        before = server.read_cpu_s() if server else 0.0
        print("go", file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise PeerError("its sessions failed; the message is above")
        found = json.loads(line)
        cpu_s = server.read_cpu_s() - before if server else 0.0
        return found["seconds"], found["wall_s"], 1000 * cpu_s / len(found["seconds"])


@contextmanager
def start_load() -> Iterator[Load]:
    command = [sys.executable, "-m", "peers.load"]
    env = {**os.environ, "PYTHONPATH": str(SCRIPTS)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            yield Load(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()


def percentile_ms(seconds: Sequence[float], share: float) -> float:
    ordered = sorted(seconds)
    return 1000 * ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


SIZES = {
    "1kb": {"turns": 4, "new_bytes": 100, "measured": 3, "sessions": 60},
    "300kb": {"turns": 121, "new_bytes": 2200, "measured": 25, "sessions": 1},
    "300kb_new20": {"turns": 15, "new_bytes": 20_000, "measured": 5, "sessions": 8},
}
"""How sessions grow to about so many kilobytes; the last is for eight sessions at once."""


def run_size(server: Server, load: Load, size: dict[str, int], threads: int) -> dict[str, float]:
    keys = [server.ask("open") for _ in range(size["sessions"])]
    job = {name: size[name] for name in ("turns", "new_bytes", "measured")}
    job |= {"origin": server.origin, "threads": [keys[i::threads] for i in range(threads)]}
    seconds, wall_s, cpu_ms = load.run(server, job)
    for key in keys:
        server.ask("close", key=key)
    return {
        "p50_ms": percentile_ms(seconds, 0.5),
        "p95_ms": percentile_ms(seconds, 0.95),
        "cpu_ms": cpu_ms,
        "per_s": len(seconds) / wall_s,
    }


def measure_memory(server: Server, load: Load, turns: int) -> float:
    """Measure megabytes held per session of so many turns: the mean of two, after one that is held too."""

    def play() -> None:
        job = {"turns": turns, "new_bytes": 2300, "measured": turns, "origin": server.origin}
        load.run(None, {**job, "threads": [[server.ask("open")]]})

    play()
    before = server.ask("memory")
    play()
    play()
    return float(server.ask("memory") - before) / 2


def measure_peer(peer: Peer, load: Load, stub: ConstantServer, tokenizer: str, memory: bool) -> dict[str, float]:
    """Measure the columns of table B once; those of memory, which repeat to a few percent, if they are asked for."""
    arguments = (f"{stub.origin}/v1", tokenizer) if peer.packages else (tokenizer, "constant")
    found: dict[str, float] = {}
    with start(peer, *arguments) as server:
        run_size(server, load, SIZES["1kb"], 1)  # warms up
        found |= {f"1kb_{name}": value for name, value in run_size(server, load, SIZES["1kb"], 1).items()}
        found["1kb_per_s"] = run_size(server, load, SIZES["1kb"], 8)["per_s"]
        found |= {f"300kb_{name}": value for name, value in run_size(server, load, SIZES["300kb"], 1).items()}
        new20 = run_size(server, load, SIZES["300kb_new20"], 8)
        found |= {"300kb_per_s": new20["per_s"], "300kb_new20_cpu_ms": new20["cpu_ms"]}
    for turns in MEMORY_TURNS if memory and peer.has_rows else ():
        with start(peer, *arguments) as server:  # afresh: what was freed before would hide what is held
            found[f"memory_{turns}_mb"] = measure_memory(server, load, turns)
    return found


COST_COLUMNS = {
    "1 KB added p50/p95, ms": ("1kb_p50_ms", "1kb_p95_ms"),
    "CPU ms": ("1kb_cpu_ms",),
    "requests/s, 8 sessions": ("1kb_per_s",),
    "300 KB added p50/p95, ms": ("300kb_p50_ms", "300kb_p95_ms"),
    "CPU ms, 2.2 KB new": ("300kb_cpu_ms",),
    "CPU ms, 20 KB new, 8 sessions": ("300kb_new20_cpu_ms",),
    "requests/s there": ("300kb_per_s",),
    "MB held at 48/96/193 turns": tuple(f"memory_{turns}_mb" for turns in MEMORY_TURNS),
}


def measure_direct(load: Load, stub: ConstantServer) -> dict[str, float]:
    """Measure the engine alone, on the same bodies; it is taken off the peers that ask it over HTTP."""
    found = {}
    for name in ("1kb", "300kb"):
        size = SIZES[name]
        job = {key: size[key] for key in ("turns", "new_bytes", "measured")}
        seconds, _, _ = load.run(None, {**job, "origin": stub.origin, "threads": [["none"] * size["sessions"]]})
        found |= {f"{name}_p50_ms": percentile_ms(seconds, 0.5), f"{name}_p95_ms": percentile_ms(seconds, 0.95)}
    return found


def measure_cost(only: Sequence[str], tokenizer: str, repeats: int) -> list[dict[str, Any]]:
    stub = ConstantServer(encode_constant_reply(load_tokenizer(tokenizer)))
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in only}
    failed: dict[str, str] = {}
    loads = [os.getloadavg()[0]]
    for repeat in range(repeats):  # in turns, so that a busy minute of the machine is not one system's
        for name in only:
            if name in failed:
                continue
            try:
                install(PEERS[name])
                with start_load() as load:
                    direct = measure_direct(load, stub) if PEERS[name].packages else {}
                    taken = measure_peer(PEERS[name], load, stub, tokenizer, memory=repeat == 0)
                runs[name].append({key: value - direct.get(key, 0.0) for key, value in taken.items()})
            except PeerError as error:
                failed[name] = str(error)
            loads.append(os.getloadavg()[0])
            print(f"{name}, load {loads[-1]:.1f}: {runs[name][-1:]}", file=sys.stderr, flush=True)
    print(f"\nTable B: cost, medians of {repeats}; load of the machine {min(loads):.1f} to {max(loads):.1f}\n")
    print("| system | " + " | ".join(COST_COLUMNS) + " |")
    print("|---" * (len(COST_COLUMNS) + 1) + "|")
    results = []
    for name in only:
        if name in failed:
            results.append({"system": name, "not_run": failed[name]})
            print(f"| {name} | not run: {failed[name].strip().splitlines()[-1]} |")
            continue
        medians = {key: statistics.median(run[key] for run in runs[name] if key in run) for key in runs[name][0]}
        results.append({"system": name, "medians": medians, "runs": runs[name]})
        cells = [
            " / ".join(_show(medians[key]) if key in medians else "–" for key in keys)
            for keys in COST_COLUMNS.values()
        ]
        print(f"| {name} | " + " | ".join(cells) + " |")
    return results


def _show(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(PEERS), metavar="PEER", help=f"of {', '.join(PEERS)}")
    parser.add_argument("--table", choices=["rows", "cost", "both"], default="both", help="A, B, or both (default)")
    parser.add_argument("--repeats", type=int, default=3, help="of table B, whose medians are shown (default 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there too")
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error("--repeats must be at least 1")
    if not MODEL.is_dir():
        parser.error(f"{MODEL} is not there; scripts/dev/get_model.py fetches it")
    options.only = options.only or list(PEERS)
    return options


def main() -> None:
    options = read_options()
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    tokenizer = FOLDER.absolute() / "tokenizer"
    save_tokenizer(MODEL, tokenizer)
    result: dict[str, Any] = {"peers": {name: PEERS[name].packages for name in options.only}}
    if options.table != "cost":
        result["rows"] = measure_rows(options.only, str(tokenizer))
    if options.table != "rows":
        result["cost"] = measure_cost(options.only, str(tokenizer), options.repeats)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
