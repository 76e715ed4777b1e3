"""Run OpenCode (npm `opencode-ai`, a native binary), with its configuration in one environment variable.

Verified at 1.18.33, which exits with 0 after an empty answer, and with 1 after a context overflow that it got over.
The variable is read after a repository's own opencode.json and after the user's, so neither chooses the model. The
instruction comes by stdin, since this version wraps an argument in double quotes. Titles and summaries declare no
tools.
"""

import json
import shlex
from typing import Literal

from polar_trl.errors import ConfigError
from polar_trl.harness.base import INSTRUCTION_FILE, SHORT_PROMPT, Launch, PackagedAgent, PromptSize
from polar_trl.harness.install import NpmPackage
from polar_trl.types import Endpoint, Task, ToolCall

VERIFIED_VERSION = "1.18.33"
OpenCodeAPI = Literal["openai", "openai-responses", "anthropic", "google"]
# ours -> the AI SDK package that speaks it (all are in the binary), and what that expects after the origin
_APIS: dict[str, tuple[str, str]] = {
    "openai": ("@ai-sdk/openai-compatible", "/v1"),
    "openai-responses": ("@ai-sdk/openai", "/v1"),
    "anthropic": ("@ai-sdk/anthropic", "/v1"),
    "google": ("@ai-sdk/google", "/v1beta"),
}
_PROVIDER = "polar"
# "invalid" is never shown to the model; without it, a call that does not parse is answered with a wrong reason
_SHORT_PROMPT_TOOLS = ("bash", "read", "edit", "write", "glob", "grep", "invalid")
# At its start it installs its plugin library from npm into this folder, unless these say that it is there. Only
# plugins need it, and there are none.
_NO_INSTALL = {
    ".config/opencode/node_modules/.polar": "",
    ".config/opencode/package-lock.json": json.dumps(
        {"packages": {"": {"dependencies": {"@opencode-ai/plugin": "*"}}}}
    ),
}


class OpenCodeHarness(PackagedAgent):
    """Run `opencode run` once per session.

    Args:
        api: The provider API that it speaks to the policy.
        short_prompt: Six tools and a system prompt of a few lines, instead of the agent's own.
        version: Of the npm package.
    """

    name = "opencode"
    verified_version = VERIFIED_VERSION
    prompt_size = PromptSize(default=7000, short=3200)

    def __init__(
        self, *, api: OpenCodeAPI = "openai", short_prompt: bool = False, version: str = VERIFIED_VERSION
    ) -> None:
        if api not in _APIS:
            raise ConfigError(f"opencode: api must be one of {', '.join(_APIS)}, not {api!r}")
        self._api = api
        self._short_prompt = short_prompt
        self._package = NpmPackage(name="opencode-ai", version=version, binary="opencode", needs_script=True)
        super().__init__(self._package)

    def build_launch(self, task: Task, endpoint: Endpoint) -> Launch:
        """Launch OpenCode with the instruction on stdin."""
        self.prompt_size.require_fit(self.name, endpoint, is_short=self._short_prompt)
        program = shlex.quote(str(self._package.program))
        return Launch(
            command=(
                # all of its folders under HOME
                "unset XDG_CONFIG_HOME XDG_DATA_HOME XDG_STATE_HOME XDG_CACHE_HOME\n"
                # a title given is a title that the model is not asked for
                f'exec {program} run --pure --title task <"$HOME/{INSTRUCTION_FILE}"'
            ),
            env={"OPENCODE_CONFIG_CONTENT": json.dumps(self._build_config(endpoint)), **_SWITCHES},
            files={INSTRUCTION_FILE: task.instruction, **_NO_INSTALL},
        )

    def build_shell_call(self, command: str) -> ToolCall:
        """Build a call of its tool `bash`."""
        arguments = {"command": command, "description": "Run a command"}
        return ToolCall(id="", name="bash", arguments=json.dumps(arguments))

    def _build_config(self, endpoint: Endpoint) -> dict[str, object]:
        package, path = _APIS[self._api]
        model = f"{_PROVIDER}/{endpoint.model}"
        config: dict[str, object] = {
            "autoupdate": False,
            "share": "disabled",
            "snapshot": False,
            "lsp": False,
            "formatter": False,
            "permission": "allow",
            "enabled_providers": [_PROVIDER],
            "model": model,
            "small_model": model,
            "provider": {
                _PROVIDER: {
                    "npm": package,
                    "options": {
                        "baseURL": endpoint.origin + path,
                        "apiKey": endpoint.api_key,
                        # no limits: an answer may wait for the engine, and the session has an outer timer
                        "timeout": False,
                        "headerTimeout": False,
                        "chunkTimeout": False,
                    },
                    "models": {endpoint.model: _build_model(endpoint)},
                }
            },
        }
        if self._short_prompt:
            tools = {"*": False} | dict.fromkeys(_SHORT_PROMPT_TOOLS, True)
            config["agent"] = {"build": {"prompt": SHORT_PROMPT, "tools": tools}}
        return config


_SWITCHES = {
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    "OPENCODE_DISABLE_SHARE": "1",
}


def _build_model(endpoint: Endpoint) -> dict[str, object]:
    return {
        "reasoning": True,
        "tool_call": True,
        # it compacts when what is left of the window is less than one answer
        "limit": {
            "context": endpoint.max_model_len,
            "output": min(endpoint.max_tokens, endpoint.max_model_len // 2),
        },
    }
