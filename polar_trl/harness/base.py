"""Harnesses: how a coding agent is installed and launched. They know command lines, and no model or tokens."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from polar_trl.errors import ConfigError
from polar_trl.harness.install import Package
from polar_trl.harness.prompt import PromptSize
from polar_trl.sandbox.base import ExecResult
from polar_trl.types import Call, ChatRequest, Endpoint, Purpose, Task, ToolCall

INSTRUCTION_FILE = ".polar/instruction.txt"
"""Path under HOME of the instruction for agents that read it from stdin, so that it may be of any length."""
MAX_ARGUMENT_BYTES = 127 << 10
"""Of a text that a program gets as one argument or variable: Linux takes 128 KiB (MAX_ARG_STRLEN), a name before it
and a NUL byte after it included."""
_PROBE = Task(id="start", instruction="-")


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """The command of one session in its sandbox, with its environment and settings files."""

    command: str
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    """Path relative to HOME -> text: the agent's own settings."""
    executables: Collection[str] = ()
    """Those of `files` that can be run."""


class Harness(Protocol):
    """An agent that runs once per session against an endpoint.

    A base class, too: an own agent needs `name` and `build_launch`, and overrides where it differs from the rest.
    """

    name: str
    """In records and metrics."""

    @property
    def folders(self) -> Sequence[Path]:
        """Host folders that the agent needs, which sandboxes show at the same path."""
        return ()

    def install(self) -> None:
        """Install the agent and what it needs, unless it is there. Called once, before the first session.

        Raises `ConfigError` with the reason and what to do.
        """
        return

    def build_launch(self, task: Task, endpoint: Endpoint) -> Launch:
        """Build the command, environment and settings files for a task and an endpoint. Pure.

        Raises `ConfigError` where the agent cannot work there, or cannot be given the task; a run asks for each before
        a model is loaded.
        """
        ...

    def judge_exit(self, result: ExecResult, calls: Sequence[Call]) -> bool:
        """Return whether the agent ended as it should (its work is graded either way): with exit code 0."""
        return result.exit_code == 0

    def classify(self, request: ChatRequest) -> Purpose:
        """Return "auxiliary" for a request beside the task: a title, a summary, a quota probe. Else "policy"."""
        return "policy"


class AgentHarness(Harness, Protocol):
    """A known command-line agent, whose behaviour was verified at one version."""

    verified_version: str
    prompt_size: PromptSize

    def find_installed_version(self) -> str | None:
        """Return the version that `build_launch` would run; None where the agent is not installed."""
        ...

    def build_shell_call(self, command: str) -> ToolCall:
        """Build a call of the agent's own shell tool, as a scripted model makes it in `polar-trl doctor`."""
        ...

    def build_last_message(self, text: str) -> tuple[str, tuple[ToolCall, ...]]:
        """Return the text and tool calls with which a model ends the agent's task."""
        ...


class PackagedAgent:
    """The part of `AgentHarness` that agents from a registry share; an agent overrides where it differs.

    Args:
        packages: In the order of installation; the last one is the agent itself.
    """

    def __init__(self, *packages: Package) -> None:
        self._packages = packages

    @property
    def folders(self) -> tuple[Path, ...]:
        """See `Harness.folders`."""
        return tuple(package.folder for package in self._packages)

    def install(self) -> None:
        """See `Harness.install`."""
        for package in self._packages:
            package.install()

    def find_installed_version(self) -> str | None:
        """Return the agent's own version; None where the agent, or a package that it needs, is missing."""
        versions = [package.find_version() for package in self._packages]
        return versions[-1] if all(versions) else None

    def build_last_message(self, text: str) -> tuple[str, tuple[ToolCall, ...]]:
        """Return the text alone: a reply without tool calls ends the task."""
        return text, ()

    def judge_exit(self, result: ExecResult, calls: Sequence[Call]) -> bool:
        """Return whether the policy's last reply was a whole answer: text, no tool call left to run, not cut.

        Exit codes of agents lie in both directions: 0 after an empty reply, 1 after a run that recovered.
        """
        # a budget message is the proxy's answer and not the policy's
        answered = (call for call in reversed(calls) if call.purpose == "policy" and call.is_answered)
        last = next(answered, None)
        if last is None or last.completion.finish_reason == "length":
            return False
        return bool(last.message.text.strip()) and not last.message.tool_calls

    def classify(self, request: ChatRequest) -> Purpose:
        """Return "policy" for requests that declare tools: titles, summaries and quota probes declare none."""
        return "policy" if request.tools else "auxiliary"


def require_launch(harness: Harness, tasks: Sequence[Task] = (_PROBE,), **limits: int) -> None:
    """Have an agent build a launch for each task. `limits` are the `Endpoint`'s: `max_model_len`, `max_tokens`.

    Raises its `ConfigError`, such as for a context window that its prompt fills, or an instruction that is too long.
    """
    endpoint = Endpoint(origin="http://127.0.0.1:1", api_key="none", model="policy", **limits)
    for task in tasks:
        _count_bytes(task)
        launch: object = harness.build_launch(task, endpoint)
        if not isinstance(launch, Launch):
            raise ConfigError(f"agent {harness.name}: build_launch gives a {type(launch).__name__}, and not a Launch")
        for kind, texts in (("env", launch.env), ("files", launch.files)):
            for key, value in texts.items():
                if not isinstance(value, str):
                    raise ConfigError(
                        f"agent {harness.name}: {kind}[{key!r}] of its Launch must be text, not {value!r}"
                    )


def check_instruction(task: Task) -> int:
    """Return the bytes of an instruction that a program gets as an argument. Raises `ConfigError` where none can."""
    if "\0" in task.instruction:
        raise ConfigError(f"task {task.id}: the instruction holds a NUL byte, which no process can be given")
    return _count_bytes(task)


def _count_bytes(task: Task) -> int:
    try:
        return len(task.instruction.encode())
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"task {task.id}: the instruction holds half a surrogate pair at position {error.start}, which is no text"
        ) from error
