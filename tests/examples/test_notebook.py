"""Test examples/notebook.ipynb: its cells are those of examples/notebook.py, which runs; outputs are of one run."""

import json
import subprocess
from pathlib import Path
from typing import Any

from launch import find_warm_python
from make_notebook import NOTEBOOK, SOURCE, read_cells


def read_notebook() -> dict[str, Any]:
    notebook: dict[str, Any] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return notebook


def test_its_cells_are_those_of_the_source() -> None:
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in read_notebook()["cells"]]
    assert cells == read_cells(SOURCE.read_text(encoding="utf-8")), "run scripts/dev/make_notebook.py"


def test_its_outputs_are_those_of_a_run_to_the_end_without_an_error() -> None:
    code = [cell for cell in read_notebook()["cells"] if cell["cell_type"] == "code"]
    outputs = [output for cell in code for output in cell["outputs"]]
    if not outputs:  # as scripts/dev/make_notebook.py --no-outputs writes it
        assert [cell["execution_count"] for cell in code] == [None] * len(code)
        return
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert all(output["output_type"] != "error" for output in outputs)
    printed = "".join("".join(output.get("text", "")) for output in outputs)
    assert "step 10: reward" in printed and "reward: " in printed
    assert NOTEBOOK.stat().st_size < 100_000


def test_the_source_runs(tmp_path: Path) -> None:
    program = SOURCE.read_text(encoding="utf-8")
    for before, after in (
        ("max_steps=10", "max_steps=1"),
        ("gradient_accumulation_steps=4", "gradient_accumulation_steps=1"),
    ):
        assert program.count(before) == 1
        program = program.replace(before, after)
    command = [find_warm_python(), "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "step 1: reward" in done.stdout
