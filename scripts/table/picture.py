"""Draw the table and the matrix of a report as a PNG."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
from table.report import TITLES

matplotlib.use("Agg")
from matplotlib import pyplot  # after the choice of a backend

COLORS = {"base": "#b5b5b5", "sft": "#e0a458", "grpo": "#5b8cc0", "both": "#2f5d8a"}


def draw_report(report: Mapping[str, Any], path: Path) -> None:
    """Draw pass@1 of each stage in each agent with its interval, and beside it the matrix where there is one.

    A cell that lacks seeds is marked with an asterisk, one that lacks all is left blank.
    """
    has_matrix = any(cell["rate"] for row in report["matrix"].values() for cell in row.values())
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), width_ratios=(3, 2), squeeze=True)
    draw_stages(report, axes[0])
    if has_matrix:
        draw_matrix(report, axes[1])
    else:
        axes[1].remove()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def draw_stages(report: Mapping[str, Any], axes: Any) -> None:
    """Draw a group of bars per agent."""
    agents, stages = report["agents"], report["stages"]
    width = 0.8 / len(stages)
    for place, stage in enumerate(stages):
        for group, agent in enumerate(agents):
            cell = report["cells"][stage][agent]
            if (rate := cell["rate"]) is None:
                continue
            x = group + (place - (len(stages) - 1) / 2) * width
            below, above = rate["rate"] - rate["low"], rate["high"] - rate["rate"]
            axes.bar(x, 100 * rate["rate"], 0.92 * width, color=COLORS[stage])
            axes.errorbar(x, 100 * rate["rate"], [[100 * below], [100 * above]], color="black", lw=0.8, capsize=2)
            axes.text(x, 100 * rate["high"] + 1.5, render_rate(cell), ha="center", fontsize=7)
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=COLORS[stage]) for stage in stages]
    axes.legend(handles, [TITLES[stage] for stage in stages], loc="upper left", ncols=len(stages), fontsize=8)
    axes.set_xticks(range(len(agents)), [f"in {agent}" for agent in agents])
    axes.set(ylabel="pass@1 on held-out tasks (%)", ylim=(0, 118), yticks=range(0, 101, 20))
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(f"{len(report['seeds'])} seeds, 95 % intervals over tasks and seeds", fontsize=9)


def draw_matrix(report: Mapping[str, Any], axes: Any) -> None:
    """Draw models as rows, the agents that they were evaluated inside as columns."""
    agents = report["agents"]
    rows = [("no training", report["cells"]["base"])] if "base" in report["cells"] else []
    rows += [(f"trained in {agent}", report["matrix"][agent]) for agent in agents]
    values = [
        [100 * cell["rate"]["rate"] if (cell := row[a])["rate"] else float("nan") for a in agents] for _, row in rows
    ]
    axes.imshow(values, vmin=0, vmax=100, cmap="Blues", aspect="auto")
    for y, (_, row) in enumerate(rows):
        for x, agent in enumerate(agents):
            if row[agent]["rate"] is not None:
                color = "white" if values[y][x] > 60 else "black"
                axes.text(x, y, render_rate(row[agent]), ha="center", va="center", color=color, fontsize=9)
    axes.set_xticks(range(len(agents)), [f"in {agent}" for agent in agents], fontsize=8)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=8)
    axes.set_title("trained in row, evaluated in column (pass@1, %)", fontsize=9)


def render_rate(cell: Mapping[str, Any]) -> str:
    """Render pass@1 in per cent, with an asterisk where seeds are missing."""
    return f"{100 * cell['rate']['rate']:.0f}{'*' if cell['num_done'] < cell['num_wanted'] else ''}"
