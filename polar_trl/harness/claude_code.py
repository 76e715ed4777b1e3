"""Run Claude Code (`@anthropic-ai/claude-code`): one native program, instruction on stdin, no settings file.

Verified at 2.1.332, whose package asks for Node 22 but runs without any. The policy answers its web searches too,
since no other model can be reached.
"""

import json
import shlex

from polar_trl.errors import ConfigError
from polar_trl.harness.base import INSTRUCTION_FILE, Launch, PackagedAgent, PromptSize
from polar_trl.harness.install import NpmPackage
from polar_trl.types import ChatRequest, Endpoint, Purpose, Task, ToolCall

VERIFIED_VERSION = "2.1.332"
_MODEL_VARIABLES = (
    "ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_MODEL", "ANTHROPIC_DEFAULT_FABLE_MODEL", "ANTHROPIC_DEFAULT_OPUS_MODEL",
    "ANTHROPIC_DEFAULT_SONNET_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL", "ANTHROPIC_SMALL_FAST_MODEL",
    "CLAUDE_CODE_SUBAGENT_MODEL",
)  # fmt: skip
_SWITCHES = {
    # without it, it does not skip permissions as root
    "IS_SANDBOX": "1",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_TELEMETRY": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "DISABLE_AUTOUPDATER": "1",
    "CLAUDE_CODE_DISABLE_FEEDBACK_SURVEY": "1",
    # the proxy forbids to repeat what is hopeless; what is left are a busy engine and lost connections
    "CLAUDE_CODE_MAX_RETRIES": "4",
    # an answer may wait for the engine, and the session has an outer timer
    "API_TIMEOUT_MS": "3600000",
    "API_FORCE_IDLE_TIMEOUT": "0",
    "CLAUDE_STREAM_IDLE_TIMEOUT_MS": "1800000",
}
_COMPACTION = "CRITICAL: Respond with TEXT ONLY"
_BUFFER_TOKENS = 13_000
"""Tokens that it leaves free of its window, beside an answer, before it compacts: made for windows of 200,000."""


class ClaudeCodeHarness(PackagedAgent):
    """Run `claude -p` once per session.

    Args:
        short_prompt: Its `--bare` mode: a prompt of 4 kB and three tools (Bash, Edit, Read), without the work
            folder's CLAUDE.md.
        max_turns: Replies after which it stops by itself; None leaves that to the session's limits.
        version: Of the npm package.
    """

    name = "claude_code"
    verified_version = VERIFIED_VERSION
    prompt_size = PromptSize(default=11_500, short=950)

    def __init__(
        self, *, short_prompt: bool = False, max_turns: int | None = None, version: str = VERIFIED_VERSION
    ) -> None:
        if max_turns is not None and max_turns < 1:
            raise ConfigError(f"claude_code: max_turns must be at least 1, not {max_turns}")
        self._short_prompt = short_prompt
        self._max_turns = max_turns
        self._package = NpmPackage(
            name="@anthropic-ai/claude-code", version=version, binary="claude", needs_script=True
        )
        super().__init__(self._package)

    def build_launch(self, task: Task, endpoint: Endpoint) -> Launch:
        """Launch Claude Code without questions, its events as JSON lines on stdout."""
        self.prompt_size.require_fit(self.name, endpoint, is_short=self._short_prompt)
        arguments = [
            "-p",
            "--dangerously-skip-permissions",
            "--output-format=stream-json",
            "--verbose",
            f"--model={endpoint.model}",
            *(["--bare"] if self._short_prompt else []),
            *([f"--max-turns={self._max_turns}"] if self._max_turns is not None else []),
        ]
        # in its bare mode it takes a key only, never a token
        key_variable = "ANTHROPIC_API_KEY" if self._short_prompt else "ANTHROPIC_AUTH_TOKEN"
        return Launch(
            command=(
                'export CLAUDE_CONFIG_DIR="$HOME/.claude"\n'
                f'exec {shlex.join([str(self._package.program), *arguments])} <"$HOME/{INSTRUCTION_FILE}"'
            ),
            env={
                "ANTHROPIC_BASE_URL": endpoint.origin,
                key_variable: endpoint.api_key,
                **dict.fromkeys(_MODEL_VARIABLES, endpoint.model),
                # a model that it does not know is taken to have a window of a million tokens
                "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(_find_window(endpoint.max_model_len)),
                "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(endpoint.max_tokens),
                **_SWITCHES,
            },
            files={INSTRUCTION_FILE: task.instruction},
        )

    def build_shell_call(self, command: str) -> ToolCall:
        """Build a call of its tool `Bash`."""
        arguments = {"command": command, "description": "Run a command"}
        return ToolCall(id="", name="Bash", arguments=json.dumps(arguments))

    def classify(self, request: ChatRequest) -> Purpose:
        """Tell summaries by their first words: they declare the conversation's tools. Titles declare none."""
        last = request.messages[-1]
        if last.role == "user" and last.text.startswith(_COMPACTION):
            return "auxiliary"
        return super().classify(request)


def _find_window(max_model_len: int) -> int:
    """Return the context window to declare, so that the agent keeps at most a tenth of the true one free.

    With 13,000 tokens of 32,768 free, and 8192 for an answer, its own prompt would be too long already: it would
    compact until it gives up.
    """
    return max_model_len + max(0, _BUFFER_TOKENS - max_model_len // 10)
