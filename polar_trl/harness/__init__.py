"""Agents. `AGENTS` is every one that is known by name."""

from collections.abc import Mapping
from typing import Any

from polar_trl.errors import ConfigError
from polar_trl.harness.base import AgentHarness
from polar_trl.harness.claude_code import ClaudeCodeHarness
from polar_trl.harness.codex import CodexHarness
from polar_trl.harness.gemini_cli import GeminiCLIHarness
from polar_trl.harness.mini_swe_agent import MiniSWEAgentHarness
from polar_trl.harness.opencode import OpenCodeHarness
from polar_trl.harness.pi import PiHarness
from polar_trl.harness.qwen_code import QwenCodeHarness

AGENTS: Mapping[str, type[AgentHarness]] = {
    "claude_code": ClaudeCodeHarness,
    "codex": CodexHarness,
    "gemini_cli": GeminiCLIHarness,
    "mini_swe_agent": MiniSWEAgentHarness,
    "opencode": OpenCodeHarness,
    "pi": PiHarness,
    "qwen_code": QwenCodeHarness,
}


def build_agent(name: str, options: Mapping[str, Any] | None = None) -> AgentHarness:
    """The agent of that name. `options` are its class's arguments. Raises `ConfigError` for what it does not know."""
    if name not in AGENTS:
        raise ConfigError(f"agent {name!r} is not known; known are {', '.join(AGENTS)}")
    try:
        return AGENTS[name](**(options or {}))
    except TypeError as error:
        raise ConfigError(
            f"agent {name!r}: {str(error).removeprefix(f'{AGENTS[name].__name__}.__init__() ')}"
        ) from error
