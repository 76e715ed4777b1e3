"""How one agent is installed and launched. Knows command lines and settings files, no model and no tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from polar_trl.harness.install import Package
from polar_trl.sandbox.base import ExecResult
from polar_trl.types import Call, ChatRequest, Endpoint, Purpose, Task, ToolCall

INSTRUCTION_FILE = ".polar/instruction.txt"
"""Under HOME: where agents that read the instruction from stdin get it from, so that it may be of any length."""
SHORT_PROMPT = """\
You are a coding agent at work in the user's current folder. Nobody can answer questions: decide yourself.
Use the tools to look at files, change them and run commands. Check your work by running it.
When the task is done, answer with a short summary and call no tool.
"""
"""In place of an agent's own system prompt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """What to run in the sandbox for one session."""

    command: str
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    """Path relative to HOME -> text: the agent's own settings."""


class Harness(Protocol):
    """One agent."""

    name: str

    @property
    def folders(self) -> Sequence[Path]:
        """Folders of this machine that it needs, which sandboxes show at the same path."""
        ...

    def install(self) -> None:
        """Put onto this machine what the agent needs, unless it is there. Called once, before the first session.

        Raises `ConfigError` with the reason and what to do.
        """
        ...

    def build_launch(self, task: Task, endpoint: Endpoint) -> Launch:
        """Pure: the command, environment and settings files for this task and endpoint."""
        ...

    def judge_exit(self, result: ExecResult, calls: Sequence[Call]) -> bool:
        """Whether the agent came to its end as it should (its work is graded either way)."""
        ...

    def classify(self, request: ChatRequest) -> Purpose:
        """ "auxiliary" for what the agent asks beside its task: a title, a summary, a quota."""
        ...


class AgentHarness(Harness, Protocol):
    """One of the known command-line agents, whose behaviour was verified at one version."""

    verified_version: str

    def find_installed_version(self) -> str | None:
        """The version that `build_launch` would run; None where it is not installed."""
        ...

    def build_shell_call(self, command: str) -> ToolCall:
        """A call of the agent's own tool for shell commands: what a scripted model says in `polar-trl doctor`."""
        ...

    def build_last_message(self, text: str) -> tuple[str, tuple[ToolCall, ...]]:
        """Text and tool calls with which a model ends the agent's task."""
        ...


class PackagedAgent:
    """The part of `AgentHarness` that is the same for every agent from a registry.

    Args:
        packages: What it needs, in the order of installation; the last one is the agent itself.
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
        """The agent's own version; None where it, or anything that it needs, is missing."""
        versions = [package.find_version() for package in self._packages]
        return versions[-1] if all(versions) else None


def judge_by_answer(calls: Sequence[Call]) -> bool:
    """Whether the policy's last reply was a whole answer: text, no tool call left to run, not cut for its length.

    Exit codes of agents lie in both directions: 0 after an empty reply, 1 after a run that recovered.
    """
    # a budget message is the proxy's answer and not the policy's
    answered = (call for call in reversed(calls) if call.purpose == "policy" and call.is_answered)
    last = next(answered, None)
    if last is None or last.completion.finish_reason == "length":
        return False
    return bool(last.message.text.strip()) and not last.message.tool_calls


def without_tools_is_auxiliary(request: ChatRequest) -> Purpose:
    """For agents whose own turns always declare tools: titles, topics, summaries and quota probes declare none."""
    return "policy" if request.tools else "auxiliary"
