"""Check the options that fit an agent's first prompt into a small window: system prompt, tools, an earlier session.

They are the same for every agent that has them. How an agent is told is in its own module.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from polar_trl.errors import ConfigError
from polar_trl.types import Endpoint

DONE = "Done."
"""The assistant's last word in each demonstration, after the command's output."""
# fixed, so that a launch is the same each time
EARLIER_ID = "00000000-0000-4000-8000-000000000000"
"""Of the earlier session."""
EARLIER = "2026-01-01T00:00:00.000Z"
EARLIER_MS = 1_767_225_600_000
"""The same time, in milliseconds since 1970."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Demonstration:
    """A request of the earlier session, answered by one call of the agent's shell tool."""

    request: str
    command: str
    call_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptOptions:
    """What an agent is told instead of its own prompt."""

    system_prompt: str | None = None
    """In place of the agent's own, and of what it reads from the work folder (AGENTS.md and the like)."""
    tools: tuple[str, ...] | None = None
    """Of the agent's own tools, those that the policy may use; None leaves the agent's choice."""
    demonstrations: tuple[Demonstration, ...] = ()
    """Turns of an earlier session that the agent resumes."""

    @property
    def is_shorter(self) -> bool:
        """Whether the prompt may be shorter than the agent's own."""
        return self.system_prompt is not None or self.tools is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSize:
    """The tokens of an agent's first prompt with an instruction of one word: system prompt, tools and context.

    Counted at the verified versions with the 151,000 tokens of Qwen's vocabulary, and rounded down. Smaller
    vocabularies need more, SmolLM2's 6 to 30 % (`polar-trl doctor --model`).
    """

    default: int
    smallest: int
    """With a system prompt of one word and the shell tool alone; from SmolLM2's count, 5 to 25 % below it."""

    def require_fit(self, name: str, endpoint: Endpoint, *, is_shorter: bool) -> None:
        """Raise `ConfigError` where the prompt leaves no room in the context window."""
        tokens = self.smallest if is_shorter else self.default
        if tokens < endpoint.max_model_len:
            return
        shorter = (
            "" if is_shorter else f", or give the agent a shorter prompt by agent_options (down to {self.smallest})"
        )
        raise ConfigError(
            f"{name}: its own prompt has about {tokens} tokens, and the context window is {endpoint.max_model_len}: "
            f"set vllm_max_model_length higher{shorter}"
        )


def check_prompt_options(
    agent: str,
    *,
    offered: Sequence[str],
    shell: str,
    system_prompt: object = None,
    tools: object = None,
    demonstrations: object = (),
) -> PromptOptions:
    """Check the three options as a run file gives them. Raises `ConfigError`.

    Args:
        agent: Its name, for the error.
        offered: The names of its tools.
        shell: The one of them that runs a command.
    """
    names = None if tools is None else _check_tools(agent, tools, offered)
    pairs = tuple(_check_demonstrations(agent, demonstrations))
    if pairs and names is not None and shell not in names:
        raise ConfigError(
            f"{agent}: demonstrations call the tool {shell}, and tools are {', '.join(names)}; add {shell}"
        )
    text = None if system_prompt is None else check_system_prompt(agent, system_prompt)
    return PromptOptions(system_prompt=text, tools=names, demonstrations=pairs)


def check_system_prompt(agent: str, text: object) -> str:
    """Return the text. Raises `ConfigError` where it is none."""
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(
            f"{agent}: system_prompt must be a text with words in it, not {text!r}; leave it out for the agent's own"
        )
    return _join_surrogates(agent, "system_prompt", text)


def _check_tools(agent: str, names: object, offered: Sequence[str]) -> tuple[str, ...]:
    if isinstance(names, str) or not isinstance(names, Sequence) or not names:
        raise ConfigError(f"{agent}: tools must be a list such as [{offered[0]}], not {names!r}")
    for name in names:
        if name not in offered:
            raise ConfigError(f"{agent}: tools names {name!r}; there are {', '.join(offered)}")
    return tuple(dict.fromkeys(names))


def _check_demonstrations(agent: str, pairs: object) -> Iterable[Demonstration]:
    if isinstance(pairs, str) or not isinstance(pairs, Sequence):
        raise ConfigError(f"{agent}: demonstrations must be a list of pairs, not {pairs!r}")
    for position, pair in enumerate(pairs):
        match pair:
            case [str(request), str(command)] if request.strip() and command.strip():
                request, command = (_join_surrogates(agent, "demonstrations", text) for text in (request, command))
                yield Demonstration(request=request, command=command, call_id=f"demonstration{position}")
            case _:
                raise ConfigError(
                    f"{agent}: demonstrations has {pair!r}; each must be a request and a command, both with words in "
                    "them"
                )


def _join_surrogates(agent: str, option: str, text: str) -> str:
    """Return the text with each surrogate pair as its character: YAML reads JSON's escapes of an emoji as two."""
    try:
        return text.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{agent}: {option} has half a surrogate pair in {text!r}, which is no text") from error
