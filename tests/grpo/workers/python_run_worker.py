"""Runs from Python that forget to close anything: `python_run_worker.py MODEL OUT`, which writes OUT/result.json."""

import asyncio
import gc
import json
import signal
import sys
import threading
from pathlib import Path

from transformers import TrainerCallback

from polar_trl.errors import ConfigError

sys.path.insert(0, str(Path(__file__).parent))
from worker_common import build_trainer

model, out = sys.argv[1], Path(sys.argv[2])
result: dict[str, object] = {}


class InterruptOnce(TrainerCallback):
    """Ctrl-C in the second step, when a checkpoint is there."""

    def on_step_begin(self, args, state, control, **_):
        if state.global_step == 1:
            signal.raise_signal(signal.SIGINT)


# ---- A run that is interrupted
settings = {"save_strategy": "steps", "save_steps": 1, "eval_on_start": True, "num_generations_eval": 1}
first = build_trainer(model, out / "a", ["ok", "ok"], max_steps=2, everything=True, **settings)
first.add_callback(InterruptOnce)
try:
    first.train()
except KeyboardInterrupt as stop:
    result["notes"] = stop.__notes__
closed = []
for use in (first.train, first.evaluate):
    try:
        use()
    except ConfigError as error:
        closed.append(str(error))
result["closed"] = closed

# ---- Another trainer of the same process: refused, then goes on; it is never closed
second = build_trainer(model, out / "a", ["ok", "ok"], max_steps=2, everything=True, **settings)
try:
    second.train()
except ConfigError as error:
    result["refused"] = str(error)
second.train(resume_from_checkpoint="auto")


# ---- A third one, in place of the second; `with` and an event loop that runs
async def main():
    with build_trainer(model, out / "b", ["ok", "ok"], max_steps=1) as third:
        result["second_is_closed"] = not second._open
        result["is_wrapped"] = type(third.accelerator.prepare(third.model)).__name__
        third.train()
    result["third_is_closed"] = not third._open


asyncio.run(main())

# ---- A fourth one that becomes garbage, and a fifth that is forgotten
fourth = build_trainer(model, out / "c", ["ok", "ok"], max_steps=1)
fourth.train()
parts = fourth._open
del fourth
gc.collect()
for thread in threading.enumerate():
    if thread.name == "polar-close":
        thread.join()
result["fourth_is_closed"] = not parts
fifth = build_trainer(model, out / "d", ["ok", "ok"], max_steps=1)
fifth.train()
(out / "result.json").write_text(json.dumps(result))
