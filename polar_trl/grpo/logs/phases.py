"""Measure the wall time of each part of a training step, as metrics of the step.

`polar/phase/<name>_s` is the time of one part, `polar/phase/step_s` everything from the end of one optimizer step to
the end of the next, and `polar/phase/overhead_share` the share of it that is neither rollouts nor training. GPU
work in flight at the end of a part is waited for, and counted there.
"""

import time
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import TrainerCallback

USEFUL = ("rollouts", "resampling", "training", "optimizer")
"""Parts that a step is made for; all else is overhead."""


class PhaseClock(TrainerCallback):
    """Measure the parts of steps.

    Args:
        metrics: Of TRL, by mode: lists of values by name, emptied at every log.
    """

    def __init__(self, metrics: Mapping[str, MutableMapping[str, list[float]]]) -> None:
        self._metrics = metrics
        self._useful_s = 0.0
        self._step_began: float | None = None
        self._training_ended = 0.0

    @contextmanager
    def measure(self, mode: str, name: str) -> Iterator[None]:
        """Measure the block as a part of the step; `name` without prefix and unit."""
        began = time.monotonic()
        yield
        if name == "training":
            _wait_for_device()
            self._training_ended = time.monotonic()
        self._add(mode, name, time.monotonic() - began)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin the first step; later ones begin where the one before ended."""
        self._step_began = self._step_began or time.monotonic()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure clipping and the optimizer's update, which lie between the last backward pass and this."""
        _wait_for_device()
        self._add("train", "optimizer", time.monotonic() - self._training_ended)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the step, but for its log and its checkpoint, which count into the next."""
        now = time.monotonic()
        assert self._step_began is not None
        seconds = now - self._step_began
        metrics = self._metrics["train"]
        metrics["polar/phase/step_s"].append(seconds)
        metrics["polar/phase/overhead_share"].append(1.0 - self._useful_s / seconds)
        self._step_began, self._useful_s = now, 0.0

    def _add(self, mode: str, name: str, seconds: float) -> None:
        self._metrics[mode][f"polar/phase/{name}_s"].append(seconds)
        if mode == "eval":  # not of the training step that it fell into
            self._step_began = None if self._step_began is None else self._step_began + seconds
        elif name in USEFUL:
            self._useful_s += seconds


def _wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
