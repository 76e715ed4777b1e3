"""Evaluations as the table of scripts/reproduce_table.py finds them, and the rows that it prints."""

import json
from pathlib import Path
from typing import Any

from polar_trl.eval.sample_tasks import SampleResult
from polar_trl.eval.summary import build_summary


def record_cell(out: Path, name: str, passed: int, *, num_tasks: int = 10, **settings: Any) -> None:
    """A cell as `polar-trl eval` leaves it, of which the first tasks were passed and one could not be graded."""
    folder = out / name
    folder.mkdir(parents=True)
    results = [
        SampleResult(
            task=f"t{number}", sample=0, attempt=1, rollout=f"r{number}", record=f"sessions/s/r{number}.jsonl",
            repo=None, reward=None if number == num_tasks - 1 else float(number < passed), error=None,
            stop_reason="completed", calls=3, sampled_tokens=50, seconds={},
        )
        for number in range(num_tasks)
    ]  # fmt: skip
    summary = build_summary([r.task for r in results], results, num_samples=1, ks=[1])
    about = {"model": name, "task_set": "swe-bench-verified", "num_samples": 1}
    lines = (json.dumps({key: getattr(r, key) for key in SampleResult.__dataclass_fields__}) + "\n" for r in results)
    (folder / "results.jsonl").write_text("".join(lines))
    (folder / "summary.json").write_text(json.dumps(about | summary))
    (folder / "settings.json").write_text(json.dumps({"tasks": "10 tasks aa", "temperature": 1.0} | settings))


def read_rows(text: str, title: str = "") -> dict[str, list[str]]:
    """Rows by their first cell, of the first table or of the one under a title."""
    part = text.split(f"## {title}\n")[1] if title else text
    lines = [line for line in part.split("\n## ")[0].splitlines() if line.startswith("| ")]
    return {cells[0]: cells[1:] for line in lines if (cells := [cell.strip() for cell in line.strip("|").split("|")])}
