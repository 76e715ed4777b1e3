"""Define a renderer: a chat template that also parses replies and continues a prompt token for token."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from polar_trl.errors import RenderError
from polar_trl.types import Message, TokenIds, Tool

NO_PREFILL = "This model does not support assistant message prefill. The conversation must end with a user message."
"""Anthropic's words, of its own models that do not."""
DROPPED_TEXT = "reply_text_dropped"
"""Replies with sampled text that is in no part of their message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedReply:
    """A reply as it was understood, and what was not."""

    message: Message
    losses: Mapping[str, int] = field(default_factory=dict)
    """Counts of the session, by name: what the agent does not get of what was sampled."""


class Renderer(Protocol):
    """One model family's chat format."""

    stop_token_ids: tuple[int, ...]
    """Tokens that end an assistant turn."""

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> TokenIds:
        """Render the whole conversation and the opening of the next assistant turn.

        Raises `RenderError` if the template cannot express it.
        """
        ...

    def extend(
        self, prompt_ids: TokenIds, completion_ids: TokenIds, new_messages: Sequence[Message], tools: Sequence[Tool]
    ) -> TokenIds | None:
        """Return `prompt_ids + completion_ids`, the end of that turn if it is missing, then only `new_messages`.

        The result begins with `prompt_ids + completion_ids` exactly. None where the template would rewrite what
        came before (its own rules drop earlier reasoning, say): the caller renders anew, and a fork begins.
        """
        ...

    def continue_reply(self, prompt_ids: TokenIds, reply: Message) -> TokenIds:
        """Return a prompt with the beginning of the reply behind it, from which the model goes on.

        Raises `RenderError` where the format does not say how a reply begins.
        """
        raise RenderError(NO_PREFILL)

    def parse(self, prompt_ids: TokenIds, completion_ids: TokenIds, tools: Sequence[Tool]) -> Message:
        """Parse the sampled ids into an assistant message. Bad tool calls are kept and marked, never dropped."""
        ...

    def parse_reply(self, prompt_ids: TokenIds, completion_ids: TokenIds, tools: Sequence[Tool]) -> ParsedReply:
        """As `parse`, with what was lost."""
        return ParsedReply(message=self.parse(prompt_ids, completion_ids, tools))
