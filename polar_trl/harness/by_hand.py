"""Write the settings with which a person points their own agent at an endpoint: lines for a shell, and files.

They are those of the harnesses, without what only a sandbox allows: agents ask before they act, as they ever do.
"""

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from polar_trl.errors import ConfigError
from polar_trl.harness.base import AgentHarness
from polar_trl.harness.claude_code import ClaudeCodeHarness
from polar_trl.harness.codex import CodexHarness, list_flags
from polar_trl.harness.gemini_cli import GeminiCLIHarness
from polar_trl.harness.mini_swe_agent import MiniSWEAgentHarness
from polar_trl.harness.opencode import OpenCodeHarness
from polar_trl.harness.pi import PiHarness
from polar_trl.harness.qwen_code import QwenCodeHarness
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

    name: str = ""
    command: str
    """To paste: exports for a dialect, the start of an agent, or a comment that says why it cannot be used."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Path relative to the folder that the command names -> text."""


def list_settings(endpoint: Endpoint, folder: Path) -> list[Settings]:
    """List the settings of each dialect and agent.

    Args:
        folder: Absolute, where files will be put.
    """
    env = build_provider_env(endpoint)
    key, mini_model = endpoint.api_key, shlex.quote(f"openai/{endpoint.model}")
    openai = {name: env[name] for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY", "OPENAI_MODEL")}
    google = {name: env[name] for name in ("GOOGLE_GEMINI_BASE_URL", "GEMINI_API_KEY", "GEMINI_MODEL")}
    anthropic = {name: env[name] for name in ("ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY", "ANTHROPIC_MODEL")}
    mini = {"OPENAI_API_BASE": env["OPENAI_API_BASE"], "OPENAI_API_KEY": key, **_MINI}
    agents: dict[str, Callable[[], Settings]] = {
        "Codex": lambda: _build_codex(endpoint),
        "Claude Code": lambda: _build_claude(endpoint),
        "Gemini CLI": lambda: _build_gemini(endpoint, folder, google),
        "Qwen Code": lambda: _build_plain(QwenCodeHarness(), endpoint, openai, "qwen --auth-type openai"),
        "Pi": lambda: _build_pi(endpoint, folder),
        "OpenCode": lambda: _build_opencode(endpoint),
        "mini-swe-agent": lambda: _build_plain(MiniSWEAgentHarness(), endpoint, mini, f"mini -m {mini_model}"),
    }
    return [
        Settings(name="OpenAI (Chat Completions, Responses)", command=f"export {_assign(openai)}"),
        Settings(name="Anthropic (Messages)", command=f"export {_assign(anthropic)}"),
        Settings(name="Google (generateContent)", command=f"export {_assign(google)}"),
        *(_build_or_explain(name, build) for name, build in agents.items()),
    ]


def _build_or_explain(name: str, build: Callable[[], Settings]) -> Settings:
    try:
        return replace(build(), name=name)
    except ConfigError as error:  # its own prompt does not fit the window
        return Settings(name=name, command=f"# {error}")


def _build_plain(harness: AgentHarness, endpoint: Endpoint, env: Mapping[str, object], program: str) -> Settings:
    harness.build_launch(_NO_TASK, endpoint)  # whether it fits
    return Settings(command=f"{_assign(env)} {program}")


def _build_codex(endpoint: Endpoint) -> Settings:
    harness = CodexHarness()
    harness.build_launch(_NO_TASK, endpoint)
    flags = [word for flag in list_flags(_without("codex", harness.build_config(endpoint))) for word in ("-c", flag)]
    return Settings(command=f"POLAR_API_KEY={shlex.quote(endpoint.api_key)} codex {shlex.join(flags)}")


def _build_claude(endpoint: Endpoint) -> Settings:
    env = _without("claude", ClaudeCodeHarness().build_launch(_NO_TASK, endpoint).env)
    return Settings(command=f"{_assign(env)} claude")


def _build_opencode(endpoint: Endpoint) -> Settings:
    config = json.loads(OpenCodeHarness().build_launch(_NO_TASK, endpoint).env["OPENCODE_CONFIG_CONTENT"])
    env = {"OPENCODE_CONFIG_CONTENT": json.dumps(_without("opencode", config))}
    return Settings(command=f"{_assign(env)} opencode")


def _build_gemini(endpoint: Endpoint, folder: Path, env: Mapping[str, object]) -> Settings:
    # without a settings file that says how it signs in, it takes any base URL for a gateway of its maker's
    path = ".gemini/settings.json"
    env = {**env, "GEMINI_CLI_HOME": str(folder / "gemini")}
    text = GeminiCLIHarness().build_launch(_NO_TASK, endpoint).files[path]
    command = f"{_assign(env)} gemini -m {shlex.quote(endpoint.model)}"
    return Settings(command=command, files={f"gemini/{path}": text})


def _build_pi(endpoint: Endpoint, folder: Path) -> Settings:
    launch = PiHarness().build_launch(_NO_TASK, endpoint)
    env = {"POLAR_API_KEY": endpoint.api_key, "PI_CODING_AGENT_DIR": str(folder / "pi")}
    root = ".pi/agent/"
    files = {f"pi/{path.removeprefix(root)}": text for path, text in launch.files.items() if path.startswith(root)}
    return Settings(command=f"{_assign(env)} pi --provider polar --model {shlex.quote(endpoint.model)}", files=files)


def _without(agent: str, values: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in values.items() if name not in _OF_A_SANDBOX[agent]}


def _assign(env: Mapping[str, object]) -> str:
    return " ".join(f"{name}={shlex.quote(str(value))}" for name, value in env.items())
