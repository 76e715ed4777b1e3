"""Test a run in a notebook: a real kernel, whose event loop runs in each cell."""

from pathlib import Path

import nbformat
from doc_pages import ROOT, find_blocks
from launch import WORKERS
from nbclient import NotebookClient

CELLS = """
import asyncio, sys
sys.path.insert(0, {workers!r})
import polar_trl
from worker_common import build_trainer
asyncio.get_running_loop()  # raises where none runs
trainer = build_trainer({model!r}, {out!r}, ["ok", "ok"], max_steps=2, everything=True)
###
asyncio.get_running_loop()
trainer.train().global_step
###
"eval_graded" in trainer.evaluate()
###
{look}
###
trainer.close()
"""


def test_a_trainer_trains_and_evaluates_in_a_notebook(tiny_model: Path, tmp_path: Path) -> None:
    (look,) = find_blocks(ROOT / "docs" / "python.md", "python")
    look = look.replace('"runs/first"', repr(str(tmp_path / "run")))
    text = CELLS.format(workers=str(WORKERS), model=str(tiny_model), out=str(tmp_path / "run"), look=look)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in text.split("###\n")])
    NotebookClient(notebook, timeout=500, kernel_name="python3").execute()
    built, trained, evaluated, looked, _ = notebook.cells
    for noise in ("Traceback", "IProgress not found", "pin_memory", "clean_up_tokenization"):
        assert noise not in str(notebook.cells)
    printed = "".join(output["text"] for output in trained.outputs if output.output_type == "stream")
    steps = [line.split()[1] for line in printed.splitlines() if line.startswith("step ")]
    # beside the line of each step there are those of its faults: "step 1: 1 of 4 sessions: ..."
    assert [step for step in steps if not step.endswith(":")] == ["1/2", "2/2"]
    assert "%|" not in printed  # no bars, which a notebook would keep line by line
    for cell, value in ((trained, "2"), (evaluated, "True")):
        (result,) = (output["data"] for output in cell.outputs if output.output_type == "execute_result")
        assert result["text/plain"] == value
    (output,) = looked.outputs
    rewards = [float(line.split()[0]) for line in output["text"].splitlines() if line.endswith(" None")]
    # of the grader, tenths, and of a reward function, hundredths; an evaluation's sessions are none of the eight
    assert len(rewards) == 8 and any(abs(reward * 10 - round(reward * 10)) > 0.01 for reward in rewards)
    assert not [output for output in built.outputs if "safetensors" in str(output)]
