"""Run OpenCode (npm `opencode-ai`, a native binary), with its configuration in one environment variable.

Verified at 1.18.33, which exits with 0 after an empty answer, and with 1 after a context overflow that it got over.
The variable is read after a repository's own opencode.json and after the user's, so neither chooses the model. The
instruction comes by stdin, since this version wraps an argument in double quotes. Titles and summaries declare no
tools.
"""

import json
import shlex
from collections.abc import Sequence
from typing import Literal

from polar_trl.errors import ConfigError
from polar_trl.harness.base import INSTRUCTION_FILE, Launch, PackagedAgent
from polar_trl.harness.install import NpmPackage
from polar_trl.harness.prompt import DONE, EARLIER_MS, PromptSize, check_prompt_options
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
_SHELL = "bash"
_TOOLS = (_SHELL, "read", "edit", "write", "glob", "grep", "skill", "task", "todowrite", "webfetch")
_EARLIER_SESSION = ".polar/earlier.json"
_SESSION_ID = "ses_0000000000000demonstration"
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
        system_prompt: In place of its own and of AGENTS.md. It writes the model, the work folder and the date after
            it.
        tools: The names of its tools that the policy may use; None leaves its choice, which is all of them.
        demonstrations: Pairs of a request and the shell command that answers it: a session that it imports, for which
            it starts twice.
        version: Of the npm package.
    """

    name = "opencode"
    verified_version = VERIFIED_VERSION
    prompt_size = PromptSize(default=7000, smallest=1400)

    def __init__(
        self,
        *,
        api: OpenCodeAPI = "openai",
        system_prompt: str | None = None,
        tools: Sequence[str] | None = None,
        demonstrations: Sequence[Sequence[str]] = (),
        version: str = VERIFIED_VERSION,
    ) -> None:
        if api not in _APIS:
            raise ConfigError(f"opencode: api must be one of {', '.join(_APIS)}, not {api!r}")
        self._api = api
        self._prompt = check_prompt_options(
            self.name,
            offered=_TOOLS,
            shell=_SHELL,
            system_prompt=system_prompt,
            tools=tools,
            demonstrations=demonstrations,
        )
        self._package = NpmPackage(name="opencode-ai", version=version, binary="opencode", needs_script=True)
        super().__init__(self._package)

    def build_launch(self, task: Task, endpoint: Endpoint) -> Launch:
        """Launch OpenCode with the instruction on stdin."""
        self.prompt_size.require_fit(self.name, endpoint, is_shorter=self._prompt.is_shorter)
        program = shlex.quote(str(self._package.program))
        files = {INSTRUCTION_FILE: task.instruction, **_NO_INSTALL}
        env = {"OPENCODE_CONFIG_CONTENT": json.dumps(self._build_config(endpoint)), **_SWITCHES}
        if self._prompt.system_prompt is not None:
            env |= _NO_CONTEXT_FILES
        # a title given is a title that the model is not asked for
        prologue, session = "", "--title task"
        if self._prompt.demonstrations:
            files[_EARLIER_SESSION] = self._build_earlier_session(endpoint)
            prologue = f'{program} import "$HOME/{_EARLIER_SESSION}"\n'
            session = f"--session {_SESSION_ID}"
        return Launch(
            command=(
                # all of its folders under HOME
                "unset XDG_CONFIG_HOME XDG_DATA_HOME XDG_STATE_HOME XDG_CACHE_HOME\n"
                f'{prologue}exec {program} run --pure {session} <"$HOME/{INSTRUCTION_FILE}"'
            ),
            env=env,
            files=files,
        )

    def build_shell_call(self, command: str) -> ToolCall:
        """Build a call of its tool `bash`."""
        arguments = {"command": command, "description": "Run a command"}
        return ToolCall(id="", name=_SHELL, arguments=json.dumps(arguments))

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
        agent: dict[str, object] = {}
        if self._prompt.system_prompt is not None:
            agent["prompt"] = self._prompt.system_prompt
        if self._prompt.tools is not None:
            # "invalid" is never shown to the model; without it, a call that does not parse is answered with a wrong
            # reason
            agent["tools"] = {"*": False} | dict.fromkeys((*self._prompt.tools, "invalid"), True)
        elif self._prompt.demonstrations:
            agent["tools"] = {"question": False}  # a resumed session would offer to ask the user
        return config | ({"agent": {"build": agent}} if agent else {})

    def _build_earlier_session(self, endpoint: Endpoint) -> str:
        """Write what `opencode export` gives: the session, then its messages with their parts."""
        model = {"providerID": _PROVIDER, "modelID": endpoint.model}
        tokens = {"input": 0, "output": 0, "reasoning": 0, "cache": {"read": 0, "write": 0}}
        messages: list[dict[str, object]] = []

        def add(info: dict[str, object], part: dict[str, object]) -> str:
            # both are sorted by their ids
            number = len(messages)
            own_id = f"msg_{number:012x}demonstration"
            ids = {"id": f"prt_{number:012x}demonstration", "sessionID": _SESSION_ID, "messageID": own_id}
            time = {"created": EARLIER_MS + number, "completed": EARLIER_MS + number}
            info = {**info, "id": own_id, "sessionID": _SESSION_ID, "agent": "build", "time": time}
            messages.append({"info": info, "parts": [{**part, **ids}]})
            return own_id

        for shown in self._prompt.demonstrations:
            request_id = add({"role": "user", "model": model}, {"type": "text", "text": shown.request})
            answer = {
                "role": "assistant",
                "parentID": request_id,
                "mode": "build",
                "path": {"cwd": "/", "root": "/"},
                "cost": 0,
                "tokens": tokens,
                **model,
            }
            state = {
                "status": "completed",
                "input": {"command": shown.command},
                "output": "(no output)",
                "metadata": {},
                "title": shown.command,
                "time": {"start": EARLIER_MS, "end": EARLIER_MS},
            }
            call: dict[str, object] = {"type": "tool", "tool": _SHELL, "callID": shown.call_id, "state": state}
            add({**answer, "finish": "tool-calls"}, call)
            add({**answer, "finish": "stop"}, {"type": "text", "text": DONE})
        info = {
            "id": _SESSION_ID,
            "slug": "demonstrations",
            "projectID": "global",
            "directory": "/",
            "path": "",
            "title": "task",
            "version": VERIFIED_VERSION,
            "time": {"created": EARLIER_MS, "updated": EARLIER_MS},
        }
        return json.dumps({"info": info, "messages": messages})


_SWITCHES = {
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    "OPENCODE_DISABLE_SHARE": "1",
}
_NO_CONTEXT_FILES = {"OPENCODE_DISABLE_PROJECT_CONFIG": "1", "OPENCODE_DISABLE_CLAUDE_CODE": "1"}


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
