"""Take commands of the measuring process on standard input, a JSON object a line; standard library only.

Every server under measurement runs in a process and an environment of its own. Its file beside this one begins the
server and calls `obey` with what it can do: "open" gives a session's key, "rows" the session's rows as lists, "close"
forgets it. "memory" is answered here: resident megabytes, without what was freed and not given back.
"""

import ctypes
import gc
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def obey(origin: str, commands: Mapping[str, Callable[..., Any]], pid: int | None = None) -> None:
    """Say where the server listens, then answer commands until the input ends."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the server prints is no answer
    answer: Any = {"origin": origin, "pid": pid or os.getpid()}
    print(json.dumps(answer), file=out, flush=True)
    for line in sys.stdin:
        words = json.loads(line)
        name = words.pop("command")
        try:
            answer = read_memory_mb(pid) if name == "memory" else commands[name](**words)
            print(json.dumps({"answer": answer}), file=out, flush=True)
        except Exception:  # noqa: BLE001 - the measuring process says it
            print(json.dumps({"error": traceback.format_exc(limit=-3)}), file=out, flush=True)


def read_memory_mb(pid: int | None) -> float:
    if pid is None:
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    lines = Path(f"/proc/{pid or 'self'}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))
