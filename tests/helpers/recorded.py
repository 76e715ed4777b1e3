"""Write runs for the tests of the inspector: sessions, by the log that a run writes them with, and rows."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polar_trl.reconstruct import build_prefix_merged, count_calls, digest
from polar_trl.recording.log import SessionLog
from polar_trl.types import Call, ChatRequest, Completion, Message, Rollout, TokenIds, Tool

ATTEMPT = "20260101-120000-999999999-rank0"
"""Of a process that no machine has."""


def build_call(session_id: str, index: int, prompt: TokenIds, sampled: TokenIds, **fields: Any) -> Call:
    """A call; `messages`, `tools` and `reply` (a message) besides the fields of `Call`."""
    messages = fields.pop("messages", (Message(role="user", text="hi"),))
    tools: Sequence[Tool] = fields.pop("tools", ())
    version = fields.pop("version", 0)
    logprobs = fields.pop("logprobs", (-0.5,) * len(sampled))
    return Call(
        session_id=session_id,
        index=index,
        dialect="openai_chat",
        request=ChatRequest(messages=tuple(messages), tools=tuple(tools)),
        prompt_ids=prompt,
        completion=Completion(
            token_ids=sampled,
            logprobs=logprobs,
            finish_reason="stop",
            first_policy_version=version,
            last_policy_version=version,
        ),
        message=fields.pop("reply", Message(role="assistant", text="ok")),
        **fields,
    )


def write_session(
    run: Path,
    name: str,
    calls: Sequence[Call],
    *,
    batch: str = "train_00000",
    finish: bool = True,
    summary: bool = True,
    owner: str | None = None,
    **rollout: Any,
) -> Path:
    """RUN/sessions/ATTEMPT/BATCH/NAME.jsonl with these calls (whose session id is the name)."""
    path = run / "sessions" / ATTEMPT / batch / f"{name}.jsonl"
    group = name.rpartition("-r")[0] or name
    task = rollout.pop("task_id", "task")
    log = SessionLog(session_id=name, task_id=task, group_id=group, path=path, owner=owner)
    for call in calls:
        log.append(call)
    if finish:
        fields = {"reward": 1.0, "seconds": {"queue": 0.5, "prepare": 1.0, "agent": 2.0, "grade": 0.5}} | rollout
        ended = Rollout(id=name, task_id=task, group_id=group, calls=tuple(calls), **fields)
        built = build_prefix_merged(ended)
        extra: dict[str, Any] = {"trajectory_digest": digest(built.trajectories), "builder": "prefix_merging"}
        log.close(ended, extra | ({"summary": count_calls(ended, built)} if summary else {}))
    return path


def write_rows(run: Path, step: int, lines: Sequence[dict[str, Any]], mode: str = "train") -> Path:
    """Append to RUN/rows/ATTEMPT/train_STEP.jsonl."""
    path = run / "rows" / ATTEMPT / f"{mode}_{step:05d}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    return path


def name_record(name: str, batch: str = "train_00000") -> str:
    """Return what rows call a session's record."""
    return f"sessions/{ATTEMPT}/{batch}/{name}.jsonl"


def describe_rollout(name: str, advantage: float, dropped: str | None = None) -> dict[str, Any]:
    """A "rollout" line."""
    return {
        "type": "rollout",
        "rollout": name,
        "record": name_record(name),
        "task": "task",
        "group": name.rpartition("-r")[0],
        "reward": None if dropped == "no_reward" else 1.0,
        "advantage": advantage,
        "dropped": dropped,
    }


def write_long_session(run: Path, name: str, *, num_tokens: int, num_calls: int, vocabulary: int) -> Path:
    """One trajectory of so many tokens, a tenth of them sampled, with rows that say what the trainer made of it."""
    chance = random.Random(3)
    per_call = num_tokens // num_calls
    num_sampled = per_call // 10
    messages: tuple[Message, ...] = ()
    ids: TokenIds = ()
    calls: list[Call] = []
    spans: list[tuple[int, int]] = []
    trainer: list[float] = []
    for index in range(num_calls):
        role = "user" if index == 0 else "tool"
        messages = (*messages, Message(role=role, text=f"result {index}: " + "word " * (per_call - num_sampled)))  # type: ignore[arg-type]
        prompt = ids + tuple(chance.randrange(300, vocabulary) for _ in range(per_call - num_sampled))
        sampled = tuple(chance.randrange(300, vocabulary) for _ in range(num_sampled))
        logprobs = tuple(-chance.expovariate(3.0) for _ in sampled)
        reply = Message(role="assistant", text=f"reply {index}")
        parent = index - 1 if index else None
        calls.append(
            build_call(
                name, index, prompt, sampled, messages=messages, reply=reply, parent=parent, logprobs=logprobs,
                version=1 + index // 100,
            )
        )  # fmt: skip
        spans.append((len(prompt), len(prompt) + num_sampled))
        trainer += [round(value + chance.gauss(0.0, 0.01), 5) for value in logprobs]
        ids = prompt + sampled
        messages = (*messages, reply)
    path = write_session(run, name, calls)
    row = {"type": "row", "step": 1, "rollout": name, "record": name_record(name), "calls": list(range(num_calls))}
    row |= {"num_tokens": len(ids), "num_trainable": len(trainer), "trained": spans, "advantage": 0.75}
    write_rows(run, 1, [describe_rollout(name, 0.75), row | {"logprobs": trainer}])
    return path
