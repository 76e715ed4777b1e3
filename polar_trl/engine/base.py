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
    """The answer of a server that takes messages."""

    message: Message
    finish_reason: FinishReason
    num_sampled_tokens: int
    """As the server counts; 0 where it does not say."""
    prompt_ids: TokenIds = ()
    """[P], what the server made of the messages, and"""
    completion: Completion | None = None
    """what it sampled; None where it gives no token ids."""


class Engine(Protocol):
    """Answers model calls. Awaited on any event loop; cancelling the await aborts the request."""

    max_model_len: int
    """Prompt and completion tokens together."""
    policy_version: int
    """Grows by one whenever the weights change."""
    cache_tokens: int | None = None
    """Tokens of histories for which its key-value cache has room; None where it does not say."""
    own_renderer: Renderer | None
    """None where prompts are token ids. Else the engine takes messages and gives `TextReply`s, which are recorded as
    `text_only` where they have no ids, and this stands where a renderer is asked for."""

    async def answer(
        self,
        request: ChatRequest,
        prompt_ids: TokenIds,
        params: GenerationParams,
        so_far: list[int] | None = None,
    ) -> Completion | TextReply:
        """Sample the next message of a conversation.

        Args:
            request: The conversation; read by engines that take messages.
            prompt_ids: [P], the rendered prompt; read by all others.
            so_far: Filled with the ids as they are sampled, from any thread, by engines that can; None where nobody
                looks at them, which costs nothing.

        Raises:
            EngineError, EngineBusyError: the engine fails, is closed meanwhile, or takes no requests for now.
            WireError: a server refuses the request, which is the agent's to hear.
        """
        ...


class TokenEngine(Engine, Protocol):
    """Base of engines from token ids to token ids, the only ones that can be trained from. They give `generate`."""

    own_renderer: Renderer | None = None
    vocab_size: int = 1 << 33
    """Token ids are below it; unless the engine knows better, one that no vocabulary reaches."""

    async def generate(self, prompt_ids: TokenIds, params: GenerationParams) -> Completion:
        """Sample one completion. Raises `EngineError` if the engine fails or closes meanwhile."""
        ...

    async def generate_live(self, prompt_ids: TokenIds, params: GenerationParams, so_far: list[int]) -> Completion:
        """Sample the same, and fill `so_far`; engines that know no ids before the end leave it empty."""
        return await self.generate(prompt_ids, params)

    async def answer(
        self,
        request: ChatRequest,
        prompt_ids: TokenIds,
        params: GenerationParams,
        so_far: list[int] | None = None,
    ) -> Completion | TextReply:
        """Sample from the prompt's ids; see `Engine.answer`. Raises `EngineError` as `require_usable` does."""
        if so_far is None:
            completion = await self.generate(prompt_ids, params)
        else:
            completion = await self.generate_live(prompt_ids, params, so_far)
        return require_usable(completion, self.vocab_size)


def require_usable(completion: Completion, vocab_size: int) -> Completion:
    """Return a completion that can be trained on.

    Raises `EngineError` where it has no token, and for the first token whose id is none of the vocabulary's, or whose
    logprob is not finite and at most 0.
    """
    count = len(completion.token_ids)
    if not count:
        raise EngineError(f"the engine sampled no token (finish reason {completion.finish_reason!r})")
    low, high = min(completion.token_ids), max(completion.token_ids)
    if low >= 0 and high < vocab_size and all(-math.inf < logprob <= 0.0 for logprob in completion.logprobs):
        return completion
    for position, (token_id, logprob) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
        if not 0 <= token_id < vocab_size:
            raise EngineError(
                f"the engine gave id {token_id} for sampled token {position} of {count}; "
                f"ids are at least 0 and below {vocab_size}"
            )
        if not -math.inf < logprob <= 0.0:
            raise EngineError(
                f"the engine gave log-probability {logprob} for sampled token {position} of {count}; "
                "it must be a finite number, at most 0"
            )
    return completion
