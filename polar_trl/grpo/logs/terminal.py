"""Show a run on the terminal: a line for each logged step and each evaluation. All figures are in `log.jsonl`."""

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from transformers.trainer_callback import PrinterCallback

from polar_trl.grpo.logs.evaluations import find_evaluations, format_solved

BARS = "▁▂▃▄▅▆▇█"
NUM_BARS = 12
"""Steps whose rewards are drawn."""
REPLACED = (PrinterCallback, DEFAULT_PROGRESS_CALLBACK)
"""transformers' own, whose place `StepLines` takes."""


def say(line: str) -> None:
    """Print a line of the run's, also where the terminal has no letters for all of it."""
    try:
        print(line, flush=True)
    except UnicodeEncodeError:
        print(line.encode("ascii", "replace").decode(), flush=True)


class StepLines(TrainerCallback):
    """Prints, on rank 0.

    Args:
        about: First line, without the number of steps.
    """

    def __init__(self, about: str) -> None:
        self._about = about
        self._rewards: list[float] = []
        self._began = 0.0
        self._first_step = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say what begins, and draw what a checkpoint has."""
        self._began, self._first_step = time.monotonic(), state.global_step
        self._rewards = [entry["reward"] for entry in state.log_history if _is_number(entry.get("reward"))]
        if state.is_world_process_zero:
            done = f", from step {state.global_step} on" if state.global_step else ""
            say(f"{state.max_steps} steps{done}: {self._about}")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Print the line of a step or an evaluation."""
        if not state.is_world_process_zero or not logs:
            return
        if "polar/sampled_tokens" in logs:
            if _is_number(logs.get("reward")):
                self._rewards.append(logs["reward"])
            done = state.global_step - self._first_step
            seconds_left = (
                (time.monotonic() - self._began) / done * (state.max_steps - state.global_step) if done else 0
            )
            say(format_step(state.global_step, state.max_steps, logs, self._rewards, seconds_left))
        for prefix in find_evaluations(logs):
            say(format_evaluation(state.global_step, logs, prefix))


def format_step(
    step: int, max_steps: int, logs: Mapping[str, Any], rewards: Sequence[float], seconds_left: float
) -> str:
    """Format a step's line.

    Args:
        logs: Its figures by name, as they are logged.
        rewards: Of the run so far, this step's included.
        seconds_left: Until the last step, by the mean so far (s).
    """
    spread, constant = _format(logs.get("reward_std"), ".2f"), logs.get("frac_reward_zero_std")
    parts = [
        f"step {step:>{len(str(max_steps))}}/{max_steps}",
        f"reward {_format(logs.get('reward'), '.3f')} {draw(rewards[-NUM_BARS:])}".rstrip(),
        f"spread {spread}, {'none' if constant is None else f'{100 * (1 - constant):.0f} %'} of groups differ",
        f"tokens {logs['polar/sampled_tokens']:,.0f} sampled, {logs.get('polar/trained_tokens', 0):,.0f} trained",
        f"gap {_format(logs.get('sampling/sampling_logp_difference/mean'), '.1e')}",
        f"{_format(logs.get('polar/phase/step_s'), '.1f')} s",
    ]
    if step < max_steps:
        parts.append(f"{format_duration(seconds_left)} left")
    return "  ".join(parts)


def format_evaluation(step: int, logs: Mapping[str, Any], prefix: str = "eval_") -> str:
    """Format an evaluation's line."""
    name = prefix.removeprefix("eval_").rstrip("_")
    parts = [f"evaluation{f' of {name}' if name else ''} at step {step}"]
    if f"{prefix}graded" in logs:
        parts.append(f"solved {format_solved(logs, prefix)}")
    parts.append(f"reward {_format(logs.get(f'{prefix}reward', logs.get('eval_reward')), '.3f')}")
    parts.append(f"{_format(logs.get(f'{prefix}runtime'), '.1f')} s")
    return "  ".join(parts)


def draw(values: Sequence[float]) -> str:
    """Draw a bar for each value, on the scale from 0 to 1, or beyond where values are."""
    low, high = min(0.0, *values, 0.0), max(1.0, *values, 1.0)
    return "".join(BARS[min(len(BARS) - 1, int((value - low) / (high - low) * len(BARS)))] for value in values)


def format_duration(seconds: float) -> str:
    """Format a time by its two largest units, as in "7 min" or "3 h 20 min"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def describe_run(num_tasks: int, group_size: int, folder: Path, libraries: Path) -> str:
    """Describe a run for its first line."""
    return (
        f"groups of {group_size} sessions of {num_tasks} tasks, into {folder}\nwhat libraries print is in {libraries}"
    )


def _format(value: Any, style: str) -> str:
    return format(value, style) if _is_number(value) else "none"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
