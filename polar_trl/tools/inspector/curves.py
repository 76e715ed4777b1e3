"""Build the charts of a run from its log: which metrics, under which names, one list of values per series.

A chart none of whose metrics were logged is left out.
"""

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polar_trl.grpo.logs.evaluations import list_evaluations
from polar_trl.run_folder import LOG_FILE, read_log

_GAP = "sampling/sampling_logp_difference"


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """One chart: the log's key of each series by its name, or a prefix of keys."""

    title: str
    hint: str
    """One sentence on what to look for."""
    series: Mapping[str, str] | str
    kind: str = "lines"
    """"lines", "log" (a logarithmic axis) or "stack"."""
    unit: str = ""
    evaluated: str | None = None
    """Key of the evaluation's points."""
    first: tuple[str, ...] = ()
    """Names of a prefix's series that come first, so that the usual ones look the same in every run."""


CHARTS = (
    Chart(
        title="Reward",
        hint="Mean over the rollouts of a step.",
        series={"mean": "reward"},
        evaluated="eval_reward",
    ),
    Chart(
        title="Reward spread",
        hint="A group whose rollouts all have one reward teaches nothing.",
        series={"standard deviation": "reward_std", "groups without spread": "frac_reward_zero_std"},
    ),
    Chart(
        title="Trainer-engine gap",
        hint="|log-probability of the trainer minus the engine's| of the trained tokens. It should stay flat.",
        series={"mean": f"{_GAP}/mean", "99th percentile": f"{_GAP}/p99", "largest": f"{_GAP}/max"},
        kind="log",
        unit="nats",
    ),
    Chart(
        title="Update ratio",
        hint="How far the engine's weights move at a push, over the optimizer's: 1 is right, near 0 is not learning.",
        series={"moves of the engine's": "polar/update_ratio", "weights that changed": "polar/changed_weights"},
    ),
    Chart(
        title="Tokens of a step",
        hint="Sampled by the engine, and trained.",
        series={"sampled": "polar/sampled_tokens", "trained": "polar/trained_tokens"},
    ),
    Chart(title="Calls per rollout", hint="Model calls of one session.", series={"calls": "polar/calls_per_rollout"}),
    Chart(
        title="Trajectories per rollout",
        hint="1 means that every call continued the one before. More means forks.",
        series={"trajectories": "polar/trajectories_per_rollout"},
    ),
    Chart(
        title="Seconds of a step",
        hint="Where the time goes. Rollouts and training are what a step is made for.",
        series="polar/phase/",
        first=("rollouts", "training"),
        kind="stack",
        unit="s",
    ),
    Chart(
        title="Sampled tokens left out",
        hint="By reason.",
        series="polar/dropped/",
        kind="stack",
        unit="tokens",
    ),
    Chart(
        title="How sessions ended",
        hint="Rollouts of a step by stop reason.",
        series="polar/stopped/",
        first=("completed", "agent failed", "agent timeout"),
        kind="stack",
        unit="rollouts",
    ),
    Chart(title="Entropy", hint="Of the policy on trained tokens.", series={"entropy": "entropy"}, unit="nats"),
    Chart(title="Gradient norm", hint="Before clipping.", series={"norm": "grad_norm"}),
    Chart(
        title="Seconds of a session",
        hint="Mean per phase.",
        series="polar/seconds/",
        first=("queue", "prepare", "agent", "held", "grade"),
        kind="stack",
        unit="s",
    ),
)
_NO_PHASE = frozenset({"polar/phase/step_s", "polar/phase/overhead_share"})


class Curves:
    """The charts of a run, read again whenever its log has grown. Threads may share it.

    Args:
        folder: The run's.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._path = folder, folder / LOG_FILE
        self._lock = threading.Lock()
        self._seen: tuple[int, int] = (0, 0)
        self._lines: list[dict[str, Any]] = []
        self.version = 0
        """Grows with the log."""

    def refresh(self) -> list[dict[str, Any]]:
        """Return the log's lines in the order of steps, read again if the file has changed."""
        with self._lock:
            try:
                status = self._path.stat()
            except OSError:
                return []
            seen = (status.st_size, status.st_mtime_ns)
            if seen != self._seen:
                self._seen = seen
                self._lines = read_log(self._folder)
                self.version += 1
            return self._lines

    def build(self) -> dict[str, Any]:
        """Build the JSON of all charts: steps, and the values of each series; NaN and infinities are null."""
        lines = self.refresh()
        train = [line for line in lines if "reward" in line]
        evaluated = [line for line in lines if any(key.startswith("eval_") for key in line)]
        charts = [built for chart in CHARTS if (built := _build_chart(chart, train, evaluated))]
        if passed := _build_pass_rates(evaluated):
            charts.insert(1, passed)
        return {"version": self.version, "charts": charts}


def _build_chart(
    chart: Chart, train: Sequence[Mapping[str, Any]], evaluated: Sequence[Mapping[str, Any]]
) -> dict[str, Any] | None:
    found = {name: [_read_number(line.get(key)) for line in train] for name, key in _name_series(chart, train).items()}
    series = [
        {"name": name, "values": values}
        for name, values in found.items()
        if any(value is not None for value in values)
    ]
    points = [
        [line["step"], value]
        for line in evaluated
        if chart.evaluated and (value := _read_number(line.get(chart.evaluated))) is not None
    ]
    if not series and not points:
        return None
    if chart.kind == "stack":
        series = [item for item in series if any(item["values"])] or series[:1]
    return {
        "title": chart.title,
        "hint": chart.hint,
        "kind": chart.kind,
        "unit": chart.unit,
        "steps": [line["step"] for line in train],
        "series": series,
        "evaluated": points,
    }


def _build_pass_rates(evaluated: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Build the chart of pass@1 by evaluation: with its interval, or a line for each of several sets."""
    found = [item for item in list_evaluations(evaluated) if "pass_rate" in item]
    by_set: dict[str, dict[int, Mapping[str, Any]]] = {}
    for item in found:
        by_set.setdefault(item["set"], {})[item["step"]] = item
    steps = sorted({item["step"] for item in found})
    if len(steps) < 2:  # the header says it
        return None
    if len(by_set) == 1:
        ((name, points),) = by_set.items()
        keys = {name or "pass@1": "pass_rate", "95 % from": "pass_rate_low", "to": "pass_rate_high"}
        lines = {title: (points, key) for title, key in keys.items()}
    else:
        lines = {name or "pass@1": (points, "pass_rate") for name, points in by_set.items()}
    return {
        "title": "Evaluations",
        "hint": "Share of the evaluation tasks that were solved, after the step.",
        "kind": "lines",
        "unit": "pass@1",
        "steps": steps,
        "series": [
            {"name": title, "values": [_read_number(points.get(step, {}).get(key)) for step in steps]}
            for title, (points, key) in lines.items()
        ],
        "evaluated": [],
    }


def _name_series(chart: Chart, lines: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    if not isinstance(chart.series, str):
        return dict(chart.series)
    keys = sorted({key for line in lines for key in line if key.startswith(chart.series)} - _NO_PHASE)
    named = {key.removeprefix(chart.series).removesuffix("_s").replace("_", " "): key for key in keys}
    return {name: named[name] for name in (*chart.first, *named) if name in named}


def _read_number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return round(value, 9) if isinstance(value, float) else value
