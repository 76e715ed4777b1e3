"""Make a renderer of any Jinja chat template, with continuations that were proven (see `proof`).

For models that `families` does not know. Where the template would have rewritten the reply, `extend` returns
None, and the caller renders anew.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from polar_trl.errors import RenderError
from polar_trl.tokens.base import ParsedReply
from polar_trl.tokens.chat_template import ChatTemplate, ChatTokenizer
from polar_trl.tokens.encoding import PromptTokenizer
from polar_trl.tokens.plain_text import PlainText
from polar_trl.tokens.proof import find_turn_end, prove_continuation, write_tail
from polar_trl.tokens.tagged_reply import build_reply, find_turn_length, split_reply, write_reply_start
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
        end_ids: More tokens that end a turn, such as those of the model's generation config.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        *,
        thinking: Literal["keep", "template"] = "keep",
        template_kwargs: Mapping[str, Any] | None = None,
        strict: bool = False,
        end_ids: Sequence[int] = (),
    ) -> None:
        self._plain = PlainText(tokenizer)
        if not isinstance(tokenizer, PromptTokenizer):
            tokenizer = PromptTokenizer(tokenizer)
        self._tokenizer: ChatTokenizer = tokenizer
        self._template = ChatTemplate(tokenizer, kwargs=template_kwargs)
        self._turn_end = find_turn_end(self._template, tokenizer)
        self._continuation = prove_continuation(self._template, self._turn_end)
        self._thinking = thinking
        ends = [self._turn_end.id if self._turn_end else None, tokenizer.eos_token_id, *end_ids]
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
        plain = self._plain
        text = self._template.write(plain.set_seams(messages), plain.set_seams_in_tools(tools))
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

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
        text = self._turn_end.text + write_tail(self._template, self._turn_end, self._plain.set_seams(new_messages))
        # encoded together with the end of turn: some tokenizers put a space before the first word of a text
        turn_end_id, *ids = self._tokenizer.encode(text, add_special_tokens=False)
        if turn_end_id != self._turn_end.id:
            raise RenderError(f"the end of turn {self._turn_end.text!r} was encoded as part of another token")
        close = () if completion_ids[-1] == turn_end_id else (turn_end_id,)
        tail = (*close, *ids)
        return prompt_ids + (completion_ids + tail)

    def continue_reply(self, prompt_ids: TokenIds, reply: Message) -> TokenIds:
        """As `Renderer.continue_reply`."""
        has_thinking = self._template.has_thinking
        (reply,) = self._plain.set_seams([reply])
        text = write_reply_start(
            reply, has_thinking=has_thinking, is_open=has_thinking and self._opens_thinking(prompt_ids)
        )
        return prompt_ids + tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def parse(self, prompt_ids: TokenIds, completion_ids: TokenIds, tools: Sequence[Tool]) -> Message:
        """Parse text, reasoning in <think> tags (if the template knows them), and calls in <tool_call> tags."""
        return self.parse_reply(prompt_ids, completion_ids, tools).message

    def parse_reply(self, prompt_ids: TokenIds, completion_ids: TokenIds, tools: Sequence[Tool]) -> ParsedReply:
        """As `Renderer.parse_reply`."""
        has_thinking = self._template.has_thinking
        is_open = has_thinking and self._opens_thinking(prompt_ids)
        reply = split_reply(self._decode(completion_ids), has_thinking=has_thinking, is_open=is_open, tools=tools)
        return build_reply(reply, prompt_ids, completion_ids, self.stop_token_ids)

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
        said = list(completion_ids[: find_turn_length(completion_ids, self.stop_token_ids)])
        return self._tokenizer.decode(said, skip_special_tokens=False)

    def _decode_opening(self, prompt_ids: TokenIds) -> str:
        """Decode a prompt from its last end of turn on, or its last tokens where it has none."""
        stops = set(self.stop_token_ids)
        for position in range(len(prompt_ids) - 1, -1, -1):
            if prompt_ids[position] in stops:
                return self._tokenizer.decode(list(prompt_ids[position + 1 :]), skip_special_tokens=False)
        return self._tokenizer.decode(list(prompt_ids[-_NUM_OPENING_TOKENS:]), skip_special_tokens=False)

    def _opens_thinking(self, prompt_ids: TokenIds) -> bool:
        text = self._decode_opening(prompt_ids)
        opening = self._template.reply_opening
        if opening and opening in text:
            said = text.rpartition(opening)[2]  # by the template, and by a reply that is continued
            return said.rfind("<think>") > said.rfind("</think>")
        return text.rstrip().endswith("<think>")

    def _report(self, *, strict: bool) -> None:
        if strict and self.limits:
            raise RenderError("; ".join(self.limits))
        for limit in self.limits:
            logger.warning("chat template: %s", limit)
        if self._continuation.drops_thinking and self._thinking == "keep":
            logger.info("chat template: it removes earlier reasoning; prompts keep sampled reasoning all the same")
        if self.prompts_tools:
            logger.info("chat template: no tools that replies can be read for; tools go into the system message")
