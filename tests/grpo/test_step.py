"""A micro-step rolls out or trains its window, also where generation batch and optimizer step differ in length."""

from contextlib import nullcontext
from math import gcd
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from polar_trl.grpo.step import TrainingStep


class Recorder(TrainingStep):
    """Packs a batch into numbered windows, and notes which it trains."""

    def pack(self, rows: Any, mode: str) -> Any:
        num_windows = self.args.steps_per_generation // self.packer.micro_steps_per_window
        return [[f"{rows}{number}"] for number in range(num_windows)]

    def train(self, model: Any, passes: Any) -> torch.Tensor:
        self.trained.append(passes)  # type: ignore[attr-defined]
        return torch.zeros(())


@pytest.mark.parametrize(
    ("per_generation", "iterations", "accumulation", "collected", "trained"),
    [
        (2, 1, 2, "ab", [["a0"], ["b0"]]),
        (4, 1, 2, "a", [["a0"], ["a1"]]),  # one generation feeds two optimizer steps
        (2, 1, 4, "ab", [["a0", "b0"]]),  # two generations feed one
        (4, 1, 6, "abc", [["a0", "a1", "b0"], ["b1", "c0", "c1"]]),
        (2, 2, 2, "a", [["a0"], ["a0"]]),  # trained twice
    ],
)
def test_windows_are_trained_in_the_step_that_they_end_in(
    per_generation: int, iterations: int, accumulation: int, collected: str, trained: list[list[str]]
) -> None:
    names = iter("abcdef")
    seen: list[str] = []

    def collect(inputs: Any, mode: str) -> Any:
        seen.append(next(names))
        return seen[-1]

    args = SimpleNamespace(
        steps_per_generation=per_generation,
        num_iterations=iterations,
        gradient_accumulation_steps=accumulation,
    )
    trl = SimpleNamespace(micro_step=0, micro_steps_per_step=accumulation, log_step_time=lambda *_, **__: None)
    step = Recorder(
        args,
        SimpleNamespace(device="cpu"),
        trl,  # type: ignore[arg-type]
        collect_rows=collect,
        packer=SimpleNamespace(micro_steps_per_window=gcd(per_generation, accumulation)),
        loss=SimpleNamespace(prepare=lambda windows: [item for window in windows for item in window]),  # type: ignore[arg-type]
        guard=SimpleNamespace(),  # type: ignore[arg-type]
        phases=SimpleNamespace(measure=lambda *_: nullcontext()),  # type: ignore[arg-type]
        checkpointing=SimpleNamespace(),  # type: ignore[arg-type]
    )
    step.trained = []  # type: ignore[attr-defined]
    model = SimpleNamespace(train=lambda: None)
    for _ in range(accumulation * len(trained)):
        step.run(model, [])
    assert "".join(seen) == collected
    assert step.trained == trained  # type: ignore[attr-defined]
