"""Build calls, rollouts and logs to write records of."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from polar_trl.recording.log import SessionLog, read_record
from polar_trl.types import Call, ChatRequest, Completion, Message, Rollout, Tool

TOOL = Tool(name="shell", description="Runs a command", parameters={"type": "object", "properties": {"n": {}}})


def build_call(index: int, parent: Call | None = None, **changes: Any) -> Call:
    """A call with an answer of its own; with a parent it continues that one by two ids and one message."""
    call = Call(
        session_id="s",
        index=index,
        dialect="anthropic",
        request=ChatRequest(messages=(Message(role="user", text=f"question {index}"),), tools=(TOOL,), stream=True),
        prompt_ids=(1, 2, index),
        completion=Completion(token_ids=(500 + index,), logprobs=(-0.1 - index / 3,), finish_reason="stop"),
        message=Message(role="assistant", text=f"answer {index}"),
        started_s=1790000000.123456,
        duration_s=0.1 + 0.2,
    )
    if parent is not None:
        history = (*parent.request.messages, parent.message)
        call = replace(
            call,
            parent=parent.index,
            prompt_ids=(*parent.prompt_ids, *parent.completion.token_ids, 7, index),
            request=replace(call.request, messages=(*history, Message(role="tool", text="ok", tool_call_id="c"))),
        )
    return replace(call, **changes)


def build_rollout(*calls: Call, **changes: Any) -> Rollout:
    return replace(Rollout(id="s", task_id="t", group_id="g", calls=calls), **changes)


def open_log(path: Path | None) -> SessionLog:
    return SessionLog(session_id="s", task_id="t", group_id="g", path=path)


def read_session(path: Path) -> Rollout:
    """Read the rollout of a record, whether it has an end or not."""
    return read_record(path).rollout
