"""scripts/gpu/report.py: figures are on the disk row by row, failures are rows, and stored figures render again."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
STORED = sorted((ROOT / "docs" / "results").glob("*.json"))


@pytest.fixture
def report_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "gpu"))
    monkeypatch.setattr(sys, "argv", ["scripts/gpu/phases.py", "--out", "somewhere", "--steps", "3"])
    import report

    yield report


def test_every_row_is_on_the_disk_at_once_and_a_failure_ends_with_1(
    report_module: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = report_module.Report("mine", tmp_path / "new", {"a": "first", "b": "second"})
    report.add(a=1, b=0.12345, log=[1, 2, 3])
    stored = json.loads((tmp_path / "new" / "mine.json").read_text())
    assert stored["rows"] == [{"a": 1, "b": 0.12345, "log": [1, 2, 3]}]
    assert stored["command"] == "bash scripts/gpu/run.sh phases --steps 3"
    report.fail(RuntimeError("out of | memory\nand a trace"), a=12345)
    with pytest.raises(SystemExit) as ended:
        report.finish()
    assert ended.value.code == 1
    table = capsys.readouterr().out.split("| first |")[1].splitlines()
    assert table[2:4] == ["| 1 | 0.123 |", "| 12,345 | RuntimeError: out of / memory |"]


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_stored_figures_render_again(report_module: Any, path: Path) -> None:
    content = json.loads(path.read_text())
    text = report_module.render_report(content)
    assert text.count("\n| ") == len(content["rows"])
    assert content["machine"] in text and "bash scripts/gpu/run.sh" in text


def test_figures_are_stored() -> None:
    assert {path.stem for path in STORED} >= {"correct", "hybrid", "learn", "phases", "train_cost"}
