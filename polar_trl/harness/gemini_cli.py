"""Run Gemini CLI (`@google/gemini-cli`) on Node 22, with its settings in HOME and the instruction on stdin.

Verified at 0.61.0, which exits with 0 after an empty answer and after one that was cut. Its summaries and checks for
loops declare no tools. The model is named by -m: without it, the agent asks the model to choose one, and the answer
must be JSON.
"""

import json
import shlex

from polar_trl.harness.base import INSTRUCTION_FILE, SHORT_PROMPT, Launch, PackagedAgent, PromptSize
from polar_trl.harness.install import NODE, NpmPackage, put_node_first
from polar_trl.types import Endpoint, Task, ToolCall

VERIFIED_VERSION = "0.61.0"
_SYSTEM_PROMPT = ".polar/system.md"
_SHORT_PROMPT_TOOLS = [
    "run_shell_command", "read_file", "write_file", "replace", "list_directory", "glob", "grep_search",
]  # fmt: skip


class GeminiCLIHarness(PackagedAgent):
    """Run `gemini` headless once per session.

    As for anyone who types it, a file of the work folder that the instruction names as `@path` is read into it. A
    conversation that outgrows the model's window ends the session: 0.61.0 compacts only between two instructions.

    Args:
        short_prompt: Seven tools and a system prompt of a few lines, instead of the agent's own.
        version: Of the npm package.
    """

    name = "gemini_cli"
    verified_version = VERIFIED_VERSION
    prompt_size = PromptSize(default=10_300, short=2900)

    def __init__(self, *, short_prompt: bool = False, version: str = VERIFIED_VERSION) -> None:
        self._short_prompt = short_prompt
        self._package = NpmPackage(name="@google/gemini-cli", version=version, binary="gemini")
        super().__init__(NODE, self._package)

    def build_launch(self, task: Task, endpoint: Endpoint) -> Launch:
        """Launch Gemini CLI without questions, its system prompt by the option."""
        self.prompt_size.require_fit(self.name, endpoint, is_short=self._short_prompt)
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
        if self._short_prompt:
            env["GEMINI_SYSTEM_MD"] = f"~/{_SYSTEM_PROMPT}"
            files[_SYSTEM_PROMPT] = SHORT_PROMPT
        return Launch(
            command=(
                f"{put_node_first()}\n"
                f"exec {program} --skip-trust --yolo -m {shlex.quote(endpoint.model)} "
                f'<"$HOME/{INSTRUCTION_FILE}"'
            ),
            env=env,
            files=files,
        )

    def build_shell_call(self, command: str) -> ToolCall:
        """Build a call of its tool `run_shell_command`."""
        return ToolCall(id="", name="run_shell_command", arguments=json.dumps({"command": command}))

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
        if self._short_prompt:
            settings["tools"] = {"core": _SHORT_PROMPT_TOOLS}
            settings["skills"] = {"enabled": False}
        return settings
