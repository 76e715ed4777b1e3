"""Answer as a model that knows each task's solution: one call of the agent's shell tool, then a closing word.

Sessions of it are demonstrations for SFT where sampling finds nothing. A task's solution is one shell command, `gold`
of its metadata. The replies are spelled by the model's own chat template, so that what is recorded is what the model
would have had to sample; each token has the log-probability 0, since the program has no other choice.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from polar_trl.engine.base import Engine, GenerationParams
from polar_trl.errors import ConfigError, WireError
from polar_trl.harness.base import Harness
from polar_trl.tokens.base import Renderer
from polar_trl.types import ChatRequest, Completion, Message, Task, TokenIds, Tool, ToolCall

LAST_WORD = "Done."


class SolutionEngine(Engine):
    """An engine that plays the known solutions of tasks.

    Args:
        harness: Of the agent; gives the calls of its shell tool and the form of its last message.
        max_model_len: Prompt and completion tokens together, as the agent is told.

    Raises `ConfigError` for a task without a solution, two solutions for one instruction, or an agent whose shell tool
    is not known.
    """

    own_renderer = None

    def __init__(self, tasks: Iterable[Task], harness: Harness, renderer: Renderer, *, max_model_len: int) -> None:
        if not hasattr(harness, "build_shell_call"):
            raise ConfigError(
                f"solutions: how {harness.name} calls its shell tool is not known; take an agent that is known by name"
            )
        self._solutions = _list_solutions(tasks)
        self._harness: Any = harness
        self._renderer = renderer
        self.max_model_len = max_model_len
        self.policy_version = 0

    async def answer(
        self, request: ChatRequest, prompt_ids: TokenIds, params: GenerationParams, so_far: list[int] | None = None
    ) -> Completion:
        """Return the next reply of the session. Raises `WireError` where there is none, or it is too long."""
        ids = self._spell(request, self._choose(request))
        if len(ids) > params.max_tokens:
            raise _refuse(
                f"a reply of {len(ids)} tokens after a prompt of {len(prompt_ids)} does not fit max_completion_length "
                f"({params.max_tokens}) or vllm_max_model_length ({self.max_model_len})"
            )
        return Completion(token_ids=ids, logprobs=(0.0,) * len(ids), finish_reason="stop")

    def _choose(self, request: ChatRequest) -> Message:
        """Choose the call while no reply follows the instruction, the last word after it or where no tool is offered.

        Earlier messages may be demonstrations or the agent's own context.
        """
        messages = request.messages
        for place in reversed(range(len(messages))):
            told = [text for text in self._solutions if text in messages[place].text]
            if messages[place].role == "user" and told:
                is_solved = any(message.role == "assistant" for message in messages[place:])
                call = self._harness.build_shell_call(self._solutions[max(told, key=len)])
                if request.tools and not is_solved:
                    return Message(role="assistant", tool_calls=(_shorten(call, request.tools),))
                break
        else:
            if request.tools:
                raise _refuse("the agent's request holds no task's instruction")
        text, calls = self._harness.build_last_message(LAST_WORD)
        return Message(role="assistant", text=text, tool_calls=calls)

    def _spell(self, request: ChatRequest, reply: Message) -> TokenIds:
        """Return the reply's ids, its end included: what the template writes of it behind the same conversation."""
        renderer, messages, tools = self._renderer, request.messages, request.tools
        prompt, whole = renderer.render(messages, tools), renderer.render([*messages, reply], tools)
        ids = whole[len(prompt) :]
        end = next((place for place, token in enumerate(ids) if token in renderer.stop_token_ids), None)
        if whole[: len(prompt)] != prompt or not end:
            raise _refuse(
                "the chat template does not write a reply behind its own opening of one; if that opens reasoning, try "
                "chat_template_kwargs with enable_thinking: false"
            )
        return ids[: end + 1]


def _list_solutions(tasks: Iterable[Task]) -> Mapping[str, str]:
    """Map instructions, without the blanks around them that agents trim, to their solving commands."""
    solutions: dict[str, str] = {}
    for task in tasks:
        gold = task.metadata.get("gold")
        if not isinstance(gold, str) or not gold.strip():
            raise ConfigError(f"solutions: task {task.id!r} has none; give a shell command as `gold` of its metadata")
        if solutions.setdefault(task.instruction.strip(), gold) != gold:
            raise ConfigError(f"solutions: task {task.id!r} has the instruction of another with another solution")
    return solutions


def _refuse(reason: str) -> WireError:
    # no failure of an engine, after which agents ask the same for minutes
    return WireError(f"solutions: {reason}")


def _shorten(call: ToolCall, tools: Sequence[Tool]) -> ToolCall:
    """Leave out arguments that the agent does not ask for, such as a description: a small model has to learn each.

    Spaces are those of the demonstrations, and of what models write: without them SFT taught SmolLM2 to leave out more
    than the spaces (`"arguments":"mv a b"`).
    """
    arguments: dict[str, Any] = json.loads(call.arguments)
    required = next((tool.parameters.get("required") for tool in tools if tool.name == call.name), None)
    kept = {name: value for name, value in arguments.items() if required is None or name in required}
    return ToolCall(id=call.id, name=call.name, arguments=json.dumps(kept))
