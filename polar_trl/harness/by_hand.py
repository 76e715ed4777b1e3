"""Write the settings with which a person points their own agent at an endpoint: lines for a shell, and files.

They are those of the harnesses, without what only a sandbox allows: agents ask before they act, as they ever do.
"""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from polar_trl.errors import ConfigError
from polar_trl.harness.claude_code import ClaudeCodeHarness
from polar_trl.harness.codex import CodexHarness, list_flags
from polar_trl.harness.gemini_cli import GeminiCLIHarness
from polar_trl.harness.opencode import OpenCodeHarness
from polar_trl.harness.pi import PiHarness
from polar_trl.harness.shell import build_provider_env
from polar_trl.types import Endpoint, Task

_NO_TASK = Task(id="", instruction="")
_MINI = {"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors"}
_OF_A_SANDBOX = {
    "codex": ("approval_policy", "sandbox_mode", "check_for_update_on_startup", "web_search", "analytics", "features"),
    "opencode": ("permission", "snapshot", "lsp", "formatter"),
    "claude": ("IS_SANDBOX",),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What points one agent, or the clients of one dialect, at an endpoint."""

    name: str
    command: str
    """To paste: exports for a dialect, the start of an agent."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Path relative to the folder that the command names -> text."""


def list_settings(endpoint: Endpoint, folder: Path) -> list[Settings]:
    """List the settings of each dialect and agent.

    Args:
        folder: Absolute, where files will be put.
    """
    env = build_provider_env(endpoint)
    key, model = endpoint.api_key, endpoint.model
    openai = {name: env[name] for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY", "OPENAI_MODEL")}
    google = {name: env[name] for name in ("GOOGLE_GEMINI_BASE_URL", "GEMINI_API_KEY", "GEMINI_MODEL")}
    anthropic = {name: env[name] for name in ("ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY", "ANTHROPIC_MODEL")}
    mini = {"OPENAI_API_BASE": env["OPENAI_API_BASE"], "OPENAI_API_KEY": key, **_MINI}
    codex = _without("codex", CodexHarness().build_config(endpoint))
    opencode = json.loads(OpenCodeHarness().build_launch(_NO_TASK, endpoint).env["OPENCODE_CONFIG_CONTENT"])
    opencode = {"OPENCODE_CONFIG_CONTENT": json.dumps(_without("opencode", opencode))}
    claude = _without("claude", ClaudeCodeHarness().build_launch(_NO_TASK, endpoint).env)
    flags = [word for flag in list_flags(codex) for word in ("-c", flag)]
    return [
        Settings(name="OpenAI (Chat Completions, Responses)", command=f"export {_assign(openai)}"),
        Settings(name="Anthropic (Messages)", command=f"export {_assign(anthropic)}"),
        Settings(name="Google (generateContent)", command=f"export {_assign(google)}"),
        Settings(name="Codex", command=f"POLAR_API_KEY={shlex.quote(key)} codex {shlex.join(flags)}"),
        Settings(name="Claude Code", command=f"{_assign(claude)} claude"),
        _build_gemini(endpoint, folder, google),
        Settings(name="Qwen Code", command=f"{_assign(openai)} qwen --auth-type openai"),
        *_list_pi(endpoint, folder),
        Settings(name="OpenCode", command=f"{_assign(opencode)} opencode"),
        Settings(name="mini-swe-agent", command=f"{_assign(mini)} mini -m {shlex.quote(f'openai/{model}')}"),
    ]


def _build_gemini(endpoint: Endpoint, folder: Path, env: Mapping[str, object]) -> Settings:
    # without a settings file that says how it signs in, it takes any base URL for a gateway of its maker's
    path = ".gemini/settings.json"
    env = {**env, "GEMINI_CLI_HOME": str(folder / "gemini")}
    text = GeminiCLIHarness().build_launch(_NO_TASK, endpoint).files[path]
    command = f"{_assign(env)} gemini -m {shlex.quote(endpoint.model)}"
    return Settings(name="Gemini CLI", command=command, files={f"gemini/{path}": text})


def _list_pi(endpoint: Endpoint, folder: Path) -> list[Settings]:
    """List none where the window is too small for it."""
    try:
        launch = PiHarness().build_launch(_NO_TASK, endpoint)
    except ConfigError:
        return []
    env = {"POLAR_API_KEY": endpoint.api_key, "PI_CODING_AGENT_DIR": str(folder / "pi")}
    root = ".pi/agent/"
    files = {f"pi/{path.removeprefix(root)}": text for path, text in launch.files.items() if path.startswith(root)}
    command = f"{_assign(env)} pi --provider polar --model {shlex.quote(endpoint.model)}"
    return [Settings(name="Pi", command=command, files=files)]


def _without(agent: str, values: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in values.items() if name not in _OF_A_SANDBOX[agent]}


def _assign(env: Mapping[str, object]) -> str:
    return " ".join(f"{name}={shlex.quote(str(value))}" for name, value in env.items())
