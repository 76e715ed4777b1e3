"""Run any program that finds its model through environment variables, started by one shell command.

Refuses {instruction} inside quotes, where the shell would read the task's text as code, and an instruction with a NUL
byte, which no process can be given (`ConfigError`).
"""

import difflib
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from polar_trl.errors import ConfigError
from polar_trl.harness.base import Launch
from polar_trl.sandbox.base import ExecResult
from polar_trl.types import Call, ChatRequest, Endpoint, Purpose, Task

PLACEHOLDERS = ("instruction", "model", "base_url", "api_key")
# Other tools' names for these. Left alone, the agent would be handed "{prompt}" as its task.
MISNOMERS = {
    "prompt": "instruction",
    "task": "instruction",
    "problem_statement": "instruction",
    "url": "base_url",
    "endpoint": "base_url",
    "key": "api_key",
}
_WORD = re.compile(r"(?<!\$)\{([A-Za-z_]+)\}")  # ${model} is a variable of the shell


class ShellHarness:
    """Run `command` in the work folder, with every provider's variables pointing at the policy.

    Args:
        command: For bash. `{instruction}` is replaced, quoted as one word; `{model}`, `{base_url}` (OpenAI's, ending
            in /v1) and `{api_key}` likewise. Other braces are the shell's own: `${VAR}`, `awk '{print}'`.
        name: Of this agent in records and metrics.
        env: Extra variables.
        files: Path relative to HOME -> text, laid before the command starts.
        folders: Of this machine, which the command needs and sandboxes show at the same path.

    Raises `ConfigError` for a command that is empty, or has a placeholder misspelled or {instruction} in quotes.
    """

    def __init__(
        self,
        command: str,
        *,
        name: str = "shell",
        env: Mapping[str, str] | None = None,
        files: Mapping[str, str] | None = None,
        folders: Sequence[Path | str] = (),
    ) -> None:
        if not command.strip():
            raise ConfigError("the agent's command is empty; give a shell command, such as 'my-agent {instruction}'")
        _check_placeholders(command)
        self.name = name
        self._command = command
        self._env = dict(env or {})
        self._files = dict(files or {})
        self.folders = tuple(map(Path, folders))

    def build_launch(self, task: Task, endpoint: Endpoint) -> Launch:
        """Fill in the command, and point every provider's variables at the endpoint. Raises `ConfigError`."""
        if "\0" in task.instruction:
            raise ConfigError(f"task {task.id}: the instruction holds a NUL byte, which no process can be given")
        values = {
            "instruction": task.instruction,
            "model": endpoint.model,
            "base_url": f"{endpoint.origin}/v1",
            "api_key": endpoint.api_key,
        }
        command = _WORD.sub(
            lambda match: shlex.quote(values[match[1]]) if match[1] in values else match[0], self._command
        )
        env = {**build_provider_env(endpoint), "POLAR_INSTRUCTION": task.instruction, **self._env}
        return Launch(command=command, env=env, files=self._files)

    def install(self) -> None:
        """Do nothing: the command is the user's."""

    def judge_exit(self, result: ExecResult, calls: Sequence[Call]) -> bool:
        """Return whether the exit code is 0."""
        return result.exit_code == 0

    def classify(self, request: ChatRequest) -> Purpose:
        """Return "policy" for every request: nothing is known of this agent."""
        return "policy"


def build_provider_env(endpoint: Endpoint) -> dict[str, str]:
    """Build the variables in which each provider's clients look for an address, a key and a model."""
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


def _check_placeholders(command: str) -> None:
    for match in _WORD.finditer(command):
        word = match[1]
        if word == "instruction" and _is_quoted(command[: match.start()]):
            raise ConfigError(
                "the agent's command has {instruction} inside quotes; it is quoted already, so write it bare, "
                'or write "$POLAR_INSTRUCTION"'
            )
        if word not in PLACEHOLDERS:
            near = difflib.get_close_matches(word.lower(), PLACEHOLDERS, n=1, cutoff=0.75)
            if meant := near[0] if near else MISNOMERS.get(word.lower()):
                allowed = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
                raise ConfigError(
                    f"the agent's command has {{{word}}}; did you mean {{{meant}}}? The placeholders are {allowed}"
                )


def _is_quoted(text: str) -> bool:
    """Return whether the shell is inside quotes after `text`. Knows quotes and backslashes, not here-documents."""
    quote = ""
    characters = iter(text)
    for character in characters:
        if character == "\\" and quote != "'":
            next(characters, None)
        elif quote:
            quote = "" if character == quote else quote
        elif character in ("'", '"'):
            quote = character
    return bool(quote)
