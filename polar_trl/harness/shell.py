"""Any program that finds its model through environment variables, started by one shell command.

It refuses an instruction that no process can be given (one with a NUL byte).
"""

import re
import shlex
from collections.abc import Mapping

from polar_trl.errors import ConfigError
from polar_trl.harness.base import Launch
from polar_trl.sandbox.base import ExecResult
from polar_trl.types import Endpoint, Task

PLACEHOLDERS = ("instruction", "model", "base_url", "api_key")
_PLACEHOLDER = re.compile(r"\{(" + "|".join(PLACEHOLDERS) + r")\}")


class ShellHarness:
    """Runs `command` in the work folder, with every provider's variables pointing at the policy.

    Args:
        command: For bash. `{instruction}` is replaced, quoted as one word; `{model}`, `{base_url}` (OpenAI's, ending
            in /v1) and `{api_key}` likewise. Other braces are the shell's own.
        name: What records and metrics call this agent.
        env: Extra variables.
        files: Path relative to HOME -> text, laid before the command starts.
    """

    def __init__(
        self,
        command: str,
        *,
        name: str = "shell",
        env: Mapping[str, str] | None = None,
        files: Mapping[str, str] | None = None,
    ) -> None:
        if not command.strip():
            raise ConfigError("the agent's command is empty; give a shell command, such as 'my-agent {instruction}'")
        self.name = name
        self._command = command
        self._env = dict(env or {})
        self._files = dict(files or {})

    def build_launch(self, task: Task, endpoint: Endpoint) -> Launch:
        """The command for this task, and where its agent finds the policy."""
        if "\0" in task.instruction:
            raise ConfigError(f"task {task.id}: the instruction holds a NUL byte, which no process can be given")
        values = {
            "instruction": task.instruction,
            "model": endpoint.model,
            "base_url": f"{endpoint.origin}/v1",
            "api_key": endpoint.api_key,
        }
        command = _PLACEHOLDER.sub(lambda match: shlex.quote(values[match[1]]), self._command)
        return Launch(
            command=command, env={**build_provider_env(endpoint), **_task_env(task), **self._env}, files=self._files
        )

    def judge_exit(self, result: ExecResult) -> bool:
        """Exit code 0."""
        return result.exit_code == 0


def build_provider_env(endpoint: Endpoint) -> dict[str, str]:
    """The variables in which each provider's clients look for an address, a key and a model."""
    key, model, openai_url = endpoint.api_key, endpoint.model, f"{endpoint.origin}/v1"
    return {
        "OPENAI_BASE_URL": openai_url,
        "OPENAI_API_BASE": openai_url,
        "OPENAI_API_KEY": key,
        "OPENAI_MODEL": model,
        "ANTHROPIC_BASE_URL": endpoint.origin,
        "ANTHROPIC_API_KEY": key,
        "ANTHROPIC_AUTH_TOKEN": key,
        "ANTHROPIC_MODEL": model,
        "GOOGLE_GEMINI_BASE_URL": endpoint.origin,
        "GEMINI_API_KEY": key,
        "GOOGLE_API_KEY": key,
        "GEMINI_MODEL": model,
        "POLAR_MODEL": model,
    }


def _task_env(task: Task) -> dict[str, str]:
    return {"POLAR_INSTRUCTION": task.instruction}
