"""bench_sessions.py on two short sessions: what a session holds does not grow with the square of its calls."""

import json
import subprocess
import sys
from pathlib import Path

from launch import ROOT


def test_two_lengths_and_their_exponents(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "scripts/bench_sessions.py",
        "--calls",
        "40",
        "160",
        "--json",
        str(tmp_path / "out.json"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((tmp_path / "out.json").read_text())
    assert [row["calls"] for row in found["rows"]] == [40, 160]
    # a record has the same bytes on every machine; its memory and time are not asserted
    assert 0.9 < found["exponents"]["record_mb"] < 1.1
    assert "exponent" in done.stdout


def test_one_length_gives_no_exponent() -> None:
    command = [sys.executable, "scripts/bench_sessions.py", "--calls", "40", "40"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--calls: give at least two different lengths" in done.stderr
