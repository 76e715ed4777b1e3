#!/usr/bin/env python3
"""Time bodies of 5 MB, of every dialect and shape: processor seconds to read one, and to answer it in a session.

"parse" is the reader alone, "parse grown" reads the same body with one more message in the same session. "session" and
"session grown" are whole turns without HTTP: parse, digests, prompt, reply, record. The renderer makes a token of
every byte. The last line names the slowest.
"""

import argparse
import asyncio
import gc
import platform
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "helpers"))  # bodies are made by tests' clients

from large_bodies import SHAPES, build, build_follow_up

from polar_trl.engine.base import GenerationParams
from polar_trl.engine.scripted import ScriptedEngine
from polar_trl.errors import WireError
from polar_trl.recording.log import SessionLog
from polar_trl.recording.session import ModelBackend, Session, SessionLimits
from polar_trl.tokens.bytes import ByteRenderer
from polar_trl.types import Message
from polar_trl.wire import DIALECTS
from polar_trl.wire.base import Dialect, Incoming, ItemMemo

RENDERER = ByteRenderer()
NUM_BYTES = 5_000_000
REPLY = RENDERER.spell(Message(role="assistant", text="ok"))


def measure(work: Callable[[], object]) -> tuple[float, str]:
    """Seconds of processor time, and the beginning of the refusal if it was one."""
    gc.collect()
    start = time.process_time()
    try:
        work()
    except WireError as error:
        return time.process_time() - start, f"{error.status}: {str(error)[:60]}"
    return time.process_time() - start, "read"


async def answer(session: Session, dialect: Dialect, incoming: Incoming) -> None:
    turn, parsed = await session.begin_turn(dialect, incoming)
    await asyncio.wait({turn.task})
    session.leave(turn)
    dialect.render(session.describe(turn, parsed), turn.result())


def measure_row(dialect: Dialect, shape: str, workers: ThreadPoolExecutor) -> tuple[float, list[float], str]:
    """Megabytes, seconds of the four columns, and what came of it."""
    incoming = build(dialect.name, shape, NUM_BYTES)
    grown = incoming if shape == "nested too deeply" else build_follow_up(dialect.name, incoming)
    memo = ItemMemo()
    parse_s, outcome = measure(lambda: dialect.parse(incoming, memo))
    grown_s, _ = measure(lambda: dialect.parse(grown, memo))
    engine = ScriptedEngine(lambda prompt_ids: REPLY, max_model_len=1 << 30)
    backend = ModelBackend(
        engine=engine, renderer=RENDERER, params=GenerationParams(max_tokens=100), model="policy", workers=workers
    )
    session = Session(backend, SessionLog(session_id="s", task_id="t", group_id="g"), SessionLimits())
    with asyncio.Runner() as runner:
        turns = [
            measure(lambda body=body: runner.run(answer(session, dialect, body)))[0]  # type: ignore[misc]
            for body in (incoming, grown)
        ]
    return len(incoming.body) / 1e6, [parse_s, grown_s, *turns], outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dialect", choices=[dialect.name for dialect in DIALECTS], help="only this one")
    parser.add_argument("--shape", choices=SHAPES, help="only this one")
    options = parser.parse_args()
    print(f"Python {platform.python_version()}, seconds of processor time\n")
    print("| dialect | shape | MB | parse | parse grown | session | session grown | outcome |")
    print("|---|---|---|---|---|---|---|---|")
    slowest = (0.0, "")
    with ThreadPoolExecutor(2) as workers:
        for dialect in DIALECTS:
            if options.dialect not in (None, dialect.name):
                continue
            for shape in [options.shape] if options.shape else SHAPES:
                megabytes, seconds, outcome = measure_row(dialect, shape, workers)
                columns = " | ".join(f"{value:.2f}" for value in seconds)
                print(f"| {dialect.name} | {shape} | {megabytes:.1f} | {columns} | {outcome} |", flush=True)
                slowest = max(slowest, (max(seconds[:2]), f"{dialect.name}, {shape}"))
    print(f"\nslowest parse: {slowest[0]:.2f} s ({slowest[1]})")


if __name__ == "__main__":
    main()
