"""Registry of the known agents by name, and `build_agent`."""

import re
from collections.abc import Mapping
from typing import Any, get_type_hints

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
    """Build an agent by its name. `options` are its class's arguments. Raises `ConfigError` for unknown ones."""
    if name not in AGENTS:
        raise ConfigError(f"agent {name!r} is not known; known are {', '.join(AGENTS)}")
    _check_options(name, options or {})
    return AGENTS[name](**(options or {}))


def _check_options(name: str, options: Mapping[str, Any]) -> None:
    """Check option types before a run: a wrong one would fail in its middle, or name a folder that is not ours."""
    kinds = get_type_hints(AGENTS[name].__init__)
    kinds.pop("return")
    for key, value in options.items():
        if key not in kinds:
            raise ConfigError(f"agent {name!r} has no option {key!r}; it has {', '.join(kinds)}")
        kind = kinds[key]
        if kind is bool and not isinstance(value, bool):
            raise ConfigError(f"agent {name!r}: {key} must be true or false, not {value!r}")
        if kind in (int, int | None) and value is not None and (type(value) is not int or value < 0):
            raise ConfigError(f"agent {name!r}: {key} must be a whole number from 0, not {value!r}")
        if key == "version" and not (isinstance(value, str) and re.fullmatch(r"[0-9][0-9A-Za-z.+-]*", value)):
            raise ConfigError(f"agent {name!r}: version must be an exact version such as 1.2.3, not {value!r}")
