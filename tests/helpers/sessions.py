"""Run sessions of real agents with a scripted model, whose settings a test changes and whose requests it hears."""

import asyncio
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polar_trl.engine.base import GenerationParams
from polar_trl.engine.scripted import ScriptedEngine
from polar_trl.errors import EngineBusyError
from polar_trl.grade.command import CommandGrader
from polar_trl.harness.base import AgentHarness, Launch
from polar_trl.proxy import Proxy
from polar_trl.rollout.runner import Job, RolloutConfig, RolloutResult, RolloutRunner
from polar_trl.sandbox.local import LocalSandboxBackend
from polar_trl.serving import endpoint
from polar_trl.tokens.base import Renderer
from polar_trl.tools.doctor import MAX_MODEL_LEN, RENDERER, answer_by_turn
from polar_trl.types import ChatRequest, Completion, Message, Rollout, Task, TokenIds, ToolCall
from polar_trl.wire.base import Dialect, Incoming, ItemMemo, ParsedRequest

Change = Callable[[Launch], Launch]
INSTRUCTION = "Do the work."
SUMMARY = "<state_snapshot>Some of the work is done; go on with the rest.</state_snapshot>"
LOOKUPS = """
const fs = require("fs"), dns = require("dns"), log = process.env.HOME + "/lookups.txt";
fs.appendFileSync(log, "");
for (const home of [dns, dns.promises]) {
  const lookup = home.lookup;
  home.lookup = function (name, ...rest) {
    fs.appendFileSync(log, name + "\\n");
    return lookup.call(this, name, ...rest);
  };
}
"""
LOOKED_NOTHING_UP = 'test -e "$HOME/lookups.txt" && test ! -s "$HOME/lookups.txt"'


class Changed:
    """A harness whose launch is changed: other settings, another environment."""

    def __init__(self, harness: AgentHarness, change: Change) -> None:
        self._harness, self._change = harness, change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._harness, name)

    def build_launch(self, task: Task, endpoint: Any) -> Launch:
        return self._change(self._harness.build_launch(task, endpoint))


def say(text: str, *tool_calls: ToolCall) -> Message:
    return Message(role="assistant", text=text, tool_calls=tool_calls)


def call_tool(name: str, arguments: str | Mapping[str, object]) -> ToolCall:
    """Arguments as the model writes them, or what it writes as JSON."""
    return ToolCall(id="", name=name, arguments=arguments if isinstance(arguments, str) else json.dumps(arguments))


def results(rollout: Rollout) -> list[str]:
    """The texts that tools gave, as the last call saw them."""
    return [message.text for message in rollout.calls[-1].request.messages if message.role == "tool"]


def purposes(rollout: Rollout) -> str:
    """One letter per call: "p" for the policy's own, "a" for auxiliary ones."""
    return "".join(call.purpose[0] for call in rollout.calls)


def run_session(
    harness: AgentHarness,
    engine: ScriptedEngine | Sequence[Message],
    *,
    grader: str | None = None,
    change: Change | None = None,
    max_tokens: int = 4096,
    ping_interval_s: float = 10.0,
    live: bool = False,
    record_path: Path | None = None,
    renderer: Renderer = RENDERER,
    files: Mapping[str, str] | None = None,
) -> RolloutResult:
    """One session; a list of replies is one per turn of the conversation, as in `run_scripted_session`.

    `live` tells them while they are sampled.
    """
    if not isinstance(engine, ScriptedEngine):
        engine = ScriptedEngine(answer_by_turn(engine, after=INSTRUCTION), max_model_len=MAX_MODEL_LEN)
    task = Task(id="t", instruction=INSTRUCTION, agent_timeout_s=120.0, grader=grader, files=files or {})
    params = GenerationParams(max_tokens=max_tokens)
    with Proxy(engine, renderer, params=params, ping_interval_s=ping_interval_s, live=live) as running:
        runner = RolloutRunner(
            proxy=running,
            backend=LocalSandboxBackend(),
            harness=Changed(harness, change) if change else harness,  # type: ignore[arg-type]
            grader=CommandGrader(grader) if grader else None,
            config=RolloutConfig(),
        )
        return runner.run([Job(rollout_id="agent", group_id="g", task=task, record_path=record_path)])[0]


def answer_in_order(replies: Sequence[Message]) -> Callable[[TokenIds], TokenIds]:
    """A script for sessions that compact: summaries where they are asked for, else one reply after the other."""
    rest = itertools.chain(replies, itertools.repeat(replies[-1]))

    def answer(prompt_ids: TokenIds) -> TokenIds:
        turns = _split_turns(prompt_ids)
        asks_for_summary = not turns[0].startswith(b"tools") or b"summarizes a conversation" in turns[-1]
        return RENDERER.spell(say(SUMMARY) if asks_for_summary else next(rest))

    return answer


class BusyEngine(ScriptedEngine):
    """Sends its second request back, at once or (when the stream has begun) after a while."""

    def __init__(self, replies: Sequence[Message], busy_after_s: float = 0.0) -> None:
        super().__init__(answer_by_turn(replies), max_model_len=MAX_MODEL_LEN)
        self.busy_after_s = busy_after_s
        self.num_asked = 0

    async def generate(self, prompt_ids: TokenIds, params: GenerationParams) -> Completion:
        self.num_asked += 1
        if self.num_asked == 2:
            await asyncio.sleep(self.busy_after_s)
            raise EngineBusyError("weights are being updated", retry_after_s=1.0)
        return await super().generate(prompt_ids, params)


def overhear(monkeypatch: pytest.MonkeyPatch) -> list[ChatRequest]:
    """A list that fills with the requests as agents send them. (On record, matched messages are those sampled.)"""
    heard: list[ChatRequest] = []
    monkeypatch.setattr(endpoint, "DIALECTS", tuple(_Overheard(dialect, heard) for dialect in endpoint.DIALECTS))
    return heard


def change_settings(path: str, **values: Any) -> Change:
    """Top-level keys of a JSON file in HOME set anew."""
    return lambda launch: replace(
        launch, files={**launch.files, path: json.dumps({**json.loads(launch.files[path]), **values})}
    )


def change_env(**values: str | None) -> Change:
    """Environment variables set anew, or left out where None."""

    def change(launch: Launch) -> Launch:
        env: Mapping[str, str | None] = {**launch.env, **values}
        return replace(launch, env={name: value for name, value in env.items() if value is not None})

    return change


def note_lookups(launch: Launch) -> Launch:
    """Have Node.js write each name that it looks up into ~/lookups.txt."""
    export = 'export NODE_OPTIONS="--require $HOME/.polar/lookups.cjs"\n'
    return replace(launch, command=export + launch.command, files={**launch.files, ".polar/lookups.cjs": LOOKUPS})


class _Overheard:
    def __init__(self, dialect: Dialect, heard: list[ChatRequest]) -> None:
        self._dialect, self._heard = dialect, heard

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dialect, name)

    def parse(self, incoming: Incoming, memo: ItemMemo) -> ParsedRequest:
        parsed = self._dialect.parse(incoming, memo)
        self._heard.append(parsed.request)
        return parsed


def _split_turns(prompt_ids: TokenIds) -> list[bytes]:
    """The finished turns of a prompt, each beginning with its role."""
    turns: list[bytearray] = []
    for token_id in prompt_ids:
        if token_id == 256:
            turns.append(bytearray())
        elif token_id < 256:
            turns[-1].append(token_id)
    return [bytes(turn) for turn in turns[:-1]]
