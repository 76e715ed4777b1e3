"""Try an agent of which nothing is known: what it asks of a model, and what a run would make of it.

A scripted model reads the tools that each request declares: it calls the first that looks like a shell, once, then
ends the task (by a tool that looks made for it, or with a text). An agent without tools gets the command in a code
block.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from polar_trl.errors import PolarError
from polar_trl.harness.base import Harness, Launch, require_launch
from polar_trl.recording.session import SessionLimits
from polar_trl.rollout.runner import RolloutResult
from polar_trl.sandbox.base import ExecResult, SandboxBackend
from polar_trl.tokens.base import Renderer
from polar_trl.tokens.bytes import END, START
from polar_trl.tools.doctor import RENDERER, build_task, run_scripted_session
from polar_trl.types import Call, ChatRequest, Endpoint, Message, Purpose, Task, TokenIds, ToolCall

MAX_CALLS = 20
"""An agent that asks more often does not end by itself here."""
_COMMAND = "printf hello > doctor.txt"
_END = "The file is written."
_TOOLS = (START, *b"tools\n")
_SHELL_NAMES = (r"bash", r"shell", r"exec", r"terminal|command", r"^(run|sh)$")
_SHELL_KEYS = ("command", "cmd", "commands", "script", "code", "input")
_END_NAME = re.compile(r"attempt_completion|task_complete|complete_task|submit|finish|^(complete|done)$", re.I)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """What an agent did in one session; the keys of the JSON report."""

    works: bool
    why: str
    """What is wrong and what to do; empty where it works."""
    dialects: Mapping[str, int]
    """Dialect -> calls."""
    streamed: int = 0
    """Calls that asked for a stream."""
    auxiliary: int = 0
    without_tools: int = 0
    prompt_bytes: Sequence[int] = ()
    """Of each call's prompt, without a chat format."""
    prompt_tokens: Sequence[int] | None = None
    """The same in tokens of the model that was named."""
    max_tokens: Sequence[int] = ()
    """The longest answers that it asked for, where it said."""
    tools: Sequence[str] = ()
    unread: Mapping[str, int]
    """Fields of requests that were seen and not understood -> calls that had them."""
    counters: Mapping[str, int]
    """The session's: refused requests, retries, aborted calls and the like."""
    forks: int = 0
    notes: Sequence[str] = ()
    """What works and may not be what was wanted."""


def try_agent(
    harness: Harness,
    *,
    backend: SandboxBackend,
    delay_s: float = 0.0,
    model: Renderer | None = None,
    window: int | None = None,
    place: Task | None = None,
) -> Trial:
    """Run one session in which the agent is told to write a file.

    Args:
        backend: Where it runs.
        delay_s: How long the scripted model takes for each answer.
        model: The chat format by which its prompts are counted.
        window: The context window that its first prompt has to fit.
        place: A task in whose image it runs.
    """
    task = build_task(delay_s, place)
    watched = _Watched(harness)
    script = _Script()
    try:
        require_launch(harness, [task])
        harness.install()
        finished = run_scripted_session(
            watched, script.answer, task, backend=backend, delay_s=delay_s, limits=SessionLimits(max_calls=MAX_CALLS)
        )
    except PolarError as error:
        return Trial(works=False, why=str(error), dialects={}, unread={}, counters={})
    calls = finished.rollout.calls
    counted = None if model is None else [len(model.render(c.request.messages, c.request.tools)) for c in calls]
    why = _find_fault(finished, watched, script)
    if not why and counted and window is not None and counted[0] >= window:
        why = f"its first prompt has {counted[0]} tokens, and the context window is {window}"
    return Trial(
        works=not why,
        why=why,
        dialects=dict(Counter(call.dialect for call in calls)),
        streamed=sum(call.request.stream for call in calls),
        auxiliary=sum(call.purpose == "auxiliary" for call in calls),
        without_tools=sum(not call.request.tools for call in calls),
        prompt_bytes=[len(call.prompt_ids) for call in calls],
        prompt_tokens=counted,
        max_tokens=sorted({n for call in calls if (n := call.request.sampling.max_tokens) is not None}),
        tools=sorted({tool.name for call in calls for tool in call.request.tools}),
        unread=dict(Counter(path for call in calls for path in _name_fields(call.request.unread))),
        counters=dict(finished.rollout.counters),
        forks=finished.reconstruction.counters["forks"],
        notes=_list_notes(finished, script),
    )


class _Watched(Harness):
    """A harness whose command's end is seen."""

    def __init__(self, harness: Harness) -> None:
        self._harness = harness
        self.name = harness.name
        self.result: ExecResult | None = None

    def build_launch(self, task: Task, endpoint: Endpoint) -> Launch:
        return self._harness.build_launch(task, endpoint)

    def judge_exit(self, result: ExecResult, calls: Sequence[Call]) -> bool:
        self.result = result
        return self._harness.judge_exit(result, calls)

    def classify(self, request: ChatRequest) -> Purpose:
        return self._harness.classify(request)


class _Script:
    """The scripted model."""

    def __init__(self) -> None:
        self.shell: str | None = None
        """The tool that was called with the command."""
        self._has_tools = False

    def answer(self, prompt_ids: TokenIds) -> TokenIds:
        return RENDERER.spell(self._choose(prompt_ids))

    def _choose(self, prompt_ids: TokenIds) -> Message:
        tools = _read_tools(prompt_ids)
        self._has_tools = self._has_tools or bool(tools)
        is_given = _COMMAND.encode() in bytes(token_id for token_id in prompt_ids if token_id < 256)
        if not is_given and (call := _build_shell_call(tools)):
            self.shell = call.name
            return Message(role="assistant", text="I write it.", tool_calls=(call,))
        if not is_given and not self._has_tools:
            return Message(role="assistant", text=f"I write it.\n\n```bash\n{_COMMAND}\n```\n")
        ending = [tool for tool in tools if _END_NAME.search(tool["name"])]
        calls = tuple(_call(tool, {}) for tool in ending[:1])
        return Message(role="assistant", text=_END, tool_calls=calls)


def _read_tools(prompt_ids: TokenIds) -> list[dict[str, Any]]:
    """Read the tools that a prompt of `ByteRenderer` begins with."""
    if prompt_ids[: len(_TOOLS)] != _TOOLS:
        return []
    tools: list[dict[str, Any]] = orjson.loads(bytes(prompt_ids[len(_TOOLS) : prompt_ids.index(END)]))
    return tools


def _build_shell_call(tools: Sequence[dict[str, Any]]) -> ToolCall | None:
    """Build a call of the tool that looks most like a shell; None where none does."""
    for pattern in _SHELL_NAMES:
        for tool in tools:
            properties = tool["parameters"].get("properties") or {}
            for key in _SHELL_KEYS:
                schema = properties.get(key)
                if re.search(pattern, tool["name"], re.I) and isinstance(schema, dict) and "enum" not in schema:
                    is_list = schema.get("type") == "array"
                    words = [_COMMAND] if key == "commands" else ["bash", "-lc", _COMMAND]
                    return _call(tool, {key: words if is_list else _COMMAND})
    return None


def _call(tool: dict[str, Any], arguments: dict[str, Any]) -> ToolCall:
    """Build a call of a tool, with something in the place of each other argument that its schema requires."""
    samples = {"boolean": False, "integer": 60, "number": 60, "array": [], "object": {}}
    properties = tool["parameters"].get("properties") or {}
    for key in tool["parameters"].get("required") or ():
        schema = properties.get(key) or {}
        kind = str(schema.get("type"))
        sample = schema["enum"][0] if schema.get("enum") else samples.get(kind, _END)
        arguments.setdefault(key, sample)
    return ToolCall(id="", name=tool["name"], arguments=json.dumps(arguments))


def _name_fields(paths: Sequence[str]) -> list[str]:
    """Name each field once, wherever in a list it stands."""
    return list(dict.fromkeys(re.sub(r"\[\d+\]", "[]", path) for path in paths))


def _find_fault(finished: RolloutResult, watched: _Watched, script: _Script) -> str:
    """Say why a run could not use this agent; "" where it could."""
    rollout = finished.rollout
    if rollout.error is not None:
        return rollout.error
    if rollout.stop_reason == "agent_timeout":
        return f"it did not end in {rollout.seconds['agent']:.0f} s, after {len(rollout.calls)} calls"
    if rollout.counters.get("budget_messages"):
        return f"it asked the model more than {MAX_CALLS} times, and did not end when told that the task is done"
    if rollout.stop_reason != "completed":
        result = watched.result
        said = "" if result is None else (result.stderr.strip() or result.stdout.strip())[-300:]
        code = "" if result is None else f" (exit code {result.exit_code}; it printed: {said!r})"
        return f"it did not end as it should{code}, after {len(rollout.calls)} calls"
    if all(call.purpose == "auxiliary" for call in rollout.calls):
        return f"each of its {len(rollout.calls)} calls is auxiliary, so that nothing would be trained"
    if script.shell is not None and rollout.reward != 1.0:
        return f"its tool {script.shell} was called, and the file that the command writes is not in the work folder"
    return ""


def _list_notes(finished: RolloutResult, script: _Script) -> list[str]:
    rollout, counters = finished.rollout, finished.reconstruction.counters
    policy = [call for call in rollout.calls if call.purpose == "policy"]
    bare = sum(not call.request.tools for call in policy)
    notes = []
    if script.shell is None and rollout.calls:
        ran = "ran" if rollout.reward == 1.0 else "did not run"
        notes.append(f"it declares no tool that looks like a shell, and {ran} a command in a code block")
    if 0 < bare < len(policy):
        notes.append(
            f"{bare} of its calls declare no tools: titles, summaries and the like are left out of training by "
            "agent_options: {auxiliary_without_tools: true}"
        )
    if counters["forks"]:
        notes.append(f"its calls do not all continue each other: {counters['forks']} forks, each a row of its own")
    return notes
