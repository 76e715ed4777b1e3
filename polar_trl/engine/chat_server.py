"""Sample text from an OpenAI-compatible chat server, which renders the messages itself.

Its calls are marked `text_only`: they can be recorded, graded, and read by a trainer that tokenizes for itself, and
the laws refuse to train on them (`LawError`). No token id is ever made up here. Model servers of NeMo Gym with
`return_token_id_information` put `prompt_token_ids`, `generation_token_ids` and `generation_log_probs` into their
messages; these are kept, and such calls are like those of any engine.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from polar_trl.engine.base import Engine, GenerationParams, TextReply, TokenEngine, require_usable
from polar_trl.engine.openai_server import OpenAIServer, RefusedError
from polar_trl.errors import ConfigError, EngineError, RenderError, WireError, WireErrorKind
from polar_trl.json_text import is_json_object
from polar_trl.tokens.base import Renderer
from polar_trl.tokens.chat_dicts import build_message_dict, build_tool_dict, place_system
from polar_trl.types import ChatRequest, Completion, FinishReason, Message, TokenIds, Tool, ToolCall

_PROBE_TOOL = Tool(
    name="read_file",
    description="Reads a file.",
    parameters={"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
)


class ChatServer(Engine, Renderer):
    """The engine of a server that gives text alone, and its own renderer.

    Args:
        server: Closed by whoever made it.
        model: Its name there.
        max_model_len: What agents are told of the context; the server itself refuses what is longer.
    """

    policy_version = 0
    stop_token_ids: tuple[int, ...] = ()

    def __init__(self, server: OpenAIServer, *, model: str, max_model_len: int) -> None:
        self._server = server
        self._model = model
        self.max_model_len = max_model_len
        self.own_renderer = self

    async def answer(
        self,
        request: ChatRequest,
        prompt_ids: TokenIds,
        params: GenerationParams,
        so_far: list[int] | None = None,
    ) -> TextReply:
        """Ask for the next message; see `Engine.answer`."""
        body = self._build_body(request, params)
        try:
            try:
                answer = await self._server.post("/chat/completions", body)
            except RefusedError as error:
                if not _is_overflow(error):
                    raise
                # fewer than max_tokens are left, or none: servers that are not told a number give what is left
                del body["max_tokens"]
                answer = await self._server.post("/chat/completions", body)
        except RefusedError as error:
            if error.status in (401, 403, 404):
                raise  # the server does not know us, or the model: no fault of the agent's
            kind: WireErrorKind = "context_overflow" if _is_overflow(error) else "invalid_request"
            raise WireError(str(error), kind=kind, reason="server") from error
        return _parse_reply(answer)

    def probe(self, params: GenerationParams) -> None:
        """Have one question with a tool answered. Raises `ConfigError` if the server does not."""
        request = ChatRequest(messages=(Message(role="user", text="Say hello."),), tools=(_PROBE_TOOL,))
        try:
            _parse_reply(self._server.ask("POST", "/chat/completions", self._build_body(request, params)))
        except EngineError as error:
            raise ConfigError(
                f"the chat server does not answer a question with tools: {error}; for `vllm serve`, "
                "--enable-auto-tool-choice and --tool-call-parser turn them on"
            ) from error

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> TokenIds:
        """Return no ids: the server renders. Raises `RenderError` for images, as a renderer does."""
        if any(message.images for message in messages):
            build_message_dict(next(message for message in messages if message.images), parse_arguments=False)
        return ()

    def extend(
        self, prompt_ids: TokenIds, completion_ids: TokenIds, new_messages: Sequence[Message], tools: Sequence[Tool]
    ) -> TokenIds | None:
        """Return what is known: the prompt begins with it, unless the server renders earlier turns in another way."""
        self.render(new_messages, tools)
        return (*prompt_ids, *completion_ids)

    def continue_reply(self, prompt_ids: TokenIds, reply: Message) -> TokenIds:
        """Return no ids: whether a reply is continued is the server's to say."""
        return ()

    def parse(self, prompt_ids: TokenIds, completion_ids: TokenIds, tools: Sequence[Tool]) -> Message:
        """Raise `RenderError`: there are no ids to parse."""
        raise RenderError("a text-only server gives no token ids, so there are none to parse")

    def _build_body(self, request: ChatRequest, params: GenerationParams) -> dict[str, Any]:
        """Build a body that a strict server understands: fields of vLLM's own only where they do something."""
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [
                build_message_dict(message, parse_arguments=False)
                for message in place_system(request.messages, "first", at_start=True)
            ],
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
        }
        plain = GenerationParams(max_tokens=1)
        for name in ("top_p", "top_k", "min_p", "repetition_penalty"):
            if getattr(params, name) != getattr(plain, name):
                body[name] = getattr(params, name)
        if params.stop:
            body["stop"] = list(params.stop)
        if request.tools:
            body["tools"] = [build_tool_dict(tool) for tool in request.tools]
            if request.tool_choice in ("none", "required"):
                body["tool_choice"] = request.tool_choice
            elif request.tool_choice != "auto":
                body["tool_choice"] = {"type": "function", "function": {"name": request.tool_choice}}
        return body


def _is_overflow(error: RefusedError) -> bool:
    said = str(error).lower()
    return "context" in said and ("length" in said or "window" in said)


def _parse_reply(answer: Mapping[str, Any]) -> TextReply:
    try:
        choice = answer["choices"][0]
        message = choice["message"]
        tool_calls = tuple(_parse_tool_call(item) for item in message.get("tool_calls") or ())
        reasoning = message.get("reasoning_content") or message.get("reasoning")  # the second is vLLM's new name
        reply = Message(
            role="assistant", text=message.get("content") or "", reasoning=reasoning or None, tool_calls=tool_calls
        )
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise EngineError(f"the server's answer cannot be read ({error!r}): {str(answer)[:200]}") from error
    names = [text for call in tool_calls for text in (call.id, call.name)]
    if not all(isinstance(text, str) for text in (reply.text, reply.reasoning or "", *names)):
        raise EngineError(f"the server's answer is not text: {str(message)[:200]}")
    usage = answer.get("usage") or {}
    finish_reason: FinishReason = "length" if choice.get("finish_reason") == "length" else "stop"
    return TextReply(
        message=reply,
        finish_reason=finish_reason,
        num_sampled_tokens=usage.get("completion_tokens") or 0,
        prompt_ids=tuple(message.get("prompt_token_ids") or ()),
        completion=_parse_completion(message, finish_reason) if message.get("prompt_token_ids") else None,
    )


def _parse_completion(message: Mapping[str, Any], finish_reason: FinishReason) -> Completion:
    """Parse the ids and logprobs in a message. Raises `EngineError` as `require_usable` does."""
    try:
        completion = Completion(
            token_ids=tuple(message["generation_token_ids"]),
            logprobs=tuple(message["generation_log_probs"]),
            finish_reason=finish_reason,
        )
        return require_usable(completion, TokenEngine.vocab_size)
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError(f"the server's token ids cannot be read ({error!r}): {str(message)[:200]}") from error


def _parse_tool_call(item: Mapping[str, Any]) -> ToolCall:
    function = item["function"]
    arguments = function.get("arguments") or "{}"
    if not isinstance(arguments, str):  # an object, as some servers send it
        arguments = json.dumps(arguments, ensure_ascii=False)
    return ToolCall(
        id=item.get("id") or "",
        name=function["name"],
        arguments=arguments,
        parse_status="ok" if is_json_object(arguments) else "malformed",
    )
