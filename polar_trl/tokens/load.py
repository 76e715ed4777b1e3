"""Choose the renderer for a tokenizer and a model's name or folder, and log the reason.

A family of `renderers` is taken only if it writes what the tokenizer's own chat template writes, token for token, on
probe conversations. So a folder of a Qwen3 checkpoint is recognised whatever it is called, and another model's ChatML
is not taken for Qwen3's. A name alone decides only where the tokenizer has no template to compare with.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from renderers.base import MODEL_RENDERER_MAP
from transformers.utils import cached_file

from polar_trl.errors import ConfigError, RenderError
from polar_trl.tokens.base import Renderer
from polar_trl.tokens.chat_dicts import build_message_dict, build_tool_dict
from polar_trl.tokens.encoding import PromptTokenizer
from polar_trl.tokens.families import FamilyRenderer
from polar_trl.tokens.template import TemplateRenderer
from polar_trl.types import Message, TokenIds, Tool, ToolCall

logger = logging.getLogger(__name__)

_FAMILIES_OF_MODEL_TYPE: Mapping[str, tuple[str, ...]] = {
    "qwen3": ("qwen3",),
    "qwen3_moe": ("qwen3",),
    "qwen3_5": ("qwen3.5", "qwen3.6", "qwen3.8"),
    "qwen3_5_moe": ("qwen3.5", "qwen3.6", "qwen3.8"),
    "glm4_moe": ("glm-4.5",),
    "llama": ("llama-3",),
}
"""`model_type` of a config.json, and the families to compare with."""

_FAMILIES_OF_MARKS: Sequence[tuple[tuple[str, ...], tuple[str, ...]]] = (
    (("<function=", "<|im_start|>"), ("qwen3.5", "qwen3.6", "qwen3.8")),
    (("<tool_call>", "<think>", "<|im_start|>"), ("qwen3",)),
)
"""Words of a chat template, and the families to compare with: for folders without a config.json."""

_TOOLS = (
    Tool(
        name="read_file",
        description="Reads a file – all of it.",
        parameters={
            "type": "object",
            "properties": {"path": {"type": "string"}, "whole": {"type": "boolean"}},
            "required": ["path"],
        },
    ),
    Tool(name="list_files", description="Lists files.", parameters={"type": "object", "properties": {}}),
)


def load_renderer(
    tokenizer: Any,
    model_name_or_path: str,
    *,
    family: str | None = None,
    thinking: Literal["keep", "template"] = "keep",
    template_kwargs: Mapping[str, Any] | None = None,
    strict: bool = False,
    end_ids: Sequence[int] = (),
) -> Renderer:
    """Load the renderer for a model.

    Args:
        tokenizer: Its `transformers` tokenizer.
        model_name_or_path: Hub name or local folder.
        family: Chosen by hand: one of `families.FAMILIES`, taken without comparison, or "template" for the
            tokenizer's own chat template. None or "auto" finds out.
        thinking: What becomes of reasoning in earlier turns; see `FamilyRenderer`.
        template_kwargs: Switches of the chat template, such as `enable_thinking`.
        strict: With the tokenizer's own template, raise `RenderError` where replies cannot be continued exactly.
        end_ids: Tokens that end a turn, beside those of the family, the template, the tokenizer and the model's
            generation config.

    Raises `ConfigError` for an unknown family or a switch that it does not have.
    """
    kwargs = dict(template_kwargs or {})
    ends = tuple(dict.fromkeys((*end_ids, *_read_end_ids(model_name_or_path))))
    tokenizer = PromptTokenizer(tokenizer)  # one for all that are tried
    if family == "auto":
        family = None
    if family is not None and family != "template":
        renderer = FamilyRenderer(tokenizer, family, thinking=thinking, template_kwargs=kwargs, end_ids=ends)
        logger.info("renderer: %s, as asked", family)
        return renderer
    if family is None:
        for candidate in _list_candidates(tokenizer, model_name_or_path):
            found = _try_family(tokenizer, candidate, thinking=thinking, kwargs=kwargs, end_ids=ends)
            if found is not None:
                return found
    logger.info("renderer: the tokenizer's own chat template%s", ", as asked" if family else "")
    return TemplateRenderer(tokenizer, thinking=thinking, template_kwargs=kwargs, strict=strict, end_ids=ends)


def _list_candidates(tokenizer: Any, model_name_or_path: str) -> list[str]:
    """List the families that the model may be of, the likeliest first."""
    names = (model_name_or_path, getattr(tokenizer, "name_or_path", ""))
    candidates = [MODEL_RENDERER_MAP[name] for name in names if name in MODEL_RENDERER_MAP]
    model_type = str(_read_json(Path(model_name_or_path) / "config.json").get("model_type", ""))
    candidates += _FAMILIES_OF_MODEL_TYPE.get(model_type, ())
    template = str(tokenizer.chat_template or "")
    for marks, families in _FAMILIES_OF_MARKS:
        if all(mark in template for mark in marks):
            candidates += families
    return list(dict.fromkeys(candidates))


def _read_end_ids(model_name_or_path: str) -> tuple[int, ...]:
    """Read every token that the model's own settings call an end, as vLLM does: it stops at them unasked."""
    for name in ("generation_config.json", "config.json"):
        try:
            path = cached_file(
                model_name_or_path,
                name,
                _raise_exceptions_for_gated_repo=False,
                _raise_exceptions_for_missing_entries=False,
                _raise_exceptions_for_connection_errors=False,
            )
        except OSError:  # no folder, and no repository of the hub
            return ()
        settings = {} if path is None else _read_json(Path(path))
        text_settings = settings.get("text_config")
        found = settings.get("eos_token_id")
        if found is None and isinstance(text_settings, dict):
            found = text_settings.get("eos_token_id")
        if found is not None:
            return tuple(end for end in (found if isinstance(found, list) else [found]) if isinstance(end, int))
    return ()


def _read_json(path: Path) -> dict[str, Any]:
    """Read an object; an empty one where there is no such file. Raises `ConfigError`."""
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    return config if isinstance(config, dict) else {}


def _try_family(
    tokenizer: Any,
    family: str,
    *,
    thinking: Literal["keep", "template"],
    kwargs: dict[str, Any],
    end_ids: Sequence[int],
) -> FamilyRenderer | None:
    """Return the family's renderer if it writes what the tokenizer's chat template writes.

    Small Qwen3.5 models do not think unless told to, and a folder's name does not say which one it holds: both
    settings are compared with the template's own, and what is logged is about the settings that were asked for.
    """
    variants = [kwargs] if "enable_thinking" in kwargs else [kwargs, {**kwargs, "enable_thinking": False}]
    reasons: list[str] = []
    for variant in variants:
        try:
            renderer = FamilyRenderer(tokenizer, family, thinking=thinking, template_kwargs=variant, end_ids=end_ids)
        except ConfigError as error:
            # a model type such as "llama" is that of many models: without switches, only tokens are missing
            reasons += [str(error)] if kwargs else []
            break
        if not tokenizer.chat_template:
            logger.info("renderer: %s, by the model's name; the tokenizer has no template to compare with", family)
            return renderer
        difference = _find_difference(renderer, tokenizer, family, kwargs, variant)
        if difference is None:
            logger.info("renderer: %s, which writes what the tokenizer's chat template writes", family)
            return renderer
        reasons.append(f"it differs from the chat template on {difference}")
    if reasons:
        logger.info("renderer: not %s: %s", family, reasons[0])
    return None


def _find_difference(
    renderer: FamilyRenderer, tokenizer: Any, family: str, kwargs: dict[str, Any], variant: dict[str, Any]
) -> str | None:
    """Return the name of a probe that family and template write differently; None if there is none.

    Without thinking, `renderers` departs from the template on purpose: earlier replies keep the empty reasoning that
    they were prompted with. Conversations with earlier replies are therefore compared with thinking.
    """
    later_renderer, later_kwargs = renderer, kwargs
    if variant.get("enable_thinking") is False:
        later_kwargs = {**kwargs, "enable_thinking": True}
        later_renderer = FamilyRenderer(tokenizer, family, template_kwargs=later_kwargs)
    for name, messages, tools in _list_probes():
        is_first = all(message.role != "assistant" for message in messages)
        compared, compared_kwargs = (renderer, kwargs) if is_first else (later_renderer, later_kwargs)
        try:
            if compared.render(messages, tools) != _apply_template(tokenizer, messages, tools, compared_kwargs):
                return name
        except RenderError as error:
            return f"{name} ({error})"
    return None


def _apply_template(
    tokenizer: Any, messages: Sequence[Message], tools: Sequence[Tool], kwargs: Mapping[str, Any]
) -> TokenIds:
    try:
        text = tokenizer.apply_chat_template(
            [build_message_dict(message, parse_arguments=True) for message in messages],
            tools=[build_tool_dict(tool) for tool in tools] or None,
            tokenize=False,
            add_generation_prompt=True,
            **kwargs,
        )
    except Exception as error:  # templates are programs: they raise anything
        raise RenderError(f"the chat template refuses it: {error}") from error
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def _list_probes() -> list[tuple[str, list[Message], tuple[Tool, ...]]]:
    system = Message(role="system", text="Answer briefly.")
    user = Message(role="user", text="What is in notes.txt, naïve 🙂?\n\n- all of it")
    call = Message(
        role="assistant",
        text="I look.",
        tool_calls=(
            ToolCall(id="probe0001", name="read_file", arguments='{"path": "notes.txt", "whole": true}'),
            ToolCall(id="probe0002", name="list_files", arguments="{}"),
        ),
    )
    results = [
        Message(role="tool", text="first line\nsecond line", tool_call_id="probe0001"),
        Message(role="tool", text="notes.txt", tool_call_id="probe0002"),
    ]
    thought = Message(role="assistant", text="Two lines.", reasoning="I count them.")
    followup = Message(role="user", text="And now?")
    return [
        ("one question", [user], ()),
        ("a system message", [system, user], ()),
        ("tools", [user], _TOOLS),
        ("tools under a system message", [system, user], _TOOLS),
        ("an earlier reply", [user, Message(role="assistant", text="Two lines."), followup], ()),
        ("an earlier reply with reasoning", [system, user, thought, followup], ()),
        ("tool calls and results", [system, user, call, *results], _TOOLS),
        ("a reply after tool calls", [system, user, call, *results, thought, followup], _TOOLS),
    ]
