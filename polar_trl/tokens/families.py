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

from polar_trl.errors import ConfigError, RenderError
from polar_trl.tokens.chat_dicts import SystemPlacement, build_message_dict, build_tool_dict, place_system
from polar_trl.tokens.encoding import PromptTokenizer
from polar_trl.tokens.tool_calls import (
    UNNAMED,
    ParsedCall,
    build_tool_calls,
    parse_json_call,
    parse_xml_call,
    split_tagged_calls,
)
from polar_trl.types import Message, TokenIds, Tool

logger = logging.getLogger(__name__)

FAMILIES = tuple(sorted(set(MODEL_RENDERER_MAP.values())))
"""Names of the families, such as "qwen3" and "qwen3.5"."""

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
    """

    def __init__(
        self,
        tokenizer: Any,
        family: str,
        *,
        thinking: Literal["keep", "template"] = "keep",
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if family not in FAMILIES:
            raise ConfigError(_describe_unknown(family))
        config = config_from_name(family)
        assert config is not None
        if thinking == "keep":
            config = config.model_copy(update={"thinking_retention": "all"})
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
        self.stop_token_ids: tuple[int, ...] = tuple(self._renderer.get_stop_token_ids())

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> TokenIds:
        """Render the whole conversation and the opening of the next assistant turn. Raises `RenderError`."""
        if not messages:
            raise RenderError("the conversation is empty; send at least one message")
        dicts = self._build_dicts(messages, at_start=True)
        try:
            ids = self._run(
                partial(self._renderer.render_ids, dicts, tools=_build_tools(tools), add_generation_prompt=True)
            )
        except Exception as error:  # what a family cannot express, it says with any exception
            raise RenderError(f"the chat format of {self.family} refuses the conversation: {error}") from error
        return tuple(ids or ())

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

    def parse(self, prompt_ids: TokenIds, completion_ids: TokenIds, tools: Sequence[Tool]) -> Message:
        """Parse the message that the sampled ids spell; text after a tool call is kept too."""
        try:
            parsed = self._renderer.parse_response(
                list(completion_ids), tools=_build_tools(tools), prompt_ids=self._take_opening(prompt_ids)
            )
        except (ValueError, RecursionError) as error:
            # renderers expects JSON to fail by its syntax only; a number of 5000 digits or 1000 nested brackets, which
            # a policy stuck in a loop does sample, fails otherwise
            logger.warning("%s cannot read a reply of %d tokens: %s", self.family, len(completion_ids), error)
            return self._parse_tags(prompt_ids, completion_ids)
        calls = [_read_call(call, tools) for call in parsed.tool_calls]
        texts = [parsed.content, *self._texts_after_calls(parsed, completion_ids)]
        return Message(
            role="assistant",
            text="\n".join(text for text in texts if text),
            reasoning=(parsed.reasoning_content or "").strip() or None,
            tool_calls=tuple(build_tool_calls(calls, prompt_ids, completion_ids)),
        )

    def _parse_tags(self, prompt_ids: TokenIds, completion_ids: TokenIds) -> Message:
        """Parse the message by its tags alone; a call in it that cannot be read is marked."""
        end = next((i for i, token in enumerate(completion_ids) if token in self.stop_token_ids), len(completion_ids))
        text = self._tokenizer.decode(list(completion_ids[:end]), skip_special_tokens=False)
        reasoning, closed, rest = text.partition("</think>")
        text, calls = split_tagged_calls(rest if closed else text)
        return Message(
            role="assistant",
            text=text.strip("\n"),
            reasoning=(reasoning.strip().removeprefix("<think>").strip() or None) if closed else None,
            tool_calls=tuple(build_tool_calls(calls, prompt_ids, completion_ids)),
        )

    def _texts_after_calls(self, parsed: ParsedResponse, completion_ids: TokenIds) -> list[str]:
        """Return text between and after tool calls, which parsers leave out, where all else there is calls."""
        if not self.family.startswith("qwen") or not parsed.tool_calls:
            return []
        end = next((i for i, token in enumerate(completion_ids) if token in self.stop_token_ids), len(completion_ids))
        spans = [call.token_span for call in parsed.tool_calls if call.token_span is not None]
        starts = [span[0] for span in spans[1:]] + [end]
        texts = []
        for (_, gap_start), gap_end in zip(spans, starts, strict=True):
            ids = list(completion_ids[gap_start:gap_end])
            texts.append(self._tokenizer.decode(ids, skip_special_tokens=False).strip() if ids else "")
        return texts

    def _bridge(
        self, prompt_ids: list[int], completion_ids: list[int], dicts: list[Any], tools: Sequence[Tool]
    ) -> list[int] | None:
        extended = self._renderer.bridge_to_next_turn(prompt_ids, completion_ids, dicts, tools=_build_tools(tools))
        return None if extended is None else extended.token_ids

    def _run(self, render: Callable[[], list[int] | None]) -> list[int] | None:
        return self._tokenizer.render_quickly(render) if self.family in _READING_LITTLE else render()

    def _take_opening(self, prompt_ids: TokenIds) -> list[int]:
        """Take what the family reads of a prompt: from the end of the last turn on, or all of it."""
        if self.family in _READING_LITTLE:
            tail = list(prompt_ids[-_NUM_OPENING_TOKENS:])
            for position in range(len(tail) - 1, -1, -1):
                if tail[position] in self.stop_token_ids:
                    return tail[position:]
        return list(prompt_ids)

    def _build_dicts(self, messages: Sequence[Message], *, at_start: bool) -> list[Any]:
        placed = place_system(messages, self._system, at_start=at_start)
        return [build_message_dict(message, parse_arguments=False) for message in placed]

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
    xml = parse_xml_call(call.raw, tools)
    if xml is not None:
        return xml
    is_ok = call.status == ToolCallParseStatus.OK
    if call.raw.lstrip().startswith("{") and ('"arguments"' in call.raw or not is_ok):
        return parse_json_call(call.raw)
    if is_ok and call.name and isinstance(call.arguments, dict):
        return call.name, _dump(call.arguments), "ok"
    if call.status == ToolCallParseStatus.UNKNOWN_TOOL and call.name and isinstance(call.arguments, dict):
        return call.name, _dump(call.arguments), "ok"  # the agent knows its tools, and its answer teaches the model
    return call.name or UNNAMED, call.arguments if isinstance(call.arguments, str) else call.raw, "malformed"


def _build_tools(tools: Sequence[Tool]) -> list[Any] | None:
    return [build_tool_dict(tool) for tool in tools] or None


def _dump(arguments: dict[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False)
