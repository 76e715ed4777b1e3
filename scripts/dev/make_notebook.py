#!/usr/bin/env python3
"""Make examples/notebook.ipynb of examples/notebook.py, and execute it: pip install ipykernel nbclient nbformat.

  python scripts/dev/make_notebook.py
  python scripts/dev/make_notebook.py --no-outputs    without executing it

The kernel is this Python. What the terminal would show of progress is left out of the outputs.
"""

import re
import sys
import tempfile
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SOURCE = EXAMPLES / "notebook.py"
NOTEBOOK = EXAMPLES / "notebook.ipynb"
MAX_OUTPUT_CHARACTERS = 4000


def read_cells(source: str) -> list[tuple[str, str]]:
    """Return (kind, text) of the cells of a file in the percent format: "markdown" or "code"."""
    cells = []
    for part in re.split(r"^# %%", source, flags=re.MULTILINE)[1:]:
        head, _, body = part.partition("\n")
        if "[markdown]" in head:
            cells.append(("markdown", re.sub(r"^# ?", "", body, flags=re.MULTILINE).strip()))
        else:
            cells.append(("code", body.strip()))
    return cells


def build_notebook(cells: list[tuple[str, str]]) -> Any:
    """Build a notebook without outputs."""
    from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

    make = {"markdown": new_markdown_cell, "code": new_code_cell}
    built = [make[kind](text, id=f"cell-{number}") for number, (kind, text) in enumerate(cells)]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return new_notebook(cells=built, metadata={"kernelspec": kernel, "language_info": {"name": "python"}})


def keep_readable(notebook: Any) -> None:
    """Cut outputs to what is worth reading: no bars that were drawn over, no warnings of libraries, no long texts."""
    for cell in notebook.cells:
        cell.get("metadata", {}).pop("execution", None)
        kept = []
        for output in cell.get("outputs", []):
            if output.output_type == "stream" and output.name == "stderr":
                continue
            if output.output_type == "stream":
                output.text = output.text[-MAX_OUTPUT_CHARACTERS:]
            kept.append(output)
        if cell.cell_type == "code":
            cell.outputs = kept


def main() -> None:
    import nbformat
    from nbclient import NotebookClient

    notebook = build_notebook(read_cells(SOURCE.read_text(encoding="utf-8")))
    if "--no-outputs" not in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as folder:
            NotebookClient(notebook, timeout=1800, resources={"metadata": {"path": folder}}).execute()
        keep_readable(notebook)
    nbformat.write(notebook, NOTEBOOK)
    print(NOTEBOOK)


if __name__ == "__main__":
    main()
