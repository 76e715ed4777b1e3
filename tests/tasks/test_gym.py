"""Rows of NeMo Gym as tasks, and those that no agent with tools of its own can be given."""

import json
from pathlib import Path
from typing import Any

import pytest

from polar_trl.errors import TaskError
from polar_trl.tasks.gym import read_row
from polar_trl.tasks.load import load_task_set


def row(given: Any, **params: Any) -> dict[str, Any]:
    return {"responses_create_params": {"input": given, **params}, "expected_answer": "B", "instance_id": "x"}


def test_rows_become_tasks(tmp_path: Path) -> None:
    path = tmp_path / "example.jsonl"
    parts = [{"type": "input_text", "text": "Which one?"}]
    turns = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    rows = [row("Six times seven?", instructions="Answer."), row(turns, temperature=0.5)]
    path.write_text("\n\n".join(map(json.dumps, rows)))
    first, second = load_task_set(path)
    assert (first.id, first.instruction) == ("example-1", "Answer.\n\nSix times seven?")
    assert (second.id, second.instruction) == ("example-3", "Be brief.\n\nWhich one?")
    assert second.metadata == {"gym": rows[1]}


ASSISTANT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
IMAGE = [{"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AA=="}]}]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (row("hi", tools=[{"type": "function", "name": "f"}]), "functions of the resources server"),
        (row(ASSISTANT), "has a turn of the assistant"),
        (row(IMAGE), "has images"),
        (row([]), "input: must hold at least one message"),
        ({"responses_create_params": 1}, "must be an object, not 1"),
    ],
)
def test_rows_that_are_no_task(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=f"^rows:2: .*{message}"):
        read_row(bad, "a", "rows:2")
