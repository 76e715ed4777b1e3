"""Run Pi (`@earendil-works/pi-coding-agent`) on Node 22, with its settings and one model in HOME.

Verified at 1.6.0, which exits with 0 after an empty answer, and reads the instruction from stdin, trimmed. Its
summaries, the only side requests, declare no tools.
"""

import json
import shlex
from collections.abc import Sequence
from typing import Literal

from polar_trl.errors import ConfigError
from polar_trl.harness.base import INSTRUCTION_FILE, Launch, PackagedAgent
from polar_trl.harness.install import NODE, NpmPackage, put_node_first
from polar_trl.harness.prompt import DONE, EARLIER, EARLIER_ID, EARLIER_MS, PromptSize, check_prompt_options
from polar_trl.types import Endpoint, Task, ToolCall

VERIFIED_VERSION = "1.6.0"
PiAPI = Literal["openai", "openai-responses", "anthropic", "google"]
# ours -> Pi's name of the API, and what it expects after the origin
_APIS: dict[str, tuple[str, str]] = {
    "openai": ("openai-completions", "/v1"),
    "openai-responses": ("openai-responses", "/v1"),
    "anthropic": ("anthropic-messages", ""),
    "google": ("google-generative-ai", "/v1beta"),
}
_SHELL = "bash"
_TOOLS = ("read", _SHELL, "edit", "write", "grep", "find", "ls")
_SYSTEM_PROMPT = ".pi/agent/SYSTEM.md"
_EARLIER_SESSION = ".polar/earlier.jsonl"
_SESSIONS = ".polar/sessions"
_PROVIDER = "polar"
# Pi's defaults, made for its default window; in a small one they would leave nothing to compact, or nothing to answer
_DEFAULT_WINDOW = 128_000
_RESERVE_TOKENS = 16384
_KEEP_RECENT_TOKENS = 20000
_MARGIN_TOKENS = 4096
"""What Pi leaves free beside an answer: closer to the window, it asks for one token."""

_NO_TOKENS = {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0}


class PiHarness(PackagedAgent):
    """Run `pi -p` once per session.

    Args:
        api: The provider API that it speaks to the policy.
        images: Tell it that the model reads images. Otherwise it describes an image file in words.
        system_prompt: In place of Pi's own and of AGENTS.md. Pi writes the work folder after it.
        tools: The names of Pi's tools that the policy may use; None leaves Pi's choice (read, bash, edit, write).
        demonstrations: Pairs of a request and the shell command that answers it: a session that Pi continues.
        version: Of the npm package.
    """

    name = "pi"
    verified_version = VERIFIED_VERSION
    prompt_size = PromptSize(default=1200, smallest=200)

    def __init__(
        self,
        *,
        api: PiAPI = "openai",
        images: bool = False,
        system_prompt: str | None = None,
        tools: Sequence[str] | None = None,
        demonstrations: Sequence[Sequence[str]] = (),
        version: str = VERIFIED_VERSION,
    ) -> None:
        if api not in _APIS:
            raise ConfigError(f"pi: api must be one of {', '.join(_APIS)}, not {api!r}")
        self._api: PiAPI = api
        self._images = images
        self._prompt = check_prompt_options(
            self.name,
            offered=_TOOLS,
            shell=_SHELL,
            system_prompt=system_prompt,
            tools=tools,
            demonstrations=demonstrations,
        )
        self._package = NpmPackage(name="@earendil-works/pi-coding-agent", version=version, binary="pi")
        super().__init__(NODE, self._package)

    def build_launch(self, task: Task, endpoint: Endpoint) -> Launch:
        """Launch Pi with the instruction on stdin. Raises `ConfigError` for a window without room for an answer."""
        _check_window(endpoint)
        program = shlex.quote(str(self._package.program))
        files = {
            ".pi/agent/models.json": json.dumps(self._build_models(endpoint)),
            ".pi/agent/settings.json": json.dumps(_build_settings(endpoint)),
            INSTRUCTION_FILE: task.instruction,
        }
        options = [f"--provider {_PROVIDER} --model {shlex.quote(endpoint.model)}"]
        if self._prompt.system_prompt is not None:
            files[_SYSTEM_PROMPT] = self._prompt.system_prompt
            options.append("--no-context-files")
        if self._prompt.tools is not None:
            options.append(f"--tools {','.join(self._prompt.tools)}")
        if self._prompt.demonstrations:
            # a copy is continued: a session is bound to its folder, and the folder is not known here
            files[_EARLIER_SESSION] = self._build_earlier_session(endpoint)
            options.append(f'--session-dir "$HOME/{_SESSIONS}" --fork "$HOME/{_EARLIER_SESSION}"')
        else:
            options.append("--no-session")
        return Launch(
            command=(f'{put_node_first()}\nexec {program} -p {" ".join(options)} <"$HOME/{INSTRUCTION_FILE}"'),
            env={"POLAR_API_KEY": endpoint.api_key, "PI_OFFLINE": "1", "PI_TELEMETRY": "0"},
            files=files,
        )

    def build_shell_call(self, command: str) -> ToolCall:
        """Build a call of its tool `bash`."""
        return ToolCall(id="", name=_SHELL, arguments=json.dumps({"command": command}))

    def _build_models(self, endpoint: Endpoint) -> dict[str, object]:
        api, path = _APIS[self._api]
        model = {
            "id": endpoint.model,
            "reasoning": True,
            "input": ["text", "image"] if self._images else ["text"],
            "contextWindow": endpoint.max_model_len,
            "maxTokens": endpoint.max_tokens,
        }
        provider = {
            "baseUrl": endpoint.origin + path,
            "api": api,
            "apiKey": "$POLAR_API_KEY",
            # fields of the Chat API that nobody here reads; the other APIs know neither switch
            "compat": {"supportsStore": False, "supportsReasoningEffort": False},
            "models": [model],
        }
        return {"providers": {_PROVIDER: provider}}

    def _build_earlier_session(self, endpoint: Endpoint) -> str:
        """Write a session file of Pi's (version 3): a header, then messages that each name the one before."""
        answer = {
            "role": "assistant",
            "api": _APIS[self._api][0],
            "provider": _PROVIDER,
            "model": endpoint.model,
            "usage": {**_NO_TOKENS, "totalTokens": 0, "cost": {**_NO_TOKENS, "total": 0}},
        }
        messages: list[dict[str, object]] = []
        for shown in self._prompt.demonstrations:
            arguments = {"command": shown.command}
            call = {"type": "toolCall", "id": shown.call_id, "name": _SHELL, "arguments": arguments}
            messages += [
                {"role": "user", "content": shown.request},
                {**answer, "content": [call], "stopReason": "toolUse"},
                {
                    "role": "toolResult",
                    "toolCallId": shown.call_id,
                    "toolName": _SHELL,
                    "content": [_build_text("(no output)")],
                    "isError": False,
                },
                {**answer, "content": [_build_text(DONE)], "stopReason": "stop"},
            ]
        header = {"type": "session", "version": 3, "id": EARLIER_ID, "timestamp": EARLIER, "cwd": "/"}
        entries = [
            {
                "type": "message",
                "id": f"{position + 1:08x}",
                "parentId": f"{position:08x}" if position else None,
                "timestamp": EARLIER,
                "message": {**message, "timestamp": EARLIER_MS + position},
            }
            for position, message in enumerate(messages)
        ]
        return "".join(f"{json.dumps(entry)}\n" for entry in (header, *entries))


def _build_text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _check_window(endpoint: Endpoint) -> None:
    least = 2 * _MARGIN_TOKENS
    if endpoint.max_model_len < least:
        raise ConfigError(
            f"pi: a context window of {endpoint.max_model_len} tokens is too small; Pi leaves {_MARGIN_TOKENS} free, "
            f"beside its own prompt of about {PiHarness.prompt_size.default}, and asks for a single token beyond. "
            f"Set vllm_max_model_length to {least} or more"
        )


def _build_settings(endpoint: Endpoint) -> dict[str, object]:
    window = endpoint.max_model_len
    return {
        # its own retries wait for fixed times, whatever failed; these, one level below, obey the reply's headers
        "retry": {"enabled": False, "provider": {"maxRetries": 4}},
        # no limit: an answer may wait for the engine, and the session has an outer timer
        "httpIdleTimeoutMs": 0,
        "enableInstallTelemetry": False,
        "compaction": {
            "reserveTokens": min(_RESERVE_TOKENS, endpoint.max_tokens + _MARGIN_TOKENS, window // 2),
            "keepRecentTokens": min(_KEEP_RECENT_TOKENS, _KEEP_RECENT_TOKENS * window // _DEFAULT_WINDOW),
        },
    }
