"""Make a folder as `sample_tasks` leaves it, with sessions that a real proxy recorded from a scripted model."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import openai
from records import read_session
from serving import client, serve
from transformers import AutoTokenizer

from polar_trl.engine.scripted import ScriptedEngine
from polar_trl.eval.sample_tasks import SampleResult
from polar_trl.harness.base import PackagedAgent
from polar_trl.reconstruct import build_prefix_merged
from polar_trl.recording.log import SessionLog
from polar_trl.tokens.load import load_renderer
from polar_trl.types import Rollout, StopReason

TOOL = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": "Runs a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
OTHER_TOOL = {
    "type": "function",
    "function": {
        "name": "read",
        "description": "Reads a file.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}, "lines": {"type": "integer"}}},
    },
}
CALL = (
    "<think>\nI look.\n</think>\n\n"
    '<tool_call>\n{"name": "shell", "arguments": {"command": "ls"}}\n</tool_call><|im_end|>'
)
DONE = "<think>\nThere.\n</think>\n\nThe file is there.<|im_end|>"
TITLE = "<think>\n\n</think>\n\nA title<|im_end|>"


def ask(agent: openai.OpenAI, messages: list[Any], tools: Sequence[Any] = (TOOL,)) -> Any:
    """The reply to one request, as an agent sends it back."""
    extra: dict[str, Any] = {"tools": list(tools)} if tools else {}
    reply = agent.chat.completions.create(model="policy", messages=messages, **extra).choices[0].message
    return reply.model_dump(exclude_none=True)


def two_turns(agent: openai.OpenAI, task: str) -> None:
    """A tool call and a last word; two calls, one trajectory."""
    messages: list[Any] = [{"role": "user", "content": f"List the files of {task}."}]
    reply = ask(agent, messages)
    tool_call_id = reply["tool_calls"][0]["id"]
    messages += [reply, {"role": "tool", "tool_call_id": tool_call_id, "content": "notes.txt"}]
    ask(agent, messages)


def with_fork(agent: openai.OpenAI, task: str) -> None:
    """A title beside the task (auxiliary), two turns, then a history that the agent rewrote: a second trajectory."""
    ask(agent, [{"role": "user", "content": "Name this."}], tools=())
    two_turns(agent, task)
    ask(agent, [{"role": "user", "content": f"Summary of {task}: one file. Go on."}], tools=(TOOL, OTHER_TOOL))


@dataclass
class Recorder:
    """Writes sessions to `folder`, in the template of the model in `model`."""

    model: Path
    folder: Path
    results: list[SampleResult] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(self.model)

    def record(
        self,
        task: str,
        sample: int,
        reward: float | None,
        *,
        repo: str | None,
        script: Sequence[str] = (CALL, DONE),
        session: Any = two_turns,
        stop_reason: StopReason = "completed",
    ) -> SampleResult:
        """Run one session and write its record and its line."""
        name = f"{task}-s{sample}"
        path = self.folder / "sessions" / "start" / f"{name}.jsonl"
        engine = ScriptedEngine([self.tokenizer.encode(text, add_special_tokens=False) for text in script])
        log = SessionLog(session_id=name, task_id=task, group_id=name, path=path)
        renderer = load_renderer(self.tokenizer, str(self.model))
        with serve(engine, renderer) as proxy:
            endpoint = proxy.open_session(log, classify=PackagedAgent().classify)
            if script:
                session(client(endpoint), task)
            proxy.close_session(endpoint.api_key)
        error = None if reward is not None else "the sandbox died"
        rollout = Rollout(
            id=name,
            task_id=task,
            group_id=name,
            calls=log.calls,
            stop_reason=stop_reason,
            reward=reward,
            error=error,
        )
        log.close(rollout)
        result = SampleResult(
            task=task,
            sample=sample,
            attempt=1,
            rollout=name,
            record=str(path.relative_to(self.folder)),
            repo=repo,
            reward=reward,
            error=error,
            stop_reason=stop_reason,
            calls=len(log.calls),
            sampled_tokens=sum(len(call.completion.token_ids) for call in log.calls),
            seconds={},
        )
        self.results.append(result)
        with (self.folder / "results.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(result)) + "\n")
        return result

    def trajectories(self, result: SampleResult) -> list[tuple[list[int], list[int]]]:
        """Ids and mask of each trajectory of a session, built from its record without the package under test."""
        merged = build_prefix_merged(read_session(self.folder / result.record))
        return [(list(t.token_ids), [int(bit) for bit in t.trainable]) for t in merged.trajectories]


def record_folder(model: Path, folder: Path) -> Recorder:
    """12 tasks of two repositories: accepted with a fork, rejected, failed, and ten that are plain."""
    recorder = Recorder(model, folder)
    recorder.record("a1", 0, 1.0, repo="alpha", script=(TITLE, CALL, DONE, DONE), session=with_fork)
    recorder.record("a1", 1, 0.0, repo="alpha")
    recorder.record("a2", 0, None, repo="alpha", script=(), stop_reason="prepare_failed")
    for number in range(10):
        recorder.record(f"b{number}", 0, 1.0, repo="beta")
    recorder.record("b0", 1, 1.0, repo="beta")
    recorder.record("b1", 1, 0.4, repo="beta")
    return recorder
