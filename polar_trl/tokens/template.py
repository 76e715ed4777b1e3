"""Make a renderer of any Jinja chat template, with continuations that were proven (see `proof`).

For models that `families` does not know. Where the template would have rewritten the reply, `extend` returns
None, and the caller renders anew.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from polar_trl.errors import RenderError
from polar_trl.tokens.chat_template import ChatTemplate, ChatTokenizer
from polar_trl.tokens.encoding import PromptTokenizer
from polar_trl.tokens.proof import find_turn_end, prove_continuation, write_tail
from polar_trl.tokens.tool_calls import build_tool_calls, split_tagged_calls
from polar_trl.types import Message, TokenIds, Tool

logger = logging.getLogger(__name__)

_NUM_OPENING_TOKENS = 32
"""More than any template writes between the start of an assistant turn and the first sampled token."""


class TemplateRenderer:
    """A renderer made of a tokenizer and its chat template.

    Args:
        tokenizer: A `transformers` tokenizer with a chat template.
        thinking: Where the template removes reasoning from earlier turns, "keep" continues with the sampled tokens
            all the same, and "template" renders anew, which begins a fork.
        template_kwargs: Handed to the chat template, such as `enable_thinking`.
        strict: Raise `RenderError` where some replies, or all, could not be continued.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        *,
        thinking: Literal["keep", "template"] = "keep",
        template_kwargs: Mapping[str, Any] | None = None,
        strict: bool = False,
    ) -> None:
        if not isinstance(tokenizer, PromptTokenizer):
            tokenizer = PromptTokenizer(tokenizer)
        self._tokenizer: ChatTokenizer = tokenizer
        self._template = ChatTemplate(tokenizer, kwargs=template_kwargs)
        self._turn_end = find_turn_end(self._template, tokenizer)
        self._continuation = prove_continuation(self._template, self._turn_end)
        self._thinking = thinking
        ends = [self._turn_end.id if self._turn_end else None, tokenizer.eos_token_id]
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys(end for end in ends if end is not None))
        if not self.stop_token_ids:
            raise RenderError(
                "neither the chat template nor the tokenizer has a token that ends a turn; set eos_token"
            )
        self._report(strict=strict)

    @property
    def continuation_refusal(self) -> str | None:
        """The reason why every turn is rendered anew; None where replies can be continued."""
        return self._continuation.refusal

    @property
    def prompts_tools(self) -> bool:
        """True where tools are described in the system message, because the template has no place for them."""
        return not self._template.has_tools

    @property
    def limits(self) -> tuple[str, ...]:
        """Sentences that say which replies cannot be continued, and why; empty if all can."""
        found = self._continuation
        limits = []
        if found.refusal is not None:
            limits.append(f"every turn is rendered anew and forks: {found.refusal}")
        if found.trims_replies:
            limits.append("a reply with whitespace around it forks: the template trims replies")
        if found.drops_thinking and self._thinking == "template":
            limits.append("a reply with reasoning forks: the template removes it from earlier turns")
        return tuple(limits)

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> TokenIds:
        """Render the whole conversation and the opening of the next assistant turn. Raises `RenderError`."""
        if not messages:
            raise RenderError("the conversation is empty; send at least one message")
        return tuple(self._tokenizer.encode(self._template.write(messages, tools), add_special_tokens=False))

    def extend(
        self, prompt_ids: TokenIds, completion_ids: TokenIds, new_messages: Sequence[Message], tools: Sequence[Tool]
    ) -> TokenIds | None:
        """As `Renderer.extend`; None where the template would have rewritten the reply."""
        if self._turn_end is None or self._continuation.refusal is not None or not completion_ids:
            return None
        if not new_messages or any(message.role == "assistant" for message in new_messages):
            return None
        if self._rewrites(prompt_ids, completion_ids):
            return None
        text = self._turn_end.text + write_tail(self._template, self._turn_end, new_messages)
        # encoded together with the end of turn: some tokenizers put a space before the first word of a text
        turn_end_id, *ids = self._tokenizer.encode(text, add_special_tokens=False)
        if turn_end_id != self._turn_end.id:
            raise RenderError(f"the end of turn {self._turn_end.text!r} was encoded as part of another token")
        close = () if completion_ids[-1] in self.stop_token_ids else (turn_end_id,)
        tail = (*close, *ids)
        return prompt_ids + (completion_ids + tail)

    def parse(self, prompt_ids: TokenIds, completion_ids: TokenIds, tools: Sequence[Tool]) -> Message:
        """Parse text, reasoning in <think> tags (if the template knows them), and JSON calls in <tool_call> tags."""
        text, reasoning = self._decode(completion_ids), None
        if self._template.has_thinking:
            text, reasoning = _split_reasoning(text, is_open=self._opens_thinking(prompt_ids))
        text, calls = split_tagged_calls(text)
        tool_calls = build_tool_calls(calls, prompt_ids, completion_ids)
        return Message(role="assistant", text=text, reasoning=reasoning, tool_calls=tuple(tool_calls))

    def _rewrites(self, prompt_ids: TokenIds, completion_ids: TokenIds) -> bool:
        found = self._continuation
        checks_thinking = found.drops_thinking and self._thinking == "template"
        if not found.trims_replies and not checks_thinking:
            return False
        text = self._decode(completion_ids)
        if found.trims_replies and text != text.strip():
            return True
        return checks_thinking and ("<think>" in self._decode_opening(prompt_ids) or "</think>" in text)

    def _decode(self, completion_ids: TokenIds) -> str:
        if completion_ids and completion_ids[-1] in self.stop_token_ids:
            completion_ids = completion_ids[:-1]
        return self._tokenizer.decode(list(completion_ids), skip_special_tokens=False)

    def _decode_opening(self, prompt_ids: TokenIds) -> str:
        """Decode the last tokens of a prompt, from the last end of turn on."""
        tail = list(prompt_ids[-_NUM_OPENING_TOKENS:])
        for position in range(len(tail) - 1, -1, -1):
            if tail[position] in self.stop_token_ids:
                return self._tokenizer.decode(tail[position + 1 :], skip_special_tokens=False)
        return self._tokenizer.decode(tail, skip_special_tokens=False)

    def _opens_thinking(self, prompt_ids: TokenIds) -> bool:
        return self._decode_opening(prompt_ids).rstrip().endswith("<think>")

    def _report(self, *, strict: bool) -> None:
        if strict and self.limits:
            raise RenderError("; ".join(self.limits))
        for limit in self.limits:
            logger.warning("chat template: %s", limit)
        if self._continuation.drops_thinking and self._thinking == "keep":
            logger.info("chat template: it removes earlier reasoning; prompts keep sampled reasoning all the same")
        if self.prompts_tools:
            logger.info("chat template: no tools that replies can be read for; tools go into the system message")


def _split_reasoning(text: str, *, is_open: bool) -> tuple[str, str | None]:
    """Split a reply from its leading <think> block. An unclosed block is all reasoning."""
    start = text.lstrip()
    if not is_open and not start.startswith("<think>"):
        return text, None
    reasoning, closed, rest = start.removeprefix("<think>").partition("</think>")
    return (rest.lstrip("\n") if closed else ""), reasoning.strip() or None
