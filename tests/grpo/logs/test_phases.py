"""`PhaseClock` under a clock of the test's own."""

from collections import defaultdict

import pytest

from polar_trl.grpo.logs import phases


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


def test_what_is_neither_rollouts_nor_training_nor_evaluation_is_overhead(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(phases, "time", clock)
    metrics: dict[str, defaultdict[str, list[float]]] = {"train": defaultdict(list), "eval": defaultdict(list)}
    phase_clock = phases.PhaseClock(metrics)
    for _ in range(2):
        phase_clock.on_step_begin(None, None, None)
        for name, seconds in (("weight_sync", 1.0), ("rollouts", 10.0), ("training", 6.0)):
            with phase_clock.measure("train", name):
                clock.now += seconds
        clock.now += 2.0  # clipping and the optimizer
        phase_clock.on_optimizer_step(None, None, None)
        phase_clock.on_step_end(None, None, None)
        clock.now += 1.0  # the log: of the next step
        with phase_clock.measure("eval", "rollouts"):
            clock.now += 50.0
    train = metrics["train"]
    assert train["polar/phase/step_s"] == [19.0, 20.0]
    assert train["polar/phase/optimizer_s"] == [2.0, 2.0]
    assert train["polar/phase/overhead_share"] == pytest.approx([1 / 19, 2 / 20])
    assert metrics["eval"]["polar/phase/rollouts_s"] == [50.0, 50.0]


def test_the_optimizer_step_of_a_micro_step_without_training_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(phases, "time", clock)
    metrics: dict[str, defaultdict[str, list[float]]] = {"train": defaultdict(list)}
    phase_clock = phases.PhaseClock(metrics)
    phase_clock.on_step_begin(None, None, None)
    clock.now += 5.0
    phase_clock.on_step_end(None, None, None)
    assert metrics["train"] == {"polar/phase/step_s": [5.0], "polar/phase/overhead_share": [1.0]}
