"""Change this process for the time of a measurement: what throughput.py compares the package with."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from polar_trl.engine import vllm
from polar_trl.errors import ConfigError

_UNITS = {"ms": 1e-3, "us": 1e-6}


@contextmanager
def changed(variant: str, engine_thread: int) -> Iterator[None]:
    """Have the process as a variant says, whose parts are joined by "+".

    "now" is the package as it is. A time such as "5ms" or "20us" is Python's switch interval while the engine runs.
    "1steps" or "4steps" has the engine admit requests at most every so many steps.
    "slack" lets the thread with this system id wake without timer slack, 50 microseconds otherwise. "freeze" takes all
    objects that there are out of the collector's sight. Raises `ConfigError` for another.
    """
    interval_s, steps_apart = vllm.SWITCH_INTERVAL_S, vllm.MAX_STEPS_APART
    slack = Path(f"/proc/{engine_thread}/timerslack_ns")
    slack_ns = slack.read_text() if "slack" in variant else ""  # not every system has it
    try:
        for part in variant.split("+"):
            if part == "slack":
                slack.write_text("1")
            elif part.removesuffix("steps").isdecimal():
                vllm.MAX_STEPS_APART = int(part.removesuffix("steps"))
            elif part == "freeze":
                gc.collect()
                gc.freeze()
            elif part[-2:] in _UNITS:
                vllm.SWITCH_INTERVAL_S = float(part[:-2]) * _UNITS[part[-2:]]
            elif part != "now":
                raise ConfigError(
                    f"--variants: {part!r} is none of now, slack, freeze, 4steps, or a time such as 20us"
                )
        yield
    finally:
        vllm.SWITCH_INTERVAL_S, vllm.MAX_STEPS_APART = interval_s, steps_apart
        if slack_ns:
            slack.write_text(slack_ns)
        gc.unfreeze()
