"""Read a run's `reasons.jsonl`, which `lessons` writes. Pages read it too, so it imports nothing of training."""

import json
from pathlib import Path
from typing import Any

REASONS_FILE = "reasons.jsonl"
MOST_REASONS = 10


def summarize_reasons(folder: Path) -> dict[str, Any]:
    """Summarize a run's `reasons.jsonl`: the training sessions by reason, and the steps that taught nothing.

    Of a step that was made twice, after a resume, the later attempt counts.
    """
    latest: dict[int, list[dict[str, Any]]] = {}
    path = folder / REASONS_FILE
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        try:
            line = json.loads(text)
            if line["mode"] == "train" and _is_whole(line):
                before = latest.get(line["step"], [])
                latest[line["step"]] = [*(other for other in before if other["attempt"] == line["attempt"]), line]
        except (ValueError, KeyError, TypeError):  # torn by a kill
            continue
    rows: dict[str, dict[str, Any]] = {}
    for row in (row for lines in latest.values() for line in lines for row in line["reasons"]):
        num_before = rows[row["reason"]]["sessions"] if row["reason"] in rows else 0
        rows[row["reason"]] = {**row, "sessions": num_before + row["sessions"]}
    nothing = [lines[-1] for lines in latest.values() if all("taught_nothing" in line for line in lines)]
    return {
        "reasons": sorted(rows.values(), key=lambda row: -row["sessions"])[:MOST_REASONS],
        "steps_that_taught_nothing": len(nothing),
        **({"taught_nothing": nothing[-1]["taught_nothing"], "try": nothing[-1]["try"]} if nothing else {}),
    }


def _is_whole(line: dict[str, Any]) -> bool:
    """Tell whether a line has all that is read of it. Raises `KeyError` and `TypeError` too where it has not."""
    rows = [isinstance(row["reason"], str) and isinstance(row["sessions"], int) for row in line["reasons"]]
    return all(rows) and isinstance(line["attempt"], str) and ("taught_nothing" in line) == ("try" in line)
