#!/usr/bin/env python3
"""Measure what a session costs as it grows: memory, the rebuilding of its rows, replay, and the record on disk.

An agent's conversation of 25 to 200 calls, each with a tool call and 2.6 KB more to send, goes over HTTP through the
proxy; a real tokenizer renders it and a scripted engine answers. Every length is measured in a process of its own. A
column's exponent is the slope of its logarithm over that of the calls: 1 is linear, 2 is quadratic.
"""

import argparse
import ctypes
import gc
import http.client
import json
import math
import multiprocessing
import resource
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

EXAMPLES = """examples:
  python scripts/bench_sessions.py
  python scripts/bench_sessions.py --calls 100 200 400 --json sessions.json
"""
TOKENIZER = Path(".cache/models/SmolLM2-135M-Instruct")
ARGUMENTS = '{"command":"sed -n 1,40p module.py"}'
REPLY_TEXT = f'Next I read on.\n<tool_call>\n{{"name": "bash", "arguments": {ARGUMENTS}}}\n</tool_call>'
NEW_TEXT_BYTES = 2300
SESSIONS = 4
"""Resident memory is the mean of so many, held at once; what is left in the allocator's hands is in it."""
GOAL_EXPONENT = 1.1
GOALS = {"held_mb": 10.0, "build_cpu_s": 0.1}
"""At 193 calls and 153k tokens: 200 calls here."""
COLUMNS = (
    "held_mb",
    "resident_mb",
    "build_cpu_s",
    "replay_cpu_s",
    "replay_peak_mb",
    "inspect_cpu_s",
    "inspect_peak_mb",
    "record_mb",
)


def build_bodies(num_calls: int) -> Iterator[bytes]:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You are a coding agent."},
        {"role": "user", "content": "Fix the bug."},
    ]
    for index in range(num_calls):
        yield json.dumps({"model": "policy", "messages": messages}).encode()
        call_id = f"call_{index}_0"
        tool_call = {"id": call_id, "type": "function", "function": {"name": "bash", "arguments": ARGUMENTS}}
        lines = [f"    value = compute(value, index)  # one more line of file {index:03}\n"] * 60
        messages.append({"role": "assistant", "content": "Next I read on.", "tool_calls": [tool_call]})
        messages.append({"role": "tool", "tool_call_id": call_id, "content": "".join(lines)[:NEW_TEXT_BYTES]})


def run_agent(origin: str, api_key: str, num_calls: int) -> None:
    connection = http.client.HTTPConnection(origin.removeprefix("http://"))
    for body in build_bodies(num_calls):
        connection.request("POST", "/v1/chat/completions", body, {"Authorization": f"Bearer {api_key}"})
        answer = connection.getresponse()
        text = answer.read()
        if answer.status != 200 or b"tool_calls" not in text:
            raise SystemExit(f"a request failed: {answer.status} {text[:300]!r}")


def read_resident_mb() -> float:
    """Resident memory, without what was freed and not given back."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) / 1024


def record_sessions(folder: Path, num_calls: int) -> dict[str, float]:
    """Record the sessions, and measure what Python holds of one that has ended, rows and all."""
    from transformers import AutoTokenizer

    from polar_trl.engine.base import GenerationParams
    from polar_trl.engine.scripted import ScriptedEngine
    from polar_trl.proxy import Proxy
    from polar_trl.reconstruct import build_prefix_merged, check_laws, digest
    from polar_trl.recording.log import SessionLog
    from polar_trl.recording.session import SessionLimits
    from polar_trl.tokens.load import load_renderer
    from polar_trl.types import Rollout

    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    renderer = load_renderer(tokenizer, str(TOKENIZER))
    reply = (*tokenizer.encode(REPLY_TEXT, add_special_tokens=False), renderer.stop_token_ids[0])
    engine = ScriptedEngine(lambda _: reply, max_model_len=1 << 20)
    held, builds, start_mb, resident_mb = [], [], 0.0, 0.0
    with Proxy(engine, renderer, params=GenerationParams(max_tokens=512)) as proxy:
        for number in range(-1, SESSIONS + 1):  # the first one warms up, the last one is traced, which takes longer
            if number == SESSIONS:
                resident_mb = (read_resident_mb() - start_mb) / SESSIONS
                tracemalloc.start()
            name = f"s{number}"
            path = folder / "sessions" / f"{name}.jsonl" if number >= 0 else None
            log = SessionLog(session_id=name, task_id="bench", group_id="bench", path=path)
            session = proxy.open_session(log, SessionLimits(max_calls=1 << 20))
            agent = multiprocessing.get_context("spawn").Process(
                target=run_agent, args=(proxy.origin, session.api_key, num_calls if number >= 0 else 25)
            )
            agent.start()
            agent.join()
            if agent.exitcode != 0:
                raise SystemExit("the agent failed; its message is above")
            proxy.close_session(session.api_key)
            rollout = Rollout(id=name, task_id="bench", group_id="bench", calls=log.calls, reward=1.0)
            start = time.process_time()
            rows = build_prefix_merged(rollout)
            check_laws(rollout, rows)
            digested = digest(rows.trajectories)
            builds.append(time.process_time() - start)
            if len(rows.trajectories) != 1:
                raise SystemExit("the conversation is more than one row: the bench measures continuations")
            log.close(rollout, extra={"trajectory_digest": digested})
            if number < 0:
                del log, session, rollout, rows
                start_mb = read_resident_mb()
                continue
            held.append((rollout, rows))
            del log, session
        gc.collect()
        held_mb = tracemalloc.get_traced_memory()[0] / 1e6
    tokens = len(held[0][1].trajectories[0].token_ids)
    found = {"held_mb": held_mb, "resident_mb": resident_mb, "build_cpu_s": min(builds[1:-1])}
    return {"tokens": tokens} | found


def replay_session(folder: Path) -> None:
    from polar_trl.tools.replay import replay

    if not replay(folder / "sessions" / "s0.jsonl", "prefix_merging", print).is_good:
        raise SystemExit("the replay failed; its message is above")


def inspect_session(folder: Path) -> None:
    from polar_trl.tools.inspector.run_folder import RunFolder

    run = RunFolder(folder, tokenizer=str(TOKENIZER))
    key = run.build_table()[0]["key"]
    run.build_session(key)
    view = run.open_session(key)
    view.build_calls(0, 50)
    view.build_lines(0, 100, 0, 100)


TOOLS = {"replay": replay_session, "inspect": inspect_session}


def use_tool(name: str, folder: Path) -> dict[str, float]:
    """Use a tool in this process: a small session first, which loads what it needs, then the one to measure."""
    TOOLS[name](folder / "small")
    start_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    start = time.process_time()
    TOOLS[name](folder)
    cpu_s = time.process_time() - start
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - start_mb
    return {f"{name}_cpu_s": cpu_s, f"{name}_peak_mb": peak_mb}


def run_apart(*words: str) -> dict[str, float]:
    """Run a part in a process of its own."""
    done = subprocess.run([sys.executable, __file__, *words], stdout=subprocess.PIPE, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(words)} failed; its message is above")
    found: dict[str, float] = json.loads(done.stdout)
    return found


def measure(num_calls: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        row = {"calls": num_calls} | run_apart("--part", "record", "--folder", name, "--calls", str(num_calls))
        row["record_mb"] = (folder / "sessions" / "s0.jsonl").stat().st_size / 1e6
        run_apart("--part", "record", "--folder", str(folder / "small"), "--calls", "3")
        for tool in TOOLS:
            row |= run_apart("--part", tool, "--folder", name)
    return row


def find_exponent(rows: Sequence[dict[str, float]], column: str) -> float:
    """Slope of the least-squares line through the logarithms."""
    points = [(math.log(row["calls"]), math.log(max(row[column], 1e-6))) for row in rows]
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--calls",
        type=int,
        nargs="+",
        default=[25, 50, 100, 200],
        help="lengths of the session (default 25 50 100 200)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows and exponents there too")
    parser.add_argument("--part", choices=["record", *TOOLS], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if (
        len(options.calls) < (1 if options.part else 2)
        or min(options.calls) < 1
        or len(set(options.calls)) < len(options.calls)
    ):
        parser.error("--calls: give at least two different lengths, each at least 1")
    if not TOKENIZER.is_dir():
        parser.error(f"{TOKENIZER} is not there; scripts/dev/get_model.py fetches it")
    return options


def main() -> None:
    options = read_options()
    if options.part == "record":
        print(json.dumps(record_sessions(options.folder, options.calls[0])))
        return
    if options.part:
        print(json.dumps(use_tool(options.part, options.folder)))
        return
    names = ("calls", "tokens", *COLUMNS)
    print("  ".join(f"{name:>15}" for name in names), flush=True)
    rows = []
    for num_calls in options.calls:
        rows.append(measure(num_calls))
        print(
            "  ".join(f"{rows[-1][name]:>15.3f}" if name in COLUMNS else f"{rows[-1][name]:>15}" for name in names),
            flush=True,
        )
    exponents = {column: find_exponent(rows, column) for column in COLUMNS}
    print("  ".join([f"{'exponent':>15}", " " * 15, *(f"{exponents[name]:>15.2f}" for name in COLUMNS)]))
    for column, goal in GOALS.items():
        print(f"{column} at {rows[-1]['calls']} calls: {rows[-1][column]:.3f}, goal {goal} at 193 calls")
    print(f"goal of the exponents of held_mb, build_cpu_s, replay_cpu_s and record_mb: {GOAL_EXPONENT}")
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "exponents": exponents}, indent=2) + "\n")


if __name__ == "__main__":
    main()
