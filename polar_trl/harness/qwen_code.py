"""Run Qwen Code (`@qwen-code/qwen-code`) on Node 22, with its settings in HOME and in environment variables.

Verified at 0.24.4. The instruction is an argument, up to 120 kB: the kernel takes none longer than 128 kB. A longer
one comes by stdin, where this version waits half a second for the first byte, and ends without a call after that.
"""

import json
import shlex
from collections.abc import Sequence
from typing import Literal

from polar_trl.errors import ConfigError
from polar_trl.harness.base import INSTRUCTION_FILE, Launch, PackagedAgent, check_instruction
from polar_trl.harness.install import NODE, NpmPackage, put_node_first
from polar_trl.harness.prompt import DONE, EARLIER, EARLIER_ID, PromptSize, check_prompt_options
from polar_trl.types import ChatRequest, Endpoint, Purpose, Task, ToolCall

VERIFIED_VERSION = "0.24.4"
MAX_ARGUMENT_BYTES = 120_000
"""Of the instruction as bash reads it, in quotes."""
QwenAPI = Literal["openai", "openai-responses", "anthropic", "google"]
# ours -> its name of the API, the variables of address and key, and what it expects after the origin
_APIS: dict[str, tuple[str, str, str, str]] = {
    "openai": ("openai", "OPENAI_BASE_URL", "OPENAI_API_KEY", "/v1"),
    "openai-responses": ("openai-responses", "OPENAI_BASE_URL", "OPENAI_API_KEY", "/v1"),
    "anthropic": ("anthropic", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY", ""),
    "google": ("gemini", "GOOGLE_GEMINI_BASE_URL", "GEMINI_API_KEY", ""),
}
_SHELL = "run_shell_command"
_TOOLS = (
    _SHELL, "read_file", "write_file", "edit", "glob", "grep_search", "notebook_edit", "agent", "list_agents", "skill",
    "get_goal", "update_goal", "tool_search", "tool_call",
    # offered by tool_search, or where that is not offered by themselves
    "cron_create", "cron_delete", "cron_list", "enter_worktree", "exit_worktree", "loop_wakeup", "monitor",
    "read_mcp_resource", "record_artifact", "report_findings", "send_message", "task_stop", "web_fetch", "zoom_image",
)  # fmt: skip
_NO_FILE = "no-such-file.md"
# it writes 190 tokens of rules about the answer's language into this file unless its mark is there
_NO_LANGUAGE_RULES = {".qwen/output-language.md": "<!-- qwen-code:llm-output-language: auto -->\n"}
_SYSTEM_PROMPT = ".polar/system.md"
_EARLIER_SESSION = ".polar/earlier.jsonl"
# a session lies in a folder named after its work folder, and names it in each line: it is not known before
_LAY_EARLIER_SESSION = f"""\
work=$(pwd -P)
chats="$HOME/.qwen/projects/$(printf %s "$work" | tr -c a-zA-Z0-9 -)/chats"
mkdir -p "$chats"
quoted=$(printf %s "$work" | sed 's/[&|]/\\\\&/g')
sed "s|\\"cwd\\": \\"\\"|\\"cwd\\": \\"$quoted\\"|" "$HOME/{_EARLIER_SESSION}" >"$chats/{EARLIER_ID}.jsonl"
"""
_MEMORY_AGENT = "managed memory extraction subagent"
_SUMMARIZER = "component that summarizes a conversation"


class QwenCodeHarness(PackagedAgent):
    """Run `qwen --yolo` once per session.

    Args:
        api: The provider API that it speaks to the policy.
        system_prompt: In place of its own, of the list of skills and of AGENTS.md and QWEN.md. The date stays before
            each instruction.
        tools: The names of its tools that the policy may use; None leaves its choice.
        demonstrations: Pairs of a request and the shell command that answers it: a session that it resumes.
        images: Tell it that the model reads images.
        version: Of the npm package.
    """

    name = "qwen_code"
    verified_version = VERIFIED_VERSION
    prompt_size = PromptSize(default=15_600, smallest=1700)

    def __init__(
        self,
        *,
        api: QwenAPI = "openai",
        system_prompt: str | None = None,
        tools: Sequence[str] | None = None,
        demonstrations: Sequence[Sequence[str]] = (),
        images: bool = False,
        version: str = VERIFIED_VERSION,
    ) -> None:
        if api not in _APIS:
            raise ConfigError(f"qwen_code: api must be one of {', '.join(_APIS)}, not {api!r}")
        self._api = api
        self._prompt = check_prompt_options(
            self.name,
            offered=_TOOLS,
            shell=_SHELL,
            system_prompt=system_prompt,
            tools=tools,
            demonstrations=demonstrations,
        )
        self._images = images
        self._package = NpmPackage(name="@qwen-code/qwen-code", version=version, binary="qwen")
        super().__init__(NODE, self._package)

    def build_launch(self, task: Task, endpoint: Endpoint) -> Launch:
        """Launch Qwen Code with the instruction as an argument, or on stdin where it is too long for one."""
        self.prompt_size.require_fit(self.name, endpoint, is_shorter=self._prompt.is_shorter)
        check_instruction(task)
        auth_type, url_name, key_name, path = _APIS[self._api]
        arguments = [
            f"--auth-type={auth_type}",
            f"--model={endpoint.model}",
            "--yolo",
            *([f"--resume={EARLIER_ID}"] if self._prompt.demonstrations else []),
        ]
        files = {".qwen/settings.json": json.dumps(self._build_settings(endpoint))}
        env = {}
        if self._prompt.system_prompt is not None:
            env["QWEN_SYSTEM_MD"] = f"~/{_SYSTEM_PROMPT}"
            files |= {_SYSTEM_PROMPT: self._prompt.system_prompt, **_NO_LANGUAGE_RULES}
        prologue = ""
        if self._prompt.demonstrations:
            files[_EARLIER_SESSION] = self._build_earlier_session()
            prologue = _LAY_EARLIER_SESSION
        prompt = shlex.quote(f"--prompt={task.instruction}")
        if len(prompt.encode()) > MAX_ARGUMENT_BYTES:
            files[INSTRUCTION_FILE] = task.instruction
            prompt = f'<"$HOME/{INSTRUCTION_FILE}"'
        else:
            prompt += " </dev/null"
        command = shlex.join([str(self._package.program), *arguments])
        return Launch(
            command=f"{put_node_first()}\n{prologue}exec {command} {prompt}",
            env={
                url_name: endpoint.origin + path,
                key_name: endpoint.api_key,
                **_SWITCHES,
                **env,
                # its own limit, 32000, is raised to 64000 and the answer asked for again where one is cut; no answer
                # of the policy is longer than this, so a second one would only be cut at the same place
                "QWEN_CODE_MAX_OUTPUT_TOKENS": str(endpoint.max_tokens),
            },
            files=files,
        )

    def build_shell_call(self, command: str) -> ToolCall:
        """Build a call of its tool `run_shell_command`."""
        arguments = {"command": command, "description": "Run a command", "is_background": False}
        return ToolCall(id="", name=_SHELL, arguments=json.dumps(arguments))

    def classify(self, request: ChatRequest) -> Purpose:
        """Tell its memory agent and its summaries by their prompts: they declare tools like the rest."""
        messages = request.messages
        if messages and messages[0].role in ("system", "developer") and _MEMORY_AGENT in messages[0].text:
            return "auxiliary"
        if messages and messages[-1].role == "user" and _SUMMARIZER in messages[-1].text:
            return "auxiliary"
        return super().classify(request)

    def _build_settings(self, endpoint: Endpoint) -> dict[str, object]:
        generation: dict[str, object] = {
            "timeout": 0,
            "maxRetries": 1,
            "contextWindowSize": endpoint.max_model_len,
            "modalities": {"image": self._images},
        }
        model: dict[str, object] = {"generationConfig": generation}
        settings: dict[str, object] = {
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
            "general": {
                "enableAutoUpdate": False,
                # 0.24.4 takes a command's exit for the end of its output, and hears of the exit first where another of
                # its processes ends at that moment: quick commands then come back empty. With this switch on it starts
                # such a process, systemd-inhibit, with every command. (A terminal for commands loses more: the end of
                # whatever is longer than 4 kB)
                "preventSystemSleep": False,
            },
            "memory": {
                "enableManagedAutoMemory": False,
                "enableManagedAutoDream": False,
                "enableAutoSkill": False,
            },
            "ui": {"enableFollowupSuggestions": False},
            "model": model,
        }
        if self._prompt.system_prompt is not None:
            model["skipStartupContext"] = True
            settings["skills"] = {"disabledLevels": ["project", "user", "extension", "bundled"]}
            settings["context"] = {"fileName": _NO_FILE}
        if self._prompt.tools is not None:
            settings["tools"] = {"disabled": [name for name in _TOOLS if name not in self._prompt.tools]}
        return settings

    def _build_earlier_session(self) -> str:
        """Write a session file of Qwen Code's: messages of Google's API, each of which names the one before."""
        entries: list[dict[str, object]] = []

        def add(kind: str, role: str, part: dict[str, object], **more: object) -> None:
            number = len(entries)
            entries.append(
                {
                    "uuid": f"{EARLIER_ID[:-12]}{number + 1:012d}",
                    "parentUuid": f"{EARLIER_ID[:-12]}{number:012d}" if number else None,
                    "sessionId": EARLIER_ID,
                    "timestamp": EARLIER,
                    "type": kind,
                    "cwd": "",
                    "version": VERIFIED_VERSION,
                    "message": {"role": role, "parts": [part]},
                    **more,
                }
            )

        for shown in self._prompt.demonstrations:
            call = {"id": shown.call_id, "name": _SHELL}
            add("user", "user", {"text": shown.request})
            add("assistant", "model", {"functionCall": {**call, "args": {"command": shown.command}}})
            add(
                "tool_result",
                "user",
                {"functionResponse": {**call, "response": {"output": "(empty)"}}},
                toolCallResult={"callId": shown.call_id, "status": "success"},
            )
            add("assistant", "model", {"text": DONE})
        return "".join(f"{json.dumps(entry)}\n" for entry in entries)


_SWITCHES = {
    # or it starts itself a second time, for a larger heap
    "QWEN_CODE_NO_RELAUNCH": "true",
    "QWEN_USAGE_STATISTICS_ENABLED": "0",
    "QWEN_TELEMETRY_ENABLED": "0",
    "QWEN_DISABLE_AUTO_TITLE": "1",
    "QWEN_CODE_EMIT_TOOL_USE_SUMMARIES": "0",
    "QWEN_CODE_SUPPRESS_YOLO_WARNING": "1",
    # one after the other, for the same reason as `preventSystemSleep`
    "QWEN_CODE_MAX_TOOL_CONCURRENCY": "1",
    # no limits: an answer may wait for the engine, and the session has an outer timer. Comments in a stream, which
    # keep other clients waiting, do not count for the second one (four minutes by default)
    "QWEN_CODE_API_TIMEOUT_MS": "0",
    "QWEN_STREAM_IDLE_TIMEOUT_MS": "0",
    "QWEN_STREAM_MAX_LIFETIME_MS": "0",
}
