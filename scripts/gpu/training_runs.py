"""What experiments that run the whole trainer share: the start of ranks, a step's gap, the picture of rewards."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

GAP = "sampling/sampling_logp_difference"
"""Of a step's metrics: |trainer - engine| of the log-probability of a trained token (nats), mean, p99 and max."""


def build_launch(processes: int) -> list[str]:
    """The command in front of a script and its flags, for one process or for so many ranks."""
    if processes == 1:
        return [sys.executable]
    return [
        *(sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines", "1"),
        *("--num_processes", str(processes), "--main_process_port", "0"),
        *("--mixed_precision", "no", "--dynamo_backend", "no"),
    ]


def render_gap(line: Mapping[str, Any]) -> str:
    """Of one step: "mean / p99 / max"."""
    return " / ".join(f"{line[f'{GAP}/{name}']:.2g}" for name in ("mean", "p99", "max"))


def plot_arms(rows: Sequence[Mapping[str, Any]], path: Path, *, title: str) -> None:
    """Rewards per step as a PNG: a thin line per run, and a thick one for the mean over the seeds of an arm."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups: dict[str, list[list[float]]] = {}
    for row in rows:
        label = str(row["arm"]) + (f", {row['processes']} ranks" if row["processes"] > 1 else "")
        curve = [np.nan if line.get("reward") is None else line["reward"] for line in row["log"]]
        groups.setdefault(label, []).append(curve)
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for number, (label, curves) in enumerate(groups.items()):
        longest = max(map(len, curves))
        padded = np.array([curve + [np.nan] * (longest - len(curve)) for curve in curves])
        seeds = f" ({len(curves)} seeds)" if len(curves) > 1 else ""
        axes.plot(range(1, longest + 1), np.nanmean(padded, axis=0), color=f"C{number}", lw=2, label=label + seeds)
        for curve in curves:
            axes.plot(range(1, len(curve) + 1), curve, color=f"C{number}", lw=0.6, alpha=0.4)
    axes.set(xlabel="step", ylabel="mean reward", title=title, ylim=(0, 1.05))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
