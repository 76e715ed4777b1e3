"""Run mini-swe-agent (PyPI), whose `mini` reads the instruction and its settings from one file under HOME.

Verified at 2.4.6, which makes no side requests. An instruction may be of any length, since none is an argument.
"""

import json
import shlex
from collections.abc import Sequence

from polar_trl.harness.base import Launch, PackagedAgent
from polar_trl.harness.install import PyPIPackage
from polar_trl.harness.prompt import PromptSize, check_system_prompt
from polar_trl.sandbox.base import ExecResult
from polar_trl.types import Call, Endpoint, Task, ToolCall

VERIFIED_VERSION = "2.4.6"
SUBMIT_MARK = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""A command that prints this ends the task."""
ANSWER_TIMEOUT_S = 86400
"""Beyond any session's own limit. The client's default is ten minutes, and a plain reply has no pings."""
_CONFIG = ".polar/mini.yaml"
_SETTINGS = ".config/mini-swe-agent"


class MiniSWEAgentHarness(PackagedAgent):
    """Run `mini --yolo` once per session.

    Args:
        system_prompt: In place of its own and of the rules that it writes around the instruction, so that a command
            that prints `SUBMIT_MARK` ends the task only if this says so.
        step_limit: The most replies of the model that it asks for; 0: no limit.
        command_timeout_s: How long it lets a shell command run.
        version: Of the PyPI package.

    It has one tool, and no session that could be resumed.
    """

    name = "mini_swe_agent"
    verified_version = VERIFIED_VERSION
    prompt_size = PromptSize(default=750, smallest=120)

    def __init__(
        self,
        *,
        system_prompt: str | None = None,
        step_limit: int = 0,
        command_timeout_s: int = 30,
        version: str = VERIFIED_VERSION,
    ) -> None:
        self._system_prompt = None if system_prompt is None else check_system_prompt(self.name, system_prompt)
        self._step_limit = step_limit
        self._command_timeout_s = command_timeout_s
        self._package = PyPIPackage(name="mini-swe-agent", version=version, binary="mini")
        super().__init__(self._package)

    def build_launch(self, task: Task, endpoint: Endpoint) -> Launch:
        """Launch mini with its own settings first and ours laid over them."""
        self.prompt_size.require_fit(self.name, endpoint, is_shorter=self._system_prompt is not None)
        folder = shlex.quote(str(self._package.folder))
        return Launch(
            command=(
                f'export MSWEA_GLOBAL_CONFIG_DIR="$HOME/{_SETTINGS}"\n'
                # isolated: a task's PYTHONPATH is for its own programs
                f"exec {folder}/bin/python -I -m minisweagent.run.mini --yolo --exit-immediately "
                f"--config {folder}/lib/python3*/site-packages/minisweagent/config/mini.yaml "
                f'--config "$HOME/{_CONFIG}" </dev/null'
            ),
            env={"OPENAI_API_BASE": f"{endpoint.origin}/v1", "OPENAI_API_KEY": endpoint.api_key, **_SWITCHES},
            files={_CONFIG: self._build_config(task, endpoint)},
        )

    def build_shell_call(self, command: str) -> ToolCall:
        """Build a call of its tool `bash`."""
        return ToolCall(id="", name="bash", arguments=json.dumps({"command": command}))

    def build_last_message(self, text: str) -> tuple[str, tuple[ToolCall, ...]]:
        """Add a command that prints its mark, which ends the task; a text alone is a format error to it."""
        return text, (self.build_shell_call(f"echo {SUBMIT_MARK}"),)

    def judge_exit(self, result: ExecResult, calls: Sequence[Call]) -> bool:
        """Return whether the last reply submitted the work. 2.4.6 exits with 0 after repeated format errors, too."""
        last = next((call for call in reversed(calls) if call.purpose == "policy"), None)
        if last is None or result.exit_code != 0:
            return False
        return any(SUBMIT_MARK in tool_call.arguments for tool_call in last.message.tool_calls)

    def _build_config(self, task: Task, endpoint: Endpoint) -> str:
        # nothing here has a price
        agent: dict[str, object] = {"cost_limit": 0, "step_limit": self._step_limit}
        if self._system_prompt is not None:
            # a text in a template, in which no sign has a meaning
            text = json.dumps(self._system_prompt, ensure_ascii=False)
            agent |= {"system_template": f"{{{{ {text} }}}}", "instance_template": "{{task}}"}
        config = {
            "agent": agent,
            "environment": {"timeout": self._command_timeout_s},
            # retries are the SDK's, which waits as long as an error reply asks it to
            "model": {"model_name": f"openai/{endpoint.model}", "model_kwargs": {"timeout": ANSWER_TIMEOUT_S}},
        }
        # JSON is YAML, but for the pairs of escapes that JSON writes for an emoji
        return f'{json.dumps(config)[:-1]}, "run": {{"task": {_quote_yaml(task.instruction)}}}}}\n'


_SWITCHES = {
    "MSWEA_CONFIGURED": "true",  # no questions at the first start
    "MSWEA_SILENT_STARTUP": "1",
    "MSWEA_COST_TRACKING": "ignore_errors",
    # of its own, each with the SDK's three requests in it
    "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "2",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # no download at start
    "LITELLM_MODE": "PRODUCTION",  # a .env file in the work folder is the task's, not the agent's
}


def _quote_yaml(text: str) -> str:
    """Write a double-quoted YAML scalar on one line, whatever the text holds."""
    return '"' + "".join(c if c.isprintable() and c not in '"\\' else f"\\U{ord(c):08x}" for c in text) + '"'
