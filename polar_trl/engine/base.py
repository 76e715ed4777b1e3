"""The engine protocol: sample token ids and logprobs for a prompt of token ids, or take text from a chat server."""

import math
from dataclasses import dataclass
from typing import Protocol

from polar_trl.errors import EngineError
from polar_trl.tokens.base import Renderer
from polar_trl.types import ChatRequest, Completion, FinishReason, Message, TokenIds


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationParams:
    """The distribution to sample from and when to stop.

    `temperature` divides the logits; logprobs are those of the scaled distribution. The truncations
    (`top_p`, `top_k`, `min_p`) are for evaluation: training refuses them, since the trainer's logprobs do not
    apply them.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all tokens."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    """Texts that end the completion; the tokens that spelled them stay in it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextReply:
    """The answer of a server that gives no token ids."""

    message: Message
    finish_reason: FinishReason
    num_sampled_tokens: int
    """As the server counts; 0 where it does not say."""


class Engine(Protocol):
    """Answers model calls. Awaited on any event loop; cancelling the await aborts the request."""

    max_model_len: int
    """Prompt and completion tokens together."""
    policy_version: int
    """Grows by one whenever the weights change."""
    own_renderer: Renderer | None
    """None where prompts are token ids. Else the engine takes messages and gives `TextReply`s, which are recorded as
    `text_only`, and this stands where a renderer is asked for."""

    async def answer(
        self, request: ChatRequest, prompt_ids: TokenIds, params: GenerationParams
    ) -> Completion | TextReply:
        """Sample the next message of a conversation.

        Args:
            request: The conversation; read by engines that take messages.
            prompt_ids: [P], the rendered prompt; read by all others.

        Raises:
            EngineError, EngineBusyError: the engine fails, is closed meanwhile, or takes no requests for now.
            WireError: a server refuses the request, which is the agent's to hear.
        """
        ...


class TokenEngine(Engine, Protocol):
    """Base of engines from token ids to token ids, the only ones that can be trained from. They give `generate`."""

    own_renderer: Renderer | None = None

    async def generate(self, prompt_ids: TokenIds, params: GenerationParams) -> Completion:
        """Sample one completion. Raises `EngineError` if the engine fails or closes meanwhile."""
        ...

    async def answer(
        self, request: ChatRequest, prompt_ids: TokenIds, params: GenerationParams
    ) -> Completion | TextReply:
        """Sample from the prompt's ids; see `Engine.answer`. Raises `EngineError` as `require_logprobs` does."""
        return require_logprobs(await self.generate(prompt_ids, params))


def require_logprobs(completion: Completion) -> Completion:
    """Return the completion. Raises `EngineError` naming the first logprob that is not finite and at most 0."""
    for position, logprob in enumerate(completion.logprobs):
        if not -math.inf < logprob <= 0.0:
            raise EngineError(
                f"the engine gave log-probability {logprob} for sampled token {position} of "
                f"{len(completion.token_ids)}; it must be a finite number, at most 0"
            )
    return completion
