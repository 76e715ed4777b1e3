"""Read rows of NeMo Gym's data sets as tasks; their resources server gives the reward (`polar_trl.grade.gym`).

A row is a JSON object: `responses_create_params`, the body of a request in OpenAI's Responses format, and whatever its
resources server reads beside it. The texts of its messages become the instruction, since an agent has messages of its
own around it. The row is kept whole in `Task.metadata["gym"]`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polar_trl.errors import TaskError, WireError
from polar_trl.tasks.jsonl import read_lines, read_object
from polar_trl.tasks.rules import collect_tasks, require_limit
from polar_trl.types import Message, Task
from polar_trl.wire.base import ItemMemo
from polar_trl.wire.openai_responses_request import parse_body

PARAMS = "responses_create_params"
"""The field that a row is known by."""


def load_gym(path: Path, *, limit: int | None = None) -> list[Task]:
    """Load the rows of a JSONL file, at most the first `limit`; ids are the file's name and the line's number.

    Raises `TaskError` as `read_row` does.
    """
    require_limit(limit)
    rows = ((f"{path}:{number}", f"{path.stem}-{number}", line) for number, line in read_lines(path))
    return collect_tasks(
        ((where, read_row(read_object(line, where), name, where)) for where, name, line in rows), limit
    )


def read_row(row: Mapping[str, Any], task_id: str, where: str) -> Task:
    """Build a task from a row.

    Raises `TaskError`, which begins with `where`, for a row that no agent with tools of its own can be given: one with
    functions to call, with turns of an assistant, with images, or without a message.
    """
    params = row.get(PARAMS)
    if not isinstance(params, Mapping):
        raise TaskError(f"{where}: {PARAMS!r} must be an object, not {params!r:.100}")
    if params.get("tools"):
        raise TaskError(
            f"{where}: '{PARAMS}.tools': these are functions of the resources server, which an agent with tools of "
            "its own cannot call; leave such rows out"
        )
    try:
        request, _ = parse_body(dict(params), ItemMemo(), compact=False)
    except WireError as error:
        raise TaskError(f"{where}: {PARAMS}.{error}") from error
    if other := next((message for message in request.messages if not _is_instruction(message)), None):
        kind = "images" if other.images else f"a turn of the {other.role}"
        raise TaskError(f"{where}: '{PARAMS}.input' has {kind}, and a task is text; leave such rows out")
    instruction = "\n\n".join(message.text for message in request.messages)
    return Task(id=task_id, instruction=instruction, metadata={"gym": dict(row)})


def _is_instruction(message: Message) -> bool:
    return message.role in ("system", "developer", "user") and not message.images
