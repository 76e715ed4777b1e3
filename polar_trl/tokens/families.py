"""Wrap the chat formats of the package `renderers` (Qwen3, GLM, Kimi and others) as a `Renderer`.

Beyond what the package promises, a continuation that does not begin with the sampled tokens raises, and tool calls are
read from their own text, so that arguments stay as sampled and none is lost.
"""

import difflib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from renderers.base import MODEL_RENDERER_MAP, ParsedResponse, ParsedToolCall, ToolCallParseStatus, create_renderer
from renderers.configs import config_from_name
from renderers.reasoning import prompt_ends_in_reasoning

from polar_trl.errors import ConfigError, RenderError
from polar_trl.json_text import is_json_object, replace_half_surrogates
from polar_trl.tokens.base import DROPPED_TEXT, NO_PREFILL, ParsedReply
from polar_trl.tokens.chat_dicts import (
    SystemPlacement,
    build_message_dict,
    build_tool_dict,
    place_system,
    wrap_malformed,
)
from polar_trl.tokens.encoding import PromptTokenizer
from polar_trl.tokens.plain_text import PlainText
from polar_trl.tokens.tagged_reply import TaggedReply, build_reply, find_turn_length, split_reply, write_reply_start
from polar_trl.tokens.tool_calls import UNNAMED, ParsedCall, parse_json_call, parse_xml_call
from polar_trl.types import Message, TokenIds, Tool

logger = logging.getLogger(__name__)

FAMILIES = tuple(sorted(set(MODEL_RENDERER_MAP.values())))
"""Names of the families, such as "qwen3" and "qwen3.5"."""

_TAGGED = ("qwen", "prime-qwen", "nemotron")
"""Beginnings of the names of families that write <think> and <tool_call> tags, with JSON or <function=> in them."""
_NUM_OPENING_TOKENS = 64
"""More than a chat format writes between the end of the last turn and the first sampled token."""
_READING_LITTLE = frozenset({"qwen3", "qwen3.5", "qwen3.6", "qwen3.8"})
"""Families that read nothing of a prompt before the end of its last turn, and nothing of a text's ids, which spares
most of the work of `renderers`."""

_PROBE_INSTRUCTION = Message(role="system", text="probe instruction")
_PROBE_QUESTION = Message(role="user", text="probe question")


class FamilyRenderer:
    """One family's renderer.

    Args:
        tokenizer: The model's `transformers` tokenizer.
        family: One of `FAMILIES`.
        thinking: Templates of reasoning models remove the reasoning of earlier turns once a new user message comes.
            "keep" continues with the sampled tokens all the same: prompts then hold what was sampled, which the
            template alone would not show the model. "template" renders anew as the template says,
            which is counted as a fork.
        template_kwargs: Switches of the family's chat template, such as `enable_thinking`; unknown ones are refused.
        end_ids: More tokens that end a turn, such as those of the model's generation config.
    """

    def __init__(
        self,
        tokenizer: Any,
        family: str,
        *,
        thinking: Literal["keep", "template"] = "keep",
        template_kwargs: Mapping[str, Any] | None = None,
        end_ids: Sequence[int] = (),
    ) -> None:
        if family not in FAMILIES:
            raise ConfigError(_describe_unknown(family))
        config = config_from_name(family)
        assert config is not None
        if thinking == "keep":
            config = config.model_copy(update={"thinking_retention": "all"})
        self._plain = PlainText(tokenizer)
        if not isinstance(tokenizer, PromptTokenizer):
            tokenizer = PromptTokenizer(tokenizer)
        try:
            self._renderer = create_renderer(tokenizer, config, chat_template_kwargs=template_kwargs)
        except Exception as error:  # renderers asserts on missing tokens and raises pydantic's errors on bad switches
            raise ConfigError(f"the tokenizer does not fit the model family {family!r}: {error}") from error
        self._tokenizer = tokenizer
        self.family = family
        self._system: SystemPlacement = "anywhere"
        self._system = self._find_system_placement()
        self._own_stop_ids: tuple[int, ...] = tuple(self._renderer.get_stop_token_ids())
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys((*self._own_stop_ids, *end_ids)))

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> TokenIds:
        """Render the whole conversation and the opening of the next assistant turn. Raises `RenderError`."""
        if not messages:
            raise RenderError("the conversation is empty; send at least one message")
        try:
            ids = self._render(messages, tools)
        except Exception as error:  # what a family cannot express, it says with any exception
            readable = [wrap_malformed(message) for message in messages]
            if readable == list(messages):
                raise RenderError(f"the chat format of {self.family} refuses the conversation: {error}") from error
            return self.render(readable, tools)
        return tuple(ids or ())

    def _render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int] | None:
        dicts = self._build_dicts(messages, at_start=True)
        return self._run(
            partial(self._renderer.render_ids, dicts, tools=self._build_tools(tools), add_generation_prompt=True)
        )

    def extend(
        self, prompt_ids: TokenIds, completion_ids: TokenIds, new_messages: Sequence[Message], tools: Sequence[Tool]
    ) -> TokenIds | None:
        """As `Renderer.extend`. A turn that ended at its token limit is closed, its reasoning first if that is open.

        Raises `RenderError` if `renderers` breaks its promise to keep what was sampled.
        """
        dicts = self._build_dicts(new_messages, at_start=False)
        opening = self._take_opening(prompt_ids)
        try:
            extended = self._run(partial(self._bridge, opening, list(completion_ids), dicts, tools))
        except Exception as error:
            raise RenderError(f"the chat format of {self.family} refuses the new messages: {error}") from error
        if extended is None:
            return None
        num_kept = len(opening) + len(completion_ids)
        if extended[:num_kept] != [*opening, *completion_ids]:
            raise RenderError(
                f"renderers changed sampled tokens while continuing a {self.family} conversation "
                f"({len(prompt_ids)} prompt and {len(completion_ids)} sampled tokens); use thinking='template', or "
                "report the conversation"
            )
        return prompt_ids + (completion_ids + tuple(extended[num_kept:]))

    def continue_reply(self, prompt_ids: TokenIds, reply: Message) -> TokenIds:
        """As `Renderer.continue_reply`."""
        if not self.family.startswith(_TAGGED):
            raise RenderError(NO_PREFILL)
        (reply,) = self._plain.set_seams([reply])
        text = write_reply_start(reply, has_thinking=True, is_open=self._is_thinking(self._take_opening(prompt_ids)))
        return prompt_ids + tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def parse(self, prompt_ids: TokenIds, completion_ids: TokenIds, tools: Sequence[Tool]) -> Message:
        """Parse the message that the sampled ids spell; text after a tool call is kept too."""
        return self.parse_reply(prompt_ids, completion_ids, tools).message

    def parse_reply(self, prompt_ids: TokenIds, completion_ids: TokenIds, tools: Sequence[Tool]) -> ParsedReply:
        """As `Renderer.parse_reply`. Families whose format we know are read by their tags, others by `renderers`."""
        opening = self._take_opening(prompt_ids)
        reply = None if self.family.startswith(_TAGGED) else self._parse_by_family(opening, completion_ids, tools)
        if reply is None:
            end = find_turn_length(completion_ids, self.stop_token_ids)
            text = self._tokenizer.decode(list(completion_ids[:end]), skip_special_tokens=False)
            reply = split_reply(text, has_thinking=True, is_open=self._is_thinking(opening), tools=tools)
        return build_reply(reply, prompt_ids, completion_ids, self.stop_token_ids)

    def _parse_by_family(
        self, opening: list[int], completion_ids: TokenIds, tools: Sequence[Tool]
    ) -> TaggedReply | None:
        """Return the reply as `renderers` reads it; None where it cannot."""
        end = find_turn_length(completion_ids, self.stop_token_ids)
        if end < len(completion_ids) and completion_ids[end] in self._own_stop_ids:
            end += 1
        ids = list(completion_ids[:end])
        try:
            parsed = self._renderer.parse_response(ids, tools=_build_tools(tools), prompt_ids=opening)
        except Exception as error:  # noqa: BLE001 - a number of 5000 digits, half an emoji as a name: it raises any
            logger.warning("%s cannot read a reply of %d tokens: %s", self.family, len(completion_ids), error)
            return None
        return TaggedReply(
            text=replace_half_surrogates(parsed.content or ""),
            reasoning=replace_half_surrogates((parsed.reasoning_content or "").strip()) or None,
            calls=[_read_call(call, tools) for call in parsed.tool_calls],
            losses={DROPPED_TEXT: 1} if self._has_text_after_calls(parsed, ids) else {},
        )

    def _has_text_after_calls(self, parsed: ParsedResponse, ids: list[int]) -> bool:
        """Tell whether something was said behind the last tool call, which parsers of other families leave out."""
        spans = [call.token_span for call in parsed.tool_calls if call.token_span is not None]
        if not spans:
            return False
        rest = self._tokenizer.decode(ids[max(end for _, end in spans) :], skip_special_tokens=True).strip()
        return bool(rest) and rest not in (parsed.content or "")

    def _is_thinking(self, opening: list[int]) -> bool:
        stop_ids = frozenset(self._own_stop_ids)
        is_open: bool = prompt_ends_in_reasoning(self._tokenizer, opening, stop_ids=stop_ids)
        return is_open

    def _bridge(
        self, prompt_ids: list[int], completion_ids: list[int], dicts: list[Any], tools: Sequence[Tool]
    ) -> list[int] | None:
        extended = self._renderer.bridge_to_next_turn(
            prompt_ids, completion_ids, dicts, tools=self._build_tools(tools)
        )
        return None if extended is None else extended.token_ids

    def _run(self, render: Callable[[], list[int] | None]) -> list[int] | None:
        return self._tokenizer.render_quickly(render) if self.family in _READING_LITTLE else render()

    def _take_opening(self, prompt_ids: TokenIds) -> list[int]:
        """Take what the family reads of a prompt: from the end of the last turn on, or all of it."""
        if self.family in _READING_LITTLE:
            tail = list(prompt_ids[-_NUM_OPENING_TOKENS:])
            for position in range(len(tail) - 1, -1, -1):
                if tail[position] in self._own_stop_ids:
                    return tail[position:]
        return list(prompt_ids)

    def _build_dicts(self, messages: Sequence[Message], *, at_start: bool) -> list[Any]:
        placed = place_system(self._plain.set_seams(messages), self._system, at_start=at_start)
        return [build_message_dict(message, parse_arguments=False) for message in placed]

    def _build_tools(self, tools: Sequence[Tool]) -> list[Any] | None:
        return _build_tools(self._plain.set_seams_in_tools(tools))

    def _find_system_placement(self) -> SystemPlacement:
        if not self._writes([_PROBE_INSTRUCTION, _PROBE_QUESTION]):
            return "never"
        reply = Message(role="assistant", text="probe answer")
        return "anywhere" if self._writes([_PROBE_QUESTION, reply, _PROBE_INSTRUCTION, _PROBE_QUESTION]) else "first"

    def _writes(self, messages: Sequence[Message]) -> bool:
        try:
            ids = self.render(messages, ())
        except RenderError:
            return False
        return _PROBE_INSTRUCTION.text in self._tokenizer.decode(list(ids), skip_special_tokens=False)


def _describe_unknown(family: str) -> str:
    near = difflib.get_close_matches(family.lower(), (*FAMILIES, "auto", "template"), n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    return f"no model family {family!r}; {hint}known are {', '.join(FAMILIES)}; 'template' is for all others"


def _read_call(call: ParsedToolCall, tools: Sequence[Tool]) -> ParsedCall:
    """Read a call from its own text where that is in a known form; otherwise as `renderers` read it."""
    is_ok = call.status in (ToolCallParseStatus.OK, ToolCallParseStatus.UNKNOWN_TOOL)  # the agent knows its tools
    if call.raw.lstrip().startswith("{"):
        if not is_ok or _names(call.raw, call.name):
            return parse_json_call(call.raw)
    elif (xml := parse_xml_call(call.raw, tools)) is not None:
        return xml
    name = replace_half_surrogates(str(call.name or "")) or UNNAMED
    if is_ok and call.name and isinstance(call.arguments, dict):
        arguments = replace_half_surrogates(json.dumps(call.arguments, ensure_ascii=False))
        return name, arguments, "ok" if is_json_object(arguments) else "malformed"
    return (
        name,
        call.arguments if isinstance(call.arguments, str) and call.arguments.strip() else call.raw,
        "malformed",
    )


def _names(raw: str, name: str | None) -> bool:
    """Tell whether a call's text is an object with its name in it, and not its arguments alone."""
    return parse_json_call(raw)[0] == name


def _build_tools(tools: Sequence[Tool]) -> list[Any] | None:
    return [build_tool_dict(tool) for tool in tools] or None
