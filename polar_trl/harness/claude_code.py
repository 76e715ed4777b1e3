"""Run Claude Code (`@anthropic-ai/claude-code`): one native program, instruction on stdin, no settings file.

Verified at 2.1.332, whose package asks for Node 22 but runs without any. The policy answers its web searches too,
since no other model can be reached.
"""

import json
import shlex
from collections.abc import Sequence

from polar_trl.errors import ConfigError
from polar_trl.harness.base import INSTRUCTION_FILE, Launch, PackagedAgent
from polar_trl.harness.install import NpmPackage
from polar_trl.harness.prompt import DONE, EARLIER, EARLIER_ID, PromptSize, check_prompt_options
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
_SHELL = "Bash"
_BARE_TOOLS = (_SHELL, "Edit", "Read")
_TOOLS = (
    *_BARE_TOOLS, "Write", "Glob", "Grep", "Agent", "ListAgents", "Skill", "ToolSearch", "Workflow", "ReportFindings",
    "ScheduleWakeup",
)  # fmt: skip
_SYSTEM_PROMPT = ".polar/system.md"
_EARLIER_SESSION = ".polar/earlier.jsonl"
_COMPACTION = "CRITICAL: Respond with TEXT ONLY"
_BUFFER_TOKENS = 13_000
"""Tokens that it leaves free of its window, beside an answer, before it compacts: made for windows of 200,000."""


class ClaudeCodeHarness(PackagedAgent):
    """Run `claude -p` once per session.

    Args:
        system_prompt: In place of its own but for one line, in its `--bare` mode: with three tools (Bash, Edit, Read),
            and without the work folder's CLAUDE.md.
        tools: The names of its tools that the policy may use; None leaves its choice.
        demonstrations: Pairs of a request and the shell command that answers it: a session that it resumes.
        max_turns: Replies after which it stops by itself; None leaves that to the session's limits.
        version: Of the npm package.
    """

    name = "claude_code"
    verified_version = VERIFIED_VERSION
    prompt_size = PromptSize(default=11_500, smallest=450)

    def __init__(
        self,
        *,
        system_prompt: str | None = None,
        tools: Sequence[str] | None = None,
        demonstrations: Sequence[Sequence[str]] = (),
        max_turns: int | None = None,
        version: str = VERIFIED_VERSION,
    ) -> None:
        if max_turns is not None and max_turns < 1:
            raise ConfigError(f"claude_code: max_turns must be at least 1, not {max_turns}")
        self._prompt = check_prompt_options(
            self.name,
            offered=_TOOLS if system_prompt is None else _BARE_TOOLS,
            shell=_SHELL,
            system_prompt=system_prompt,
            tools=tools,
            demonstrations=demonstrations,
        )
        self._max_turns = max_turns
        self._package = NpmPackage(
            name="@anthropic-ai/claude-code", version=version, binary="claude", needs_script=True
        )
        super().__init__(self._package)

    def build_launch(self, task: Task, endpoint: Endpoint) -> Launch:
        """Launch Claude Code without questions, its events as JSON lines on stdout."""
        self.prompt_size.require_fit(self.name, endpoint, is_shorter=self._prompt.is_shorter)
        prompt, is_bare = self._prompt, self._prompt.system_prompt is not None
        arguments = [
            "-p",
            "--dangerously-skip-permissions",
            "--output-format=stream-json",
            "--verbose",
            f"--model={endpoint.model}",
            *(["--bare"] if is_bare else []),
            *([f"--tools={','.join(prompt.tools)}"] if prompt.tools is not None else []),
            *([f"--max-turns={self._max_turns}"] if self._max_turns is not None else []),
        ]
        files = {INSTRUCTION_FILE: task.instruction}
        command = shlex.join([str(self._package.program), *arguments])
        if prompt.system_prompt is not None:
            files[_SYSTEM_PROMPT] = prompt.system_prompt
            command += f' --system-prompt-file="$HOME/{_SYSTEM_PROMPT}"'
        if prompt.demonstrations:
            files[_EARLIER_SESSION] = self._build_earlier_session(endpoint)
            command += f' --resume "$HOME/{_EARLIER_SESSION}" --fork-session'
        # in its bare mode it takes a key only, never a token
        key_variable = "ANTHROPIC_API_KEY" if is_bare else "ANTHROPIC_AUTH_TOKEN"
        return Launch(
            command=f'export CLAUDE_CONFIG_DIR="$HOME/.claude"\nexec {command} <"$HOME/{INSTRUCTION_FILE}"',
            env={
                "ANTHROPIC_BASE_URL": endpoint.origin,
                key_variable: endpoint.api_key,
                **dict.fromkeys(_MODEL_VARIABLES, endpoint.model),
                # a model that it does not know is taken to have a window of a million tokens
                "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(_find_window(endpoint.max_model_len)),
                "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(endpoint.max_tokens),
                **_SWITCHES,
            },
            files=files,
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

    def _build_earlier_session(self, endpoint: Endpoint) -> str:
        """Write a session file of Claude Code's: messages of its API, each of which names the one before."""
        answer = {
            "type": "message",
            "role": "assistant",
            "model": endpoint.model,
            "usage": {"input_tokens": 1, "output_tokens": 1},
        }
        messages: list[dict[str, object]] = []
        for shown in self._prompt.demonstrations:
            call = {"type": "tool_use", "id": shown.call_id, "name": _SHELL, "input": {"command": shown.command}}
            result = {
                "type": "tool_result",
                "tool_use_id": shown.call_id,
                "content": "(Bash completed with no output)",
            }
            messages += [
                {"role": "user", "content": shown.request},
                {**answer, "id": f"call_{shown.call_id}", "content": [call], "stop_reason": "tool_use"},
                {"role": "user", "content": [result]},
                {
                    **answer,
                    "id": f"end_{shown.call_id}",
                    "content": [{"type": "text", "text": DONE}],
                    "stop_reason": "end_turn",
                },
            ]
        ids = [f"{EARLIER_ID[:-12]}{position:012d}" for position in range(1, len(messages) + 1)]
        entries = [
            {
                "type": message["role"],
                "uuid": own_id,
                "parentUuid": parent_id,
                "sessionId": EARLIER_ID,
                "isSidechain": False,
                "userType": "external",
                "cwd": "/",
                "version": VERIFIED_VERSION,
                "timestamp": EARLIER,
                "message": message,
            }
            for own_id, parent_id, message in zip(ids, [None, *ids], messages, strict=False)
        ]
        return "".join(f"{json.dumps(entry)}\n" for entry in entries)


def _find_window(max_model_len: int) -> int:
    """Return the context window to declare, so that the agent keeps at most a tenth of the true one free.

    With 13,000 tokens of 32,768 free, and 8192 for an answer, its own prompt would be too long already: it would
    compact until it gives up.
    """
    return max_model_len + max(0, _BUFFER_TOKENS - max_model_len // 10)
