"""Run Codex (`@openai/codex`): its native program without the Node launcher, configuration and one model in HOME.

Verified at 0.171.0, which exits with 0 after an empty answer. Its compactions declare no tools; sub-agents do, and are
the policy's own.
"""

import json
import platform
import shlex
from collections.abc import Mapping
from pathlib import Path

from polar_trl.errors import ConfigError
from polar_trl.harness.base import INSTRUCTION_FILE, Launch, PackagedAgent, PromptSize
from polar_trl.harness.install import NpmPackage
from polar_trl.types import Endpoint, Task, ToolCall

VERIFIED_VERSION = "0.171.0"
# machine -> npm's name of it, and the target that the program was built for
_BUILDS = {
    "x86_64": ("linux-x64", "x86_64-unknown-linux-musl"),
    "aarch64": ("linux-arm64", "aarch64-unknown-linux-musl"),
}
_CATALOGUE = ".codex/models.json"
_PROVIDER = "polar"
_KEY_VARIABLE = "POLAR_API_KEY"
# a stream that is refused or lost is asked for this often more, within seconds; a busy engine says when to ask again
_STREAM_RETRIES = 3
_REQUEST_RETRIES = 2
_IDLE_TIMEOUT_MS = 1_200_000
_ROOM_FOR_RESULTS = 4096
"""Tokens by which Codex may be wrong: before it compacts, it takes four bytes of a tool's result for one token."""
_INSTRUCTIONS = (
    "You are a coding agent that works in a folder of the user's machine. Do what the user asks, completely, with the "
    "tools that you have; nobody can answer questions meanwhile. Look at the files before you change them, change no "
    "more than the task needs, and check your work by running it. When the task is done, say in a few sentences what "
    "you did."
)


class CodexHarness(PackagedAgent):
    """Run `codex exec` once per session.

    Args:
        short_prompt: A prompt of 6 kB and not 38: the model is described to Codex in a catalogue of its own, with
            short instructions and the `apply_patch` tool; no goals, sub-agents or bundled skills.
        images: With the short prompt, tell it that the model reads images. Otherwise it answers `view_image` with a
            refusal of its own. With its default prompt it takes every model for one that does, and at the 400 of a
            text model the session ends.
        version: Of the npm package.

    `build_launch` raises `ConfigError` on a machine for which the package brings no program.
    """

    name = "codex"
    verified_version = VERIFIED_VERSION
    prompt_size = PromptSize(default=8400, short=1500)

    def __init__(self, *, short_prompt: bool = False, images: bool = False, version: str = VERIFIED_VERSION) -> None:
        self._short_prompt = short_prompt
        self._images = images
        self._package = NpmPackage(name="@openai/codex", version=version, binary="codex")
        super().__init__(self._package)

    def build_launch(self, task: Task, endpoint: Endpoint) -> Launch:
        """Launch Codex with the instruction on stdin, its events as JSON lines on stdout."""
        self.prompt_size.require_fit(self.name, endpoint, is_short=self._short_prompt)
        program = self._find_build() / "bin" / "codex"
        files = {INSTRUCTION_FILE: task.instruction, ".codex/config.toml": _write_toml(self.build_config(endpoint))}
        if self._short_prompt:
            files[_CATALOGUE] = json.dumps({"models": [_describe_model(endpoint, images=self._images)]})
        return Launch(
            command=(
                'export CODEX_HOME="$HOME/.codex"\n'
                f"exec {shlex.quote(str(program))} exec --json --skip-git-repo-check - "
                f'<"$HOME/{INSTRUCTION_FILE}"'
            ),
            env={_KEY_VARIABLE: endpoint.api_key},
            files=files,
        )

    def build_shell_call(self, command: str) -> ToolCall:
        """Build a call of its tool `exec_command`."""
        return ToolCall(id="", name="exec_command", arguments=json.dumps({"cmd": command}))

    def _find_build(self) -> Path:
        machine = platform.machine()
        if machine not in _BUILDS:
            raise ConfigError(f"codex: its package brings no program for {machine}; use one of {', '.join(_BUILDS)}")
        name, target = _BUILDS[machine]
        return self._package.folder / "node_modules" / "@openai" / f"codex-{name}" / "vendor" / target

    def build_config(self, endpoint: Endpoint) -> dict[str, object]:
        """Build the content of its config.toml."""
        window = endpoint.max_model_len
        features = {"apps": False, "plugins": False}
        config: dict[str, object] = {
            "model": endpoint.model,
            "model_provider": _PROVIDER,
            "model_context_window": window,
            # by usage: at an error for its context Codex 0.171.0 gives up
            "model_auto_compact_token_limit": window - min(endpoint.max_tokens + _ROOM_FOR_RESULTS, window // 2),
            "approval_policy": "never",
            "sandbox_mode": "danger-full-access",
            "check_for_update_on_startup": False,
            "web_search": "disabled",
            "analytics": {"enabled": False},
            "model_providers": {
                _PROVIDER: {
                    "name": "Polar",
                    "base_url": f"{endpoint.origin}/v1",
                    "env_key": _KEY_VARIABLE,
                    "wire_api": "responses",
                    "request_max_retries": _REQUEST_RETRIES,
                    "stream_max_retries": _STREAM_RETRIES,
                    "stream_idle_timeout_ms": _IDLE_TIMEOUT_MS,
                }
            },
        }
        if self._short_prompt:
            features |= {"goals": False, "multi_agent": False}
            config |= {"model_catalog_json": "models.json", "skills": {"bundled": {"enabled": False}}}
        return config | {"features": features}


def _describe_model(endpoint: Endpoint, *, images: bool) -> dict[str, object]:
    """Build an entry of Codex's model catalogue."""
    return {
        "slug": endpoint.model,
        "display_name": endpoint.model,
        "description": "",
        "supported_reasoning_levels": [],
        "shell_type": "unified_exec",
        "visibility": "list",
        "supported_in_api": True,
        "priority": 1,
        "base_instructions": _INSTRUCTIONS,
        "supports_reasoning_summaries": False,
        "support_verbosity": False,
        "apply_patch_tool_type": "freeform",
        "input_modalities": ["text", "image"] if images else ["text"],
        "truncation_policy": {"mode": "tokens", "limit": 2500},
        "supports_parallel_tool_calls": True,
        "context_window": endpoint.max_model_len,
        "experimental_supported_tools": [],
    }


def _write_toml(table: Mapping[str, object], path: tuple[str, ...] = ()) -> str:
    """Write a TOML document: the plain values of a table, then its tables."""
    plain = {key: value for key, value in table.items() if not isinstance(value, Mapping)}
    lines = [f"{key} = {_write_value(value)}" for key, value in plain.items()]
    if path and lines:
        lines.insert(0, f"[{'.'.join(path)}]")
    parts = ["\n".join(lines)] if lines else []
    parts += [_write_toml(value, (*path, key)) for key, value in table.items() if isinstance(value, Mapping)]
    return "\n\n".join(parts)


def list_flags(table: Mapping[str, object], path: tuple[str, ...] = ()) -> list[str]:
    """List the values of a configuration as Codex takes them on its command line, after `-c` each."""
    flags: list[str] = []
    for key, value in table.items():
        here = (*path, key)
        flags += list_flags(value, here) if isinstance(value, Mapping) else [f"{'.'.join(here)}={_write_value(value)}"]
    return flags


def _write_value(value: object) -> str:
    # JSON writes texts, numbers and booleans as TOML does, but for one character
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
