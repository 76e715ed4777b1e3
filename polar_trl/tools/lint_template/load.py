"""Load a model's tokenizer, chat template and renderers, with the reasons for the choice of renderer.

A model without a tokenizer, without a chat template, or with one that does not write the user's text raises
`ConfigError`: there is nothing to lint.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from polar_trl.errors import ConfigError, RecordError, RenderError
from polar_trl.recording.log import read_record
from polar_trl.tokens.base import Renderer
from polar_trl.tokens.chat_template import ChatTemplate
from polar_trl.tokens.families import FamilyRenderer
from polar_trl.tokens.load import load_renderer
from polar_trl.tokens.template import TemplateRenderer
from polar_trl.types import Call, Message

Policy = Literal["keep", "template"]
POLICIES: tuple[Policy, ...] = ("keep", "template")
_CHOICE = "renderer: "
"""How lines of a log begin that say which renderer is taken."""
_QUESTION = Message(role="user", text="probe question")
_REPLY = Message(role="assistant", text="probe answer")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """A model's chat format: its tokenizer, its template and the renderers of both policies."""

    name: str
    tokenizer: Any
    template: ChatTemplate
    """The tokenizer's own template."""
    renderers: Mapping[Policy, Renderer]
    """How polar_trl writes prompts, by policy for earlier reasoning."""
    renderer: str
    """A family of `renderers`, or "template"."""
    why: tuple[str, ...]
    """How the renderer was found, in sentences."""


def load_model(
    name: str, *, family: str | None = None, template_kwargs: Mapping[str, Any] | None = None
) -> LoadedModel:
    """Load a model. Raises `ConfigError` without tokenizer or usable template, or where the family does not fit."""
    tokenizer = _load_tokenizer(name)
    if not tokenizer.chat_template:
        raise ConfigError(f"the tokenizer of {name} has no chat template; name an instruct model, or save it with one")
    with _heard("polar_trl.tokens") as heard:
        try:
            renderers: dict[Policy, Renderer] = {
                policy: load_renderer(tokenizer, name, family=family, thinking=policy, template_kwargs=template_kwargs)
                for policy in POLICIES
            }
            template = ChatTemplate(tokenizer, kwargs=template_kwargs)
            writes_all_alike = template.write([_QUESTION]) == template.write([replace(_QUESTION, text="another")])
        except RenderError as error:
            raise ConfigError(f"the chat template of {name} cannot be used: {error}") from error
    if writes_all_alike:
        raise ConfigError(f"the chat template of {name} cannot be used: it writes the same whatever the user says")
    renderer = renderers["keep"]
    if isinstance(renderer, FamilyRenderer):
        # a family reads calls that are in no form `ChatTemplate` knows, so the template's own place for tools is used
        template.has_tools = True
    return LoadedModel(
        name=name,
        tokenizer=tokenizer,
        template=template,
        renderers=renderers,
        renderer=renderer.family if isinstance(renderer, FamilyRenderer) else "template",
        why=tuple(dict.fromkeys(line.removeprefix(_CHOICE) for line in heard if line.startswith(_CHOICE))),
    )


def load_calls(path: Path) -> tuple[Call, ...]:
    """Load the calls of a recorded session that sampled something. Raises `ConfigError` where there are none."""
    if not path.is_file():
        raise ConfigError(f"--session {path}: no such file; give the .jsonl file of one session")
    try:
        calls = read_record(path).rollout.calls
    except RecordError as error:
        raise ConfigError(f"--session {error}") from error
    sampled = tuple(call for call in calls if call.completion.token_ids)
    if not sampled:
        raise ConfigError(f"--session {path}: no call of this session has sampled token ids")
    return sampled


def describe_refusal(renderer: Renderer, template: ChatTemplate) -> str | None:
    """Say why the renderer continues no reply at all; None if it does."""
    if not isinstance(renderer, TemplateRenderer) or renderer.continuation_refusal is None:
        return None
    written = template.write([_QUESTION, _REPLY], opens_reply=False)
    if written != template.write([_QUESTION, _REPLY], opens_reply=False):
        return "two renderings of the same conversation differ"
    if _REPLY.text not in written:
        return "the template does not write text as it was sampled"
    return renderer.continuation_refusal


def describe_limits(renderer: Renderer) -> Sequence[str]:
    """List the replies that a renderer cannot continue, and where it departs from the template, in sentences.

    Where it continues none, see `describe_refusal`.
    """
    if not isinstance(renderer, TemplateRenderer):
        return ()
    limits = renderer.limits if renderer.continuation_refusal is None else ()
    prompted = "the template has no tools that replies can be read for: they are described in the system message"
    return (*limits, *((prompted,) if renderer.prompts_tools else ()))


def _load_tokenizer(name: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except Exception as error:  # by the files it finds, transformers raises OSError, ValueError, KeyError and others
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        hint = "give a folder with tokenizer.json and tokenizer_config.json, or a hub name that this machine can reach"
        raise ConfigError(f"no tokenizer at {name!r}: {hint} ({first_line})") from error


@contextmanager
def _heard(logger_name: str) -> Iterator[list[str]]:
    """Collect the messages of a logger and its children, from INFO on, and keep them from all others."""
    heard: list[str] = []
    logger, handler = logging.getLogger(logger_name), _Listener(heard)
    level, propagates = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield heard
    finally:
        logger.propagate = propagates
        logger.setLevel(level)
        logger.removeHandler(handler)


class _Listener(logging.Handler):
    def __init__(self, heard: list[str]) -> None:
        super().__init__(logging.INFO)
        self._heard = heard

    def emit(self, record: logging.LogRecord) -> None:
        self._heard.append(record.getMessage())
