"""Run Codex (`@openai/codex`): its native program without the Node launcher, configuration and one model in HOME.

Verified at 0.171.0, which exits with 0 after an empty answer. Its compactions declare no tools; sub-agents do, and are
the policy's own.
"""

import json
import platform
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from polar_trl.errors import ConfigError
from polar_trl.harness.base import INSTRUCTION_FILE, Launch, PackagedAgent
from polar_trl.harness.install import NpmPackage
from polar_trl.harness.prompt import DONE, EARLIER, EARLIER_ID, PromptOptions, PromptSize, check_prompt_options
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
_SHELL = "exec_command"
# what `tools` may name -> the feature that offers it; the shell, with its write_stdin, is always there
_FEATURES = {"view_image": "view_image", "goals": "goals", "multi_agent": "multi_agent"}
_TOOLS = (_SHELL, "apply_patch", "request_user_input", *_FEATURES)
_EARLIER_SESSION = f".codex/sessions/2026/01/01/rollout-2026-01-01T00-00-00-{EARLIER_ID}.jsonl"
# nothing beside the system prompt: no rules of sandbox and modes, no list of skills, no AGENTS.md, no environment
_NOTHING_BESIDE = {
    "include_permissions_instructions": False,
    "include_apps_instructions": False,
    "include_collaboration_mode_instructions": False,
    "include_environment_context": False,
    "project_doc_max_bytes": 0,
    "skills": {"include_instructions": False, "bundled": {"enabled": False}},
}


class CodexHarness(PackagedAgent):
    """Run `codex exec` once per session.

    Args:
        system_prompt: In place of Codex's own, and of what it adds about permissions, skills, the environment and
            AGENTS.md. The model is then described to Codex in a catalogue, and offered `apply_patch`.
        tools: Of exec_command (always, with write_stdin), apply_patch (with a system prompt only),
            request_user_input, view_image, goals (three tools), multi_agent (five); None leaves Codex's choice.
        demonstrations: Pairs of a request and the shell command that answers it: a session that Codex resumes.
        images: With a system prompt, tell it that the model reads images. Otherwise it answers `view_image` with a
            refusal of its own. With its default prompt it takes every model for one that does, and at the 400 of a
            text model the session ends.
        version: Of the npm package.

    `build_launch` raises `ConfigError` on a machine for which the package brings no program.
    """

    name = "codex"
    verified_version = VERIFIED_VERSION
    prompt_size = PromptSize(default=8400, smallest=600)

    def __init__(
        self,
        *,
        system_prompt: str | None = None,
        tools: Sequence[str] | None = None,
        demonstrations: Sequence[Sequence[str]] = (),
        images: bool = False,
        version: str = VERIFIED_VERSION,
    ) -> None:
        self._prompt = check_prompt_options(
            self.name,
            offered=_TOOLS,
            shell=_SHELL,
            system_prompt=system_prompt,
            tools=tools,
            demonstrations=demonstrations,
        )
        _check_tools(self._prompt)
        self._images = images
        self._package = NpmPackage(name="@openai/codex", version=version, binary="codex")
        super().__init__(self._package)

    def build_launch(self, task: Task, endpoint: Endpoint) -> Launch:
        """Launch Codex with the instruction on stdin, its events as JSON lines on stdout."""
        self.prompt_size.require_fit(self.name, endpoint, is_shorter=self._prompt.is_shorter)
        program = self._find_build() / "bin" / "codex"
        files = {INSTRUCTION_FILE: task.instruction, ".codex/config.toml": _write_toml(self.build_config(endpoint))}
        if self._prompt.system_prompt is not None:
            files[_CATALOGUE] = json.dumps({"models": [self._describe_model(endpoint, self._prompt.system_prompt)]})
        resume = ""
        if self._prompt.demonstrations:
            files[_EARLIER_SESSION] = self._build_earlier_session()
            resume = f"resume {EARLIER_ID} "
        return Launch(
            command=(
                'export CODEX_HOME="$HOME/.codex"\n'
                f"exec {shlex.quote(str(program))} exec --json --skip-git-repo-check {resume}- "
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
        tools = self._prompt.tools
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
        if self._prompt.system_prompt is not None:
            config |= {"model_catalog_json": "models.json", **_NOTHING_BESIDE}
        if tools is not None:
            # a shell without the choice of a terminal
            features |= {"unified_exec_tty": False}
            features |= {feature: name in tools for name, feature in _FEATURES.items()}
            asks = "request_user_input" in tools
            config["tools"] = {"experimental_request_user_input": {"enabled": asks}}
        return config | {"features": features}

    def _describe_model(self, endpoint: Endpoint, system_prompt: str) -> dict[str, object]:
        """Build an entry of Codex's model catalogue."""
        tools = self._prompt.tools
        patches = tools is None or "apply_patch" in tools
        return {
            "slug": endpoint.model,
            "display_name": endpoint.model,
            "description": "",
            "supported_reasoning_levels": [],
            "shell_type": "unified_exec",
            "visibility": "list",
            "supported_in_api": True,
            "priority": 1,
            "base_instructions": system_prompt,
            "supports_reasoning_summaries": False,
            "support_verbosity": False,
            **({"apply_patch_tool_type": "freeform"} if patches else {}),
            "input_modalities": ["text", "image"] if self._images else ["text"],
            "truncation_policy": {"mode": "tokens", "limit": 2500},
            "supports_parallel_tool_calls": True,
            "context_window": endpoint.max_model_len,
            "experimental_supported_tools": [],
        }

    def _build_earlier_session(self) -> str:
        """Write a rollout file of Codex's: a header, then items of the Responses API."""
        header: dict[str, object] = {
            "id": EARLIER_ID,
            "timestamp": EARLIER,
            "cwd": "/",
            "originator": "codex_exec",
            "cli_version": VERIFIED_VERSION,
            "source": "exec",
            "model_provider": _PROVIDER,
        }
        if self._prompt.tools is not None and "multi_agent" not in self._prompt.tools:
            header["multi_agent_version"] = "disabled"  # a resumed session offers them whatever the feature says
        items: list[dict[str, object]] = []
        for shown in self._prompt.demonstrations:
            arguments = json.dumps({"cmd": shown.command})
            items += [
                _build_message("user", "input_text", shown.request),
                {"type": "function_call", "name": _SHELL, "arguments": arguments, "call_id": shown.call_id},
                {"type": "function_call_output", "call_id": shown.call_id, "output": "(no output)"},
                _build_message("assistant", "output_text", DONE),
            ]
        lines = [("session_meta", header), *(("response_item", item) for item in items)]
        return "".join(
            f"{json.dumps({'timestamp': EARLIER, 'type': kind, 'payload': payload})}\n" for kind, payload in lines
        )


def _build_message(role: str, kind: str, text: str) -> dict[str, object]:
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


def _check_tools(prompt: PromptOptions) -> None:
    if prompt.tools is None:
        return
    if _SHELL not in prompt.tools:
        raise ConfigError(f"codex: tools must name {_SHELL}, which cannot be taken away from Codex")
    if "apply_patch" in prompt.tools and prompt.system_prompt is None:
        raise ConfigError("codex: the tool apply_patch needs a system_prompt; Codex offers it to models it is told of")


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
