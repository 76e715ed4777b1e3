"""Run any program that finds its model through environment variables, started by one shell command.

Refuses {instruction} inside quotes, where the shell would read the task's text as code, and an instruction that cannot
be an argument where the command names no file (`ConfigError`).
"""

import difflib
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from polar_trl.errors import ConfigError
from polar_trl.harness.base import INSTRUCTION_FILE, MAX_ARGUMENT_BYTES, Harness, Launch, check_instruction
from polar_trl.types import ChatRequest, Endpoint, Purpose, Task

PLACEHOLDERS = ("instruction", "instruction_file", "model", "base_url", "api_key", "max_model_len", "max_tokens")
# Other tools' names for these. Left alone, the agent would be handed "{prompt}" as its task.
MISNOMERS = {
    "prompt": "instruction",
    "task": "instruction",
    "problem_statement": "instruction",
    "prompt_file": "instruction_file",
    "task_file": "instruction_file",
    "url": "base_url",
    "endpoint": "base_url",
    "key": "api_key",
    "context_window": "max_model_len",
    "context_length": "max_model_len",
    "window": "max_model_len",
}
_WORD = re.compile(r"(?<!\$)\{([A-Za-z_]+)\}")  # ${model} is a variable of the shell
# placeholders that are no plain words: the quotes in which they do not stand, and a variable that does
_UNQUOTED = {"instruction": ("'\"", "POLAR_INSTRUCTION"), "instruction_file": ("'", "POLAR_INSTRUCTION_FILE")}


class ShellHarness(Harness):
    """Run `command` in the work folder, with every provider's variables pointing at the policy.

    Args:
        command: For bash. `{instruction}` is replaced, quoted as one word; `{instruction_file}`, the path of a file
            that holds it, `{model}`, `{base_url}` (OpenAI's, ending in /v1), `{api_key}`, `{max_model_len}` and
            `{max_tokens}` (of one answer) likewise. Other braces are the shell's own: `${VAR}`, `awk '{print}'`.
        name: Of this agent in records and metrics.
        env: Extra variables.
        files: Path relative to HOME -> text, or a file of this machine with its executable bit; laid before the
            command starts.
        folders: Of this machine, which the command needs and sandboxes show at the same path.
        auxiliary_without_tools: A request that declares no tools is a title, a summary or the like, and is not
            trained; as the agents that are known by name have it. For an agent whose own requests declare some.

    Raises `ConfigError` for a command that is empty, or has a placeholder misspelled or {instruction} in quotes.
    """

    def __init__(
        self,
        command: str,
        *,
        name: str = "shell",
        env: Mapping[str, str] | None = None,
        files: Mapping[str, str | Path] | None = None,
        folders: Sequence[Path | str] = (),
        auxiliary_without_tools: bool = False,
    ) -> None:
        if not command.strip():
            raise ConfigError("the agent's command is empty; give a shell command, such as 'my-agent {instruction}'")
        if type(auxiliary_without_tools) is not bool:
            raise ConfigError(f"auxiliary_without_tools must be true or false, not {auxiliary_without_tools!r}")
        _check_placeholders(command)
        self.name = name
        self._command = command
        self._env = dict(env or {})
        given = dict(files or {})
        paths = {name: file for name, file in given.items() if isinstance(file, Path)}
        self._files = {name: read_file(file) if isinstance(file, Path) else file for name, file in given.items()}
        self._executables = frozenset(name for name, path in paths.items() if os.access(path, os.X_OK))
        self._folders = tuple(map(Path, folders))
        self._auxiliary_without_tools = auxiliary_without_tools

    @property
    def folders(self) -> tuple[Path, ...]:
        """See `Harness.folders`."""
        return self._folders

    def build_launch(self, task: Task, endpoint: Endpoint) -> Launch:
        """Fill in the command, and point every provider's variables at the endpoint. Raises `ConfigError`."""
        env = build_provider_env(endpoint) | self._env
        if self._fits_an_argument(task):
            env["POLAR_INSTRUCTION"] = task.instruction
        values = {
            "instruction": shlex.quote(task.instruction),
            "instruction_file": f'"$HOME"/{INSTRUCTION_FILE}',
            "model": shlex.quote(endpoint.model),
            "base_url": shlex.quote(f"{endpoint.origin}/v1"),
            "api_key": shlex.quote(endpoint.api_key),
            "max_model_len": str(endpoint.max_model_len),
            "max_tokens": str(endpoint.max_tokens),
        }
        command = self._fill_in(values)
        # each apostrophe has five bytes when quoted, and bash gets the whole as one argument
        if len(command.encode("utf-8", "surrogatepass")) > MAX_ARGUMENT_BYTES:
            command = self._fill_in(values | {"instruction": '"$POLAR_INSTRUCTION"'})
        return Launch(
            command=f'export POLAR_INSTRUCTION_FILE="$HOME/{INSTRUCTION_FILE}"\n{command}',
            env=env,
            files=self._files | {INSTRUCTION_FILE: task.instruction},
            executables=self._executables,
        )

    def classify(self, request: ChatRequest) -> Purpose:
        """Return "policy", but for a request without tools where those are auxiliary."""
        return "auxiliary" if self._auxiliary_without_tools and not request.tools else "policy"

    def _fill_in(self, values: Mapping[str, str]) -> str:
        return _WORD.sub(lambda match: values.get(match[1], match[0]), self._command)

    def _fits_an_argument(self, task: Task) -> bool:
        """Return whether the instruction may be an argument. Raises `ConfigError` where it may not and has to be."""
        num_bytes = check_instruction(task)
        if num_bytes <= MAX_ARGUMENT_BYTES:
            return True
        texts = (self._command, *self._files.values())
        names_file = "{instruction_file}" in self._command or any("POLAR_INSTRUCTION_FILE" in text for text in texts)
        if not names_file or "{instruction}" in self._command:
            raise ConfigError(
                f"task {task.id}: the instruction has {num_bytes} bytes, and a program takes {MAX_ARGUMENT_BYTES} as "
                "an argument or variable; have the agent read a file: write {instruction_file}, its path, in "
                "agent_command where {instruction} is or would be, such as 'my-agent < {instruction_file}'"
            )
        return False


def read_file(path: Path) -> str:
    """Read a file that an agent gets. Raises `ConfigError` where it cannot be read, or is no text."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"agent_files: {path} is not a text file") from error
    except OSError as error:
        raise ConfigError(f"agent_files: {path} cannot be read ({error.strerror})") from error


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
        "POLAR_MAX_MODEL_LEN": str(endpoint.max_model_len),
        "POLAR_MAX_TOKENS": str(endpoint.max_tokens),
    }


def _check_placeholders(command: str) -> None:
    for match in _WORD.finditer(command):
        word = match[1]
        quotes, variable = _UNQUOTED.get(word, ("", ""))
        if (quote := _find_quote(command[: match.start()])) and quote in quotes:
            raise ConfigError(
                f"the agent's command has {{{word}}} inside quotes; it is quoted already, so write it bare, "
                f'or write "${variable}"'
            )
        if word not in PLACEHOLDERS:
            near = difflib.get_close_matches(word.lower(), PLACEHOLDERS, n=1, cutoff=0.75)
            if meant := near[0] if near else MISNOMERS.get(word.lower()):
                allowed = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
                raise ConfigError(
                    f"the agent's command has {{{word}}}; did you mean {{{meant}}}? The placeholders are {allowed}"
                )


def _find_quote(text: str) -> str:
    """Return the quote in which the shell is after `text`, or "". Knows quotes and backslashes, not here-documents."""
    quote = ""
    characters = iter(text)
    for character in characters:
        if character == "\\" and quote != "'":
            next(characters, None)
        elif quote:
            quote = "" if character == quote else quote
        elif character in ("'", '"'):
            quote = character
    return quote
