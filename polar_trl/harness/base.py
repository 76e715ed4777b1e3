"""How one agent is launched. Knows command lines and settings files, no model and no tokens."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from polar_trl.sandbox.base import ExecResult
from polar_trl.types import Endpoint, Task


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

    def build_launch(self, task: Task, endpoint: Endpoint) -> Launch:
        """Pure: the command, environment and settings files for this task and endpoint."""
        ...

    def judge_exit(self, result: ExecResult) -> bool:
        """Whether the agent ran as it should (its work is graded either way)."""
        ...
