"""Run Gemini CLI (`@google/gemini-cli`) on Node 22, with its settings in HOME and the instruction on stdin.

Verified at 0.61.0, which exits with 0 after an empty answer and after one that was cut. Its summaries and checks for
loops declare no tools. The model is named by -m: without it, the agent asks the model to choose one, and the answer
must be JSON.
"""

import json
import shlex
from collections.abc import Sequence

from polar_trl.harness.base import INSTRUCTION_FILE, Launch, PackagedAgent
from polar_trl.harness.install import NODE, NpmPackage, put_node_first
from polar_trl.harness.prompt import DONE, EARLIER, EARLIER_ID, PromptSize, check_prompt_options
from polar_trl.types import Endpoint, Task, ToolCall

VERIFIED_VERSION = "0.61.0"
_SYSTEM_PROMPT = ".polar/system.md"
_EARLIER_SESSION = ".polar/earlier.json"
_SHELL = "run_shell_command"
_TOOLS = (
    _SHELL, "read_file", "write_file", "replace", "list_directory", "glob", "grep_search", "update_topic", "web_fetch",
    "google_web_search", "list_background_processes", "read_background_output", "enter_plan_mode", "invoke_agent",
    "activate_skill",
)  # fmt: skip
_NO_OUTPUT = "<untrusted_context>\nOutput: (empty)\nProcess Group PGID: 17\n</untrusted_context>"


class GeminiCLIHarness(PackagedAgent):
    """Run `gemini` headless once per session.

    As for anyone who types it, a file of the work folder that the instruction names as `@path` is read into it. A
    conversation that outgrows the model's window ends the session: 0.61.0 compacts only between two instructions.

    Args:
        system_prompt: In place of its own and of the list of files. The date, the system and the work folder's
            GEMINI.md stay before the first instruction.
        tools: The names of its tools that the policy may use; None leaves its choice, which is all of them.
        demonstrations: Pairs of a request and the shell command that answers it: a session that it resumes.
        version: Of the npm package.
    """

    name = "gemini_cli"
    verified_version = VERIFIED_VERSION
    prompt_size = PromptSize(default=10_300, smallest=650)

    def __init__(
        self,
        *,
        system_prompt: str | None = None,
        tools: Sequence[str] | None = None,
        demonstrations: Sequence[Sequence[str]] = (),
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
        self._package = NpmPackage(name="@google/gemini-cli", version=version, binary="gemini")
        super().__init__(NODE, self._package)

    def build_launch(self, task: Task, endpoint: Endpoint) -> Launch:
        """Launch Gemini CLI without questions, its system prompt by the option."""
        self.prompt_size.require_fit(self.name, endpoint, is_shorter=self._prompt.is_shorter)
        program = shlex.quote(str(self._package.program))
        env = {
            "GOOGLE_GEMINI_BASE_URL": endpoint.origin,
            "GEMINI_API_KEY": endpoint.api_key,
            # it would start itself a second time, for a larger heap, which doubles its start
            "GEMINI_CLI_NO_RELAUNCH": "true",
        }
        files = {
            ".gemini/settings.json": json.dumps(self._build_settings()),
            INSTRUCTION_FILE: task.instruction,
        }
        if self._prompt.system_prompt is not None:
            env["GEMINI_SYSTEM_MD"] = f"~/{_SYSTEM_PROMPT}"
            files[_SYSTEM_PROMPT] = self._prompt.system_prompt
        resume = ""
        if self._prompt.demonstrations:
            files[_EARLIER_SESSION] = self._build_earlier_session()
            resume = f'--session-file "$HOME/{_EARLIER_SESSION}" '
        return Launch(
            command=(
                f"{put_node_first()}\n"
                f"exec {program} --skip-trust --yolo -m {shlex.quote(endpoint.model)} "
                f'{resume}<"$HOME/{INSTRUCTION_FILE}"'
            ),
            env=env,
            files=files,
        )

    def build_shell_call(self, command: str) -> ToolCall:
        """Build a call of its tool `run_shell_command`."""
        return ToolCall(id="", name=_SHELL, arguments=json.dumps({"command": command}))

    def _build_settings(self) -> dict[str, object]:
        settings: dict[str, object] = {
            "security": {"auth": {"selectedType": "gemini-api-key"}},
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
            "general": {
                "enableAutoUpdate": False,
                "enableAutoUpdateNotification": False,
                "maxAttempts": 2,
                "retryFetchErrors": False,
            },
        }
        if self._prompt.system_prompt is not None:
            settings["skills"] = {"enabled": False}
            settings["context"] = {"includeDirectoryTree": False}
        if self._prompt.tools is not None:
            settings["tools"] = {"core": self._prompt.tools}
        return settings

    def _build_earlier_session(self) -> str:
        """Write a session file of Gemini CLI's: one JSON object, a tool's result inside of its call."""
        messages: list[dict[str, object]] = []
        for shown in self._prompt.demonstrations:
            call_id = shown.call_id
            response = {"id": call_id, "name": _SHELL, "response": {"output": _NO_OUTPUT}}
            call = {
                "id": call_id,
                "name": _SHELL,
                "args": {"command": shown.command},
                "result": [{"functionResponse": response}],
                "status": "success",
                "timestamp": EARLIER,
            }
            answer = {"timestamp": EARLIER, "type": "gemini", "thoughts": [], "model": "policy"}
            messages += [
                {
                    "id": f"request_{call_id}",
                    "timestamp": EARLIER,
                    "type": "user",
                    "content": [{"text": shown.request}],
                },
                {**answer, "id": f"call_{call_id}", "content": "", "toolCalls": [call]},
                {**answer, "id": f"end_{call_id}", "content": DONE},
            ]
        head = {"sessionId": EARLIER_ID, "projectHash": "0", "startTime": EARLIER, "lastUpdated": EARLIER}
        return json.dumps({**head, "kind": "main", "messages": messages})
