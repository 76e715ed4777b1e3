"""Pi (`@earendil-works/pi-coding-agent`) on Node 22, with its settings and one model in HOME.

Verified at 1.6.0. It refuses an API that Pi does not speak. Pi reads the instruction from stdin, and trims it.
"""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from polar_trl.errors import ConfigError
from polar_trl.harness.base import Launch, judge_by_answer, without_tools_is_auxiliary
from polar_trl.harness.install import NODE, NpmPackage
from polar_trl.sandbox.base import ExecResult
from polar_trl.types import Call, ChatRequest, Endpoint, Purpose, Task, ToolCall

VERIFIED_VERSION = "1.6.0"
PiAPI = Literal["openai", "openai-responses", "anthropic", "google"]
# ours -> Pi's name of the API, and what it expects after the origin
_APIS: dict[str, tuple[str, str]] = {
    "openai": ("openai-completions", "/v1"),
    "openai-responses": ("openai-responses", "/v1"),
    "anthropic": ("anthropic-messages", ""),
    "google": ("google-generative-ai", "/v1beta"),
}
_INSTRUCTION = ".polar/instruction.txt"
_PROVIDER = "polar"
# Pi's defaults, made for its default window; in a small one they would leave nothing to compact, or nothing to answer
_DEFAULT_WINDOW = 128_000
_RESERVE_TOKENS = 16384
_KEEP_RECENT_TOKENS = 20000
_MARGIN_TOKENS = 4096
"""What Pi leaves free beside an answer: closer to the window, it asks for one token."""


class PiHarness:
    """Runs `pi -p` once per session.

    Args:
        api: The provider API that it speaks to the policy.
        images: Tell it that the model reads images. Otherwise it describes an image file in words.
        version: Of the npm package.

    There is no shorter prompt to choose: Pi's own has 5 kB and four tools.
    """

    name = "pi"
    verified_version = VERIFIED_VERSION
    parallel_tool_calls = True

    def __init__(self, *, api: PiAPI = "openai", images: bool = False, version: str = VERIFIED_VERSION) -> None:
        if api not in _APIS:
            raise ConfigError(f"pi: api must be one of {', '.join(_APIS)}, not {api!r}")
        self._api = api
        self._images = images
        self._package = NpmPackage(name="@earendil-works/pi-coding-agent", version=version, binary="pi")

    @property
    def folders(self) -> tuple[Path, ...]:
        """See `Harness.folders`."""
        return (NODE.folder, self._package.folder)

    def install(self) -> None:
        """Node 22 and Pi, from npm. Raises `ConfigError`."""
        NODE.install()
        self._package.install()

    def find_installed_version(self) -> str | None:
        """The version that would run; None where it or its Node is missing."""
        return self._package.find_version() if NODE.find_version() else None

    def build_launch(self, task: Task, endpoint: Endpoint) -> Launch:
        """Pi with the instruction on stdin."""
        program = shlex.quote(str(self._package.program))
        model = shlex.quote(endpoint.model)
        return Launch(
            command=(
                f'export PATH={shlex.quote(str(NODE.program.parent))}:"$PATH"\n'
                f"exec {program} -p --no-session --provider {_PROVIDER} --model {model} "
                f'<"$HOME/{_INSTRUCTION}"'
            ),
            env={"POLAR_API_KEY": endpoint.api_key, "PI_OFFLINE": "1", "PI_TELEMETRY": "0"},
            files={
                ".pi/agent/models.json": json.dumps(self._build_models(endpoint)),
                ".pi/agent/settings.json": json.dumps(_build_settings(endpoint)),
                _INSTRUCTION: task.instruction,
            },
        )

    def build_shell_call(self, command: str) -> ToolCall:
        """A call of its tool `bash`."""
        return ToolCall(id="", name="bash", arguments=json.dumps({"command": command}))

    def build_last_message(self, text: str) -> tuple[str, tuple[ToolCall, ...]]:
        """A text without tool calls ends the task."""
        return text, ()

    def judge_exit(self, result: ExecResult, calls: Sequence[Call]) -> bool:
        """By the last answer: Pi 1.6.0 exits with 0 after an empty one."""
        return judge_by_answer(calls)

    def classify(self, request: ChatRequest) -> Purpose:
        """Its summaries, the only side requests, declare no tools."""
        return without_tools_is_auxiliary(request)

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
